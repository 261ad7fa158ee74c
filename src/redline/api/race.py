"""`redline.race`: which recipe is faster, and is that certain?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import msgspec

from redline.analyze.race import Pair, pairs_of
from redline.analyze.summary import RunSummary, summarize
from redline.api.settings import Settings, listed, specs_of, takes_settings
from redline.api.workspace import Workspace, use
from redline.errors import UsageError
from redline.record import RunRecord
from redline.report.export import JsonDocument
from redline.report.race import race_json, race_report
from redline.report.terminal import as_text
from redline.search.race import REPLICATES, check_racers, race_specs
from redline.spec_table import layered


class RaceResult(Sequence[Pair]):
    """The pairs of a race, with the replicates they were derived from."""

    def __init__(self, replicates: Sequence[Sequence[RunRecord]]) -> None:
        self.replicates = [list(replicate) for replicate in replicates]
        self.pairs = pairs_of(self.replicates)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: Any) -> Any:
        return self.pairs[index]

    def __str__(self) -> str:
        return as_text(race_report(self.replicates))

    @property
    def records(self) -> list[RunRecord]:
        return [record for replicate in self.replicates for record in replicate]

    @property
    def rows(self) -> list[RunSummary]:
        return summarize(self.records)

    def to_json(self) -> JsonDocument:
        return race_json(self.replicates)


@takes_settings
def race(
    model: Any,
    inputs: Any | None = None,
    *,
    recipes: Iterable[str],
    replicates: int = REPLICATES,
    loss: Any | None = None,
    workspace: Workspace | None = None,
    **settings: Unpack[Settings],
) -> RaceResult:
    """Measure recipes against each other in fresh processes with interleaved blocks, until every pair is decided."""
    table = layered({"effort": "quick"}, settings)
    with use(workspace) as opened:
        recipes = listed(recipes)
        # Without any recipe there would be no spec to refuse.
        specs, working = specs_of(opened, model, inputs, recipes=recipes or "baseline", loss=loss, **table)
        check_racers(specs, replicates)
        if any(msgspec.structs.replace(spec, recipe=specs[0].recipe) != specs[0] for spec in specs):
            raise UsageError("a race is of one model: name one")
        specs = working.checked(specs)
        with working.lock(specs[0].device):
            door = working.door(specs[0].launch)
            raced = race_specs(
                specs, door, working.journal, working.observer, replicates=replicates, seed=specs[0].seed
            )
    return RaceResult(raced)
