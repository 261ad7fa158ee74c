"""On a real GPU: recipes keep the numbers in forked workers, the cap holds, running out is clean, and code runs alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from redline.launch import Door, open_door
from redline.model.protocol import BlockReply, FailureReply, Measure, Prepare, PreparedReply, Squeeze, SqueezeReply
from redline.model.record import Block
from redline.model.spec import LaunchSpec, RunSpec
from redline.model.spec_table import specs_from_table
from redline.verbs.recipe import plain_recipe

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.device_count(), reason="no GPU here")]

GIB = 2**30
MISBEHAVING = Path(__file__).parent.parent / "models" / "misbehaving.py"
UNCHECKED = {"check_numerics": False}


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    """One warm door for all: its start is most of the time these tests take."""
    opened = open_door(LaunchSpec())
    yield opened
    opened.close()


def spec_of(recipe: str = "baseline", model: str = "resnet18", **table: Any) -> RunSpec:
    return specs_from_table({"model": model, "recipe": recipe, "batch": 8, "effort": "quick", **table})[0]


def failed(door: Door, spec: RunSpec) -> tuple[str, str]:
    reply = door.open(spec).ask(Prepare(spec=spec))
    assert isinstance(reply, FailureReply), reply
    return reply.failure.kind, reply.failure.message


VIT = {"model": "vit_b_16"}
TRAINED = {"task": "train", "image_size": 64}
ADAMW = {**TRAINED, "optimizer": "adamw"}
SOUND: list[tuple[str, dict[str, Any]]] = [
    *((recipe, {}) for recipe in (
        "baseline", "fp16+channels-last+compile:reduce-overhead", "tf32+cudnn-benchmark", "torchscript", "graphs",
        "fp16+channels-last+graphs", "amp+graphs", "fp16+compile+graphs", "fold-bn", "fp16+fold-bn+channels-last+graphs", "onnx",
        "fp16+onnx", "tensorrt", "fp16+tensorrt",
    )),
    *((recipe, VIT) for recipe in (
        "sdpa:math", "sdpa:efficient", "fp16+sdpa:flash", "bf16+sdpa:cudnn", "amp-bf16+sdpa:flash+compile",
        "fp16+patch-products+graphs", "fp16+patch-products+fused-linear+compile+graphs", "int8", "bf16+int8:weight-only", "fp8",
        "bf16+fp8", "bf16+fp8+compile",
    )),
    ("amp-bf16+sdpa:flash", {**VIT, "task": "train"}),
    *((recipe, settings) for settings in (TRAINED, ADAMW) for recipe in (
        "amp", "amp-bf16+channels-last", "tf32+compile", "graphs", "amp-bf16+fused-optimizer+graphs", "amp+fused-optimizer+graphs",
        "amp-bf16+compile+graphs",
    )),
    *((recipe, TRAINED) for recipe in (
        "amp-bf16+overlap-gradients+compile+graphs", "amp-bf16+channels-last+overlap-gradients+compile:regional",
        "channels-last+overlap-gradients+compile:reduce-overhead",
    )),
]  # fmt: skip
PACKAGES = {"onnx": ("onnxruntime", "onnx"), "tensorrt": ("torch_tensorrt", "tensorrt")}
PACKAGES |= dict.fromkeys(("int8", "fp8"), ("torchao", "quant"))


@pytest.mark.parametrize(("recipe", "settings"), SOUND)
def test_a_recipe_keeps_the_numbers_or_says_which_package_it_needs(
    door: Door, recipe: str, settings: dict[str, Any]
) -> None:
    spec = spec_of(recipe, **settings)
    for name, (package, extra) in PACKAGES.items():
        if name in recipe and find_spec(package) is None:
            assert f"redline[{extra}]" in failed(door, spec)[1]
            return
    session = door.open(spec)
    reply = session.ask(Prepare(spec=spec))
    session.close()
    assert isinstance(reply, PreparedReply), reply
    assert reply.prepared.environment.device.kind in ("cuda", "rocm")
    assert reply.prepared.numerics.passed, reply.prepared.numerics


@pytest.mark.parametrize(
    ("recipe", "settings", "told"),
    [("amp+graphs", TRAINED, "GradScaler"), ("sdpa:flash", VIT, "dtype")],
)
def test_what_a_gpu_cannot_do_is_refused_with_the_reason(
    door: Door, recipe: str, settings: dict[str, Any], told: str
) -> None:
    kind, message = failed(door, spec_of(recipe, **settings))
    assert kind == "unsupported"
    assert told in message


def test_a_model_that_asks_the_device_cannot_be_recorded(door: Door, tmp_path: Path) -> None:
    path = tmp_path / "asking.py"
    path.write_text(
        "import torch\n"
        "class Asking(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x) * (1 if float(x.sum()) > 0 else 2)\n"
        "def make(): return Asking(8, 8), torch.randn(4, 8)\n"
    )
    kind, message = failed(door, spec_of("graphs", f"{path}:make", batch=None))
    assert kind == "unsupported"
    assert "cannot record" in message


def measured(door: Door, spec: RunSpec, kind: Any = "throughput") -> tuple[Any, Block]:
    session = door.open(spec)
    assert isinstance(session.ask(Prepare(spec=spec)), PreparedReply)
    reply = session.ask(Measure(kind=kind, seconds=0.3))
    assert isinstance(reply, BlockReply), reply
    return session, reply.block


def test_a_block_has_the_figures_of_the_device(door: Door) -> None:
    _, block = measured(door, spec_of(**TRAINED))
    assert block.clock == "device"
    assert set(block.phases) == {"forward", "backward", "optimizer"}
    assert len(block.issue_s) == block.steps_per_sample * (len(block.samples) + len(block.settling))
    assert (block.memory.peak_reserved_bytes or 0) >= (block.memory.peak_allocated_bytes or 0) > 0
    assert block.telemetry[-1].power_w
    assert block.telemetry[-1].foreign == ()
    assert measured(door, spec_of(), "latency")[1].clock == "host"


def test_loader_workers_feed_a_forked_gpu_worker(door: Door) -> None:
    spec = spec_of(model=f"{MISBEHAVING}:loads_with_workers", batch=None)
    assert isinstance(door.open(spec).ask(Prepare(spec=spec)), PreparedReply)


@pytest.mark.parametrize("task", ["infer", "train"])
def test_the_squeeze_lies_between_allocated_and_reserved(door: Door, task: str) -> None:
    session, block = measured(door, spec_of("amp", task=task, batch=32, max_memory="2GiB", measure=UNCHECKED))
    memory = block.memory
    assert memory.limit_bytes == 2 * GIB
    assert 0 < (memory.resident_bytes or 0) < (memory.peak_allocated_bytes or 0)
    squeezed = session.ask(Squeeze())
    assert isinstance(squeezed, SqueezeReply)
    assert (memory.peak_allocated_bytes or 0) <= (squeezed.needed_bytes or 0) <= (memory.peak_reserved_bytes or 0)
    # The cap of the session holds again, and the step still runs.
    assert isinstance(session.ask(Measure(kind="throughput", seconds=0.1)), BlockReply)


@pytest.mark.parametrize(
    "spec",
    [
        spec_of(model=f"{MISBEHAVING}:eats_device_memory", batch=None),
        spec_of(task="train", batch=4096, max_memory="2GiB", measure=UNCHECKED),
    ],
)
def test_running_out_of_memory_is_clean(door: Door, spec: RunSpec) -> None:
    assert failed(door, spec)[0] == "oom"


def test_an_inline_session_lifts_its_cap_again() -> None:
    spec = spec_of(max_memory="2GiB", measure=UNCHECKED, launch={"door": "inline"})
    session = open_door(spec.launch).open(spec)
    assert isinstance(session.ask(Prepare(spec=spec)), PreparedReply)
    session.close()
    assert torch.empty(3 * GIB, dtype=torch.uint8, device="cuda").numel() == 3 * GIB


@pytest.mark.parametrize(
    ("recipe", "task"),
    [
        ("fp16+channels-last+graphs", "infer"),
        ("amp-bf16+fused-optimizer+graphs", "train"),
        ("fp16+compile", "infer"),
        ("amp-bf16+compile", "train"),
        ("amp-bf16+channels-last+overlap-gradients+compile+graphs", "train"),
    ],
)
def test_the_code_of_a_recipe_runs_alone(recipe: str, task: str, tmp_path: Path) -> None:
    path = tmp_path / "snippet.py"
    path.write_text(plain_recipe(spec_of(recipe, task=task)).code)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("task", "recipe"),
    [
        ("train", "amp-bf16+channels-last+compile:regional+fused-optimizer+graphs"),
        ("train", "amp+channels-last+compile:regional+fused-optimizer+graphs"),
        ("infer", "fp16+channels-last+compile:regional+graphs"),
    ],
)
def test_a_helper_compiles_some_of_it(task: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    spec = spec_of(recipe, "resnet50", task=task, batch=32)
    door = open_door(LaunchSpec())
    try:
        helper, worker = door.open(spec), door.open(spec)
        helper.begin(Prepare(spec=spec, sharing="helps"))
        reply = worker.ask(Prepare(spec=spec, sharing="shares"))
        helper.kill()
        worker.close()
    finally:
        door.close()
    assert isinstance(reply, PreparedReply), reply
    assert reply.prepared.numerics.passed, reply.prepared.numerics
    assert reply.prepared.cold_start.compile_cache == "mixed", "the helper's part was in the cache"
    assert "could not be shared" not in " ".join(map(str, reply.prepared.recipe_notes))
