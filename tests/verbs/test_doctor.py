"""Each rule of the doctor on a machine that has the problem and on one that does not."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from redline.model.protocol import Health, HealthItem
from redline.verbs.doctor import Machine, NvidiaDriver, NvmlProblem, ask_nvml, examine, our_family, output_of

DRIVER = NvidiaDriver(version="570.124.06", cuda="12.8")
NVIDIA = {
    "dev/nvidia0": "",
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26 2025",
    "proc/driver/nvidia/params": "ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: 0\n",
    "proc/self/status": "Name:\tpython\nCapEff:\t0000000000000000\n",
}
AMD = {
    "dev/kfd": "",
    "dev/dri/renderD128": "",
    "sys/module/amdgpu/version": "6.10.5\n",
    "opt/rocm/.info/version": "6.3.1-48\n",
}
NCU_SAYS = """NVIDIA (R) Nsight Compute Command Line Profiler
Copyright (c) 2018-2024 NVIDIA Corporation
Version 2024.3.2.0 (build 34861637) (public-release)
"""
ROCPROFV3_SAYS = "version: 0.5.0\ngit_revision: 5fbb4ef\n"

MakeMachine = Callable[..., Machine]


@pytest.fixture
def machine(tmp_path: Path) -> MakeMachine:
    """A machine with these files and nothing else, unless said otherwise."""

    def make(files: dict[str, str] | None = None, tools: dict[str, str] | None = None, **changes: Any) -> Machine:
        root = Path(tempfile.mkdtemp(dir=tmp_path))
        for name, text in (files or {}).items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        said = tools or {}
        faked: dict[str, Any] = {
            "root": root,
            "environ": {"REDLINE_STORE": str(tmp_path / "data" / "history.sqlite")},
            "python": (3, 12, 1),
            "which": lambda name: f"/usr/bin/{name}" if name in said else None,
            "output_of": lambda command: said[Path(command[0]).name],
            "access": lambda path, mode: True,
            "group_of": lambda path: "render",
            "installed": lambda package: None,
            "nvml": lambda: DRIVER,
            "family": lambda: {100},
            "free_bytes": lambda folder: 50 * 2**30,
        }
        return Machine(**{**faked, **changes})

    return make


def items_of(machine: Machine, health: Health | None = None) -> dict[str, HealthItem]:
    items = examine(health or Health(items=()), machine)
    assert len({item.name for item in items}) == len(items)
    return {item.name: item for item in items}


def test_every_problem_says_how_to_mend_it(machine: MakeMachine) -> None:
    worst = machine(
        {**NVIDIA, **AMD, "proc/driver/nvidia/params": "RmProfilingAdminOnly: 1"},
        tools={"ncu": NCU_SAYS},
        python=(3, 10, 0),
        access=lambda path, mode: False,
        nvml=lambda: NvidiaDriver(problem="other", error="Driver Not Loaded"),
        free_bytes=lambda folder: 5,
    )
    items = examine(None, worst)
    assert {item.ok for item in items} == {True, False, None}
    assert all(item.seen for item in items)
    assert all(item.mend for item in items if not item.ok)


def test_a_bare_machine_is_healthy_and_hears_nothing_of_gpus(machine: MakeMachine) -> None:
    items = items_of(machine())
    assert list(items) == ["Python", "timm", "transformers", "torchao", "onnxscript", "history", "disk"]
    assert not [item for item in items.values() if item.ok is False]


def driver(*processes: int) -> dict[str, Any]:
    return {"nvml": lambda: NvidiaDriver(version="570.124.06", cuda="12.8", processes=processes)}


def broken_driver(problem: NvmlProblem) -> dict[str, Any]:
    return {"nvml": lambda: NvidiaDriver(problem=problem, error="whatever it said")}


GOVERNOR = "sys/devices/system/cpu/cpu{}/cpufreq/scaling_governor"
KFD = "sys/class/kfd/kfd/proc/{}/pasid"
NCU: dict[str, Any] = {"tools": {"ncu": NCU_SAYS}}
CLOSED = {"kfd": "render", "renderD128": "video"}
FACTS: tuple[tuple[str, dict[str, str], dict[str, Any], bool | None, str], ...] = (
    ("Python", {}, {}, True, "3.12.1"),
    ("Python", {}, {"python": (3, 10, 14)}, False, "3.11"),
    ("NVIDIA driver", NVIDIA, {}, True, "570.124.06, serves CUDA up to 12.8"),
    ("NVIDIA driver", NVIDIA, broken_driver("version-mismatch"), False, "reboot"),
    ("NVIDIA driver", NVIDIA, broken_driver("library-missing"), False, "--gpus all"),
    ("NVIDIA driver", NVIDIA, broken_driver("package-missing"), False, "pip install nvidia-ml-py"),
    (
        "NVIDIA driver",
        NVIDIA,
        broken_driver("other"),
        False,
        "kernel module 570.124.06; NVML: whatever it said nvidia-smi",
    ),
    ("NVIDIA GPU is ours alone", NVIDIA, driver(100), True, ""),
    ("NVIDIA GPU is ours alone", {**NVIDIA, "proc/4242/comm": "python3\n"}, driver(100, 4242), False, "4242 python3"),
    ("NVIDIA GPU is ours alone", {**NVIDIA, "proc/4242/comm": "x"}, driver(4242), False, "CUDA_VISIBLE_DEVICES"),
    ("NVIDIA GPU is ours alone", NVIDIA, driver(9999), None, "from inside this container"),
    ("AMD GPU is ours alone", {**AMD, KFD.format(100): "1"}, {}, True, ""),
    ("AMD GPU is ours alone", {**AMD, KFD.format(77): "2", "proc/77/comm": "trainer"}, {}, False, "77 trainer"),
    ("AMD driver", AMD, {}, True, "6.10.5"),
    ("ROCm", AMD, {}, True, "6.3.1-48 in /opt/rocm"),
    ("ROCm", {"dev/kfd": ""}, {}, None, "torch brings its own libraries"),
    ("AMD permissions", AMD, {}, True, ""),
    (
        "AMD permissions",
        AMD,
        {"access": lambda path, mode: path.name not in CLOSED, "group_of": lambda path: CLOSED[path.name]},
        False,
        "/dev/kfd, /dev/dri/renderD128: they belong to render,video sudo usermod -aG render,video",
    ),
    ("CPU governor", {GOVERNOR.format(0): "performance\n"}, {}, True, ""),
    ("CPU governor", {GOVERNOR.format(0): "performance", GOVERNOR.format(1): "powersave"}, {}, None, "-g performance"),
    ("ncu", NVIDIA, NCU, True, "2024.3.2.0, /usr/bin/ncu"),
    ("ncu", {}, NCU, True, "2024.3.2.0, /usr/bin/ncu"),  # shown where it is there, also without a GPU
    ("ncu", NVIDIA, {**NCU, "output_of": lambda command: None}, False, "ncu --version"),
    ("nsys", NVIDIA, NCU, None, "Nsight Systems"),
    ("rocprofv3", AMD, {"tools": {"rocprofv3": ROCPROFV3_SAYS}}, True, "0.5.0, /usr/bin/rocprofv3"),
    ("rocprof", AMD, {"tools": {"rocprofv3": ROCPROFV3_SAYS}}, None, "rocprofiler"),
    ("timm", AMD, {}, None, "pip install 'torch-redline[timm]'"),
    ("transformers", AMD, {}, None, "pip install 'torch-redline[hf]'"),
    ("torchao", AMD, {}, None, "pip install 'torch-redline[quant]'"),
    ("onnxscript", AMD, {}, None, "pip install 'torch-redline[onnx]'"),
    ("amdsmi", AMD, {}, None, "pip install 'torch-redline[amd]'"),
    ("timm", NVIDIA, {"installed": lambda package: "1.2.3"}, True, "1.2.3"),
    ("history", {}, {}, True, "history.sqlite"),
    ("history", {}, {"access": lambda path, mode: False}, False, "REDLINE_STORE"),
    ("history", {}, {"environ": {"REDLINE_STORE": "mysql://db/redline"}}, False, "REDLINE_STORE"),
    ("history", {}, {"environ": {"REDLINE_STORE": "postgresql://ada:s3cret@db/x"}}, True, "ada:***@db/x"),
    ("disk", {}, {}, True, "50 GiB"),
    ("disk", {}, {"free_bytes": lambda folder: 100 * 2**20}, False, "100 MiB"),
)


@pytest.mark.parametrize(("name", "files", "changes", "ok", "says"), FACTS)
def test_a_fact_says_what_was_seen_and_how_to_fix_it(
    machine: MakeMachine, name: str, files: dict[str, str], changes: dict[str, Any], ok: bool | None, says: str
) -> None:
    item = items_of(machine(files, **changes))[name]
    text = f"{item.seen} {item.mend}"
    assert item.ok is ok
    assert all(words in text for words in says.split(" ") if words), text
    assert bool(item.mend) is (ok is not True)
    assert "s3cret" not in text


@pytest.mark.parametrize(
    ("files", "changes", "absent"),
    [
        ({}, {}, ("CPU governor", "nsys", "rocprof", "amdsmi")),
        (NVIDIA, NCU, ("rocprof", "amdsmi", "AMD driver")),
        (AMD, {}, ("nsys", "ncu", "NVIDIA driver")),
        ({}, NCU, ("ncu permissions",)),
        ({}, {"environ": {"REDLINE_STORE": "postgresql://db/x"}}, ("disk",)),
    ],
)
def test_what_does_not_apply_is_not_listed(
    machine: MakeMachine, files: dict[str, str], changes: dict[str, Any], absent: tuple[str, ...]
) -> None:
    assert not items_of(machine(files, **changes)).keys() & set(absent)


def test_what_the_bench_said_is_passed_on_and_its_silence_is_a_problem(machine: MakeMachine) -> None:
    said = HealthItem(name="torch", ok=True, seen="torch 2.6.0, CPU only")
    assert items_of(machine(), Health(items=(said,)))["torch"] == said
    silent = {item.name: item for item in examine(None, machine())}["torch"]
    assert (silent.ok, "import torch" in silent.mend) == (False, True)


@pytest.mark.parametrize(
    ("admin_only", "capabilities", "ok"),
    [
        ("0", "0000000000000000", True),
        ("1", "0000000000000000", False),
        ("1", "000001ffffffffff", True),
        ("1", "00000000a80425fb", False),  # root of a plain container
    ],
)
def test_ncu_permissions(machine: MakeMachine, admin_only: str, capabilities: str, ok: bool) -> None:
    files = {
        **NVIDIA,
        "proc/driver/nvidia/params": f"Foo: 1\nRmProfilingAdminOnly: {admin_only}\n",
        "proc/self/status": f"Name:\tpython\nCapEff:\t{capabilities}\n",
    }
    item = items_of(machine(files, **NCU))["ncu permissions"]
    assert item.ok is ok
    assert ("NVreg_RestrictProfilingToAdminUsers=0" in item.mend) is not ok


@pytest.mark.parametrize("kind", ["somebody else's", "a folder", "a letter"])
def test_a_history_that_cannot_be_one(machine: MakeMachine, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "history.sqlite"
    file.mkdir() if kind == "a folder" else file.write_text("Dear" if kind == "a letter" else "")
    may = kind != "somebody else's"
    item = items_of(machine(environ={"REDLINE_STORE": str(file)}, access=lambda path, mode: may or path != file))
    assert (item["history"].ok, "is a folder" in item["history"].seen) == (False, kind == "a folder")


class NVMLError(Exception):
    value = 0


def fake_nvml(**changes: Any) -> SimpleNamespace:
    """As much of pynvml as the doctor asks."""
    process = SimpleNamespace(pid=31, usedGpuMemory=None)
    functions: dict[str, Any] = {
        **{name: getattr(pynvml, name) for name in dir(pynvml) if name.startswith("NVML_ERROR_")},
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "570.124.06",
        "nvmlSystemGetCudaDriverVersion": lambda: 12080,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [process],
    }
    return SimpleNamespace(**{**functions, **changes})


def raises(message: str, code: int = pynvml.NVML_ERROR_NOT_SUPPORTED) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        error = NVMLError(message)
        error.value = code
        raise error

    return call


def test_nvml_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    assert ask_nvml() == NvidiaDriver(version="570.124.06", cuda="12.8", processes=(31,))


def test_nvml_that_hides_processes_still_tells_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = fake_nvml(nvmlDeviceGetComputeRunningProcesses=raises("Not Supported"))
    monkeypatch.setitem(sys.modules, "pynvml", hidden)
    assert ask_nvml() == NvidiaDriver(version="570.124.06", cuda="12.8")


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlSystemGetDriverVersion"])
@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "version-mismatch"),
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "library-missing"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "other"),
    ],
)
def test_nvml_errors_are_told_by_their_code(
    monkeypatch: pytest.MonkeyPatch, function: str, code: int, problem: NvmlProblem
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**{function: raises("in other words", code)}))
    assert ask_nvml() == NvidiaDriver(problem=problem, error="in other words")


def test_nvml_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "not installed" in ask_nvml().error


def test_commands_that_fail_say_nothing() -> None:
    assert output_of(["/no/such/tool"]) is None
    assert output_of(["false"]) is None
    assert "hello" in (output_of(["echo", "hello"]) or "")


def test_the_family_holds_us_and_those_who_started_us() -> None:
    assert {os.getpid(), os.getppid()} <= our_family()


def test_this_very_machine_can_be_examined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REDLINE_STORE", str(tmp_path / "history.sqlite"))
    items = {item.name: item for item in examine(Health(items=()))}
    assert items["Python"].ok is True
    assert items["history"].ok is True
