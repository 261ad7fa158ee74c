"""What a model has to do, what a device can do, and how far apart they are: as notebooks and the command line ask."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from redline.api import ask, checked, opened, specs_of
from redline.errors import BenchError, UsageError
from redline.launch.lock import device_lock
from redline.profiling import DEFAULT_STEPS, profile_spec
from redline.protocol import (
    AskCeilings,
    AskCount,
    AskEnvironment,
    CeilingsAnswer,
    CountAnswer,
    EnvironmentAnswer,
    Profile,
)
from redline.record import RunRecord
from redline.search.interleave import Observer
from redline.spec import LaunchSpec, RunSpec
from redline.spec_table import specs_from_table

if TYPE_CHECKING:
    from redline.analyze.flops import FlopsSummary
    from redline.analyze.limits import CeilingsSummary, RooflineRow
    from redline.launch import Door
    from redline.store import History
    from redline.work import Ceilings

DISSOLVED = "latency per module is n/a: this recipe dissolves modules into one program"


class FlopsResult:
    def __init__(self, summary: FlopsSummary, record: RunRecord | None = None) -> None:
        self.summary = summary
        self.record = record

    def __str__(self) -> str:
        from redline.report.flops import FlopsReport
        from redline.report.terminal import as_text

        return as_text(FlopsReport(self.summary))

    def to_json(self) -> str:
        return _json(self.summary)


class CeilingsResult:
    def __init__(self, summary: CeilingsSummary, ceilings: Ceilings) -> None:
        self.summary = summary
        self.ceilings = ceilings

    def __str__(self) -> str:
        from redline.report.ceilings import ceilings_report
        from redline.report.terminal import as_text

        return as_text(ceilings_report(self.summary))

    def to_json(self) -> str:
        return _json(self.summary)


class RooflineResult(Sequence["RooflineRow"]):
    """One row per recipe, under the ceilings of the device they ran on."""

    def __init__(
        self, rows: Sequence[RooflineRow], ceilings: CeilingsSummary, failures: Mapping[str, str] | None = None
    ) -> None:
        self.rows = list(rows)
        self.ceilings = ceilings
        self.failures = dict(failures or {})
        """Recipes that broke, and what they said."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __str__(self) -> str:
        from redline.report.roofline import RooflineReport
        from redline.report.terminal import as_text

        return as_text(RooflineReport(self.rows, self.failures))

    def to_json(self) -> str:
        return _json({"schema": 1, "ceilings": self.ceilings, "results": self.rows, "failures": self.failures})

    def plot(self, path: str | Path) -> Path:
        """The rows under their roofs, both axes logarithmic."""
        from redline.report.roofline_plot import plot_roofline

        return plot_roofline(self.rows, self.ceilings, Path(path))


def flops(
    model: Any,
    inputs: Any | None = None,
    *,
    recipe: str = "baseline",
    loss: Any | None = None,
    latency: bool = False,
    door: Door | None = None,
    observer: Observer | None = None,
    **settings: Any,
) -> FlopsResult:
    """Parameters, MACs, FLOPs and bytes of one step, module by module; nothing runs and no memory is needed.

    With `latency` a few steps run under the profiler, and each module carries its time. `settings` are those of `run`.
    """
    from redline.analyze.flops import flops_summary

    specs, own_door = specs_of(model, inputs, recipes=recipe, loss=loss, **settings)
    if len(specs) != 1:
        raise UsageError(f"one model under one recipe is counted at a time, got {len(specs)}")
    if latency:
        return _flops_with_latency(specs[0], own_door or door, observer)
    with ExitStack() as stack:
        door = own_door or door or stack.enter_context(opened(specs[0].launch))
        (spec,) = checked([msgspec.structs.replace(specs[0], device="cpu")], door)
        reply = ask(AskCount(spec=spec), door)
    assert isinstance(reply, CountAnswer)
    return FlopsResult(flops_summary(spec, reply.workload, reply.work))


