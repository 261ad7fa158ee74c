"""`max_memory` on a CPU, runs without a numerics check, and every wording of running out of memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from redline.bench.device import process
from redline.bench.device.cuda import CudaDevice
from redline.bench.device.failure import is_out_of_memory
from redline.bench.workload.build import build_workload, fingerprint_of
from redline.launch import Door, open_door
from redline.model.errors import UsageError
from redline.model.protocol import FailureReply, Measure, Prepare, PreparedReply, Reply, Squeeze, SqueezeReply
from redline.model.record import Prepared
from redline.model.spec import LaunchSpec, RunSpec, WorkloadSpec
from redline.model.spec_table import specs_from_table


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    door = open_door(LaunchSpec())
    yield door
    door.close()


def spec_of(**table: Any) -> RunSpec:
    quick = {"warmup_max_seconds": 0.05, "max_seconds": 0.1, "check_numerics": False}
    settings = {"model": "simple_cnn", "device": "cpu", "effort": "quick", "threads": 1, "measure": quick, **table}
    return specs_from_table(settings)[0]


def prepare(door: Door, spec: RunSpec) -> tuple[Any, Reply]:
    session = door.open(spec)
    return session, session.ask(Prepare(spec=spec))


def prepared(reply: Reply) -> Prepared:
    assert isinstance(reply, PreparedReply), reply
    return reply.prepared


def test_a_cpu_worker_stays_within_its_limit(door: Door) -> None:
    session, reply = prepare(door, spec_of(max_memory="1.5GiB", batch=64))
    memory = prepared(reply).memory
    assert memory.limit_bytes == 3 * 2**29
    assert memory.peak_private_bytes is not None
    assert memory.resident_bytes is not None
    assert memory.resident_bytes <= memory.peak_private_bytes <= memory.limit_bytes
    assert session.ask(Squeeze()) == SqueezeReply(needed_bytes=None)
    session.close()


class TestCapOnAGpu:
    """The calls that a GPU would get; the GPU itself is in tests/gpu."""

    @pytest.fixture
    def shares(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        shares: list[float] = []
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * 2**30, 140 * 2**30))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2**30)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: shares.append(share))
        return shares

    @pytest.fixture
    def device(self) -> CudaDevice:
        device = CudaDevice.__new__(CudaDevice)
        device.torch_device = torch.device("cuda", 0)
        return device

    def test_is_the_share_of_the_whole_card(self, device: CudaDevice, shares: list[float]) -> None:
        device.limit_memory(16 * 2**30, isolated=True)
        assert shares == [16 / 140]
        assert device._limit_bytes == 16 * 2**30
        assert device.cap_allocator(None)
        assert shares[-1] == 1.0

    def test_none_is_what_is_free(self, device: CudaDevice, shares: list[float]) -> None:
        device.limit_memory(None, isolated=True)
        assert shares == []
        assert device._limit_bytes == 101 * 2**30

    def test_more_than_there_is_cannot_be_had(self, device: CudaDevice, shares: list[float]) -> None:
        device.limit_memory(200 * 2**30, isolated=True)
        assert shares == [1.0]
        assert device._limit_bytes == 101 * 2**30


def test_a_limit_below_what_torch_itself_takes_says_so(door: Door) -> None:
    session, reply = prepare(door, spec_of(max_memory="100MiB"))
    assert isinstance(reply, FailureReply)
    assert (reply.failure.kind, reply.failure.stage) == ("oom", "device")
    assert "torch alone holds" in reply.failure.message
    session.close()


def test_the_persons_own_process_is_not_limited() -> None:
    spec = spec_of(max_memory="4GiB", launch={"door": "inline"})
    session = open_door(spec.launch).open(spec)
    reply = session.ask(Prepare(spec=spec))
    assert isinstance(reply, FailureReply)
    assert "worker of its own" in reply.failure.message
    session.close()


@pytest.mark.parametrize("task", ["infer", "train"])
def test_numerics_may_be_left_out_and_the_record_says_so(door: Door, task: str) -> None:
    spec = spec_of(task=task, batch=4, recipe="bf16")
    stages: list[str] = []
    session = door.open(spec)
    reply = session.ask(Prepare(spec=spec), lambda progress: stages.append(progress.stage))
    numerics = prepared(reply).numerics
    assert (numerics.method, numerics.passed, numerics.rel_l2) == ("unchecked", False, None)
    assert numerics.reason.code == "unchecked"
    assert not {"reference", "numerics"} & set(stages)
    # The inputs as they were asked for, though only the cast ones are kept.
    assert prepared(reply).workload.input_shapes == ("4×3×32×32 float32",)
    assert not isinstance(session.ask(Measure(kind="throughput", seconds=0.01)), FailureReply)
    session.close()


def test_only_the_recipes_own_inputs_stay_in_memory() -> None:
    from redline.bench.device.cpu import CpuDevice
    from redline.bench.recipe.compose import apply_recipe
    from redline.model.spec import Recipe

    workload = build_workload(WorkloadSpec(model="simple_cnn", batch=2), seed=0)
    setup = apply_recipe(Recipe.parse("bf16"), workload, CpuDevice())
    assert workload.args[0].dtype == torch.float32
    setup.let_originals_go()
    assert workload.args[0] is setup.args[0]
    assert workload.args[0].dtype == torch.bfloat16


def test_onednn_says_no_more_than_that_it_could_not(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("could not create a primitive")
    monkeypatch.setattr("redline.bench.device.failure.is_near_private_limit", lambda: False)
    assert not is_out_of_memory(error)
    monkeypatch.setattr("redline.bench.device.failure.is_near_private_limit", lambda: True)
    assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


class TestFingerprint:
    def test_follows_the_files_a_model_is_made_of(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "parts").mkdir()
        (tmp_path / "parts" / "__init__.py").write_text("")
        (tmp_path / "parts" / "layer.py").write_text("from parts import deep\n")
        (tmp_path / "parts" / "deep.py").write_text("WIDTH = 8\n")
        (tmp_path / "unrelated.py").write_text("x = 1\n")
        (tmp_path / "net.py").write_text("import torch\nfrom parts.layer import deep\ndef make(): ...\n")
        spec = WorkloadSpec(model=f"{tmp_path}/net.py:make")
        first = fingerprint_of(spec)
        (tmp_path / "unrelated.py").write_text("x = 2\n")
        assert fingerprint_of(spec) == first
        (tmp_path / "parts" / "deep.py").write_text("WIDTH = 16\n")
        second = fingerprint_of(spec)
        assert second != first
        (tmp_path / "net.py").write_text("import torch\nfrom parts.layer import deep\ndef make(): return 1\n")
        assert fingerprint_of(spec) not in (first, second)

    def test_names_the_library_a_model_comes_from(self) -> None:
        import torchvision

        assert torchvision.__version__ in fingerprint_of(WorkloadSpec(model="resnet18"))
        assert fingerprint_of(WorkloadSpec(model="simple_cnn")) != fingerprint_of(WorkloadSpec(model="resnet18"))

    def test_a_broken_file_is_still_told_apart(self, tmp_path: Any) -> None:
        (tmp_path / "net.py").write_text("def make(: ...\n")
        assert fingerprint_of(WorkloadSpec(model=f"{tmp_path}/net.py:make"))
        with pytest.raises(UsageError):
            fingerprint_of(WorkloadSpec(model=f"{tmp_path}/nowhere.py:make"))


THREADS_AND_A_PEAK = f"""
import os, runpy, threading, time
# Without its package, which loads torch: the size of torch's thread stacks is not what this is about.
module = runpy.run_path({process.__file__!r})
peak_private_bytes, private_bytes = module["peak_private_bytes"], module["private_bytes"]
restart_private_peak = module["restart_private_peak"]

