"""Each rule of the bench's health on a machine that has the problem and on one that does not."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from redline.bench import doctor as under_test
from redline.bench.doctor import (
    Machine,
    TorchDevice,
    TorchView,
    dotted,
    health,
    judge_build,
    judge_compiler,
    judge_device,
    judge_gpu,
    judge_gpu_libraries,
    judge_number_formats,
    judge_threads,
    judge_torchvision,
    runs_on,
    satisfies,
)
from redline.model.environment import DeviceInfo
from redline.model.questions import HealthItem

NVIDIA = {"dev/nvidia0": "", "dev/nvidiactl": "", "proc/driver/nvidia/version": "NVRM version: 570.124.06"}
AMD = {"dev/kfd": "", "dev/dri/renderD128": ""}
CPU = TorchView(version="2.6.0+cpu", torchvision="0.21.0+cpu", torchvision_needs="torch (==2.6.0)", threads=4)
CUDA = replace(CPU, version="2.6.0+cu124", cuda="12.4")
ROCM = replace(CPU, version="2.6.0+rocm6.2", hip="6.2.41133")
H200 = TorchDevice(
    DeviceInfo(kind="cuda", index=0, name="NVIDIA H200", memory_bytes=140 * 2**30, capability="9.0"),
    bf16=True,
    tf32=True,
)
ARCHES = ("sm_50", "sm_80", "sm_86", "sm_90")

MakeMachine = Callable[..., Machine]


@pytest.fixture
def machine(tmp_path: Path) -> MakeMachine:
    """A machine with these files and nothing else, unless said otherwise."""

    def make(files: dict[str, str] | None = None, **changes: Any) -> Machine:
        root = Path(tempfile.mkdtemp(dir=tmp_path))
        for name, text in (files or {}).items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        faked: dict[str, Any] = {"root": root, "environ": {}, "access": lambda path, mode: True, "cpus": 4}
        return Machine(**{**faked, **changes})

    return make


def on_bus(vendor: str, kind: str) -> dict[str, str]:
    device = "sys/bus/pci/devices/0000:01:00.0"
    return {f"{device}/vendor": f"{vendor}\n", f"{device}/class": f"{kind}\n"}


def test_this_very_torch_answers() -> None:
    answer = health()
    names = [item.name for item in answer.items]
    assert len(set(names)) == len(names)
    assert {"torch", "GPU", "C++ compiler", "torchvision", "threads"} <= set(names)
    assert all(item.mend for item in answer.items if item.ok is False)
    torchvision = next(item for item in answer.items if item.name == "torchvision")
    assert torchvision.ok is True, torchvision.seen


def test_devices_are_told(machine: MakeMachine) -> None:
    answer = health(machine(NVIDIA), replace(CUDA, devices=(H200,), arch_list=ARCHES, dnn="9.1.0"))
    assert answer.devices == (H200.info,)
    assert "cuda:0" in [item.name for item in answer.items]


@pytest.mark.parametrize(
    ("view", "files", "ok"),
    [
        (CPU, {}, True),
        (CUDA, {}, True),
        (CUDA, NVIDIA, True),
        (ROCM, AMD, True),
        (CUDA, {**NVIDIA, **AMD}, True),  # an AMD processor with graphics beside an NVIDIA card
        (CPU, NVIDIA, False),
        (CPU, AMD, False),
        (CUDA, AMD, False),
        (ROCM, NVIDIA, False),
        (CPU, on_bus("0x10de", "0x030200"), False),
        (CPU, on_bus("0x10de", "0x020000"), True),  # a network card by NVIDIA
        (CPU, on_bus("0x8086", "0x030000"), True),
    ],
)
def test_build_against_the_machine(machine: MakeMachine, view: TorchView, files: dict[str, str], ok: bool) -> None:
    item = judge_build(view, machine(files))
    assert item.ok is ok
    assert view.version in item.seen
    assert bool(item.mend) is not ok


@pytest.mark.parametrize(("node", "here"), [("simd_count 0", False), ("cpu_cores_count 0\nsimd_count 304", True)])
def test_kfd_without_a_gpu_is_no_gpu(machine: MakeMachine, node: str, here: bool) -> None:
    files = {**AMD, "sys/class/kfd/kfd/topology/nodes/1/properties": node}
    assert machine(files).amd() is here


def test_gpu_in_use(machine: MakeMachine) -> None:
    assert judge_gpu(replace(CUDA, devices=(H200,)), machine(NVIDIA)).ok is True


@pytest.mark.parametrize("view", [CPU, CUDA, ROCM])
def test_no_gpu_is_no_fault(machine: MakeMachine, view: TorchView) -> None:
    assert judge_gpu(replace(view, unavailable="Found no NVIDIA driver"), machine()).ok is None


@pytest.mark.parametrize(
    ("view", "files", "variable", "value"),
    [
        (CUDA, NVIDIA, "CUDA_VISIBLE_DEVICES", ""),
        (CUDA, NVIDIA, "CUDA_VISIBLE_DEVICES", "-1"),
        (ROCM, AMD, "HIP_VISIBLE_DEVICES", ""),
        (ROCM, AMD, "ROCR_VISIBLE_DEVICES", ""),
        (ROCM, AMD, "CUDA_VISIBLE_DEVICES", "-1"),
    ],
)
def test_gpu_hidden_by_a_variable(
    machine: MakeMachine, view: TorchView, files: dict[str, str], variable: str, value: str
) -> None:
    item = judge_gpu(replace(view, unavailable="No GPUs are available"), machine(files, environ={variable: value}))
    assert item.ok is False
    assert variable in item.seen
    assert f"unset {variable}" in item.mend
    other = judge_gpu(replace(view, unavailable="No GPUs are available"), machine(files, environ={variable: "0"}))
    assert variable not in other.seen


@pytest.mark.parametrize(
    ("view", "files", "node"),
    [(CUDA, NVIDIA, "nvidiactl"), (ROCM, AMD, "kfd"), (ROCM, AMD, "renderD128")],
)
def test_gpu_without_permission(machine: MakeMachine, view: TorchView, files: dict[str, str], node: str) -> None:
    closed = judge_gpu(replace(view, unavailable="no"), machine(files, access=lambda path, mode: path.name != node))
    assert closed.ok is False
    assert node in closed.seen
    assert "usermod" in closed.mend


def test_gpu_without_a_driver(machine: MakeMachine) -> None:
    item = judge_gpu(replace(CUDA, unavailable="Found no NVIDIA driver"), machine(on_bus("0x10de", "0x030200")))
    assert item.ok is False
    assert "driver is not loaded" in item.seen


@pytest.mark.parametrize(
    ("said", "mend"),
    [
        ("The NVIDIA driver on your system is too old (found version 11040).", "older CUDA than 12.4"),
        ("Unexpected error from cudaGetDeviceCount(). Error 803: unsupported display driver", "reboot"),
        ("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized", "fabricmanager"),
        ("CUDA unknown error", "nvidia-smi"),
    ],
)
def test_gpu_that_torch_cannot_open(machine: MakeMachine, said: str, mend: str) -> None:
    item = judge_gpu(replace(CUDA, unavailable=said), machine(NVIDIA))
    assert (item.ok, item.seen) == (False, said)
    assert mend in item.mend


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
def test_architectures(capability: str, arch_list: tuple[str, ...], ok: bool) -> None:
    assert runs_on(capability, arch_list) is ok


def test_device() -> None:
    fine = judge_device(H200, ARCHES)
    assert (fine.name, fine.ok) == ("cuda:0", True)
    assert "NVIDIA H200, 9.0, 140 GiB" in fine.seen
    unserved = judge_device(H200, ("sm_70",))
    assert unserved.ok is False
    assert "sm_70" in unserved.seen


def test_number_formats(machine: MakeMachine) -> None:
    def formats(device: TorchDevice) -> dict[str, HealthItem]:
        return {item.name: item for item in judge_number_formats(replace(CUDA, devices=(device,)), machine())}

    modern, turing = formats(H200), formats(replace(H200, bf16=False, tf32=False))
    assert (modern["bf16"].ok, modern["TF32"].ok) == (True, True)
    assert (turing["bf16"].ok, turing["TF32"].ok) == (None, None)
    assert "cuda:0" in turing["TF32"].seen


@pytest.mark.parametrize(
    ("cpuinfo", "ok"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16 amx_tile\n", True),
        ("Features\t: fp asimd fphp asimdhp bf16\n", True),
        ("flags\t\t: fpu avx2 fma f16c\n", None),
    ],
)
def test_half_precision_on_the_cpu(machine: MakeMachine, cpuinfo: str, ok: bool | None) -> None:
    (item,) = judge_number_formats(CPU, machine({"proc/cpuinfo": cpuinfo}))
    assert item.ok is ok


def test_gpu_libraries() -> None:
    def libraries(view: TorchView) -> dict[str, bool | None]:
        return {item.name: item.ok for item in judge_gpu_libraries(view)}

    on_gpu = replace(CUDA, devices=(H200,))
    assert libraries(replace(on_gpu, dnn="9.1.0", triton="3.2.0")) == {"cuDNN": True, "Triton": True}
    assert libraries(on_gpu) == {"cuDNN": False, "Triton": False}
    assert libraries(replace(ROCM, devices=(H200,), dnn="3.2.0")) == {"MIOpen": True, "Triton": False}
    assert libraries(CPU) == {"Triton": None}


@pytest.mark.parametrize(("number", "text"), [(92600, "9.26.0"), (90100, "9.1.0"), (8902, "8.9.2"), (3002000, "3.2.0")])
def test_library_versions(number: int, text: str) -> None:
    assert dotted(number) == text


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
def test_a_compiler_that_works(machine: MakeMachine) -> None:
    item = judge_compiler(machine(environ={"PATH": os.environ["PATH"], "CXX": "g++ -w"}))
    assert item.ok is True, item.seen


def test_no_compiler(machine: MakeMachine, tmp_path: Path) -> None:
    item = judge_compiler(machine(environ={"PATH": str(tmp_path)}))
    assert item.ok is False
    assert "not found" in item.seen


@pytest.mark.parametrize(
    ("said", "mend"),
    [
        ("tiny.cpp:2:10: fatal error: Python.h: No such file or directory", "-dev"),
        ("tiny.cpp:5:10: fatal error: omp.h: No such file or directory", "OpenMP"),
        ("error: something else", "another one"),
    ],
)
def test_a_compiler_that_fails(machine: MakeMachine, tmp_path: Path, said: str, mend: str) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\necho 'In file included' >&2\necho '{said}' >&2\nexit 1\n")
    compiler.chmod(0o755)
    item = judge_compiler(machine(environ={"PATH": os.environ["PATH"], "CXX": str(compiler)}))
    assert item.ok is False
    assert said in item.seen
    assert mend in item.mend


def test_a_compiler_that_hangs(machine: MakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(under_test, "COMPILE_TIMEOUT_S", 0.05)
    item = judge_compiler(machine(environ={"PATH": os.environ["PATH"], "CXX": str(compiler)}))
    assert item.ok is False
    assert "no answer" in item.seen


def test_torchvision() -> None:
    assert judge_torchvision(CPU).ok is True
    assert judge_torchvision(replace(CPU, torchvision=None)).seen == "not installed"
    old = judge_torchvision(replace(CPU, version="2.7.0+cpu"))
    assert old.ok is False
    assert "==2.6.0" in old.seen
    broken = judge_torchvision(replace(CPU, torchvision_error="operator torchvision::nms does not exist"))
    assert broken.ok is False
    assert "together" in broken.mend


@pytest.mark.parametrize(
    ("version", "requirement", "ok"),
    [
        ("2.6.0+cu124", "torch (==2.6.0)", True),
        ("2.6.0", "torch==2.6.0", True),
        ("2.6.1", "torch==2.6.0", False),
        ("2.15.0+cu132", "torch (>=2.14.0)", True),
        ("2.9.1", "torch>=2.14.0", False),
        ("2.7.0.dev20250101", "torch", True),
        ("2.7.0a0+git1234", "torch==2.7.0", True),
    ],
)
def test_requirements(version: str, requirement: str, ok: bool) -> None:
    assert satisfies(version, requirement) is ok


@pytest.mark.parametrize(("threads", "cpus", "ok"), [(4, 4, True), (2, 4, True), (8, 4, False), (1, 16, None)])
def test_threads_against_cpus(machine: MakeMachine, threads: int, cpus: int, ok: bool | None) -> None:
    item = judge_threads(replace(CPU, threads=threads), machine(cpus=cpus))
    assert item.ok is ok
    assert ("--threads" in item.mend) is (ok is not True)


def test_few_threads_name_the_variable(machine: MakeMachine) -> None:
    item = judge_threads(replace(CPU, threads=1), machine(cpus=16, environ={"OMP_NUM_THREADS": "1"}))
    assert "OMP_NUM_THREADS=1" in item.seen


V2 = {"proc/self/cgroup": "0::/user.slice/job\n"}
V1 = {"proc/self/cgroup": "3:cpu,cpuacct:/docker/abc\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({**V2, "sys/fs/cgroup/user.slice/job/cpu.max": "max 100000"}, None),
        ({**V2, "sys/fs/cgroup/user.slice/job/cpu.max": "250000 100000"}, 2.5),
        ({**V2, "sys/fs/cgroup/user.slice/cpu.max": "100000 100000"}, 1.0),
        (
            {
                **V2,
                "sys/fs/cgroup/user.slice/job/cpu.max": "400000 100000",
                "sys/fs/cgroup/user.slice/cpu.max": "200000 100000",
            },
            2.0,
        ),
        (
            {
                **V1,
                "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "150000",
                "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000",
            },
            1.5,
        ),
        (  # inside a container the path is the host's; the top is ours
            {**V1, "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
            3.0,
        ),
        ({**V1, "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_cpu_limit(machine: MakeMachine, files: dict[str, str], limit: float | None) -> None:
    assert machine(files).cpu_limit() == limit


def test_threads_against_a_cpu_limit(machine: MakeMachine) -> None:
    item = judge_threads(CPU, machine({**V2, "sys/fs/cgroup/user.slice/job/cpu.max": "150000 100000"}))
    assert item.ok is False
    assert "limited to 1.5" in item.seen
    assert "--threads 2" in item.mend
