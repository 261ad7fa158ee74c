"""This leads from a recipe's text to a workload that it has been applied to. It knows names, exclusions, refusals and the order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from redline.bench.device.base import Device
from redline.bench.device.failure import is_out_of_memory, kind_of, one_line
from redline.bench.recipe.base import COMPILER, SWITCHES, RecipeSwitch
from redline.bench.workload.build import build_workload, settle_batch
from redline.bench.workload.step import Setup
from redline.bench.workload.workload import Workload
from redline.model.errors import BenchError, SpecError, UsageError
from redline.model.note import Note, note
from redline.model.protocol import SwitchChoice, SwitchNeed
from redline.model.spec import Recipe, RunSpec, Switch, Task, refuse_removed
from redline.model.work import Facts

COARSENESS = ("fp32", "tf32", "fp16", "bf16", "int8-weights", "fp8-weights", "fp8", "int8")
"""These are the number formats from the finest to the coarsest. A recipe is judged by its coarsest."""
HALVES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
"""A model whose own weights have one of these formats cannot be judged by a finer one."""


def switches_of(recipe: Recipe, task: Task) -> list[RecipeSwitch]:
    """Returns the recipe's switches in the order of application. Raises a `UsageError` for a mistake in the recipe itself."""
    for named in recipe.switches:
        refuse_removed(named)
    switches = [SWITCHES.get(switch.name)(switch, task) for switch in recipe.switches]
    for switch in switches:
        clash = next((other for other in switches if other is not switch and exclude_each_other(switch, other)), None)
        if clash is not None:
            one, other = sorted((str(switch.switch), str(clash.switch)))
            raise SpecError(f"recipe {recipe}: {one} and {other} exclude each other")
    return sorted(switches, key=lambda switch: switch.stage)


def exclude_each_other(one: RecipeSwitch, other: RecipeSwitch) -> bool:
    """Returns whether two switches cannot stand in one recipe.

    A name stands in it once. A graph is recorded once, and neither inside another graph nor around another engine.
    """
    records_twice = one.does.records_graph and (other.does.records_graph or other.does.refuses_graph)
    is_recorded = other.does.records_graph and one.does.refuses_graph
    excluded = _names_of(one) & other.excludes or _names_of(other) & one.excludes
    return one.name == other.name or bool(excluded) or records_twice or is_recorded


def _names_of(switch: RecipeSwitch) -> set[str]:
    """Returns the names by which an exclusion may mean a switch: with its argument and without."""
    return {switch.name, f"{switch.name}:{switch.argument or 'default'}"}


def number_format_of(recipe: Recipe, task: Task, model: nn.Module | None = None) -> str:
    """Returns the coarsest number format that any switch or the model itself computes in."""
    weights = {parameter.dtype for parameter in model.parameters()} if model is not None else set()
    formats = [name for dtype, name in HALVES.items() if dtype in weights]
    formats += [switch.number_format for switch in switches_of(recipe, task) if switch.number_format]
    return max(formats, key=COARSENESS.index, default="fp32")


def refuse_impossible(switches: Sequence[RecipeSwitch], device: Device, model: nn.Module | None) -> None:
    """Raises a `BenchError` for the first switch that cannot be used here. Without a model, only reasons that need none count."""
    names = {name for switch in switches for name in _names_of(switch)}
    for switch in switches:
        named = (str(switch.switch),)
        reason = switch.refusal(device) or (switch.irrelevance(model, None) if model is not None else None)
        if reason is not None:
            raise BenchError("unsupported", f"{switch.name}: {reason}", switches=named, scope="switch")
        for need in switch.needs:
            if not need.is_met(names):
                raise BenchError("unsupported", f"{switch.name}: {need.reason}", switches=named)


def plain_setup(workload: Workload, device: Device) -> Setup:
    """Returns the workload in strict fp32, before any switch is applied."""
    if workload.task != "step":  # a function sets its flags itself
        device.allow_tf32(False)
    return Setup(workload=workload, device=device, model=workload.model, args=workload.args, kwargs=workload.kwargs)


def apply_recipe(
    recipe: Recipe, workload: Workload, device: Device, distribute: Callable[[Setup], None] = lambda setup: None
) -> Setup:
    """Returns the workload in strict fp32 with each switch applied to it in its turn.

    `distribute` makes one model of the ranks' models. It runs after casting and before compiling.
    """
    switches = switches_of(recipe, workload.task)
    refuse_impossible(switches, device, workload.model)
    setup = plain_setup(workload, device)
    setup.switches = {str(switch.switch): switch.does for switch in switches}
    before = [switch for switch in switches if switch.stage < COMPILER]
    for part in (before, switches[len(before) :]):
        for switch in part:
            with blaming(str(switch.switch), setup, "recipe"):
                switch.apply(setup)
        if part is before:
            distribute(setup)
    setup.begin_with_originals()
    return setup


def set_up(spec: RunSpec, device: Device, *, ask: bool = True) -> Setup:
    """Returns the workload of a spec, built on a device under its recipe, with the batch that was asked for.

    With `ask`, the model may be run twice to prove its batch.
    """
    workload = build_workload(spec.workload, spec.seed).to(device.torch_device)
    settle_batch(workload, spec.workload, ask=ask)
    return apply_recipe(spec.recipe, workload, device)


