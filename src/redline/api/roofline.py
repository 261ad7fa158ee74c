"""`redline.roofline`: how far a model is from the device's limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from rich.console import RenderableType

from redline.analyze.ceilings import OF_GENERATION, CeilingsSummary, RooflineRow, ceilings_summary, roofline_row
from redline.api.ceilings import ceilings
from redline.api.flops import module_profile
from redline.api.profile import profile_spec
from redline.api.settings import Settings, specs_of, takes_settings
from redline.api.workspace import Workspace, use
from redline.model.errors import BenchError, UsageError
from redline.model.identity import device_key
from redline.report.export import JsonDocument, json_document
from redline.report.notebook import Bars, Shown
from redline.report.roofline import RooflineReport, plot_roofline


class RooflineResult(Shown, Sequence[RooflineRow]):
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

    def report(self) -> RenderableType:
        return RooflineReport(self.rows, self.failures)

    def frame_rows(self) -> Sequence[Any]:
        return self.rows

    def bars(self) -> Bars | None:
        bars = [(row.recipe, row.headroom, None, None) for row in self.rows if row.headroom]
        return Bars("time over roofline time", "times slower than the roofline", bars)

    def to_json(self) -> JsonDocument:
        return json_document("roofline", {"ceilings": self.ceilings, "results": self.rows, "failures": self.failures})

    def plot(self, path: str | Path | None = None) -> Any:
        """The rows under their roofs, both axes logarithmic: written to a path, and that path; else the figure."""
        return super().plot() if path is None else plot_roofline(self.rows, self.ceilings, Path(path))


@takes_settings
def roofline(
    model: Any = None,
    inputs: Any | None = None,
    *,
    recipes: str | Iterable[str] = "baseline",
    loss: Any | None = None,
    last: bool = False,
    workspace: Workspace | None = None,
    **settings: Unpack[Settings],
) -> RooflineResult:
    """How much is left to the device's limits, for a model under one or more recipes.

    Each recipe is timed and profiled once; ceilings that are not known yet are measured first. `last` takes the last
    run instead and measures nothing; times per kernel class need a profile and are then missing.
    """
    with use(workspace) as opened:
        if last:
            return _roofline_of_last(opened)
        specs, working = specs_of(opened, model, inputs, recipes=recipes, loss=loss, **settings)
        if len({spec.workload.model for spec in specs}) != 1:
            raise UsageError("a roofline is of one model, under one or more recipes")
        if specs[0].workload.task == "generate":
            raise UsageError(OF_GENERATION)
        specs = working.checked(specs)
        known = ceilings(specs[0].device, threads=specs[0].threads, workspace=working)
        rows, failures = [], {}
        for spec in specs:
            try:
                result = profile_spec(spec, module_profile(), working)
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


def _roofline_of_last(workspace: Workspace) -> RooflineResult:
    with workspace.reading() as history:
        records = [one for one in history.latest_group() if one.prepared is not None and one.prepared.work is not None]
        if not records:
            raise UsageError("the last run has no counted work: name a model, or run 'redline run' first")
        assert records[0].prepared is not None
        known = history.ceilings().get(device_key(records[0].prepared.environment))
    if known is None:
        raise UsageError("the ceilings of that device are not measured yet: 'redline ceilings' does it")
    return RooflineResult([roofline_row(record, known) for record in records], ceilings_summary(known))
