"""`redline.run`: measure one thing or a grid of them, interleaved where recipes are compared, resumed where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from rich.console import RenderableType

from redline.analyze.grid import Estimate, GridSummary, LeftOut, Rung, TokenTargets, UnderTargets, under_targets
from redline.analyze.pairs import Pair, pairs_of
from redline.analyze.replicates import replicate_rows
from redline.analyze.summary import CeilingsOf, RunSummary, with_price
from redline.api.settings import GridSettings, described_model, specs_of, takes_settings
from redline.api.workspace import Workspace, use
from redline.model.errors import Interrupted, UsageError
from redline.model.fields import MOST_REPLICATES, Frozen, require_range, seconds_of
from redline.model.questions import Checked
from redline.model.record import RunRecord
from redline.model.spec import RunSpec
from redline.model.spec_table import layered, read_runs
from redline.model.units import parse_price
from redline.search.decide import REPLICATES, check_racers
from redline.search.grid import (
    Grid,
    check_name,
    estimate,
    grid_from_tables,
    listed,
    make_plan,
    recipe_probes,
    refuse_unknown_recipes,
    standing,
)
from redline.search.run import Account, GridRun, measured_elsewhere, unsettled
from redline.search.spread import require_cluster, spread
from redline.search.train import After
from redline.show.export import JsonDocument, json_document
from redline.show.grid import grid_fields, grid_report
from redline.show.notebook import Bars, Shown
from redline.show.run import speed_bars


class HowMeasured(Frozen):
    """How the cells of a grid are measured and kept: what is not a setting of a single cell."""

    name: str | None = None
    decide: bool = False
    replicates: int | None = None
    resume: bool = False
    retry_failed: bool = False
    dry_run: bool = False
    jobs: int = 1
    price: str | None = None
    ray: bool = False
    address: str | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        require_range("replicates", self.replicates, 1, MOST_REPLICATES)
        require_range("jobs", self.jobs, 1, MOST_REPLICATES)
        if self.price is not None:
            parse_price(self.price)
        require_cluster(self.ray, self.address)
        if self.ray and self.decide:
            raise UsageError("pairs are decided on one machine: leave out ray (--launch ray), or decide")


class RunResult(Shown, Sequence[RunSummary]):
    """The rows of a run, with the records they were derived from."""

    def __init__(
        self,
        records: Sequence[RunRecord],
        ceilings_of: CeilingsOf | None = None,
        price: str | None = None,
        *,
        summary: GridSummary | None = None,
        decided: Sequence[Sequence[Sequence[RunRecord]]] = (),
        rungs: Sequence[Rung] = (),
        estimate: Estimate | None = None,
        slo: TokenTargets | None = None,
        columns: Sequence[str] = (),
    ) -> None:
        self.records = list(records)
        rows = replicate_rows(self.records, ceilings_of)
        self.rows = rows if price is None else with_price(rows, parse_price(price))
        """One for each thing that was measured, over all its replicates."""
        self.summary = summary
        """Every cell of the grid, those that failed or are still to be measured too; None for a single group that is all there."""
        self.decided = decided
        """The replicates of each group whose pairs were to be decided."""
        self.rungs = list(rungs)
        """What each training gains over those before it."""
        self.estimate = estimate
        """For a dry run: how long what is left may take."""
        self.slo = slo
        self.columns = columns
        """The columns of its tables; none: those that fit what was measured."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    @property
    def pairs(self) -> list[Pair]:
        """Every two recipes that were to be decided, with their verdicts."""
        return [pair for replicates in self.decided for pair in pairs_of(replicates)]

    @property
    def under_slo(self) -> UnderTargets | None:
        """The fastest generation that keeps the targets; None where none were given."""
        return None if self.slo is None else under_targets(self.rows, self.slo)

    def report(self) -> RenderableType:
        return grid_report(
            self.rows,
            self.summary,
            decided=self.decided,
            rungs=self.rungs,
            estimate=self.estimate,
            under=self.under_slo,
            columns=self.columns,
        )

    def frame_rows(self) -> Sequence[Any]:
        return self.rows

    def bars(self) -> Bars | None:
        return speed_bars(self.rows)

    @property
    def failed(self) -> bool:
        """Whether any row could not be measured. Of a grid over more than models and recipes, each cell says so itself."""
        if self.summary is not None and self.summary.sweeps:
            return False
        return any(record.failure is not None or not (record.blocks or record.epochs) for record in self.records)

    def to_json(self) -> JsonDocument:
        return json_document("run", self.fields())

    def fields(self) -> dict[str, Any]:
        """`results` are its rows; a cell names its own by `record_id`."""
        return grid_fields(
            self.rows, self.summary, self.pairs if self.decided else None, self.rungs, self.estimate, self.under_slo
        )


