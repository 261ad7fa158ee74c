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


def test_python(machine: MakeMachine) -> None:
    assert items_of(machine())["Python"].ok is True
    old = items_of(machine(python=(3, 10, 14)))["Python"]
    assert old.ok is False
    assert "3.11" in old.mend


def test_what_the_bench_said_is_passed_on(machine: MakeMachine) -> None:
    said = HealthItem(name="torch", ok=True, seen="torch 2.6.0, CPU only")
    assert items_of(machine(), Health(items=(said,)))["torch"] == said


def test_a_bench_that_did_not_answer_is_a_problem(machine: MakeMachine) -> None:
    silent = {item.name: item for item in examine(None, machine())}["torch"]
    assert silent.ok is False
    assert "import torch" in silent.mend


def test_nvidia_driver(machine: MakeMachine) -> None:
    fine = items_of(machine(NVIDIA))["NVIDIA driver"]
    assert fine.ok is True
    assert "570.124.06" in fine.seen
    assert "12.8" in fine.seen


@pytest.mark.parametrize(
    ("problem", "mend"),
    [
        ("version-mismatch", "reboot"),
        ("library-missing", "--gpus all"),
        ("package-missing", "pip install nvidia-ml-py"),
        ("other", "nvidia-smi"),
    ],
)
def test_nvidia_driver_that_does_not_answer(machine: MakeMachine, problem: NvmlProblem, mend: str) -> None:
    driver = NvidiaDriver(problem=problem, error="whatever it said")
    broken = items_of(machine(NVIDIA, nvml=lambda: driver))["NVIDIA driver"]
    assert broken.ok is False
    assert "kernel module 570.124.06; NVML: whatever it said" in broken.seen
    assert mend in broken.mend


def test_other_processes_on_an_nvidia_gpu(machine: MakeMachine) -> None:
    name = "NVIDIA GPU is ours alone"
    ours = machine(NVIDIA, nvml=lambda: NvidiaDriver(version="1", cuda="12.8", processes=(100,)))
    assert items_of(ours)[name].ok is True
    shared = machine(
        {**NVIDIA, "proc/4242/comm": "python3\n"},
        nvml=lambda: NvidiaDriver(version="1", cuda="12.8", processes=(100, 4242)),
    )
    item = items_of(shared)[name]
    assert item.ok is False
    assert "4242 python3" in item.seen
    assert "CUDA_VISIBLE_DEVICES" in item.mend


def test_processes_of_the_host_are_no_verdict_inside_a_container(machine: MakeMachine) -> None:
    item = items_of(machine(NVIDIA, nvml=lambda: NvidiaDriver(version="1", cuda="12.8", processes=(9999,))))
    assert item["NVIDIA GPU is ours alone"].ok is None


def test_other_processes_on_an_amd_gpu(machine: MakeMachine) -> None:
    name = "AMD GPU is ours alone"
    assert items_of(machine({**AMD, "sys/class/kfd/kfd/proc/100/pasid": "1"}))[name].ok is True
    shared = items_of(machine({**AMD, "sys/class/kfd/kfd/proc/77/pasid": "2", "proc/77/comm": "trainer"}))[name]
    assert shared.ok is False
    assert "77 trainer" in shared.seen


def test_rocm_userland(machine: MakeMachine) -> None:
    items = items_of(machine(AMD))
    assert "6.10.5" in items["AMD driver"].seen
    assert (items["ROCm"].ok, items["ROCm"].seen) == (True, "6.3.1-48 in /opt/rocm")


def test_torch_brings_its_own_rocm(machine: MakeMachine) -> None:
    assert items_of(machine({"dev/kfd": ""}))["ROCm"].ok is None


def test_amd_permissions(machine: MakeMachine) -> None:
    assert items_of(machine(AMD))["AMD permissions"].ok is True
    groups = {"kfd": "render", "renderD128": "video"}
    closed = machine(AMD, access=lambda path, mode: path.name not in groups, group_of=lambda path: groups[path.name])
    item = items_of(closed)["AMD permissions"]
    assert item.ok is False
    assert "/dev/kfd, /dev/dri/renderD128" in item.seen
    assert "usermod -aG render,video" in item.mend


def test_governor(machine: MakeMachine) -> None:
    path = "sys/devices/system/cpu/cpu{}/cpufreq/scaling_governor"
    assert "CPU governor" not in items_of(machine())  # a virtual machine shows none
    assert items_of(machine({path.format(0): "performance\n"}))["CPU governor"].ok is True
    mixed = items_of(machine({path.format(0): "performance\n", path.format(1): "powersave\n"}))["CPU governor"]
    assert mixed.ok is None
    assert "performance" in mixed.mend


