"""From a recipe's text to a workload it has been applied to: names, exclusions, refusals, order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from redline.bench.device.base import Device
from redline.bench.device.failure import is_out_of_memory, kind_of, one_line
from redline.bench.recipe.base import COMPILER, SWITCHES, RecipeSwitch
from redline.bench.workload.step import Setup
from redline.bench.workload.workload import Workload
from redline.model.errors import BenchError, SpecError, UsageError
from redline.model.note import Note, note
from redline.model.questions import SwitchChoice, SwitchNeed
from redline.model.spec import Recipe, RunSpec, Switch, Task, refuse_removed
from redline.model.work import Facts

_COARSENESS = ("fp32", "tf32", "fp16", "bf16", "int8-weights", "fp8-weights", "fp8", "int8", "int4-weights")


def switches_of(recipe: Recipe, task: Task) -> list[RecipeSwitch]:
    """The recipe's switches in the order of application. A mistake in the recipe itself is a `UsageError`."""
    for named in recipe.switches:
        refuse_removed(named)
    switches = [SWITCHES.get(switch.name)(switch) for switch in recipe.switches]
    for switch in switches:
        if task not in switch.tasks:
            *others, last = switch.tasks
            tasks = f"{', '.join(others)} and {last}" if others else last
            raise SpecError(f"switch {switch.name} is for {tasks}, not for {task}")
        clash = next(
            (other for other in switches if other is not switch and exclude_each_other(switch, other, task)), None
        )
        if clash is not None:
            one, other = sorted((str(switch.switch), str(clash.switch)))
            raise SpecError(f"recipe {recipe}: {one} and {other} exclude each other")
    return sorted(switches, key=lambda switch: switch.stage)


_HALVES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def number_format_of(recipe: Recipe, task: Task, model: nn.Module | None = None) -> str:
    """The coarsest number format any switch computes in, or the model itself."""
    formats = [switch.computes_in() for switch in switches_of(recipe, task)]
    held = {parameter.dtype for parameter in model.parameters()} if model is not None else set()
    formats += [name for dtype, name in _HALVES.items() if dtype in held]
    return max((name for name in formats if name), key=_COARSENESS.index, default="fp32")


def refuse_impossible(switches: list[RecipeSwitch], task: Task, device: Device, model: nn.Module | None) -> None:
    """Raise why the first switch that cannot be had here cannot; without a model, what can be said without one."""
    for switch in switches:
        told = (str(switch.switch),)
        never = switch.refusal(device, task)
        if never is None and model is not None:
            never = switch.irrelevance(model, task, None)
        if never:
            raise BenchError("unsupported", f"{switch.name}: {never}", switches=told, scope="switch")
        missing = unmet_need(switch, switches, task)
        if missing:
            raise BenchError("unsupported", f"{switch.name}: {missing}", switches=told)


def apply_recipe(
    recipe: Recipe, workload: Workload, device: Device, distribute: Callable[[Setup], None] = lambda setup: None
) -> Setup:
    """Strict fp32 first, then each switch in its turn; a switch the device cannot do is refused with the reason.

    `distribute` makes one model of the ranks' models, once it is cast and before it is compiled.
    """
    switches = switches_of(recipe, workload.task)
    refuse_impossible(switches, workload.task, device, workload.model)
    if workload.task != "step":  # a function sets its flags itself
        device.allow_tf32(False)
    setup = Setup(workload=workload, device=device, model=workload.model, args=workload.args, kwargs=workload.kwargs)
    setup.switches = {str(switch.switch): switch.capabilities() for switch in switches}
    early = [switch for switch in switches if switch.stage < COMPILER]
    for switch in early:
        with blaming(str(switch.switch), setup, "recipe"):
            switch.apply(setup)
    distribute(setup)
    for switch in switches[len(early) :]:
        with blaming(str(switch.switch), setup, "recipe"):
            switch.apply(setup)
    setup.begin_with_originals()
    return setup


@contextmanager
def blaming(switch: str | None, setup: Setup, stage: str) -> Iterator[None]:
    """Whatever breaks inside names `switch` as its cause, or as the suspect where others stand in the recipe with it.

    Running out of memory is nobody's fault, and a mistake of the person stays one.
    """
    try:
        yield
    except Exception as error:
        if switch is None or isinstance(error, UsageError) or is_out_of_memory(error):
            raise
        kind = kind_of(error, stage)
        if kind == "user" and stage != "recipe":
            kind = "unsupported"  # the model has run without the switch: its own code is not what is wrong
        broken = error if isinstance(error, BenchError) else BenchError(kind, one_line(error))
        if not broken.switches:
            broken.switches, broken.scope = (switch,), "switch" if len(setup.switches) == 1 else "recipe"
        if broken is error:
            raise
        raise broken from error


def switch_choices(
    model: torch.nn.Module, device: Device, task: Task, facts: Facts | None = None
) -> list[SwitchChoice]:
    """Every switch with each argument it offers, judged by what a step was seen doing.

    A switch for another task is no choice at all.
    """
    kinds = [kind for kind in map(SWITCHES.get, SWITCHES) if task in kind.tasks]
    switches = [kind(Switch(name=kind.name, argument=argument)) for kind in kinds for argument in kind.offered]
    return [_choice(switch, switches, model, device, task, facts) for switch in switches]


