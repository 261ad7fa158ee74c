"""Races, as notebooks and the command line ask for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec

from redline.api import checked, opened, specs_of
from redline.errors import UsageError
from redline.launch.lock import device_lock
from redline.record import RunRecord
from redline.search.interleave import Journal
from redline.spec import RunSpec
from redline.spec_table import layered

if TYPE_CHECKING:
    from redline.analyze.race import Pair
    from redline.analyze.summary import RunSummary
    from redline.launch import Door
    from redline.search.race import RaceObserver


class RaceResult(Sequence["Pair"]):
    """The pairs of a race, with the heats they were derived from."""

    def __init__(self, heats: Sequence[Sequence[RunRecord]]) -> None:
        from redline.analyze.race import pairs_of

        self.heats = [list(heat) for heat in heats]
        self.pairs = pairs_of(self.heats)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: Any) -> Any:
        return self.pairs[index]

    def __str__(self) -> str:
        from redline.report.race import race_report
        from redline.report.terminal import as_text

        return as_text(race_report(self.heats))

    @property
    def records(self) -> list[RunRecord]:
        return [record for heat in self.heats for record in heat]

    @property
    def rows(self) -> list[RunSummary]:
        from redline.analyze.summary import summarize

        return summarize(self.records)

    def to_json(self) -> str:
        from redline.report.race import race_json

        return race_json(self.heats)


def race(
    model: Any,
    inputs: Any | None = None,
    *,
    recipes: Iterable[str],
    replicates: int = 3,
    loss: Any | None = None,
    door: Door | None = None,
    journal: Journal | None = None,
    observer: RaceObserver | None = None,
    **settings: Any,
) -> RaceResult:
    """Which recipe is faster, and is that sure? Fresh processes, interleaved blocks; `settings` are those of `run`."""
    specs, own_door = specs_of(model, inputs, recipes=recipes, loss=loss, **layered({"effort": "quick"}, settings))
    return race_specs(specs, replicates=replicates, door=own_door or door, journal=journal, observer=observer)


def race_specs(
    specs: Sequence[RunSpec],
    *,
    replicates: int = 3,
    door: Door | None = None,
    journal: Journal | None = None,
    observer: RaceObserver | None = None,
) -> RaceResult:
    from redline.search.race import RaceObserver, check_racers, race

    check_racers(specs, replicates)
    if any(msgspec.structs.replace(spec, recipe=specs[0].recipe) != specs[0] for spec in specs):
        raise UsageError("a race is of one model: name one")
    watching = observer or RaceObserver()
    with ExitStack() as stack:
        door = door or stack.enter_context(opened(specs[0].launch))
        specs = checked(specs, door)
        if journal is None:
            from redline.store import History

            journal = stack.enter_context(History.open())
        stack.enter_context(device_lock(specs[0].device, on_wait=watching.waiting))
        heats = race(specs, door, journal, watching, replicates=replicates, seed=specs[0].seed)
    return RaceResult(heats)