@contextmanager
def blaming(switch: str | None, setup: Setup, stage: str) -> Iterator[None]:
    """Within this context an error names `switch` as its cause, or as the suspect if other switches stand in the recipe with it.

    Running out of memory is nobody's fault, and a mistake of the user stays one.
    """
    try:
        yield
    except Exception as error:
        if switch is None or isinstance(error, UsageError) or is_out_of_memory(error):
            raise
        kind = kind_of(error, stage)
        if kind == "user" and stage != "recipe":
            kind = "unsupported"  # the model has run without the switch, so its own code is not what is wrong
        broken = error if isinstance(error, BenchError) else BenchError(kind, one_line(error))
        if not broken.switches:
            broken.switches, broken.scope = (switch,), "switch" if len(setup.switches) == 1 else "recipe"
        if broken is error:
            raise
        raise broken from error


def suspect_of(spec: RunSpec, setup: Setup) -> str | None:
    """Returns the switch that a broken first call is blamed on: the last of those that change the program, or else the last.

    It returns None if no reference has run before, because the model itself may be broken.
    """
    changing = [name for name, does in setup.switches.items() if does.compiles or does.records_graph]
    suspects = changing or list(setup.switches)
    return suspects[-1] if suspects and spec.measure.check_numerics else None


# The functions below tell a tuner which choices it has.


def switch_choices(model: nn.Module, device: Device, task: Task, facts: Facts | None = None) -> list[SwitchChoice]:
    """Returns every switch of this task with each argument that it offers, judged by what a step was seen doing."""
    kinds = [kind for kind in map(SWITCHES.get, SWITCHES) if task in kind.tasks]
    switches = [kind(Switch(name=kind.name, argument=argument), task) for kind in kinds for argument in kind.offered]
    casts = {str(switch.switch): switch.number_format for switch in switches if switch.family == "precision"}

    def choice_of(switch: RecipeSwitch) -> SwitchChoice:
        needs = list(switch.needs)
        excludes = {str(other.switch) for other in switches if exclude_each_other(switch, other)}
        formats = switch.formats(facts) if facts is not None else None
        if formats is not None:
            suited = tuple(name for name, form in casts.items() if form in formats)
            excludes |= casts.keys() - set(suited)
            if suited and "fp32" not in formats:
                reason = f"it needs this model in {' or '.join(sorted(formats))}; add one of {', '.join(suited)}"
                needs.append(SwitchNeed(wants=suited, reason=reason))
        expected = None
        if facts is not None and switch.number_format is not None:
            product_time = device.product_time(switch.number_format)
            # Products change as the device says, and the rest of the step stays.
            expected = None if product_time is None else 1 - facts.products_share * (1 - product_time)
        return SwitchChoice(
            switch=str(switch.switch),
            family=switch.family or switch.name,
            relieves=switch.relieves,
            excludes=tuple(sorted(excludes)),
            needs=tuple(needs),
            refusal=_refusal(switch, model, device, facts),
            capabilities=switch.does,
            leaves_program=switch.leaves_program,
            is_slow_to_prepare=switch.is_slow_to_prepare,
            prepare_s=switch.prepare_s,
            is_doubtful=facts is not None and switch.is_doubtful(facts),
            expected_time=expected,
        )

    return [choice_of(switch) for switch in switches]


def _refusal(switch: RecipeSwitch, model: nn.Module, device: Device, facts: Facts | None) -> Note | None:
    unavailable = switch.refusal(device)
    irrelevant = None if unavailable else switch.irrelevance(model, facts)
    reasons = {"unavailable": unavailable, "irrelevant": irrelevant, "caution": switch.caution}
    return next((note(code, why) for code, why in reasons.items() if why), None)  # type: ignore[arg-type]


CANDIDATES: dict[tuple[bool, Task], tuple[str, ...]] = {
    (False, "generate"): ("static-cache+compile", "static-cache"),
    (True, "generate"): ("bf16+static-cache+compile+graphs", "bf16+static-cache+graphs", "bf16"),
    (False, "infer"): ("channels-last+compile", "compile", "channels-last", "bf16"),
    (False, "train"): ("channels-last", "compile", "amp-bf16"),
    (True, "infer"): (
        "fp16+channels-last+compile", "fp16+compile", "fp16+channels-last+graphs", "fp16+graphs", "fp16", "bf16", "tf32", "graphs",
        "compile",
    ),
    (True, "train"): (
        "amp-bf16+channels-last+compile", "amp-bf16+compile", "amp-bf16+channels-last", "amp-bf16", "tf32",
    ),
}  # fmt: skip
"""These recipes usually help with a task on an accelerator (True) or a CPU (False). The most promising one comes first."""


def applicable_recipes(model: nn.Module, device: Device, task: Task) -> tuple[str, ...]:
    """Returns the candidates that can be used here and would change something about this model. Nothing is run."""

    def is_applicable(text: str) -> bool:
        try:
            switches = switches_of(Recipe.parse(text), task)
            refuse_impossible(switches, device, model)
        except (BenchError, UsageError):
            return False
        return not any(switch.does.compiles for switch in switches) or device.compiler_refusal() is None

    if not any(parameter.is_floating_point() for parameter in model.parameters()):
        return ()  # the model has nothing to compute with, or is quantized already
    return tuple(filter(is_applicable, CANDIDATES[device.is_accelerator, task]))
