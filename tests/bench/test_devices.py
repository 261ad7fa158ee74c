"""Devices: the CPU as it is, names of devices that cannot be, and cards known from what their libraries once said."""

from __future__ import annotations

import mmap
import os
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
import torch

from redline.bench.device import cuda, resolve_device
from redline.bench.device.cpu import CpuDevice
from redline.bench.device.process import on_one_processor
from redline.bench.device.rocm import RocmDevice
from redline.bench.environment import few_threads
from redline.bench.measure.blocks import Sampling
from redline.bench.session import check
from redline.model.errors import UsageError
from redline.model.fields import MOST_RANKS
from redline.model.spec import LaunchSpec, RunSpec, WorkloadSpec
from redline.system.telemetry import nvml
from redline.system.telemetry.amd import AmdCard, open_amd_cards
from redline.system.telemetry.card import Card
from redline.system.telemetry.nvml import NvmlCard

MIB = 2**20


@pytest.mark.parametrize(("is_accelerator", "threads", "used"), [(True, 16, 4), (True, 2, 2), (False, 16, 16)])
def test_a_model_for_a_gpu_is_built_with_few_threads(is_accelerator: bool, threads: int, used: int) -> None:
    """Several are built at the same time; on a CPU the threads are what is measured."""
    before = torch.get_num_threads()
    device: Any = SimpleNamespace(is_accelerator=is_accelerator)
    torch.set_num_threads(threads)
    try:
        with few_threads(device):
            assert torch.get_num_threads() == used
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


# The CPU


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="this kernel keeps one peak for ever")
def test_a_cpu_has_resident_memory_and_no_other() -> None:
    device = CpuDevice()
    device.reset_peaks()
    before = device.memory()
    # Straight from the kernel: an allocator may still hold pages of earlier tests, and nothing would grow.
    with mmap.mmap(-1, 64 * MIB) as held:
        held.write(bytes(64 * MIB))
    grown = device.memory()
    assert grown.peak_rss_bytes - before.peak_rss_bytes > 32 * MIB
    assert (grown.peak_allocated_bytes, grown.peak_reserved_bytes, grown.context_bytes) == (None, None, None)
    device.reset_peaks()
    assert device.memory().peak_rss_bytes < grown.peak_rss_bytes - 32 * MIB, "a new peak begins at what is held now"


def test_a_look_at_the_cpu_is_within_reason() -> None:
    device = CpuDevice()
    with Sampling(device) as sampling:
        torch.ones(1000).sum()
    (*_, look) = sampling.samples
    assert look.at_s >= 0
    assert 0 <= look.utilisation <= 1
    assert 0 < look.memory_used_bytes < psutil.virtual_memory().total
    assert look.foreign == look.throttle == ()
    assert sampling.energy_j is None


# Names


