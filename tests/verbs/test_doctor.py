"""Each fact of the doctor, on a faked machine that has the problem and on one that has not; and what this machine really says."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from redline.bench import doctor as bench
from redline.bench.doctor import Torch, health
from redline.model.protocol import Health, HealthItem
from redline.model.record import DeviceInfo
from redline.system.health import Machine, output_of
from redline.verbs.doctor import Desk, Driver, ask_nvml, examine

NVIDIA = {"dev/nvidia0": "", "dev/nvidiactl": "", "proc/driver/nvidia/params": "Foo: 4\nRmProfilingAdminOnly: 0\n"}
AMD = {"dev/kfd": "", "dev/dri/renderD128": "", "opt/rocm/.info/version": "6.3.1-48\n"}
TOPOLOGY = "sys/class/kfd/kfd/topology/nodes/1/properties"
NO_GPU_NODE, GPU_NODE = {**AMD, TOPOLOGY: "simd_count 0"}, {**AMD, TOPOLOGY: "cpu_cores_count 0\nsimd_count 304"}
WORKS = (True, "version 2024.3.2.0 (build 34861637)")
MakeMachine = Callable[..., Machine]


@pytest.fixture
def machine(tmp_path: Path) -> MakeMachine:
    """A machine with these files and tools and nothing else, unless said otherwise."""

    def make(files: dict[str, str] | None = None, tools: tuple[str, ...] = (), **changes: Any) -> Machine:
        for name, text in (files or {}).items():
            (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "root" / name).write_text(text)
        faked: dict[str, Any] = {
            "root": tmp_path / "root",
            "environ": {"REDLINE_STORE": str(tmp_path / "data" / "history.sqlite")},
            "access": lambda path, mode: True,
            "which": lambda name: f"/usr/bin/{name}" if name in tools else None,
            "output_of": lambda command: WORKS,
        }
        return Machine(**{**faked, **changes})

    return make


def closed(*nodes: str) -> dict[str, Any]:
    return {"access": lambda path, mode: path.name not in nodes}


def on_bus(vendor: str, kind: str) -> dict[str, str]:
    device = "sys/bus/pci/devices/0000:01:00.0"
    return {f"{device}/vendor": f"{vendor}\n", f"{device}/class": f"{kind}\n"}


def is_as_told(item: HealthItem, ok: bool | None, says: str) -> None:
    text = f"{item.seen} {item.mend}"
    assert item.ok is ok
    assert all(word in text for word in says.split()), text
    assert "{" not in text, text
    assert bool(item.mend) or ok is not False
    assert "s3cret" not in text


# What torch says

CPU = Torch(version="2.6.0+cpu", torchvision="0.21.0+cpu", torchvision_needs="torch (==2.6.0)", threads=4, cpus=4)
CUDA = replace(CPU, version="2.6.0+cu124", cuda="12.4", unavailable="No GPUs are available")
ROCM = replace(CPU, version="2.6.0+rocm6.2", hip="6.2.41133", unavailable="No GPUs are available")
H200 = DeviceInfo(kind="cuda", index=0, name="NVIDIA H200", memory_bytes=140 * 2**30, capability="9.0")
ARCHES = ("sm_50", "sm_80", "sm_86", "sm_90")
GPU = {"devices": (H200,), "arch_list": ARCHES, "unavailable": ""}
DRIVERLESS = on_bus("0x10de", "0x030200")


def hides(name: str, value: str) -> dict[str, Any]:
    return {"environ": {name: value}}


@pytest.mark.parametrize(
    ("name", "view", "files", "changes", "ok", "says"),
    [
        ("torch", CPU, {}, {}, True, "torch 2.6.0+cpu, CPU only"),
        ("torch", CUDA, NVIDIA, {}, True, "CUDA 12.4"),
        ("torch", ROCM, AMD, {}, True, "ROCm 6.2.41133"),
        ("torch", CUDA, {**NVIDIA, **AMD}, {}, True, ""),  # an AMD processor with graphics beside an NVIDIA card
        ("torch", CPU, NVIDIA, {}, False, "an NVIDIA GPU, which this build cannot use"),
        ("torch", CPU, GPU_NODE, {}, False, "an AMD GPU"),
        ("torch", CPU, NO_GPU_NODE, {}, True, ""),  # servers without a GPU may have /dev/kfd too
        ("torch", CUDA, AMD, {}, False, "an AMD GPU"),
        ("torch", CPU, DRIVERLESS, {}, False, "an NVIDIA GPU"),
        ("torch", CPU, on_bus("0x10de", "0x020000"), {}, True, ""),  # a network card by NVIDIA
        ("torch", CPU, on_bus("0x8086", "0x030000"), {}, True, ""),
        ("GPU", replace(CUDA, **GPU), NVIDIA, {}, True, "1 usable"),
        *(("GPU", view, {}, {}, None, "measures on the CPU") for view in (CPU, CUDA, ROCM)),
        ("GPU", CUDA, NVIDIA, hides("CUDA_VISIBLE_DEVICES", ""), False, "unset CUDA_VISIBLE_DEVICES"),
        ("GPU", CUDA, NVIDIA, hides("CUDA_VISIBLE_DEVICES", "-1"), False, "unset CUDA_VISIBLE_DEVICES"),
        ("GPU", CUDA, NVIDIA, hides("CUDA_VISIBLE_DEVICES", "0"), False, "No GPUs are available"),
        ("GPU", CUDA, NVIDIA, hides("HIP_VISIBLE_DEVICES", ""), False, "No GPUs are available"),
        ("GPU", ROCM, AMD, hides("HIP_VISIBLE_DEVICES", ""), False, "unset HIP_VISIBLE_DEVICES"),
        ("GPU", ROCM, AMD, hides("ROCR_VISIBLE_DEVICES", ""), False, "unset ROCR_VISIBLE_DEVICES"),
        ("GPU", replace(CUDA, unavailable="Found no NVIDIA driver"), DRIVERLESS, {}, False, "--gpus all"),
        ("GPU", replace(CUDA, unavailable="The NVIDIA driver on your system is too old"), NVIDIA, {}, False, "older CUDA"),
        ("GPU", replace(CUDA, unavailable="Error 803: unsupported display driver"), NVIDIA, {}, False, "reboot"),
        ("GPU", replace(CUDA, unavailable="Error 802: system not yet initialized"), NVIDIA, {}, False, "fabricmanager"),
        ("cuda:0", replace(CUDA, **GPU), NVIDIA, {}, True, "NVIDIA H200, 9.0"),
        ("cuda:0", replace(CUDA, **{**GPU, "arch_list": ("sm_70",)}), NVIDIA, {}, False, "sm_70"),
        ("cuDNN", replace(CUDA, **GPU, dnn="9.1.0"), {}, {}, True, "9.1.0"),
        ("cuDNN", replace(CUDA, **GPU), {}, {}, False, "cuDNN off LD_LIBRARY_PATH"),
        ("MIOpen", replace(ROCM, **GPU, dnn="3.2.0"), {}, {}, True, "3.2.0"),
        ("Triton", replace(CUDA, **GPU, triton="3.2.0"), {}, {}, True, "3.2.0"),
        ("Triton", replace(CUDA, **GPU), {}, {}, False, "pip install triton"),
        ("Triton", CPU, {}, {}, None, "torch.compile needs it"),
        ("torchvision", CPU, {}, {}, True, "matches torch"),
        ("torchvision", replace(CPU, torchvision=None), {}, {}, False, "not installed"),
        ("torchvision", replace(CPU, version="2.6.1", torchvision_needs="torch==2.6.0"), {}, {}, False, "==2.6.0"),
        ("torchvision", replace(CPU, version="2.15.0+cu132", torchvision_needs="torch (>=2.14.0)"), {}, {}, True, ""),
        ("torchvision", replace(CPU, version="2.7.0a0+git1234", torchvision_needs="torch==2.7.0"), {}, {}, True, ""),
        ("torchvision", replace(CPU, torchvision_error="nms does not exist"), {}, {}, False, "together"),
        ("threads", CPU, {}, {}, True, "4 inside operators, on 4 CPUs"),
        ("threads", replace(CPU, threads=2), {}, {}, True, ""),
        ("threads", replace(CPU, threads=8), {}, {}, False, "--threads 4"),
        ("threads", replace(CPU, threads=1, cpus=16), {}, {}, None, "--threads 16 OMP_NUM_THREADS"),
        ("threads", CPU, {"sys/fs/cgroup/cpu.max": "150000 100000"}, {}, False, "--threads 2"),
        ("threads", CPU, {"sys/fs/cgroup/cpu.max": "max 100000"}, {}, True, ""),
        ("C++ compiler", CPU, {}, {"environ": {"CXX": "c++ -w"}}, True, "c++ -w compiles"),
        ("C++ compiler", CPU, {}, {"output_of": lambda words: (False, "x\nerror: no Python.h")}, False, "Python.h python3-dev"),
        ("C++ compiler", CPU, {}, {"output_of": output_of, "environ": {"CXX": "/no/such/c++"}}, False, "/no/such/c++ CXX"),
    ],
)  # fmt: skip
def test_a_fact_of_torch(
    machine: MakeMachine, name: str, view: Torch, files: dict[str, str], changes: dict[str, Any], ok: bool | None, says: str
) -> None:  # fmt: skip
    answer = health(replace(view, machine=machine(files, **changes)))
    assert answer.devices == view.devices
    is_as_told(next(item for item in answer.items if item.name == name), ok, says)


def test_this_very_torch_answers() -> None:
    items = {item.name: item for item in health().items}
    assert {"torch", "GPU", "C++ compiler", "torchvision", "threads"} <= set(items)
    assert items["torchvision"].ok
    assert items["C++ compiler"].ok or shutil.which("g++") is None


@pytest.mark.parametrize(
    ("capability", "arch_list", "ok"),
    [
        ("9.0", ARCHES, True),
        ("8.9", ARCHES, True),  # sm_86 code runs on a later minor revision
        ("8.0", ("sm_86", "sm_90"), False),
        ("12.0", ARCHES, False),
        ("12.0", (*ARCHES, "compute_90"), True),  # PTX is compiled on the spot
        ("10.0", ("sm_90", "sm_90a", "compute_90a"), False),  # 'a' code runs where it was built for only
        ("9.0", ("sm_90a",), True),
        ("10.3", ("sm_100f",), True),
        ("12.1", ("sm_120",), True),
        ("gfx942", ("gfx90a", "gfx942"), True),
        ("gfx1103", ("gfx1100",), False),
        ("9.0", (), False),
    ],
)
def test_code_runs_on_these_architectures(capability: str, arch_list: tuple[str, ...], ok: bool) -> None:
    assert bench.runs_on(capability, arch_list) is ok


@pytest.mark.parametrize(("number", "text"), [(92600, "9.26.0"), (90100, "9.1.0"), (8902, "8.9.2"), (3002000, "3.2.0")])
def test_library_versions(number: int, text: str) -> None:
    assert bench.dotted(number) == text


# What the desk sees


def items_of(machine: Machine, health: Health | None = None, **changes: Any) -> dict[str, HealthItem]:
    faked: dict[str, Any] = {
        "python": (3, 12, 1),
        "nvml": lambda: Driver(version="570.124.06", cuda="12.8"),
        "installed": lambda package: None,
    }
    items = examine(health or Health(items=()), Desk(machine, **{**faked, **changes}))
    assert len({item.name for item in items}) == len(items)
    return {item.name: item for item in items}


def store(url: str) -> dict[str, Any]:
    return {"environ": {"REDLINE_STORE": url}}


NCU: dict[str, Any] = {"tools": ("ncu",)}
ADMIN_ONLY = {**NVIDIA, "proc/driver/nvidia/params": "RmProfilingAdminOnly: 1\n"}


@pytest.mark.parametrize(
    ("name", "files", "changes", "desk", "ok", "says"),
    [
        ("Python", {}, {}, {}, True, "3.12.1"),
        ("Python", {}, {}, {"python": (3, 10, 14)}, False, "3.11"),
        ("NVIDIA driver", NVIDIA, {}, {}, True, "570.124.06, serves CUDA up to 12.8"),
        ("NVIDIA driver", DRIVERLESS, {}, {"nvml": lambda: Driver(error="not loaded", mend="load it")}, False, "not loaded load it"),
        ("ROCm", AMD, {}, {}, True, "6.3.1-48 in /opt/rocm"),
        ("ROCm", {"dev/kfd": ""}, {}, {}, None, "torch brings its own libraries"),
        ("GPU permissions", NVIDIA, {}, {}, True, ""),
        ("GPU permissions", NVIDIA, closed("nvidiactl"), {}, False, "/dev/nvidiactl usermod"),
        ("GPU permissions", AMD, closed("kfd", "renderD128"), {}, False, "/dev/dri/renderD128, /dev/kfd usermod --device"),
        ("ncu", NVIDIA, NCU, {}, True, "2024.3.2.0, /usr/bin/ncu"),
        ("ncu", {}, NCU, {}, True, "2024.3.2.0, /usr/bin/ncu"),  # shown where it is there, also without a GPU
        ("ncu", NVIDIA, {**NCU, "output_of": lambda command: (False, "")}, {}, False, "/usr/bin/ncu --version"),
        ("nsys", NVIDIA, NCU, {}, None, "Nsight Systems"),
        ("rocprof", AMD, {"tools": ("rocprofv3",)}, {}, None, "rocprofiler"),
        ("ncu permissions", NVIDIA, NCU, {}, True, "open"),
        ("ncu permissions", ADMIN_ONLY, NCU, {}, False, "NVreg_RestrictProfilingToAdminUsers=0"),
        ("ncu permissions", {**ADMIN_ONLY, "proc/self/status": "CapEff:\t00000000a80425fb\n"}, NCU, {}, False, ""),  # a container's root
        ("ncu permissions", {**ADMIN_ONLY, "proc/self/status": "CapEff:\t000001ffffffffff\n"}, NCU, {}, True, ""),
        ("timm", AMD, {}, {}, None, "pip install 'torch-redline[timm]'"),
        ("transformers", AMD, {}, {}, None, "pip install 'torch-redline[hf]'"),
        ("torchao", AMD, {}, {}, None, "pip install 'torch-redline[quant]'"),
        ("onnxscript", AMD, {}, {}, None, "pip install 'torch-redline[onnx]'"),
        ("amdsmi", AMD, {}, {}, None, "pip install 'torch-redline[amd]'"),
        ("timm", NVIDIA, {}, {"installed": lambda package: "1.2.3"}, True, "1.2.3"),
        ("history", {}, {}, {}, True, "history.sqlite"),
        ("history", {}, store("mysql://db/redline"), {}, False, "REDLINE_STORE"),
        ("history", {}, store("postgresql://ada:s3cret@db/x"), {}, True, "ada:***@db/x"),
        ("history", {}, store("/proc/nowhere/history.sqlite"), {}, False, "REDLINE_STORE"),
        ("history", {}, store("/"), {}, False, "REDLINE_STORE"),
    ],
)  # fmt: skip
def test_a_fact_of_the_desk(
    machine: MakeMachine, name: str, files: dict[str, str], changes: dict[str, Any], desk: dict[str, Any], ok: bool | None, says: str
) -> None:  # fmt: skip
    is_as_told(items_of(machine(files, **changes), **desk)[name], ok, says)


@pytest.mark.parametrize(
    ("files", "changes", "absent"),
    [
        ({}, {}, {"nsys", "rocprof", "amdsmi", "GPU permissions"}),
        (NVIDIA, NCU, {"rocprof", "amdsmi", "ROCm"}),
        (AMD, {}, {"nsys", "ncu", "NVIDIA driver"}),
        ({}, NCU, {"ncu permissions"}),
    ],
)
def test_what_does_not_apply_is_not_listed(
    machine: MakeMachine, files: dict[str, str], changes: dict[str, Any], absent: set[str]
) -> None:
    assert not items_of(machine(files, **changes)).keys() & absent


def test_a_letter_is_no_history_and_stays_as_it_is(machine: MakeMachine, tmp_path: Path) -> None:
    letter = tmp_path / "letter"
    letter.write_text("Dear Ada,")
    assert items_of(machine(**store(str(letter))))["history"].ok is False
    assert letter.read_text() == "Dear Ada,"


def test_what_the_bench_said_is_passed_on_and_its_silence_is_a_problem(machine: MakeMachine) -> None:
    said = HealthItem(name="torch", ok=True, seen="torch 2.6.0, CPU only")
    assert items_of(machine(), Health(items=(said,)))["torch"] == said
    silent = []
    for version in ("2.6.0", None):
        desk = Desk(machine(), installed={"torch": version}.get)
        silent += [(item.ok, item.mend.split(" '")[0]) for item in examine(None, desk) if item.name == "torch"]
    assert silent == [(False, "see why: python -c"), (None, "pip install")]


class NVMLError(Exception):
    value = 0


@pytest.mark.parametrize(
    ("code", "fix"),
    [
        (None, ""),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "reboot"),
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "--gpus all"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "nvidia-smi"),
    ],
)
def test_nvml_is_read_and_its_errors_are_known_by_their_code(
    monkeypatch: pytest.MonkeyPatch, code: int | None, fix: str
) -> None:
    def begin() -> None:
        if code is not None:
            error = NVMLError("in other words")
            error.value = code
            raise error

    codes = {name: getattr(pynvml, name) for name in dir(pynvml) if name.startswith("NVML_ERROR_")}
    functions = {"nvmlSystemGetDriverVersion": lambda: "570.124.06", "nvmlSystemGetCudaDriverVersion": lambda: 12080}
    faked = SimpleNamespace(**codes, **functions, NVMLError=NVMLError, nvmlInit=begin)
    monkeypatch.setitem(sys.modules, "pynvml", faked)
    told = ask_nvml()
    assert (told.version, told.cuda, told.error) == (
        ("570.124.06", "12.8", "") if code is None else ("", "", "in other words")
    )
    assert fix in told.mend


def test_commands_that_fail_are_told_from_those_that_work() -> None:
    assert [output_of(words)[0] for words in (["/no/such/tool"], ["false"], ["echo", "hello"])] == [False, False, True]
    assert "hello" in output_of(["echo", "hello"])[1]


def test_this_very_machine_can_be_examined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REDLINE_STORE", str(tmp_path / "history.sqlite"))
    items = {item.name: item for item in examine(Health(items=()))}
    assert items["Python"].ok is True
    assert items["history"].ok is True
    assert os.environ["REDLINE_STORE"] in items["history"].seen
