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

from redline.bench import doctor
from redline.bench.doctor import Machine, TorchDevice, TorchView, health
from redline.model.protocol import HealthItem
from redline.model.record import DeviceInfo

NVIDIA = {"dev/nvidia0": "", "dev/nvidiactl": "", "proc/driver/nvidia/version": "NVRM version: 570.124.06"}
AMD = {"dev/kfd": "", "dev/dri/renderD128": ""}
NO_GPU_NODE = {**AMD, "sys/class/kfd/kfd/topology/nodes/1/properties": "simd_count 0"}
GPU_NODE = {**AMD, "sys/class/kfd/kfd/topology/nodes/1/properties": "cpu_cores_count 0\nsimd_count 304"}
CPU = TorchView(version="2.6.0+cpu", torchvision="0.21.0+cpu", torchvision_needs="torch (==2.6.0)", threads=4)
CUDA = replace(CPU, version="2.6.0+cu124", cuda="12.4")
ROCM = replace(CPU, version="2.6.0+rocm6.2", hip="6.2.41133")
INFO = DeviceInfo(kind="cuda", index=0, name="NVIDIA H200", memory_bytes=140 * 2**30, capability="9.0")
H200 = TorchDevice(INFO, bf16=True, tf32=True)
TURING = replace(H200, bf16=False, tf32=False)
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
        return Machine(**{"root": root, "environ": {}, "access": lambda path, mode: True, "cpus": 4, **changes})

    return make


def on_bus(vendor: str, kind: str) -> dict[str, str]:
    device = "sys/bus/pci/devices/0000:01:00.0"
    return {f"{device}/vendor": f"{vendor}\n", f"{device}/class": f"{kind}\n"}


def closed(node: str) -> dict[str, Any]:
    return {"access": lambda path, mode: path.name != node}


def hidden(view: TorchView, said: str = "No GPUs are available") -> TorchView:
    return replace(view, unavailable=said)


def with_gpu(view: TorchView, device: TorchDevice = H200, **changes: Any) -> TorchView:
    return replace(view, devices=(device,), arch_list=ARCHES, **changes)


def asking(version: str, needs: str) -> TorchView:
    return replace(CPU, version=version, torchvision_needs=needs)


def seen_as(view: TorchView, name: str, machine: Machine) -> HealthItem:
    """The fact of this name; the compiler is tried elsewhere."""
    checks = [check for check in doctor.CHECKS if check is not doctor.check_compiler]
    return next(item for check in checks for item in check(view, machine) if item.name == name)


V2, V1 = {"proc/self/cgroup": "0::/user.slice/job\n"}, {"proc/self/cgroup": "3:cpu,cpuacct:/docker/abc\n0::/\n"}
LIMITED = {**V2, "sys/fs/cgroup/user.slice/job/cpu.max": "150000 100000"}
DRIVERLESS = on_bus("0x10de", "0x030200")


