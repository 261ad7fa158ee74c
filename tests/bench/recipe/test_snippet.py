"""The code a person pastes: it runs alone, gives the same numbers, and no name can break out of it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchvision
from applying import Model

import redline
from redline.bench.recipe.snippet import snippet_of
from redline.model.errors import UsageError
from redline.model.spec import Recipe, RunSpec, WorkloadSpec

ALL_STEPS = {
    "infer": ["tf32", "amp", "amp-bf16", "fp16", "bf16", "channels-last", "compile", "compile:freeze", "torchscript",
              "cudnn-benchmark", "graphs", "fold-bn", "sdpa:math", "int8", "onnx", "patch-products", "fused-linear+compile",
              "compile:regional", "keep-memory"],
    "train": ["tf32", "amp", "amp-bf16", "channels-last", "compile:max-autotune", "fused-optimizer", "graphs",
              "sdpa:math", "checkpointing", "overlap-gradients+compile"],
}  # fmt: skip


def spec_of(workload: WorkloadSpec, recipe: str = "baseline", **more: Any) -> RunSpec:
    return RunSpec(workload=workload, recipe=Recipe.parse(recipe), device="cpu", **more)


def snippet(recipe: str, task: str = "infer", model: str = "resnet18", **workload) -> str:
    return snippet_of(spec_of(WorkloadSpec(model=model, task=task, batch=2, **workload), recipe))


@pytest.fixture
def anything_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that has every device and every package."""
    monkeypatch.setattr("redline.bench.recipe.snippet.refuse_impossible", lambda *args: None)


@pytest.mark.parametrize(("task", "step"), [(task, step) for task, steps in ALL_STEPS.items() for step in steps])
def test_every_step_writes_sound_code(task: str, step: str, anything_goes: None) -> None:
    code = snippet(step, task)
    exec(code, {"__name__": "snippet"})
    assert "import redline" not in code
    assert "left out" not in code
    assert step in code.splitlines()[0]


ALONE = [
    ("channels-last", "infer", "mobilenet_v3_small"),
    ("fold-bn+onnx", "infer", "mobilenet_v3_small"),
    ("amp-bf16+channels-last+fused-optimizer", "train", "mobilenet_v3_small"),
    ("channels-last+fused-optimizer", "train", "squeezenet1_1"),
    ("bf16", "infer", "squeezenet1_1"),
]
RUNNER = """
import os, runpy, sys, time, traceback
import torch, torchvision

real = time.perf_counter
time.perf_counter = lambda: 50 * real()  # a snippet times itself for 4 s of this clock
sys.modules["redline"] = None
for path in sys.argv[1:]:
    if os.fork():
        os.wait()
        continue
    try:
        with open(path + ".out", "w") as sys.stdout:
            runpy.run_path(path, run_name="__main__")
    except BaseException:
        open(path + ".err", "w").write(traceback.format_exc())
    os._exit(0)
"""


@pytest.mark.long
def test_each_runs_alone(tmp_path: Path) -> None:
    """Each in a process of its own; they start from one that has loaded torch."""
    paths = [tmp_path / f"{recipe}.py" for recipe, _, _ in ALONE]
    for path, (recipe, task, model) in zip(paths, ALONE, strict=True):
        path.write_text(snippet(recipe, task, model=model, image_size=64, classes=10))
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # several would wait for each other on a busy machine
    subprocess.run([sys.executable, "-c", RUNNER, *map(str, paths)], check=True, env=one_thread)
    for path in paths:
        wrong = Path(f"{path}.err")
        assert not wrong.exists(), wrong.read_text()
        assert float(Path(f"{path}.out").read_text().removesuffix(" items/s\n")) > 0


IMAGES = torch.randn(4, 3, 64, 64)
SIDES = {"left": torch.randn(4, 4), "right": torch.randn(4, 4)}