@pytest.fixture
def torch_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes torch look as if built for something, with so many cards."""

    def pretend(built_for: str | None, cards: int = 0, problem: str | None = None) -> None:
        monkeypatch.setattr(cuda, "built_for", lambda: built_for)
        monkeypatch.setattr(cuda, "device_count", lambda: cards)
        reason = problem or (None if cards else "torch sees no GPU")
        monkeypatch.setattr(cuda, "unavailable_because", lambda: reason)

    return pretend


def test_a_variable_that_hides_gpus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in cuda.VISIBLE:
        monkeypatch.delenv(name, raising=False)
    assert cuda.unavailable_because() == "torch sees no GPU"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert cuda.unavailable_because() == "torch sees no GPU and CUDA_VISIBLE_DEVICES='7' may hide it"


def test_names_of_devices_become_exact(torch_of: Callable[..., None]) -> None:
    torch_of("cuda", cards=2)
    assert [resolve_device(text) for text in ("auto", "cpu", "cuda", "cuda:0", "cuda:1")] == [
        "cuda:0", "cpu", "cuda:0", "cuda:0", "cuda:1",
    ]  # fmt: skip
    torch_of("rocm", cards=1)
    assert [resolve_device(text) for text in ("auto", "rocm", "rocm:0")] == ["rocm:0"] * 3
    torch_of("cuda", cards=0)
    assert resolve_device("auto") == "cpu"
    torch_of(None)
    assert resolve_device("auto") == "cpu"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpu", "unknown device 'gpu'; did you mean cpu"),
        ("CUDA", "unknown device 'CUDA'; did you mean cuda"),
        ("", "unknown device ''"),
        ("mps", "unknown device 'mps'.*write auto, cpu, cuda, cuda:1 or rocm:0"),
        ("cpu:0", "device cpu takes no index, got 'cpu:0'"),
        ("auto:1", "device auto takes no index, got 'auto:1'"),
        ("cuda:2", "device cuda:2 does not exist: 2 visible, numbered from 0"),
        ("cuda:-1", "takes a number behind the colon, such as cuda:0, got .cuda:-1."),
        ("cuda:one", "takes a number behind the colon, such as cuda:0, got .cuda:one."),
        ("cuda:²", "takes a number behind the colon, such as cuda:0, got .cuda:²."),
        ("cuda:0:1", "takes a number behind the colon, such as cuda:0, got .cuda:0:1."),
        ("rocm", "device rocm is not available: this torch was built for cuda; run 'redline doctor'"),
    ],
)
def test_a_device_that_cannot_be_is_told_in_one_line(torch_of: Callable[..., None], text: str, says: str) -> None:
    torch_of("cuda", cards=2)
    with pytest.raises(UsageError, match=says) as caught:
        resolve_device(text)
    assert "\n" not in str(caught.value)


def test_more_ranks_than_the_memory_holds_are_refused_before_any_starts() -> None:
    spec = RunSpec(workload=WorkloadSpec(model="simple_cnn"), device="cpu", launch=LaunchSpec(door="torchrun"))
    assert check(msgspec.structs.replace(spec, ranks=2)).usage is None
    memory = psutil.virtual_memory().total
    held = psutil.Process().memory_info()
    most = memory // (held.rss - held.shared)
    told = check(msgspec.structs.replace(spec, ranks=min(2 * most, MOST_RANKS))).usage
    assert told is not None
    assert f"{min(2 * most, MOST_RANKS)} ranks need" in told
    assert "ask for fewer" in told


@pytest.mark.parametrize(
    ("built_for", "problem", "says"),
    [
        ("cuda", None, "device cuda is not available: torch sees no GPU; run 'redline doctor', or use --device cpu"),
        ("cuda", "the driver is too old", "device cuda is not available: the driver is too old"),
        (None, None, "device cuda is not available: this torch was built for the CPU only"),
        ("rocm", None, "device cuda is not available: this torch was built for rocm"),
    ],
)
def test_a_gpu_that_is_not_there_says_why(
    torch_of: Callable[..., None], built_for: str | None, problem: str | None, says: str
) -> None:
    torch_of(built_for, problem=problem)
    with pytest.raises(UsageError, match=says):
        resolve_device("cuda")


# NVIDIA's library


class NVMLError(Exception):
    """What a card, a driver or a permission refuses."""


def h200(**changes: Any) -> SimpleNamespace:
    """What NVML says about an H200 at work; a change to None takes a function away."""
    clocks = {0: 1980, 1: 1980, 2: 3201}
    said: dict[str, Any] = {
        "NVMLError": NVMLError,
        "NVML_CLOCK_SM": 1,
        "NVML_CLOCK_MEM": 2,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlSystemGetDriverVersion": lambda: b"570.124.06",
        "nvmlDeviceGetUUID": lambda card: "GPU-b2c1f1a6",
        "nvmlDeviceGetEnforcedPowerLimit": lambda card: 700_000,
        "nvmlDeviceGetMaxClockInfo": lambda card, kind: 1980,
        "nvmlDeviceGetEccMode": lambda card: [1, 1],
        "nvmlDeviceGetMigMode": lambda card: [0, 0],
        "nvmlDeviceGetUtilizationRates": lambda card: SimpleNamespace(gpu=97, memory=41),
        "nvmlDeviceGetMemoryInfo": lambda card: SimpleNamespace(used=4096 * MIB, total=143_771 * MIB),
        "nvmlDeviceGetPowerUsage": lambda card: 412_345,
        "nvmlDeviceGetTemperature": lambda card, sensor: 54,
        "nvmlDeviceGetClockInfo": lambda card, kind: clocks[kind],
        "nvmlDeviceGetCurrentClocksEventReasons": lambda card: 0,
        "nvmlDeviceGetTotalEnergyConsumption": lambda card: 123_456_789,
        "nvmlDeviceGetComputeRunningProcesses": lambda card: [],
    }
    return SimpleNamespace(**{name: value for name, value in {**said, **changes}.items() if value is not None})


def process(pid: int, used: int | None = 512 * MIB) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


def used_by(processes: list[SimpleNamespace]) -> NvmlCard:
    return NvmlCard(h200(nvmlDeviceGetComputeRunningProcesses=lambda card: processes), 0)


def test_a_card_tells_its_figures_in_si_units() -> None:
    card = NvmlCard(h200(), handle=object())
    assert card.facts() == {
        "uuid": "GPU-b2c1f1a6",
        "driver": "570.124.06",
        "power_limit_w": 700.0,
        "max_clock_hz": 1.98e9,
        "ecc": True,
        "mig": False,
    }
    assert card.reading() == {
        "utilisation": 0.97,
        "memory_used_bytes": 4096 * MIB,
        "power_w": 412.345,
        "temperature_c": 54.0,
        "clock_hz": 1.98e9,
        "memory_clock_hz": 3.201e9,
        "throttle": (),
    }
    assert card.energy_j() == pytest.approx(123_456.789)


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0x000, ()),
        (0x001, ()),  # idle
        (0x002, ()),  # clocks somebody set
        (0x004, ("sw_power_cap",)),
        (0x008, ("hw_slowdown",)),
        (0x010, ("sync_boost",)),
        (0x020, ("sw_thermal",)),
        (0x048, ("hw_slowdown", "hw_thermal")),
        (0x088, ("hw_slowdown", "power_brake")),
        (0x1FF, ("sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal", "hw_thermal", "power_brake")),
    ],
)
def test_bits_of_a_lowered_clock_become_words(bits: int, words: tuple[str, ...]) -> None:
    new = NvmlCard(h200(nvmlDeviceGetCurrentClocksEventReasons=lambda card: bits), handle=0)
    old = NvmlCard(
        h200(
            nvmlDeviceGetCurrentClocksEventReasons=None,
            nvmlDeviceGetCurrentClocksThrottleReasons=lambda card: bits,
        ),
        handle=0,
    )
    assert new.reading()["throttle"] == old.reading()["throttle"] == words


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Us, the desk and a sibling session."""
    ours = {os.getpid(), 1000, 1001}
    monkeypatch.setattr(nvml, "_family", lambda: ours)
    return ours