def allocate():
    thread = threading.Thread(target=bytearray, args=(1000,))
    thread.start()
    thread.join()
    settle()

def settle():
    while len(os.listdir("/proc/self/task")) > 1:  # else the next thread cannot have the stack of the last
        time.sleep(0.001)

allocate()
restart_private_peak()  # the first time with a thread of its own
settle()
restart_private_peak()
before = private_bytes()
allocate()
quiet = peak_private_bytes() - before
held = bytearray(50 << 20)
del held
print(quiet, peak_private_bytes() - before)
restart_private_peak()
print(peak_private_bytes() - private_bytes())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_private_peak_is_what_was_held_and_not_what_threads_mapped() -> None:
    """The C library maps 128 MiB for a thread and gives half back at once; none of it is held."""
    told = subprocess.run([sys.executable, "-c", THREADS_AND_A_PEAK], capture_output=True, text=True, check=True).stdout
    quiet, peak, restarted = map(int, told.split())
    assert quiet < 2 << 20
    assert 50 << 20 <= peak < 54 << 20
    assert restarted < 2 << 20


LIMITED = """
import mmap, resource
from redline.bench.device.process import restart_private_peak

size = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + (300 << 20), resource.RLIM_INFINITY))
for _ in range(8):
    mmap.mmap(-1, 100 << 20).close()
    restart_private_peak()
print("room")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_where_the_address_space_is_limited_nothing_fills_it() -> None:
    told = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True)
    assert told.stdout == "room\n", told.stderr