@takes_settings
def run(
    model: Any = None,
    inputs: Any | None = None,
    *,
    recipes: str | Iterable[str] | None = None,
    loss: Any | None = None,
    file: str | Path | None = None,
    trust: bool = False,
    exclude: Sequence[Mapping[str, Any]] = (),
    name: str | None = None,
    decide: bool = False,
    replicates: int | None = None,
    resume: bool = False,
    retry_failed: bool = False,
    dry_run: bool = False,
    jobs: int = 1,
    slo_ttft: float | str | None = None,
    slo_tpot: float | str | None = None,
    price: str | None = None,
    ray: bool = False,
    address: str | None = None,
    workspace: Workspace | None = None,
    **settings: Unpack[GridSettings],
) -> RunResult:
    """Measure a model (by name, or several; or a live module with example inputs; or a function) under recipes.

    Every setting takes several values, such as `batch="1..64"`; several make a grid. Cells that differ in their recipe
    alone are measured interleaved and compared with the first. Each row is kept as it comes: `resume` measures only what
    the same grid (or the one called `name`) still lacks, and `retry_failed` what failed as well. `exclude` holds tables
    such as {"model": "vit_b_16", "batch": [64]}. `jobs` workers may prepare at the same time.

    With `replicates` all is measured in so many fresh processes, and intervals cover what differs between them. With
    `decide` fresh processes are measured until every pair of recipes, or of functions in a list, is decided.

    `file` is a TOML file of [[run]] tables; other arguments override it, and one of another user's that names code is
    refused unless `trust` is set. `price` of the machine, such as "2.50/h", adds the cost of a million items. `slo_ttft`
    and `slo_tpot` name the fastest generation within these times. With `ray` the cells are spread over the cluster at
    `address` (`auto`: this machine's). A mistake in any cell is raised before the first is measured.
    """
    how = HowMeasured(
        name=name,
        decide=decide,
        replicates=replicates,
        resume=resume or retry_failed,
        retry_failed=retry_failed,
        dry_run=dry_run,
        jobs=jobs,
        price=price,
        ray=ray,
        address=address,
    )
    slo = _targets(slo_ttft, slo_tpot)
    own: dict[str, Any] = dict(settings)
    handed = [own.pop(what, None) for what in ("targets", "setup", "teardown")]
    with use(workspace) as opened:
        if recipes is not None:
            own["recipe"] = listed(recipes)
        tables, working = [], opened
        models = model if isinstance(model, list | tuple) and any(map(callable, model)) else [model]
        for one in models:
            described, working = described_model(opened, one, inputs, loss, *handed, task=own.get("task"))
            if len(models) > 1 and working is not opened:
                raise UsageError("a function that cannot be pickled is measured by itself: give all as file.py:step")
            tables.append({**own, **described})
        about: dict[str, Any] = {}
        if file is not None:
            about, tables = read_runs(Path(file), tables[0], trust=trust)
        if exclude:
            about["exclude"] = exclude
        return measure_tables(tables, working, how, about=about, slo=slo, where="" if file is None else str(file))