@pytest.mark.parametrize(
    ("text", "make", "inputs"),
    [
        ("baseline", torchvision.models.squeezenet1_1, (IMAGES,)),
        ("amp+fused-optimizer", torchvision.models.squeezenet1_1, (IMAGES,)),
        ("amp-bf16+channels-last", torchvision.models.squeezenet1_1, (IMAGES,)),
        ("baseline", lambda: Model(lambda own, *, left, right: own.layer(left - right), layer=torch.nn.Linear(4, 3)), SIDES),
        ("baseline", lambda: torch.nn.Linear(4, 3), SIDES["left"]),
    ],
)  # fmt: skip
def test_applied_it_trains_on_inputs_by_position_by_keyword_and_alone(text: str, make: Any, inputs: Any) -> None:
    torch.manual_seed(0)
    recipe, targets = redline.recipe(text, task="train", device="cpu", optimizer="adamw"), torch.tensor([0, 1, 2, 0])
    step = recipe.training_step(make(), torch.nn.functional.cross_entropy, inputs, targets)
    losses = [float(step(inputs, targets)) for _ in range(12)]
    assert min(losses) < losses[0]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("graphs", "^graphs: cpu has no graphs to record work into; a GPU has$"),
        ("fused-optimizer", "^switch fused-optimizer is for train, not for infer$"),
    ],
)
def test_what_cannot_be_had_here_is_refused_in_one_line(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        redline.recipe(text, device="cpu")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("int8", r"^int8: torchao quantizes linear layers, and those would be 0 of 4 parameters, 0.0% of the weights$"),
        ("fold-bn", "^fold-bn: the model has no BatchNorm$"),
    ],
)
def test_a_recipe_that_would_change_nothing_about_a_model_is_refused(text: str, told: str) -> None:
    if text == "int8":
        pytest.importorskip("torchao")
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(288, 5))
    with pytest.raises(UsageError, match=told):
        redline.recipe(text, device="cpu").apply(model)
    assert all(module.training for module in model.modules()), "looking leaves the model's mode alone"
    with pytest.raises(UsageError, match=r"applied to a torch\.nn\.Module, got str"):
        redline.recipe(text, device="cpu").apply("resnet18")


def normed() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).train()


FEW = torch.randn(2, 3, 8, 8)


def test_a_model_in_training_mode_is_looked_at_as_it_will_be() -> None:
    model = normed()
    fast = redline.recipe("fold-bn", device="cpu").apply(model, FEW, inplace=True)
    assert fast(FEW).shape == (2, 8, 6, 6)
    assert isinstance(model[1], torch.nn.Identity)


@pytest.mark.parametrize("text", ["fold-bn", "bf16", "channels-last"])
def test_applying_leaves_the_model_as_it_was(text: str) -> None:
    model = normed()
    before = {name: (value.clone(), value.stride()) for name, value in model.state_dict().items()}
    fast = redline.recipe(text, device="cpu").apply(model, FEW)
    assert fast(FEW).shape == (2, 8, 6, 6)
    assert all(module.training for module in model.modules())
    assert isinstance(model[1], torch.nn.BatchNorm2d)
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, (value, stride) in before.items():
        assert (after[name].dtype, after[name].stride()) == (value.dtype, stride)
        assert torch.equal(after[name], value)


def test_a_model_that_cannot_be_copied_is_refused_with_the_way_out() -> None:
    layer = torch.nn.Linear(4, 3)
    holding = Model(lambda own, x: own.layer(x), layer=layer, last=layer.weight * 2)  # a result of autograd
    recipe = redline.recipe("baseline", device="cpu")
    with pytest.raises(UsageError, match=r"Model cannot be copied \(.*inplace=True"):
        recipe.apply(holding, torch.randn(2, 4))
    assert recipe.apply(holding, torch.randn(2, 4), inplace=True)(torch.randn(2, 4)).shape == (2, 3)


class FakeGraph:
    """As much of a CUDA graph as can be had without a GPU: what was recorded keeps the tensors it was recorded with."""

    def replay(self) -> None: ...


@pytest.fixture
def recording_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda priority=0: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)


