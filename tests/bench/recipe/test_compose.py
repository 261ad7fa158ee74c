"""From a recipe's text to switches in their order: what is known, what excludes what, what a device refuses and why."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from applying import workload_of
from torch import nn

from redline.bench.device.cpu import CpuDevice
from redline.bench.device.failure import failure_from
from redline.bench.recipe.base import SWITCHES, RecipeSwitch
from redline.bench.recipe.compose import (
    applicable_recipes,
    apply_recipe,
    refuse_impossible,
    switches_of,
)
from redline.bench.recipe.switches.compiler import Compile
from redline.bench.workload.step import Setup
from redline.bench.workload.workload import Workload
from redline.model.errors import BenchError, SpecError, UnknownName
from redline.model.registry import Registry
from redline.model.spec import REMOVED_SWITCHES, Recipe, RunSpec, Task, WorkloadSpec
from redline.search.tune.record import TuneSpec
from redline.search.tune.space import space_for

# Other tests plant faults as switches of their own. These are for one process and no tokens.
HOUSE = [name for name in SWITCHES.names() if not name.startswith("fault-")]
FOR_INFERENCE = [name for name in HOUSE if "infer" in SWITCHES.get(name).tasks and name != "fsdp"]


class Cpu(CpuDevice):
    """A CPU that would take every switch, and remembers what it was told about TF32."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[bool] = []

    def allow_tf32(self, allowed: bool) -> None:
        self.told.append(allowed)

    def tf32_refusal(self) -> str | None:
        return None


def names(text: str, task: Task = "infer") -> list[str]:
    return [switch.name for switch in switches_of(Recipe.parse(text), task)]


def spelled(name: str) -> str:
    """A switch as one writes it: `sdpa` means nothing without a backend."""
    needed = {"sdpa": ":math"}
    return name + needed.get(name, "")


def convolution(task: Task = "infer") -> Workload:
    return workload_of(nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8), task=task)


def applied(text: str, workload: Workload, device: CpuDevice | None = None) -> Setup:
    return apply_recipe(Recipe.parse(text), workload, device or CpuDevice())


def settings(text: str) -> dict[str, Any]:
    (switch,) = switches_of(Recipe.parse(text), "infer")
    assert isinstance(switch, Compile)
    return switch.settings


def test_every_switch_of_the_house_is_known_and_says_what_it_does() -> None:
    for name in HOUSE:
        switch = SWITCHES.get(name)
        assert switch.name == name
        assert switch.summary
        assert names(spelled(name), switch.tasks[0]) == [name]


@pytest.mark.parametrize("name", REMOVED_SWITCHES)
def test_a_switch_that_was_removed_is_refused_with_what_to_use_instead(name: str) -> None:
    says = re.escape(f"switch {name} was removed: {REMOVED_SWITCHES[name]}")
    with pytest.raises(SpecError, match=says):
        names(f"channels-last+{name}")
    asked = TuneSpec(spec=RunSpec(workload=WorkloadSpec(model="resnet50")), switches=(name,))
    with pytest.raises(SpecError, match=says):
        space_for(asked, [])
    with pytest.raises(SpecError, match=says):
        space_for(msgspec.structs.replace(asked, switches=(), seeds=(name,)), [])


def test_the_baseline_is_no_switch_and_forbids_tf32() -> None:
    device = Cpu()
    setup = applied("baseline", convolution(), device)
    assert names("baseline") == []
    assert device.told == [False]
    assert setup.model is setup.workload.model
    assert setup.autocast_dtype is None
    device.told.clear()
    applied("tf32", convolution(), device)
    assert device.told == [False, True], "strict first, then what the recipe asks for"


def excludes(first: str, second: str) -> bool:
    try:
        together = names(f"{spelled(first)}+{spelled(second)}")
    except SpecError as error:
        return all(words in str(error) for words in ("exclude each other", first, second))
    return sorted(together) != sorted((first, second))


def test_two_switches_exclude_each_other_whichever_is_written_first() -> None:
    excluded = {pair for pair in combinations(FOR_INFERENCE, 2) if excludes(*pair)}
    assert excluded == {(one, other) for one, other in combinations(FOR_INFERENCE, 2) if excludes(other, one)}
    for one_of in (
        ("amp", "amp-bf16", "bf16", "fp16"),
        ("compile", "onnx", "tensorrt", "torchscript"),
        ("fp8", "int8"),
    ):
        assert set(combinations(one_of, 2)) <= excluded


@pytest.mark.parametrize(
    ("written", "meant"),
    [("compil", "compile"), ("chanels-last", "channels-last"), ("FP16", "fp16"), ("amp_bf16", "amp-bf16")],
)
def test_an_unknown_switch_is_answered_with_the_closest(written: str, meant: str) -> None:
    with pytest.raises(UnknownName, match=f"unknown switch '{written}'") as caught:
        switches_of(Recipe.parse(written), "infer")
    assert caught.value.close[0] == meant
    assert "did you mean" in str(caught.value)


