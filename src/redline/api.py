"""What notebooks and the command line call."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from redline.errors import BenchError, SpecError, UsageError
from redline.launch import Door, open_door
from redline.launch.lock import device_lock
from redline.protocol import (
    Ask,
    AskCheck,
    AskEnvironment,
    AskHealth,
    AskModels,
    Checked,
    CheckedSpecs,
    EnvironmentAnswer,
    FailureReply,
    Health,
    HealthItem,
    ModelNames,
    Progress,
    Question,
    Reply,
)
from redline.record import Environment, RunRecord
from redline.results import BatchResult, RunResult, SweepResult
from redline.search.interleave import Journal, NoJournal, Observer, measure_together
from redline.spec import LaunchSpec, RunSpec
from redline.spec_table import layered, specs_from_table
from redline.units import parse_seconds

if TYPE_CHECKING:
    from redline.analyze.sweep import IdleExclusion
    from redline.search.batch import BatchObserver
    from redline.search.sweep import SweepObserver
    from redline.store import History


def run(
    model: Any,
    inputs: Any | None = None,
    *,
    recipes: str | Iterable[str] = "baseline",
    loss: Any | None = None,
    door: Door | None = None,
    journal: Journal | None = None,
    observer: Observer | None = None,
    **settings: Any,
) -> RunResult:
    """Measure a model: by name (or several), or a live module with example inputs.

    `settings` are those of the command line and of TOML files: task, batch, image_size, classes, device, threads,
    effort, tail, seed. Several recipes are measured interleaved and set against the first. Without a `journal` the
    records go into the history.
    """
    specs, own_door = specs_of(model, inputs, recipes=recipes, loss=loss, **settings)
    records = run_specs(specs, door=own_door or door, journal=journal, observer=observer)
    if journal is not None:
        return RunResult(records)
    from redline.store import ceilings_of

    return RunResult(records, ceilings_of(records))


def specs_of(
    model: Any,
    inputs: Any | None = None,
    *,
    recipes: str | Iterable[str] = "baseline",
    loss: Any | None = None,
    **settings: Any,
) -> tuple[list[RunSpec], Door | None]:
    """The specs of a call, and the only door they can go through where a live model cannot travel."""
    described, own_door = _described(model, inputs, loss)
    return specs_from_table({"recipe": _listed(recipes), **settings, **described}), own_door


def sweep(
    model: Any,
    inputs: Any | None = None,
    *,
    recipes: str | Iterable[str] = "baseline",
    batches: Any = None,
    tasks: str | Iterable[str] = "infer",
    threads: Any = None,
    exclude: Sequence[Mapping[str, Any]] = (),
    name: str | None = None,
    fresh: bool = False,
    retry_failed: bool = False,
    loss: Any | None = None,
    door: Door | None = None,
    history: History | None = None,
    observer: SweepObserver | None = None,
    **settings: Any,
) -> SweepResult:
    """Measure every combination, each in a process of its own; run again, it goes on where it stopped.

    `batches` may be a list or a text such as "1,8" or "16..512" (doubling); `exclude` holds tables such as
    {"model": "vit_b_16", "batch": [64]}. `settings` are those of `run`. Without a `history` this user's is used.
    """
    from redline.search.grid import grid_from_table

    for one, several, is_given in (
        ("batch", "batches", batches is not None),
        ("task", "tasks", tasks != "infer"),
        ("recipe", "recipes", recipes != "baseline"),
    ):
        if is_given and one in settings:
            raise SpecError(f"give {one} or {several}, not both")
    described, own_door = _described(model, inputs, loss)
    axes = {"recipe": _listed(recipes), "task": _listed(tasks), "batch": batches, "threads": threads}
    grid = grid_from_table({**axes, "exclude": exclude, **settings, **described})
    return sweep_specs(
        grid.cells,
        idle_exclusions=grid.idle,
        name=name,
        fresh=fresh,
        retry_failed=retry_failed,
        door=own_door or door,
        history=history,
        observer=observer,
    )


def sweep_specs(
    specs: Sequence[RunSpec],
    *,
    idle_exclusions: Sequence[IdleExclusion] = (),
    name: str | None = None,
    fresh: bool = False,
    retry_failed: bool = False,
    dry_run: bool = False,
    door: Door | None = None,
    history: History | None = None,
    observer: SweepObserver | None = None,
) -> SweepResult:
    """Plan, then measure what is not settled yet. A mistake in any spec is raised before the first is measured."""
    from redline.search.exclude import recipe_probes, refuse_unknown_recipes
    from redline.search.plan import check_name, estimate, make_plan
    from redline.search.sweep import standing, sweep, unsettled
    from redline.store import History

    check_name(name)
    with ExitStack() as stack:
        door = door or stack.enter_context(opened(specs[0].launch))
        history = history or stack.enter_context(History.open())
        answers = _answers(specs, door)
        plan = make_plan(specs, answers, lambda device: _environment(device, door), name, idle_exclusions)
        if probes := recipe_probes(idle_exclusions, plan.cells[0].spec):
            refuse_unknown_recipes(_answers(probes, door))
        ledger = history.sweep(plan.name)
        if dry_run:
            settled = {} if fresh else ledger.cells()
            waiting = unsettled(plan, settled, retry_failed=retry_failed)
            to_do = {cell.key for cell in waiting}
            kept = {key: cell for key, cell in settled.items() if key not in to_do}
            return SweepResult(standing(plan, kept), estimate=estimate(waiting, history))
        if observer is not None:
            waiting = unsettled(plan, {} if fresh else ledger.cells(), retry_failed=retry_failed)
            observer.planned(plan, len(waiting), estimate(waiting, history))
        summary = sweep(plan, door, ledger, observer, fresh=fresh, retry_failed=retry_failed)
        records = history.load_many(cell.record_id for cell in summary.cells if cell.record_id)
    return SweepResult(summary, records)


def find_batch(
    model: Any,
    inputs: Any | None = None,
    *,
    recipes: str | Iterable[str] = "baseline",
    slo_p95: float | str | None = None,
    max_batch: int | None = None,
    loss: Any | None = None,
    door: Door | None = None,
    journal: Journal | None = None,
    observer: BatchObserver | None = None,
    **settings: Any,
) -> BatchResult:
    """The largest batch that fits, the throughput knee, and the best batch whose p95 stays within `slo_p95`.

    `slo_p95` in seconds or as a text such as "20ms"; `settings` are those of `run`, `max_memory` among them. Several
    recipes are searched one after the other.
    """
    specs, own_door = specs_of(model, inputs, recipes=recipes, loss=loss, **layered({"effort": "quick"}, settings))
    return find_batch_specs(
        specs,
        slo_p95_s=parse_seconds(slo_p95) if isinstance(slo_p95, str) else slo_p95,
        max_batch=max_batch,
        door=own_door or door,
        journal=journal,
        observer=observer,
    )


def find_batch_specs(
    specs: Sequence[RunSpec],
    *,
    slo_p95_s: float | None = None,
    max_batch: int | None = None,
    door: Door | None = None,
    journal: Journal | None = None,
    observer: BatchObserver | None = None,
) -> BatchResult:
    """One search per spec, in their order; the batch in a spec is where nothing was said and is not looked at."""
    from redline.search.batch import BatchObserver, find_batch, require_processes

    require_processes(specs)
    if slo_p95_s is not None and not slo_p95_s > 0:
        raise SpecError(f"slo_p95 must be above 0, got {slo_p95_s}")
    if max_batch is not None and max_batch < 1:
        raise SpecError(f"max_batch must be 1 or more, got {max_batch}")
    watching = observer or BatchObserver()
    findings = []
    with ExitStack() as stack:
        door = door or stack.enter_context(opened(specs[0].launch))
        specs = checked(specs, door)
        journal = journal or stack.enter_context(_history())
        for spec in specs:
            with device_lock(spec.device, on_wait=watching.waiting):
                found = find_batch(spec, door, journal, watching, most=max_batch, slo_p95_s=slo_p95_s)
            findings.append(found)
    return BatchResult(findings)


def run_specs(
    specs: Sequence[RunSpec],
    *,
    door: Door | None = None,
    journal: Journal | None = None,
    observer: Observer | None = None,
) -> list[RunRecord]:
    """Check all specs first, then measure those of one workload together. A mistake in any is raised before the first."""
    if not specs:
        raise UsageError("nothing to measure: name at least one model and one recipe")
    observer = observer or Observer()
    records: list[RunRecord] = []
    with ExitStack() as stack:
        door = door or stack.enter_context(opened(specs[0].launch))
        specs = checked(specs, door)
        journal = journal or stack.enter_context(_history())
        for _, together in groupby(specs, key=_measured_together):
            group = list(together)
            with device_lock(group[0].device, on_wait=lambda holder: observer.waiting(holder)):
                records += measure_together(group, door, journal, observer, seed=group[0].seed)
    return records


def checked(specs: Sequence[RunSpec], door: Door) -> list[RunSpec]:
    """The specs with their devices resolved; raises the first mistake."""
    answers = _answers(specs, door)
    for answer in answers:
        if answer.usage:
            raise UsageError(answer.usage)
    return [answer.spec for answer in answers]


def models(pattern: str | None = None, door: Door | None = None) -> ModelNames:
    """Every model that goes by name."""
    reply = ask(AskModels(pattern=pattern), door)
    assert isinstance(reply, ModelNames)
    return reply


def doctor(door: Door | None = None) -> list[HealthItem]:
    """What is wrong with this machine and how to mend it."""
    from redline.doctor import examine

    reply = ask(AskHealth(), door)
    assert isinstance(reply, Health)
    return examine(reply)


def ask(question: Question, door: Door | None = None) -> Reply:
    """A question to a bench of its own."""
    with ExitStack() as stack:
        door = door or stack.enter_context(opened(LaunchSpec()))
        session = door.open()
        stack.callback(session.close)
        reply = session.ask(Ask(question=question))
    if isinstance(reply, FailureReply):
        raise BenchError(reply.failure.kind, f"{reply.failure.message}\n{reply.failure.traceback}".strip())
    return reply


@contextmanager
def opened(launch: LaunchSpec) -> Iterator[Door]:
    door = open_door(launch)
    try:
        yield door
    finally:
        door.close()


def pickled(live: Any) -> str | None:
    """The live model as a file a worker can open, named by its content; None where it cannot travel."""
    import cloudpickle
    import platformdirs

    try:
        body = cloudpickle.dumps(live)
    except Exception:
        # Whatever an object's own pickling code raises means the same: it cannot leave this process.
        return None
    folder = Path(platformdirs.user_data_path("redline")) / "artifacts"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{hashlib.sha256(body).hexdigest()[:24]}.pkl"
    if not path.exists():
        path.write_bytes(body)
    return str(path)


def _described(model: Any, inputs: Any | None, loss: Any | None) -> tuple[dict[str, Any], Door | None]:
    """What a spec says of a model by name or of a live one, and a door of its own where the live one cannot travel."""
    if isinstance(model, str) or (isinstance(model, list | tuple) and all(isinstance(name, str) for name in model)):
        if inputs is not None or loss is not None:
            raise UsageError("inputs and loss go with a live module; a model by name brings its own")
        return {"model": model}, None
    live = (model, inputs, loss)
    name = f"live:{type(model).__name__}"
    artifact = pickled(live)
    if artifact is not None:
        return {"model": name, "artifact": artifact}, None
    # It cannot travel: the bench comes to it, nothing is isolated, and the verdict says so.
    from redline.launch.inline import InlineDoor

    place = f"memory:{id(model)}"
    door = InlineDoor(handed_over={place: live})
    return {"model": name, "artifact": place, "launch": {"door": "inline"}}, door


def _answers(specs: Sequence[RunSpec], door: Door) -> tuple[Checked, ...]:
    reply = ask(AskCheck(specs=tuple(specs)), door)
    assert isinstance(reply, CheckedSpecs)
    return reply.answers


def _environment(device: str, door: Door) -> Environment:
    reply = ask(AskEnvironment(device=device), door)
    assert isinstance(reply, EnvironmentAnswer)
    return reply.environment


def _history() -> History:
    from redline.store import History

    return History.open()


def _listed(value: str | Iterable[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _measured_together(spec: RunSpec) -> RunSpec:
    """Specs that differ in their recipe alone."""
    from redline.spec import Recipe

    return msgspec.structs.replace(spec, recipe=Recipe())


__all__ = [
    "BatchResult",
    "NoJournal",
    "Progress",
    "RunResult",
    "SweepResult",
    "doctor",
    "find_batch",
    "find_batch_specs",
    "models",
    "run",
    "run_specs",
    "sweep",
    "sweep_specs",
]
