"""`redline.sweep`: a grid of models, recipes, batches, tasks and threads, resumed where it stopped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from rich.console import RenderableType

from redline.analyze.replicates import replicate_rows
from redline.analyze.summary import CeilingsOf, RunSummary, with_price
from redline.analyze.sweep import Estimate, SweepCell, SweepSummary, TokenTargets, UnderTargets, under_targets
from redline.api.settings import OtherSettings, described_model, listed, takes_settings
from redline.api.workspace import Workspace, use
from redline.model.errors import SpecError
from redline.model.fields import MOST_REPLICATES, require_range, seconds_of
from redline.model.record import RunRecord
from redline.model.spec_table import layered
from redline.model.units import parse_price
from redline.report.export import JsonDocument
from redline.report.notebook import Bars, Shown
from redline.report.run import speed_bars
from redline.report.sweep import sweep_json, sweep_report
from redline.search.grid import Grid, grid_from_table, preset, read_sweep, recipe_probes, refuse_unknown_recipes
from redline.search.spread import require_cluster, spread
from redline.search.sweep import (
    Spread,
    check_name,
    estimate,
    make_plan,
    measured_elsewhere,
    standing,
    sweep_plan,
    unsettled,
)


class SweepResult(Shown, Sequence[SweepCell]):
    """The cells of a sweep as they stand, with the records that settled them."""

    def __init__(
        self,
        summary: SweepSummary,
        records: Mapping[str, RunRecord] | None = None,
        estimate: Estimate | None = None,
        price: str | None = None,
        slo: TokenTargets | None = None,
        ceilings_of: CeilingsOf | None = None,
    ) -> None:
        self._ceilings_of = ceilings_of
        self.summary = summary
        self.records = dict(records or {})
        self._price = price
        self.estimate = estimate
        """For a dry run: how long what is left may take."""
        self.slo = slo

    def __len__(self) -> int:
        return len(self.summary.cells)

    def __getitem__(self, index: Any) -> Any:
        return self.summary.cells[index]

    def report(self) -> RenderableType:
        return sweep_report(self.summary, self.rows, self.estimate, self.under_slo)

    def frame_rows(self) -> Sequence[Any]:
        return self.rows

    def bars(self) -> Bars | None:
        return speed_bars(self.rows)

    @property
    def rows(self) -> list[RunSummary]:
        """What was measured, cell by cell; a cell that is still waiting has no row."""
        ids = [cell.record_id for cell in self.summary.cells]
        known = [self.records[record_id] for record_id in ids if record_id in self.records]
        rows = replicate_rows(known, self._ceilings_of)
        return rows if self._price is None else with_price(rows, parse_price(self._price))

    @property
    def under_slo(self) -> UnderTargets | None:
        """The fastest generation that keeps the targets; None where none were given."""
        return None if self.slo is None else under_targets(self.rows, self.slo)

    def to_json(self) -> JsonDocument:
        return sweep_json(self.summary, self.rows, self.estimate, self.under_slo)


@takes_settings
def sweep(
    model: Any = None,
    inputs: Any | None = None,
    *,
    recipes: str | Iterable[str] | None = None,
    batches: Any = None,
    tasks: str | Iterable[str] | None = None,
    threads: Any = None,
    exclude: Sequence[Mapping[str, Any]] = (),
    slo_ttft: float | str | None = None,
    slo_tpot: float | str | None = None,
    file: str | Path | None = None,
    trust: bool = False,
    preset: str | None = None,
    name: str | None = None,
    replicates: int = 1,
    fresh: bool = False,
    retry_failed: bool = False,
    dry_run: bool = False,
    price: str | None = None,
    ray: bool = False,
    address: str | None = None,
    loss: Any | None = None,
    workspace: Workspace | None = None,
    **settings: Unpack[OtherSettings],
) -> SweepResult:
    """Measure every combination, each in its own process. Run again, it continues where it stopped.

    `batches` is a list or a text such as "1,8" or "16..512" (doubling); `exclude` holds tables such as
    {"model": "vit_b_16", "batch": [64]}. `file` is a TOML file with a [sweep] table, `preset` the name of a built-in
    one; other arguments override both. A file of another user's that names code is refused unless `trust` is set. With `replicates` every cell is measured so many times, in turns with the others.
    With `ray` the cells are spread over the Ray cluster at `address` (`auto`: this machine's), one trial per GPU.
    A mistake in any cell is raised before the first is measured.

    Generation has the axes `prompt` and `new_tokens` too. `slo_ttft` and `slo_tpot` (seconds, or texts such as "20ms"):
    the fastest cell whose time to the first token, and whose p95 time per token, stays within.
    """
    slo = _targets(slo_ttft, slo_tpot)
    require_range("replicates", replicates, 1, MOST_REPLICATES)
    if price is not None:
        parse_price(price)  # before anything is measured
    require_cluster(ray, address)
    given = _axes({"recipe": recipes, "task": tasks, "batch": batches, "threads": threads}, settings)
    if exclude:
        given["exclude"] = exclude
    with use(workspace) as opened:
        handed = [settings.pop("targets", None), settings.pop("setup", None), settings.pop("teardown", None)]
        described, working = described_model(opened, model, inputs, loss, *handed, task=given.get("task"))
        table = layered(_table_of(file, preset, trust), {**given, **settings, **described})
        name = table.pop("name", None) if name is None else name
        table.pop("name", None)
        elsewhere = partial(spread, address=address) if ray else None
        result = _sweep_grid(
            grid_from_table(table), working, name, replicates, fresh, retry_failed, dry_run, price, elsewhere
        )
        result.slo = slo
        return result


def _axes(axes: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The axes that were given, as a table names them."""
    for one, several in (("batch", "batches"), ("task", "tasks"), ("recipe", "recipes")):
        if axes[one] is not None and one in settings:
            raise SpecError(f"give {one} or {several}, not both")
    return {axis: value if axis in ("batch", "threads") else listed(value) for axis, value in axes.items() if value}


def _targets(slo_ttft: float | str | None, slo_tpot: float | str | None) -> TokenTargets | None:
    given = {"ttft_s": slo_ttft, "tpot_s": slo_tpot}
    found = {
        name: seconds_of(f"slo_{name.removesuffix('_s')}", each) for name, each in given.items() if each is not None
    }
    return TokenTargets(**found) if found else None


def _table_of(file: str | Path | None, preset_name: str | None, trust: bool) -> dict[str, Any]:
    if file is not None and preset_name is not None:
        raise SpecError("give a file or a preset, not both")
    if file is not None:
        return read_sweep(Path(file), trust=trust)
    return preset(preset_name) if preset_name is not None else {}


def _sweep_grid(
    grid: Grid,
    workspace: Workspace,
    name: str | None,
    replicates: int,
    fresh: bool,
    retry_failed: bool,
    dry_run: bool,
    price: str | None,
    elsewhere: Spread | None,
) -> SweepResult:
    """Plan, then measure what is not settled yet."""
    check_name(name)
    answers = workspace.answers(grid.cells)
    plan = make_plan(grid.cells, answers, workspace.environment, name, grid.idle, replicates)
    if probes := recipe_probes(grid.idle, plan.cells[0].spec):
        refuse_unknown_recipes(workspace.answers(probes))
    history = workspace.history
    ledger = history.sweep(plan.name)
    settled = {} if fresh else {**measured_elsewhere(plan, ledger), **ledger.cells()}
    waiting = unsettled(plan, settled, retry_failed=retry_failed)
    expected = estimate(waiting, history)
    if dry_run:
        to_do = {cell.key for cell in waiting}
        kept = {key: cell for key, cell in settled.items() if key not in to_do}
        return SweepResult(standing(plan, kept), estimate=expected)
    workspace.observer.sweep_planned(plan, len(waiting), expected)
    door = workspace.door(plan.cells[0].spec.launch)
    summary = sweep_plan(
        plan, door, ledger, workspace.observer, fresh=fresh, retry_failed=retry_failed, spread=elsewhere
    )
    records = history.load_many(cell.record_id for cell in summary.cells if cell.record_id)
    return SweepResult(summary, records, price=price, ceilings_of=workspace.ceilings_of(records.values()))