def measure_tables(
    tables: Sequence[Mapping[str, Any]],
    workspace: Workspace,
    how: HowMeasured,
    *,
    about: Mapping[str, Any] | None = None,
    slo: TokenTargets | None = None,
    where: str = "",
    after: Callable[[RunSpec], After | None] = lambda spec: None,
    left_out: Sequence[LeftOut] = (),
) -> RunResult:
    """Plan the cells of tables of settings, then measure those that are not settled yet."""
    about = about or {}
    effort = (
        {"effort": "quick"} if how.decide else {}
    )  # what differs between processes matters more than a narrow interval
    name = how.name if how.name is not None else about.get("name")
    check_name(name)
    grid = grid_from_tables([layered(effort, table) for table in tables], about.get("exclude", ()), where)
    if not grid.cells:
        raise UsageError("nothing to measure: name at least one model and one recipe")
    plan = make_plan(
        grid,
        workspace.answers(grid.cells),
        workspace.environment,
        name,
        replicates=how.replicates or 1,
        decides=how.decide,
        is_kept=True if how.resume or how.dry_run or name is not None else None,
        left_out=left_out,
    )
    if how.decide:
        for group in plan.groups:
            check_racers([cell.spec for cell in group], how.replicates or REPLICATES)
    if probes := recipe_probes(grid.idle, plan.cells[0].spec):
        refuse_unknown_recipes(workspace.answers(probes))
    ledger = workspace.history.sweep(plan.name) if plan.is_kept else Account()
    settled = {**measured_elsewhere(plan, ledger), **ledger.cells()} if how.resume else {}
    waiting = [cell for group in unsettled(plan, settled, retry_failed=how.retry_failed) for cell in group]
    if how.dry_run:
        to_do = {cell.key for cell in waiting}
        kept = {key: cell for key, cell in settled.items() if key not in to_do}
        return RunResult([], summary=standing(plan, kept), estimate=estimate(waiting, workspace.history), slo=slo)
    if plan.is_kept:
        workspace.observer.grid_planned(plan, len(waiting), estimate(waiting, workspace.history))
    running = GridRun(
        plan,
        workspace,
        ledger,
        live=None if plan.is_kept and workspace.keeps else workspace.journal,
        load=workspace.history.load_many if plan.is_kept else lambda ids: {},
        replicates=(how.replicates or REPLICATES) if how.decide else 0,
        jobs=how.jobs,
        after=after,
        spread=partial(spread, address=how.address) if how.ray else None,
    )

    def result() -> RunResult:
        summary = standing(plan, ledger.cells())
        ids = {cell.key: row.record_id for cell, row in zip(plan.cells, summary.cells, strict=True) if row.record_id}
        absent = [record_id for key, record_id in ids.items() if key not in running.records]
        loaded = workspace.history.load_many(absent) if absent else {}
        found = [running.records.get(key) or loaded.get(record_id) for key, record_id in ids.items()]
        records = [record for record in found if record is not None]
        if how.decide:
            records = [record for replicates in running.decided for replicate in replicates for record in replicate]
        says_more = plan.is_kept or plan.left_out or plan.idle_exclusions
        return RunResult(
            records,
            workspace.ceilings_of(records),
            how.price,
            summary=summary if says_more else None,
            decided=running.decided,
            slo=slo,
        )

    try:
        running.go(resume=how.resume, retry_failed=how.retry_failed)
    except KeyboardInterrupt:
        if workspace.keeps and (running.records or settled):
            raise Interrupted(result()) from None
        raise
    return result()


def _targets(slo_ttft: float | str | None, slo_tpot: float | str | None) -> TokenTargets | None:
    given = {"ttft_s": slo_ttft, "tpot_s": slo_tpot}
    times = {
        name: seconds_of(f"slo_{name.removesuffix('_s')}", value) for name, value in given.items() if value is not None
    }
    return TokenTargets(**times) if times else None


def run_step(step: Callable[..., Any], *, workspace: Workspace | None = None, **settings: Any) -> RunResult:
    """Measure a training step of your own, any callable, as it is; `setup`, `teardown` and `batch` as `run` takes them.

    `redline.profile(step)` says where its time goes, and `redline.run([step, other], decide=True)` sets it against another.
    """
    if not callable(step):
        raise UsageError(f"run_step measures a function, got {type(step).__name__}")
    return run(step, workspace=workspace, **settings)


def demo(device: str = "auto", *, workspace: Workspace | None = None) -> RunResult:
    """A first look with good defaults for the device."""
    with use(workspace) as opened:
        resolved = opened.checked(specs_of(opened, "resnet18", device=device)[0])[0].device
        if resolved == "cpu":
            recipes = ["baseline", "channels-last", "channels-last+compile", "channels-last+compile:freeze"]
            return run("resnet18", batch=4, recipes=recipes, effort="quick", device="cpu", workspace=opened)
        recipes = ["baseline", "amp+channels-last+compile", "fp16+channels-last+compile:reduce-overhead"]
        return run("resnet50", batch=32, recipes=recipes, device=resolved, workspace=opened)


def measure_specs(specs: Sequence[RunSpec], workspace: Workspace, replicates: int = 1) -> list[RunRecord]:
    """Check all specs first, then measure those of one workload together. Any mistake is raised before the first."""
    checked = workspace.checked(specs)
    answers = [Checked(spec=spec) for spec in checked]
    plan = make_plan(Grid(cells=checked), answers, workspace.environment, replicates=replicates, is_kept=False)
    running = GridRun(plan, workspace, Account(), live=workspace.journal)
    running.go()
    cells = sorted(plan.cells, key=lambda cell: int(cell.key.partition("-")[0]))
    return [running.records[cell.key] for cell in cells]