def test_profilers_of_nvidia(machine: MakeMachine) -> None:
    items = items_of(machine(NVIDIA, tools={"ncu": NCU_SAYS}))
    assert items["ncu"].seen == "2024.3.2.0, /usr/bin/ncu"
    assert items["nsys"].ok is None
    assert "Nsight Systems" in items["nsys"].mend
    assert not [name for name in items if name.startswith("rocprof")]


def test_profilers_of_amd(machine: MakeMachine) -> None:
    items = items_of(machine(AMD, tools={"rocprofv3": ROCPROFV3_SAYS}))
    assert (items["rocprofv3"].ok, items["rocprofv3"].seen) == (True, "0.5.0, /usr/bin/rocprofv3")
    assert [items[name].ok for name in ("rocprof", "rocprofv2", "rocprof-compute")] == [None, None, None]
    assert "nsys" not in items
    assert "ncu" not in items


def test_a_profiler_for_another_machine_is_shown_when_it_is_there(machine: MakeMachine) -> None:
    items = items_of(machine(tools={"ncu": NCU_SAYS}))
    assert items["ncu"].ok is True
    assert "ncu permissions" not in items


def test_a_profiler_that_does_not_answer(machine: MakeMachine) -> None:
    broken = items_of(machine(NVIDIA, tools={"ncu": NCU_SAYS}, output_of=lambda command: None))["ncu"]
    assert broken.ok is False
    assert "ncu --version" in broken.mend


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
    item = items_of(machine(files, tools={"ncu": NCU_SAYS}))["ncu permissions"]
    assert item.ok is ok
    assert ("NVreg_RestrictProfilingToAdminUsers=0" in item.mend) is not ok


def test_extras(machine: MakeMachine) -> None:
    missing = items_of(machine(AMD))
    assert {name: missing[name].mend for name in ("timm", "transformers", "torchao", "onnxscript", "amdsmi")} == {
        "timm": "pip install 'torch-redline[timm]'",
        "transformers": "pip install 'torch-redline[hf]'",
        "torchao": "pip install 'torch-redline[quant]'",
        "onnxscript": "pip install 'torch-redline[onnx]'",
        "amdsmi": "pip install 'torch-redline[amd]'",
    }
    assert all(missing[name].ok is None for name in ("timm", "transformers", "amdsmi"))
    there = items_of(machine(NVIDIA, installed=lambda package: "1.2.3"))
    assert (there["timm"].ok, there["timm"].seen) == (True, "1.2.3")
    assert "amdsmi" not in there


def test_history_is_writable(machine: MakeMachine, tmp_path: Path) -> None:
    assert items_of(machine())["history"].ok is True
    closed = items_of(machine(access=lambda path, mode: path != tmp_path))["history"]
    assert closed.ok is False
    assert "REDLINE_STORE" in closed.mend


def test_a_history_file_of_someone_else(machine: MakeMachine, tmp_path: Path) -> None:
    file = tmp_path / "history.sqlite"
    file.touch()
    theirs = machine(environ={"REDLINE_STORE": str(file)}, access=lambda path, mode: path != file)
    assert items_of(theirs)["history"].ok is False


@pytest.mark.parametrize("body", [None, b"a letter"])
def test_a_history_that_is_something_else(machine: MakeMachine, tmp_path: Path, body: bytes | None) -> None:
    file = tmp_path / "history.sqlite"
    file.mkdir() if body is None else file.write_bytes(body)
    item = items_of(machine(environ={"REDLINE_STORE": str(file)}))["history"]
    assert (item.ok, "is a folder" in item.seen) == (False, body is None)


def test_a_history_on_a_server_shows_no_password(machine: MakeMachine) -> None:
    items = items_of(machine(environ={"REDLINE_STORE": "postgresql://ada:secret@db/redline"}))
    assert items["history"].ok is True
    assert "secret" not in items["history"].seen
    assert "disk" not in items


def test_a_history_that_cannot_be(machine: MakeMachine) -> None:
    item = items_of(machine(environ={"REDLINE_STORE": "mysql://db/redline"}))["history"]
    assert item.ok is False
    assert "REDLINE_STORE" in item.mend


def test_disk(machine: MakeMachine) -> None:
    assert items_of(machine())["disk"].ok is True
    full = items_of(machine(free_bytes=lambda folder: 100 * 2**20))["disk"]
    assert full.ok is False
    assert "100 MiB" in full.seen


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