def ceilings(
    device: str = "auto",
    *,
    threads: int | None = None,
    fresh: bool = False,
    door: Door | None = None,
    history: History | None = None,
    observer: Observer | None = None,
) -> CeilingsResult:
    """What the device can do at most: from the history, or measured now and kept there."""
    from redline.analyze.limits import ceilings_summary
    from redline.store import History, place_of

    watching = observer or Observer()
    with ExitStack() as stack:
        door = door or stack.enter_context(opened(LaunchSpec()))
        # Any spec will do: a device that is not here is refused in one line.
        (somewhere,) = checked(specs_from_table({"model": "simple_cnn", "device": device}), door)
        reply = ask(AskEnvironment(device=somewhere.device, threads=threads), door)
        assert isinstance(reply, EnvironmentAnswer)
        shelf = (history or stack.enter_context(History.open())).ceilings()
        found = None if fresh else shelf.get(place_of(reply.environment))
        if found is None:
            with device_lock(somewhere.device, on_wait=watching.waiting):
                answer = ask(AskCeilings(device=somewhere.device, threads=threads), door)
            assert isinstance(answer, CeilingsAnswer)
            found = answer.ceilings
            shelf.put(found)
    return CeilingsResult(ceilings_summary(found), found)


def roofline(
    model: Any,
    inputs: Any | None = None,
    *,
    recipes: str | Iterable[str] = "baseline",
    loss: Any | None = None,
    door: Door | None = None,
    observer: Observer | None = None,
    **settings: Any,
) -> RooflineResult:
    """How much is left to the device's limits, for a model under one or more recipes.

    Each recipe is timed and profiled once; ceilings that are not known yet are measured first.
    """
    from redline.analyze.limits import roofline_row

    specs, own_door = specs_of(model, inputs, recipes=recipes, loss=loss, **settings)
    if len({spec.workload.model for spec in specs}) != 1:
        raise UsageError("a roofline is of one model, under one or more recipes")
    rows, failures = [], {}
    with ExitStack() as stack:
        door = own_door or door or stack.enter_context(opened(specs[0].launch))
        specs = checked(specs, door)
        known = ceilings(specs[0].device, threads=specs[0].threads, door=door, observer=observer)
        for spec in specs:
            try:
                result = profile_spec(spec, _profile(), door=door, observer=observer)
            except BenchError as error:
                if len(specs) == 1:
                    raise
                failures[str(spec.recipe)] = str(error)  # the others still run
                continue
            assert result.record is not None
            rows.append(roofline_row(result.record, known.ceilings, result.profile))
    if not rows:
        raise BenchError("unsupported", "; ".join(f"{recipe}: {said}" for recipe, said in failures.items()))
    return RooflineResult(rows, known.summary, failures)


def roofline_of_last(history: History | None = None) -> RooflineResult:
    """The same of what was measured last, without measuring again; per-class times need a profile and are missing."""
    from redline.analyze.limits import ceilings_summary, roofline_row
    from redline.store import History, place_of

    with ExitStack() as stack:
        history = history or stack.enter_context(History.open())
        records = [one for one in history.latest_group() if one.prepared is not None and one.prepared.work is not None]
        if not records:
            raise UsageError("the last run has no counted work: name a model, or run 'redline run' first")
        assert records[0].prepared is not None
        known = history.ceilings().get(place_of(records[0].prepared.environment))
    if known is None:
        raise UsageError("the ceilings of that device are not measured yet: 'redline ceilings' does it")
    return RooflineResult([roofline_row(record, known) for record in records], ceilings_summary(known))


def _flops_with_latency(spec: RunSpec, door: Door | None, observer: Observer | None) -> FlopsResult:
    from redline.analyze.flops import flops_summary
    from redline.analyze.limits import module_seconds
    from redline.store import ceilings_of

    result = profile_spec(spec, _profile(), door=door, observer=observer)
    record = result.record
    assert record is not None
    assert record.prepared is not None
    work = record.prepared.work
    if work is None:
        why = [note for note in record.prepared.workload.notes if "not counted" in note]
        raise UsageError(f"{spec.workload.model}: {why[0] if why else 'work not counted'}")
    times = module_seconds(record)
    summary = flops_summary(
        record.spec,
        record.prepared.workload,
        work,
        times=times or None,
        ceilings=ceilings_of([record])(record),
        device_name=record.prepared.environment.device.name,
        notes=() if times else (DISSOLVED,),
    )
    return FlopsResult(summary, record)


def _profile() -> Profile:
    return Profile(path="", active=DEFAULT_STEPS, shapes=False, modules=True)


def _json(document: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(document)).decode() + "\n"