@pytest.mark.parametrize(
    ("name", "view", "files", "changes", "ok", "words"),
    [
        ("torch", CPU, {}, {}, True, "torch 2.6.0+cpu, CPU only"),
        ("torch", CUDA, {}, {}, True, "CUDA 12.4"),
        ("torch", CUDA, NVIDIA, {}, True, ""),
        ("torch", ROCM, AMD, {}, True, "ROCm 6.2.41133"),
        ("torch", CUDA, {**NVIDIA, **AMD}, {}, True, ""),  # an AMD processor with graphics beside an NVIDIA card
        ("torch", CPU, NVIDIA, {}, False, "an NVIDIA GPU, which this build cannot use"),
        ("torch", CPU, AMD, {}, False, "an AMD GPU"),
        ("torch", CPU, GPU_NODE, {}, False, "an AMD GPU"),
        ("torch", CPU, NO_GPU_NODE, {}, True, ""),  # servers without a GPU may have /dev/kfd too
        ("torch", CUDA, AMD, {}, False, "an AMD GPU"),
        ("torch", ROCM, NVIDIA, {}, False, "an NVIDIA GPU"),
        ("torch", CPU, DRIVERLESS, {}, False, "an NVIDIA GPU"),
        ("torch", CPU, on_bus("0x10de", "0x020000"), {}, True, ""),  # a network card by NVIDIA
        ("torch", CPU, on_bus("0x8086", "0x030000"), {}, True, ""),
        ("GPU", with_gpu(CUDA), NVIDIA, {}, True, "1 usable"),
        *(("GPU", hidden(view, "Found no NVIDIA driver"), {}, {}, None, "measures on the CPU") for view in (CPU, CUDA, ROCM)),
        ("GPU", hidden(CUDA), NVIDIA, {"environ": {"CUDA_VISIBLE_DEVICES": ""}}, False, "unset CUDA_VISIBLE_DEVICES"),
        ("GPU", hidden(CUDA), NVIDIA, {"environ": {"CUDA_VISIBLE_DEVICES": "-1"}}, False, "unset CUDA_VISIBLE_DEVICES"),
        ("GPU", hidden(CUDA), NVIDIA, {"environ": {"CUDA_VISIBLE_DEVICES": "0"}}, False, "No GPUs are available"),
        ("GPU", hidden(ROCM), AMD, {"environ": {"HIP_VISIBLE_DEVICES": ""}}, False, "unset HIP_VISIBLE_DEVICES"),
        ("GPU", hidden(ROCM), AMD, {"environ": {"ROCR_VISIBLE_DEVICES": ""}}, False, "unset ROCR_VISIBLE_DEVICES"),
        ("GPU", hidden(ROCM), AMD, {"environ": {"CUDA_VISIBLE_DEVICES": "-1"}}, False, "unset CUDA_VISIBLE_DEVICES"),
        ("GPU", hidden(CUDA), NVIDIA, closed("nvidiactl"), False, "/dev/nvidiactl"),
        ("GPU", hidden(ROCM), AMD, closed("kfd"), False, "/dev/kfd"),
        ("GPU", hidden(ROCM), AMD, closed("renderD128"), False, "usermod"),
        ("GPU", hidden(CUDA), DRIVERLESS, {}, False, "driver is not loaded"),
        ("GPU", hidden(CUDA, "The NVIDIA driver on your system is too old"), NVIDIA, {}, False, "older CUDA than 12.4"),
        ("GPU", hidden(CUDA, "Error 803: unsupported display driver"), NVIDIA, {}, False, "reboot"),
        ("GPU", hidden(CUDA, "Error 802: system not yet initialized"), NVIDIA, {}, False, "fabricmanager"),
        ("GPU", hidden(CUDA, "CUDA unknown error"), NVIDIA, {}, False, "nvidia-smi"),
        ("cuda:0", with_gpu(CUDA), NVIDIA, {}, True, "NVIDIA H200, 9.0, 140 GiB"),
        ("cuda:0", replace(CUDA, devices=(H200,), arch_list=("sm_70",)), NVIDIA, {}, False, "sm_70"),
        ("bf16", with_gpu(CUDA), {}, {}, True, "native"),
        ("bf16", with_gpu(CUDA, TURING), {}, {}, None, "cuda:0"),
        ("TF32", with_gpu(CUDA, TURING), {}, {}, None, "cuda:0"),
        ("half precision on the CPU", CPU, {"proc/cpuinfo": "flags : avx2 avx512_bf16 amx_tile"}, {}, True, "avx512_bf16"),
        ("half precision on the CPU", CPU, {"proc/cpuinfo": "Features : fp fphp bf16"}, {}, True, "bf16, fphp"),
        ("half precision on the CPU", CPU, {"proc/cpuinfo": "flags : avx2 fma f16c"}, {}, None, "slower than fp32"),
        ("cuDNN", with_gpu(CUDA, dnn="9.1.0"), {}, {}, True, "9.1.0"),
        ("cuDNN", with_gpu(CUDA), {}, {}, False, "LD_LIBRARY_PATH"),
        ("MIOpen", with_gpu(ROCM, dnn="3.2.0"), {}, {}, True, "3.2.0"),
        ("Triton", with_gpu(CUDA, triton="3.2.0"), {}, {}, True, "3.2.0"),
        ("Triton", with_gpu(CUDA), {}, {}, False, "pip install triton"),
        ("Triton", CPU, {}, {}, None, "torch.compile needs it"),
        ("torchvision", CPU, {}, {}, True, "matches torch"),
        ("torchvision", replace(CPU, torchvision=None), {}, {}, False, "not installed"),
        ("torchvision", asking("2.6.0+cu124", "torch (==2.6.0)"), {}, {}, True, ""),
        ("torchvision", asking("2.6.1", "torch==2.6.0"), {}, {}, False, "==2.6.0"),
        ("torchvision", asking("2.15.0+cu132", "torch (>=2.14.0)"), {}, {}, True, ""),
        ("torchvision", asking("2.9.1", "torch>=2.14.0"), {}, {}, False, ">=2.14.0"),
        ("torchvision", asking("2.7.0.dev20250101", "torch"), {}, {}, True, ""),
        ("torchvision", asking("2.7.0a0+git1234", "torch==2.7.0"), {}, {}, True, ""),
        ("torchvision", replace(CPU, torchvision_error="nms does not exist"), {}, {}, False, "together"),
        ("threads", CPU, {}, {}, True, "4 inside operators on 4 CPUs"),
        ("threads", replace(CPU, threads=2), {}, {}, True, ""),
        ("threads", replace(CPU, threads=8), {}, {}, False, "--threads 4"),
        ("threads", replace(CPU, threads=1), {}, {"cpus": 16, "environ": {"OMP_NUM_THREADS": "1"}}, None, "OMP_NUM_THREADS=1"),
        ("threads", CPU, LIMITED, {}, False, "limited to 1.5"),
        ("threads", CPU, LIMITED, {}, False, "--threads 2"),
    ],
)  # fmt: skip
def test_a_rule_tells_the_problem_from_what_is_well(
    name: str,
    view: TorchView,
    files: dict[str, str],
    changes: dict[str, Any],
    ok: bool | None,
    words: str,
    machine: MakeMachine,
) -> None:
    item = seen_as(view, name, machine(files, **changes))
    assert item.ok is ok
    assert words in f"{item.seen} {item.mend}"
    assert bool(item.mend) or ok is not False