@pytest.mark.parametrize(
    ("recipe", "task", "calls_until"),
    [
        ("graphs", "train", 0),
        ("compile", "infer", 0),
        ("compile+graphs", "infer", 0),
        ("compile", "train", 4),
        ("compile+graphs", "train", 0),
    ],
)
def test_what_is_compiled_or_recorded_shortens_its_launches_once_all_has_run(
    recipe: str,
    task: str,
    calls_until: int,
    anything_goes: None,
    recording_nowhere: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("redline.bench.recipe.snippet.resolve_device", lambda text: "cuda:0")
    monkeypatch.setattr("redline.bench.recipe.snippet.open_device", lambda resolved: None)
    monkeypatch.setattr(torch, "compile", lambda model, **settings: model)
    code = snippet(recipe, task)
    assert code.count("def shorten_launches()") == 1
    namespace: dict[str, Any] = {"__name__": "snippet"}
    exec(code.replace('"cuda"', '"cpu"'), namespace)
    seen: list[int] = []
    calls = 0
    namespace["shorten_launches"] = lambda: seen.append(calls)
    inputs, targets = torch.randn(2, 4), torch.tensor([0, 1])
    if task == "infer":
        fast = namespace["optimise"](torch.nn.Linear(4, 3), inputs)
    else:
        step = namespace["make_training_step"](
            torch.nn.Linear(4, 3), torch.nn.functional.cross_entropy, (inputs,), {}, targets
        )
        fast = lambda given: step((given,), {}, targets)  # noqa: E731
    for calls in range(1, 7):  # noqa: B007  (read by what stands in for it)
        fast(inputs)
    assert seen == [calls_until]


def test_other_programs_and_devices_leave_launches_alone(anything_goes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.bench.recipe.snippet.open_device", lambda resolved: None)
    for device, recipe in (("cuda:0", "fp16"), ("rocm:0", "compile+graphs"), ("cpu", "compile")):
        monkeypatch.setattr("redline.bench.recipe.snippet.resolve_device", lambda text, device=device: device)
        assert "shorten_launches" not in snippet(recipe)


@pytest.mark.parametrize("task", ["infer", "train"])
def test_a_recorded_graph_takes_keywords_by_name(task: str, anything_goes: None, recording_nowhere: None) -> None:
    namespace: dict[str, Any] = {"__name__": "snippet"}
    exec(snippet("graphs", task), namespace)
    read: list[torch.Tensor] = []
    difference = Model(
        lambda own, *, left, right: own.layer(read.append(right) or left - right), layer=torch.nn.Linear(4, 3)
    )
    targets = torch.tensor([0, 1, 2, 0])
    if task == "infer":
        fast = namespace["optimise"](difference, **SIDES)
    else:
        step = namespace["make_training_step"](difference, torch.nn.functional.cross_entropy, (), SIDES, targets)
        fast = lambda **given: step((), given, targets)  # noqa: E731
    fast(right=SIDES["right"] + 1, left=SIDES["left"])
    assert torch.equal(read[-1], SIDES["right"] + 1)
    with pytest.raises(TypeError, match="called with"):
        fast(left=SIDES["left"])


def test_the_threads_of_a_measurement_on_a_cpu_are_those_of_its_timing() -> None:
    workload = WorkloadSpec(model="resnet18", batch=2)
    assert "    torch.set_num_threads(3)\n" in snippet_of(spec_of(workload, threads=3))
    assert "set_num_threads" not in snippet_of(spec_of(workload))


def test_a_hostile_name_stays_inside_the_docstring() -> None:
    code = snippet_of(spec_of(WorkloadSpec(model='x"""\nimport os\\', artifact="a"), "channels-last"))
    tree = ast.parse(code)
    assert isinstance(tree.body[0], ast.Expr)
    assert not any(isinstance(node, ast.Import) and node.names[0].name == "os" for node in ast.walk(tree))


def test_a_step_of_somebody_else_is_named_as_missing() -> None:
    from redline.bench.recipe.base import PRECISION, SWITCHES, RecipeSwitch

    class Other(RecipeSwitch):
        name = "other"
        summary = "somebody else's"
        stage = PRECISION

        def apply(self, setup) -> None: ...

    SWITCHES.register("other")(Other)
    try:
        assert "other has no plain form: it is left out here" in snippet("other")
    finally:
        del SWITCHES._entries["other"]
