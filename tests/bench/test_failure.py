"""What broke is told by its kind and in one line, whoever worded it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch._inductor.exc
from torch import nn

from redline.bench.device.failure import failure_from, is_out_of_memory, kind_of, one_line, user_line
from redline.model.errors import BenchError, MissingExtra, SpecError, UnknownName

OUT_OF_MEMORY = [
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 3.31 "
    "GiB is free. Including non-PyTorch memory, this process has 136.48 GiB memory in use.",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "Unable to find a valid cuDNN algorithm to run convolution",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "HIP out of memory. Tried to allocate 64.00 GiB. GPU 0 has a total capacity of 63.98 GiB",
    "HIP error: hipErrorOutOfMemory",
    "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "MIOpen Error: miopenStatusAllocFailed",
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 140737488355328 bytes. Error code 12 (Cannot allocate memory)",
    "DefaultCPUAllocator: not enough memory: you tried to allocate 8589934592 bytes.",
    "unable to mmap 4096 bytes from file </dev/shm/x>: Cannot allocate memory (12)",
    "std::bad_alloc",
]


def wrapped(inner: BaseException, *outer: BaseException) -> BaseException:
    """`inner` as the cause of each of the others in turn, the last outermost."""
    for error in outer:
        error.__cause__ = inner
        inner = error
    return inner


def raised_by(deed) -> BaseException:
    try:
        deed()
    except Exception as error:
        return error
    raise AssertionError("it did not raise")


@pytest.mark.parametrize("wording", OUT_OF_MEMORY)
def test_out_of_memory_is_known_by_every_wording(wording: str) -> None:
    plain = RuntimeError(wording)
    assert is_out_of_memory(plain)
    for stage in ("build", "compile", "first-call", "measure"):
        assert kind_of(plain, stage) == "oom"
    backend_failed = torch._dynamo.exc.TorchDynamoException("backend='inductor' raised:")
    under_a_compiler = wrapped(plain, RuntimeError("while lowering"), backend_failed)
    assert kind_of(under_a_compiler, "compile") == "oom"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("the memory of the crowd"),
        RuntimeError("size mismatch"),
        KeyError("alloc"),
        RuntimeError("CUDA error: an illegal memory access"),
        RuntimeError("out of resource: shared memory"),
        RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED"),
    ],
)
def test_other_errors_are_not_out_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)
    assert not is_out_of_memory(wrapped(error, RuntimeError("outer")))


TRITON_ERROR = type("CompilationError", (Exception,), {"__module__": "triton.compiler.errors"})


@pytest.mark.parametrize(
    ("error", "stage", "kind"),
    [
        (torch.OutOfMemoryError(), "measure", "oom"),
        (MemoryError(), "build", "oom"),
        (wrapped(MemoryError(), RuntimeError("the loader broke")), "build", "oom"),
        (raised_by(lambda: torch.ones(2**45)), "first-call", "oom"),
        (RuntimeError("\"slow_conv2d_cpu\" not implemented for 'Half'"), "first-call", "unsupported"),
        (NotImplementedError("Could not run 'aten::_fused_sdp_choice' with arguments from the 'CPU' backend."),
         "first-call", "unsupported"),
        (RuntimeError("CUDA error: no kernel image is available for execution on the device"), "first-call", "unsupported"),
        (RuntimeError("quantized::linear is not supported on this device"), "first-call", "unsupported"),
        (raised_by(lambda: torch.linalg.svd(torch.ones(2, 2, dtype=torch.float16))), "first-call", "unsupported"),
        (torch._dynamo.exc.Unsupported("Graph break"), "warm-up", "compile"),
        (torch._dynamo.exc.InvalidBackend("nope"), "warm-up", "compile"),
        (torch._inductor.exc.CppCompileError(["g++", "-c", "x.cpp"], "x.cpp:1: error"), "warm-up", "compile"),
        (TRITON_ERROR("at 1:1"), "warm-up", "compile"),
        (subprocess.CalledProcessError(1, "gcc"), "compile", "compile"),  # at that stage it can be nothing else
        (subprocess.CalledProcessError(1, "gcc"), "build", "user"),
        (ValueError("expected 3 channels"), "first-call", "user"),
        (SpecError("batch must be 1 or more, got 0"), "build", "user"),
        (UnknownName("model", "x", ()), "compile", "user"),
        *((BenchError(kind, "CUDA out of memory"), "build", kind) for kind in ("unsupported", "compile", "user", "timeout")),
    ],
    ids=repr,
)  # fmt: skip
def test_an_error_has_the_kind_of_what_broke_at_its_stage(error: Exception, stage: Any, kind: str) -> None:
    assert kind_of(error, stage) == kind


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("first\nsecond"), "ValueError: first"),
        (ValueError("\n\n  after blanks  \n"), "ValueError: after blanks"),
        (ValueError(), "ValueError"),
        (KeyError("weights"), "KeyError: 'weights'"),
        (SpecError("batch must be 1 or more, got 0"), "batch must be 1 or more, got 0"),
        (BenchError("user", "factory x raised KeyError: 1\nmore"), "factory x raised KeyError: 1"),
        (MissingExtra("timm:x", "timm", "timm"), "timm:x needs the package timm: pip install 'torch-redline[timm]'"),
    ],
)
def test_an_error_is_told_in_one_line(error: Exception, line: str) -> None:
    assert one_line(error) == line


@pytest.mark.filterwarnings("ignore")
def test_torchscript_is_told_by_what_broke_inside_it() -> None:
    traced = torch.jit.freeze(torch.jit.trace(nn.Linear(4, 3).eval(), torch.randn(2, 4)))
    error = raised_by(lambda: traced(torch.randn(2, 5)))
    assert "TorchScript interpreter" in str(error)
    assert "shapes cannot be multiplied" in one_line(error)
    assert one_line(error).count("RuntimeError") == 1


def test_a_failure_carries_stage_kind_line_and_traceback() -> None:
    def deep() -> None:
        raise ValueError("expected 3 channels\nbut got 4")

    failure = failure_from(raised_by(deep), "first-call")
    assert (failure.stage, failure.kind) == ("first-call", "user")
    assert failure.message == "ValueError: expected 3 channels"
    assert "in deep" in failure.traceback
    assert "but got 4" in failure.traceback


SAID = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 139.80 GiB of which "
    "125.85 GiB is free. Including non-PyTorch memory, this process has 13.94 GiB memory in use. 16.00 GiB allowed; Of the "
    "allocated memory 8.23 GiB is allocated by PyTorch, and {idle} is reserved by PyTorch but unallocated. If reserved "
    "but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def test_more_idle_than_asked_for_is_fragmentation_and_the_cure_is_told() -> None:
    failure = failure_from(torch.OutOfMemoryError(SAID.format(asked="3.34 GiB", idle="5.04 GiB")), "measure")
    (found,) = failure.notes
    assert found.code == "fragmented"
    assert str(found).startswith("3.34 GiB were requested while 5.04 GiB were idle in pieces; ")
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in str(found)


@pytest.mark.parametrize(
    "said",
    [
        SAID.format(asked="3.34 GiB", idle="512.00 MiB"),
        SAID.format(asked="3.34 GiB", idle="900 bytes"),
        "CUDA error: out of memory",
        "std::bad_alloc",
        "",
    ],
)
def test_what_is_really_short_of_memory_is_not_fragmented(said: str) -> None:
    assert failure_from(RuntimeError(said), "measure").notes == ()


class Unprintable(Exception):
    def __str__(self) -> str:
        raise SystemExit("not even this")


def test_an_exception_that_cannot_be_printed_keeps_its_type() -> None:
    for stage in ("build", "compile", "measure"):
        failure = failure_from(Unprintable(), stage)
        assert failure.message == "Unprintable: (its message cannot be printed: SystemExit)"
    assert failure_from(Unprintable(), "build").kind == "user"


def test_text_that_no_message_can_carry_is_escaped() -> None:
    failure = failure_from(raised_by(lambda: Path("caf\udce9").read_text()), "build")
    assert "caf\\udce9" in failure.message
    msgspec.msgpack.encode(failure)


class TestTheUsersLine:
    @pytest.fixture
    def made(self, tmp_path):
        path = tmp_path / "mine.py"
        path.write_text(
            "import json\n\ndef deep(): raise ValueError\n\ndef outer(): deep()\n\ndef far(): json.loads('{')\n"
        )
        names: dict = {}
        exec(compile(path.read_text(), str(path), "exec"), names)
        return path, names

    def test_is_the_innermost_of_their_own(self, made) -> None:
        path, names = made
        assert user_line(raised_by(names["outer"])) == f"{path}:3 in deep"
        assert user_line(raised_by(names["far"])) == f"{path}:7 in far", "not the line of the library it called"

    def test_is_found_under_what_wraps_it(self, made) -> None:
        path, names = made

        def wrapping() -> None:
            try:
                names["deep"]()
            except ValueError as error:
                raise BenchError("user", "the factory raised ValueError") from error

        error = raised_by(wrapping)
        error.__traceback__ = None
        assert failure_from(error, "build").where == f"{path}:3 in deep"

    def test_causes_in_a_circle_are_looked_at_once(self) -> None:
        one, other = ValueError("one"), ValueError("other")
        one.__cause__, other.__cause__ = other, one
        assert user_line(one) == ""


def test_a_line_that_only_announces_the_cause_is_told_with_the_cause() -> None:
    failed = torch._dynamo.exc.TorchDynamoException(
        "backend='inductor' raised:\nCppCompileError: C++ compile error\nmore"
    )
    assert one_line(failed) == "TorchDynamoException: backend='inductor' raised: CppCompileError: C++ compile error"