def test_this_very_torch_answers() -> None:
    answer = health()
    names = [item.name for item in answer.items]
    assert len(set(names)) == len(names)
    assert {"torch", "GPU", "C++ compiler", "torchvision", "threads"} <= set(names)
    assert all(item.mend for item in answer.items if item.ok is False)
    assert next(item.ok for item in answer.items if item.name == "torchvision")


def test_devices_are_told(machine: MakeMachine) -> None:
    assert health(machine(NVIDIA), with_gpu(CUDA)).devices == (INFO,)


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
    assert doctor.runs_on(capability, arch_list) is ok


@pytest.mark.parametrize(("number", "text"), [(92600, "9.26.0"), (90100, "9.1.0"), (8902, "8.9.2"), (3002000, "3.2.0")])
def test_library_versions(number: int, text: str) -> None:
    assert doctor.dotted(number) == text


@pytest.mark.parametrize(
    ("script", "ok", "words"),
    [
        (None, False, "not found"),
        ("exit 0", True, "compiles"),
        ("echo 'In file included' >&2; echo 'fatal error: Python.h: No such file' >&2; exit 1", False, "-dev"),
        ("echo 'fatal error: omp.h: No such file' >&2; exit 1", False, "OpenMP"),
        ("echo 'error: something else' >&2; exit 1", False, "error: something else fix the compiler"),
        ("exec sleep 60", False, "no answer"),
    ],
)
def test_a_compiler_is_tried(
    script: str | None, ok: bool, words: str, machine: MakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "c++"
    if script is not None:
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o755)
    monkeypatch.setattr(doctor, "COMPILE_TIMEOUT_S", 0.5 if "sleep" in str(script) else 60.0)
    (item,) = doctor.check_compiler(CPU, machine(environ={"PATH": os.environ["PATH"], "CXX": str(compiler)}))
    assert item.ok is ok
    assert words in f"{item.seen} {item.mend}"


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
def test_a_real_compiler_works(machine: MakeMachine) -> None:
    (item,) = doctor.check_compiler(CPU, machine(environ={"PATH": os.environ["PATH"], "CXX": "g++ -w"}))
    assert item.ok is True, item.seen


def quota(folder: str, quota_us: str) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": quota_us, f"{folder}/cpu.cfs_period_us": "100000"}


GROUPS = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({**V2, f"{GROUPS}/user.slice/job/cpu.max": "max 100000"}, None),
        ({**V2, f"{GROUPS}/user.slice/job/cpu.max": "250000 100000"}, 2.5),
        ({**V2, f"{GROUPS}/user.slice/cpu.max": "100000 100000"}, 1.0),
        ({**LIMITED, f"{GROUPS}/user.slice/cpu.max": "120000 100000"}, 1.2),
        (V1 | quota(f"{GROUPS}/cpu,cpuacct/docker/abc", "150000"), 1.5),
        (V1 | quota(f"{GROUPS}/cpu", "300000"), 3.0),  # inside a container the path is the host's; the top is ours
        (V1 | quota(f"{GROUPS}/cpu", "-1"), None),
    ],
)
def test_the_limit_of_control_groups(machine: MakeMachine, files: dict[str, str], limit: float | None) -> None:
    assert machine(files).cpu_limit() == limit