def test_the_words_behind_compile_become_the_compilers_settings() -> None:
    static = {"dynamic": False}  # one process, one shape
    assert settings("compile") == settings("compile:default") == static
    assert settings("compile:reduce-overhead") == static | {"mode": "reduce-overhead"}
    assert settings("compile:max-autotune,fullgraph=true") == static | {"mode": "max-autotune", "fullgraph": True}
    assert settings("compile:freeze") == static | {"options": {"freezing": True}}
    assert settings("compile:freeze,max_autotune=true")["options"] == {"freezing": True, "max_autotune": True}
    assert settings("compile:dynamic=true,backend=eager") == {"dynamic": True, "backend": "eager"}
    assert settings("compile:epilogue_fusion=false") == static | {"options": {"epilogue_fusion": False}}
    assert settings("compile:cpp.threads=1") == static | {"options": {"cpp.threads": 1}}


def test_the_order_of_application_is_not_the_order_of_the_text() -> None:
    switches = ("compile", "channels-last", "fp16", "cudnn-benchmark")
    orders = {tuple(names("+".join(order))) for order in permutations(switches)}
    assert orders == {("cudnn-benchmark", "fp16", "channels-last", "compile")}
    for text in ("fp16+channels-last", "channels-last+fp16"):
        setup = applied(text, convolution())
        weight = setup.workload.model.weight
        for tensor in (weight, setup.args[0]):
            assert tensor.dtype == torch.float16
            assert tensor.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_compile_is_neither_advised_nor_tried_for_torchscript() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    assert "compile" in applicable_recipes(nn.Linear(2, 2), CpuDevice(), "infer")
    assert not any("compile" in text for text in applicable_recipes(scripted, CpuDevice(), "infer"))
    with pytest.raises(BenchError, match=r"compile: torch\.compile does not take TorchScript"):
        refuse_impossible(switches_of(Recipe.parse("compile"), "infer"), CpuDevice(), scripted)


PLUGIN = """
from redline.bench.recipe.base import PRECISION, RecipeSwitch

class Doubled(RecipeSwitch):
    name = "doubled"
    summary = "twice the answer"
    stage = PRECISION

    def apply(self, setup):
        model = setup.model
        setup.model = lambda *args, **kwargs: 2 * model(*args, **kwargs)
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package of somebody else's that is installed and brings a step."""
    name = "redline_test_plugin"
    (tmp_path / f"{name}.py").write_text(PLUGIN)
    metadata = tmp_path / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[redline.switches]\ndoubled = {name}:Doubled\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def test_a_switch_comes_in_through_an_entry_point(plugin: str) -> None:
    switches: Registry[type[RecipeSwitch]] = Registry("recipe switch", group="redline.switches")
    assert plugin not in sys.modules, "nothing is imported before somebody asks"
    workload = workload_of(nn.Linear(4, 3), torch.randn(2, 4))
    setup = Setup(workload=workload, device=CpuDevice(), model=workload.model, args=workload.args, kwargs={})
    (switch,) = Recipe.parse("doubled").switches
    switches.get("doubled")(switch, "infer").apply(setup)
    torch.testing.assert_close(setup.model(*setup.args), 2 * workload.model(*workload.args))
    assert switches.names() == ["doubled"]


class Breaks(RecipeSwitch):
    name = "breaks"
    summary = "breaks when it is applied"
    stage = 0
    error: Exception

    def apply(self, setup: Setup) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("recipe", "error", "switches", "scope"),
    [
        ("breaks", RuntimeError("no"), ("breaks",), "switch"),
        ("breaks+channels-last", RuntimeError("no"), ("breaks",), "recipe"),
        ("breaks+channels-last", BenchError("compile", "no"), ("breaks",), "recipe"),
        ("breaks", BenchError("compile", "no", switches=("breaks", "fp16"), scope="pair"), ("breaks", "fp16"), "pair"),
        ("breaks", torch.OutOfMemoryError("out of memory"), (), "recipe"),
    ],
)
def test_a_failure_names_the_switch_and_how_far_it_holds(
    recipe: str, error: Exception, switches: tuple[str, ...], scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SWITCHES._entries, "breaks", Breaks)
    monkeypatch.setattr(Breaks, "error", error, raising=False)
    with pytest.raises(type(error) if isinstance(error, torch.OutOfMemoryError) else BenchError) as caught:
        applied(recipe, convolution())
    failure = failure_from(caught.value, "recipe")
    assert (failure.switches, failure.scope) == (switches, scope)
    assert "no" in failure.message or failure.kind == "oom"
    with pytest.raises(BenchError) as caught:  # what a device refuses rules the switch out everywhere
        applied("graphs+channels-last", convolution())
    assert (caught.value.switches, caught.value.scope) == (("graphs",), "switch")