def _choice(
    switch: RecipeSwitch,
    among: list[RecipeSwitch],
    model: torch.nn.Module,
    device: Device,
    task: Task,
    facts: Facts | None,
) -> SwitchChoice:
    argument = switch.switch.argument
    needs, strangers = _formats_needed(switch, among, facts)
    excluded = {str(other.switch) for other in among if exclude_each_other(switch, other, task)} | strangers
    return SwitchChoice(
        switch=str(switch.switch),
        family=switch.family or switch.name,
        relieves=switch.relieves,
        excludes=tuple(sorted(excluded)),
        needs=(*switch.needs.get(task, ()), *needs),
        refusal=_refusal(switch, model, device, task, facts),
        capabilities=switch.capabilities(),
        leaves_program=switch.leaves_program,
        is_slow_to_prepare=argument in switch.slow_to_prepare,
        prepare_s=switch.prepare_s(task),
        is_doubtful=facts is not None and switch.is_doubtful(facts),
        expected_time=_expected_time(switch, device, facts),
    )


def _expected_time(switch: RecipeSwitch, device: Device, facts: Facts | None) -> float | None:
    """Time of a step with the switch over one without: products change as the device says, the rest stays."""
    number_format = switch.computes_in()
    product_time = device.product_time(number_format) if number_format is not None and facts is not None else None
    if facts is None or product_time is None:
        return None
    share = facts.products_share
    return 1 - share + share * product_time


def _refusal(
    switch: RecipeSwitch, model: torch.nn.Module, device: Device, task: Task, facts: Facts | None
) -> Note | None:
    """Why a tuner does not try it, or None."""
    if (unavailable := switch.refusal(device, task)) is not None:
        return note("unavailable", unavailable)
    if (irrelevant := switch.irrelevance(model, task, facts)) is not None:
        return note("irrelevant", irrelevant)
    caution = switch.caution(task)
    return None if caution is None else note("caution", caution)


def _formats_needed(
    switch: RecipeSwitch, among: list[RecipeSwitch], facts: Facts | None
) -> tuple[list[SwitchNeed], set[str]]:
    """For a switch that only some number formats suit: which others must stand beside it, and which must not."""
    formats = switch.formats(facts) if facts is not None else None
    if formats is None:
        return [], set()
    casting = {str(other.switch): other.computes_in() for other in among if other.family == "precision"}
    suited = tuple(name for name, form in casting.items() if form in formats)
    reason = f"it needs this model in {' or '.join(sorted(formats))}; add one of {', '.join(suited)}"
    needs = [] if "fp32" in formats or not suited else [SwitchNeed(wants=suited, reason=reason)]
    return needs, casting.keys() - set(suited)


CANDIDATES: dict[tuple[bool, Task], tuple[str, ...]] = {
    (False, "generate"): ("static-cache+compile", "static-cache"),
    (True, "generate"): ("bf16+static-cache+compile+graphs", "bf16+static-cache+graphs", "bf16"),
    (False, "infer"): ("channels-last+compile", "compile", "channels-last", "bf16"),
    (False, "train"): ("channels-last", "compile", "amp-bf16"),
    (True, "infer"): (
        "fp16+channels-last+compile",
        "fp16+compile",
        "fp16+channels-last+graphs",
        "fp16+graphs",
        "fp16",
        "bf16",
        "tf32",
        "graphs",
        "compile",
    ),
    (True, "train"): (
        "amp-bf16+channels-last+compile",
        "amp-bf16+compile",
        "amp-bf16+channels-last",
        "amp-bf16",
        "tf32",
    ),
}
"""What usually helps on an accelerator or a CPU, for the task; the most promising first."""


def applicable_recipes(model: nn.Module, device: Device, task: Task) -> tuple[str, ...]:
    """Those of the candidates that can be had here and would change something about this model. Only looks."""
    if not any(parameter.is_floating_point() for parameter in model.parameters()):
        return ()  # nothing to compute with, or quantized already
    return tuple(text for text in CANDIDATES[device.is_accelerator, task] if _is_applicable(text, model, device, task))


def _is_applicable(text: str, model: nn.Module, device: Device, task: Task) -> bool:
    try:
        switches = switches_of(Recipe.parse(text), task)
        refuse_impossible(switches, task, device, model)
    except (BenchError, UsageError):
        return False
    return not any(switch.capabilities().compiles for switch in switches) or device.compiler_refusal() is None


def exclude_each_other(one: RecipeSwitch, other: RecipeSwitch, task: Task) -> bool:
    """One name stands in a recipe once, and a graph is recorded once: not inside another, nor around another engine."""
    does, also = one.capabilities(), other.capabilities()
    recorded_twice = does.records_graph and (also.records_graph or also.refuses_graph)
    return (
        one.name == other.name
        or bool(names_of(one) & other.exclusions(task) or names_of(other) & one.exclusions(task))
        or recorded_twice
        or (also.records_graph and does.refuses_graph)
    )


def unmet_need(switch: RecipeSwitch, recipe: Sequence[RecipeSwitch], task: Task) -> str | None:
    """Why this switch cannot stand in this recipe, with what is missing; None where nothing is."""
    names = {name for other in recipe for name in names_of(other)}
    return next((need.reason for need in switch.needs.get(task, ()) if not need.is_met(names)), None)


def names_of(switch: RecipeSwitch) -> set[str]:
    """By which an exclusion may mean it: its name, or its name with the argument it has."""
    return {switch.name, f"{switch.name}:{switch.switch.argument or 'default'}"}


def suspect_of(spec: RunSpec, setup: Setup) -> str | None:
    """The switch that a broken first call is put down to: the last of those that change the program, else the last.

    None where no numerics reference has run before: the model itself may be what is broken.
    """
    changing = [name for name, does in setup.switches.items() if does.compiles or does.records_graph]
    suspects = changing or list(setup.switches)
    return suspects[-1] if suspects and spec.measure.check_numerics else None
