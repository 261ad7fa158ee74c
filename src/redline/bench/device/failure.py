"""From an exception on the bench to a `Failure`: what kind it is, in one line, with the traceback beside."""

from __future__ import annotations

import site
import sysconfig
import traceback
from pathlib import Path

import torch

import redline
from redline.bench.device.process import is_near_private_limit
from redline.errors import BenchError, UsageError
from redline.record import Failure, FailureKind

_OOM_WORDINGS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory: you tried to allocate",
    "std::bad_alloc",
    "_alloc_failed",  # cuBLAS, cuDNN, cuSOLVER, cuSPARSE, cuFFT and hipBLAS each end a status of theirs so
    "_allocation_failed",  # cuDNN 9: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
    "cudaerrormemoryallocation",
    "hiperroroutofmemory",
    "miopenstatusallocfailed",
    "rocblas_status_memory_error",
    # A library that finds no room for its own handle says only that it could not be initialised.
    "cublas_status_not_initialized when calling `cublascreate",
    "cudnn_status_not_initialized",
    "unable to find a valid cudnn algorithm",
)
# oneDNN says no more than this, whatever the reason.
_ONEDNN_WORDINGS = ("could not create a primitive", "could not execute a primitive", "could not create a memory object")
_NOT_USERS = {
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *map(Path, (*site.getsitepackages(), site.getusersitepackages())),
    Path(redline.__file__).parent,
}
"""Where code that is not the user's lies: the standard library, installed packages, and Redline."""
_TORCHSCRIPT_WRAPPER = "The following operation failed in the TorchScript interpreter"
_UNSUPPORTED_WORDINGS = ("not implemented for", "not supported", "could not run '", "no kernel image is available")


def failure_from(error: BaseException, stage: str) -> Failure:
    return Failure(
        stage=stage,
        kind=kind_of(error, stage),
        message=one_line(error),
        traceback="".join(traceback.format_exception(error))[-20_000:],
        switches=error.switches if isinstance(error, BenchError) else (),
        scope=error.scope if isinstance(error, BenchError) else "recipe",  # type: ignore[arg-type]
        where=user_line(error),
    )


def user_line(error: BaseException | None) -> str:
    """The innermost line of the user's own code on the way to the error, or to what caused it."""
    while error is not None:
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if _is_users(frame.filename):
                path = Path(frame.filename)
                shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
                return f"{shown}:{frame.lineno} in {frame.name}"
        error = error.__cause__ or error.__context__
    return ""


def _is_users(filename: str) -> bool:
    """Neither Redline's nor Python's, and not installed; code typed into a notebook has no file at all."""
    path = Path(filename)
    return path.is_absolute() and path.suffix == ".py" and not any(path.is_relative_to(each) for each in _NOT_USERS)


def kind_of(error: BaseException, stage: str) -> FailureKind:
    text = f"{type(error).__name__} {error}".lower()
    if isinstance(error, BenchError):
        return error.kind  # type: ignore[return-value]
    if is_out_of_memory(error):
        return "oom"
    if isinstance(error, UsageError):
        return "user"
    if any(module in type(error).__module__ for module in ("torch._dynamo", "torch._inductor", "triton")):
        return "compile"
    if any(wording in text for wording in _UNSUPPORTED_WORDINGS):
        return "unsupported"
    return "compile" if stage == "compile" else "user"


def is_out_of_memory(error: BaseException) -> bool:
    """torch's own error, and the wordings of those below it; the cause may sit under a compiler's wrapper."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error).lower()
    if any(wording in said for wording in _OOM_WORDINGS):
        return True
    if any(said.startswith(wording) for wording in _ONEDNN_WORDINGS) and is_near_private_limit():
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if lines else ""
    if isinstance(error, BenchError | UsageError):
        return said
    if isinstance(error, SystemExit):
        return f"SystemExit: the code called sys.exit({error.code!r})"
    name = type(error).__name__
    if said.startswith(_TORCHSCRIPT_WRAPPER):
        said = lines[-1].removeprefix(f"{name}: ")
    return f"{name}: {said}"[:500] if said else name