def test_relatives_are_not_foreign_and_strangers_are(family: set[int]) -> None:
    stranger = 2**22 + 7  # above every process number a kernel hands out
    running = [process(pid) for pid in sorted(family)]
    assert used_by(running).foreign_processes() == ()
    running.append(process(stranger))
    assert used_by(running).foreign_processes() == (str(stranger),)


def test_a_stranger_that_can_be_seen_has_a_name(family: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    family.discard(os.getppid())
    running = [process(os.getpid()), process(os.getppid())]
    (told,) = used_by(running).foreign_processes()
    assert told == f"{os.getppid()} {psutil.Process(os.getppid()).name()}"


def test_numbers_of_the_hosts_processes_tell_nothing_inside_a_container(family: set[int]) -> None:
    """The driver speaks of processes as the host counts them: ours is not among them, so nobody can be told apart."""
    running = [process(3_999_991), process(3_999_992)]
    card = used_by(running)
    assert card.foreign_processes() == ()
    assert card.own_memory_bytes() is None


def test_our_own_memory_is_what_the_driver_counts_for_us() -> None:
    running = [process(1, 100), process(os.getpid(), 700 * MIB)]
    assert used_by(running).own_memory_bytes() == 700 * MIB
    hidden = [process(os.getpid(), None)]
    assert used_by(hidden).own_memory_bytes() is None


def test_the_family_is_those_before_beside_and_below_us() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert {os.getpid(), os.getppid(), child.pid} <= nvml._family()
    finally:
        child.kill()
        child.wait()
    assert 2**22 + 7 not in nvml._family()


def test_a_card_that_cannot_be_reached_is_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    def refuse(*_: Any) -> Any:
        raise NVMLError("Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError, nvmlInit=refuse))
    assert nvml.open_card("GPU-b2c1f1a6") is None
    found = h200(nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: uuid)
    monkeypatch.setitem(sys.modules, "pynvml", found)
    assert isinstance(nvml.open_card("GPU-b2c1f1a6"), NvmlCard)


# AMD's library


class AmdSmiException(Exception):
    """A figure this card does not have."""


MI300X: dict[str, Any] = {
    "amdsmi_get_gpu_driver_info": {"driver_name": "amdgpu", "driver_version": "6.10.5", "driver_date": "2015/01/01"},
    "amdsmi_get_gpu_device_uuid": "c4ff74a1-0000-1000-80c5-6b5d0e8c2d0f",
    "amdsmi_get_power_cap_info": {"power_cap": 750_000_000, "default_power_cap": 750_000_000, "dpm_cap": 0},
    "amdsmi_get_gpu_activity": {"gfx_activity": 98, "umc_activity": 34, "mm_activity": "N/A"},
    "amdsmi_get_power_info": {
        "current_socket_power": 612, "average_socket_power": "N/A", "gfx_voltage": "N/A", "power_limit": 750_000_000,
    },
    "amdsmi_get_gpu_vram_usage": {"vram_total": 196_592, "vram_used": 4_242},
    "amdsmi_get_gpu_metrics_info": {
        "temperature_edge": "N/A", "temperature_hotspot": 61, "current_gfxclk": 2100, "current_uclk": 1300,
    },
    "amdsmi_get_energy_count": {
        "energy_accumulator": 3_000_000, "counter_resolution": 15.259, "timestamp": 98_765_432_100,
    },
}  # fmt: skip


def amdsmi(answers: dict[str, Any]) -> SimpleNamespace:
    """A library that gives these answers."""
    functions = {name: lambda handle, answer=answer: answer for name, answer in answers.items()}
    return SimpleNamespace(AmdSmiException=AmdSmiException, **functions)


def test_an_amd_card_tells_its_figures_in_si_units() -> None:
    card = AmdCard(amdsmi(MI300X), handle=0)
    assert card.facts() == {"uuid": "c4ff74a1-0000-1000-80c5-6b5d0e8c2d0f", "driver": "6.10.5", "power_limit_w": 750.0}
    assert card.reading() == {
        "utilisation": 0.98,
        "memory_used_bytes": 4_242 * MIB,
        "power_w": 612.0,
        "temperature_c": 61.0,
        "clock_hz": 2.1e9,
        "memory_clock_hz": 1.3e9,
    }
    assert card.energy_j() == pytest.approx(45.777)


def test_an_amd_card_is_found_by_its_place_on_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    places = {"first": "0000:05:00.0", "second": "0000:C5:00.0"}
    library = amdsmi({})
    library.amdsmi_init = lambda: None
    library.amdsmi_get_processor_handles = lambda: list(places)
    library.amdsmi_get_gpu_device_bdf = places.__getitem__
    monkeypatch.setitem(sys.modules, "amdsmi", library)
    assert [card._handle for card in open_amd_cards("0000:c5:00.0")] == ["second"]
    assert len(open_amd_cards()) == 2
    assert open_amd_cards("0000:07:00.0") == []
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    assert open_amd_cards("0000:05:00.0") == []


@pytest.fixture
def rocm_card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RocmDevice]:
    """A ROCm device without the hardware: only its properties are real."""

    def make(**properties: Any) -> RocmDevice:
        fixed = {"name": "AMD Instinct", "total_memory": 2**37, "multi_processor_count": 304, "major": 9, "minor": 4}
        device = object.__new__(RocmDevice)
        device.torch_device = torch.device("cuda", 0)
        device._card = Card()
        monkeypatch.setattr(device, "_properties", lambda: SimpleNamespace(**{**fixed, **properties}))
        return device

    return make


@pytest.mark.parametrize(
    ("architecture", "has_it"),
    [
        ("gfx942:sramecc+:xnack-", True),
        ("gfx940", True),
        ("gfx90a:sramecc+:xnack-", False),
        ("gfx1100", False),
        ("", False),
    ],
)
def test_only_the_mi300_family_has_tf32_among_amds(
    rocm_card: Callable[..., RocmDevice], architecture: str, has_it: bool
) -> None:
    refusal = rocm_card(gcnArchName=architecture).tf32_refusal()
    assert (refusal is None) == has_it
    assert has_it or "gfx94x" in refusal
    assert rocm_card().tf32_refusal() is not None, "an unknown architecture is not guessed"


def test_an_amd_gpu_is_described_without_its_library(rocm_card: Callable[..., RocmDevice]) -> None:
    device = rocm_card(gcnArchName="gfx942", pci_bus_id=0xC5, pci_device_id=0, pci_domain_id=0)
    info = device.info()
    assert (info.kind, info.index, info.capability, info.driver) == ("rocm", 0, "gfx942", None)
    assert device._pci_address() == "0000:c5:00.0"
    look = device.look(0.5)
    assert (look.at_s, look.power_w, look.throttle) == (0.5, None, ())
    assert device.energy_j() is None
    device._card = AmdCard(amdsmi(MI300X), handle=0)
    assert device.look(0.5).power_w == 612.0
    assert device.info().driver == "6.10.5"
    assert rocm_card()._pci_address() is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot be asked for it")
def test_a_thread_is_kept_on_one_of_its_processors_for_a_while() -> None:
    before = os.sched_getaffinity(0)
    met = set()
    for turn in range(len(before)):
        with on_one_processor(turn):
            met |= os.sched_getaffinity(0)
            assert len(os.sched_getaffinity(0)) == 1
        assert os.sched_getaffinity(0) == before
    assert met == before
    with on_one_processor(None):
        assert os.sched_getaffinity(0) == before
