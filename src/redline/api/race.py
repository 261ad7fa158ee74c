"""`redline.race`: which recipe is faster, and is that certain?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import msgspec
from rich.console import RenderableType

from redline.analyze.race import Pair, pairs_of
from redline.analyze.summary import CeilingsOf, RunSummary, summarize
from redline.api.settings import Settings, listed, specs_of, takes_settings
from redline.api.workspace import Workspace, use
from redline.model.errors import UsageError
from redline.model.record import RunRecord
from redline.model.spec import RunSpec
from redline.model.spec_table import layered
from redline.report.export import JsonDocument
from redline.report.notebook import Bars, Shown
from redline.report.race import race_json, race_report
from redline.search.race import REPLICATES, check_racers, race_specs


class RaceResult(Shown, Sequence[Pair]):
    """The pairs of a race, with the replicates they were derived from."""

    def __init__(self, replicates: Sequence[Sequence[RunRecord]], ceilings_of: CeilingsOf | None = None) -> None:
        self._ceilings_of = ceilings_of
        self.replicates = [list(replicate) for replicate in replicates]
        self.pairs = pairs_of(self.replicates)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: Any) -> Any:
        return self.pairs[index]

    def report(self) -> RenderableType:
        return race_report(self.replicates, self._ceilings_of)

    def frame_rows(self) -> Sequence[Any]:
        return self.pairs

    def bars(self) -> Bars | None:
        first = self.pairs[0].a if self.pairs else ""
        bars = [(pair.b, pair.ratio, pair.low, pair.high) for pair in self.pairs if pair.a == first]
        return Bars(f"against {first}", f"time of {first} over time of this one", bars)

    @property
    def records(self) -> list[RunRecord]:
        return [record for replicate in self.replicates for record in replicate]

    @property
    def rows(self) -> list[RunSummary]:
        return summarize(self.records, self._ceilings_of)

    def to_json(self) -> JsonDocument:
        return race_json(self.replicates, self._ceilings_of)


def _is_beside(spec: RunSpec, first: RunSpec) -> bool:
    """Whether they differ in their recipes alone."""
    return msgspec.structs.replace(spec, recipe=first.recipe) == first


@takes_settings
def race(
    model: Any,
    inputs: Any | None = None,
    *,
    recipes: Iterable[str] = (),
    replicates: int = REPLICATES,
    loss: Any | None = None,
    workspace: Workspace | None = None,
    **settings: Unpack[Settings],
) -> RaceResult:
    """Measure recipes against each other in fresh processes with interleaved blocks, until every pair is decided.

    `model` may also be a list of functions, as such or as `file.py:step`: they race each other.
    """
    table = layered({"effort": "quick"}, settings)
    with use(workspace) as opened:
        recipes = listed(recipes)
        models = model if isinstance(model, list | tuple) and any(map(callable, model)) else [model]
        specs: list[RunSpec] = []
        for each in models:
            # Without any recipe there would be no spec to refuse.
            own, working = specs_of(opened, each, inputs, recipes=recipes or "baseline", loss=loss, **table)
            if len(models) > 1 and working is not opened:
                raise UsageError("a function that cannot be pickled cannot race another: give both as file.py:step")
            specs += own
        check_racers(specs, replicates)
        specs = working.checked(specs)
        are_functions = all(spec.workload.task == "step" for spec in specs)
        if not are_functions and any(not _is_beside(spec, specs[0]) for spec in specs):
            raise UsageError("a race is of one model under several recipes, or of several functions")
        with working.lock(specs[0].device):
            door = working.door(specs[0].launch)
            raced = race_specs(
                specs, door, working.journal, working.observer, replicates=replicates, seed=specs[0].seed
            )
        return RaceResult(raced, opened.ceilings_of([record for replicate in raced for record in replicate]))
