"""`redline sweep`: the grid from flags, a file or a preset; progress cell by cell; the table or the document."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from redline.analyze.sweep import Estimate
from redline.api import sweep_specs
from redline.cli.main import EXIT_INTERRUPTED
from redline.cli.progress import LiveObserver
from redline.cli.report import report_beside
from redline.errors import SpecError
from redline.record import RunRecord
from redline.report.folder import check_folder
from redline.report.sweep import estimate_text, sweep_json, sweep_report
from redline.report.terminal import make_console
from redline.search.grid import grid_from_table, preset, read_sweep
from redline.search.plan import Cell, Plan
from redline.search.sweep import SweepObserver
from redline.spec_table import layered


class LiveSweep(LiveObserver, SweepObserver):
    """One moving line for the cell at hand, one that stays for each that is settled."""

    def __init__(self) -> None:
        super().__init__()
        self._place = ""

    def planned(self, plan: Plan, waiting: int, estimate: Estimate) -> None:
        settled = len(plan.cells) - waiting
        told = (
            f"sweep {plan.name}: {len(plan.cells)} cells, {settled} settled, {waiting} to do; {estimate_text(estimate)}"
        )
        self.say(Text(told), on_stdout=False)
        for idle in plan.idle_exclusions:  # now, while it can still be stopped and mended
            self.say(Text(str(idle), style="yellow"), on_stdout=False)

    def cell(self, cell: Cell, number: int, of: int) -> None:
        self._place = f"[{number}/{of}]"

    def name_of(self, record: RunRecord) -> str:
        workload, threads = record.spec.workload, record.spec.threads
        parts = [self._place, workload.model, workload.task, str(record.spec.recipe)]
        parts += [f"batch {workload.batch}"] if workload.batch else []
        parts += [f"{threads} threads"] if threads else []
        return " ".join(parts)

    def settled(self, cell: Cell, record: RunRecord) -> None:
        self.forget(record)


def sweep_table(given: Mapping[str, Any], file: Path | None, preset_name: str | None) -> dict[str, Any]:
    """The flags over the file over the preset."""
    if file is not None and preset_name is not None:
        raise SpecError("give a file or a preset, not both")
    base = read_sweep(file) if file is not None else preset(preset_name) if preset_name is not None else {}
    return layered(base, given)


def sweep_and_print(
    table: Mapping[str, Any],
    *,
    fresh: bool,
    retry_failed: bool,
    dry_run: bool,
    as_json: bool,
    report: Path | None = None,
) -> int:
    if report is not None:
        if dry_run:
            raise SpecError("a dry run measures nothing to report: leave out --report or --dry-run")
        check_folder(report)
    grid = dict(table)
    name = grid.pop("name", None)
    found = grid_from_table(grid)
    try:
        with LiveSweep() as observer:
            result = sweep_specs(
                found.cells,
                idle_exclusions=found.idle,
                name=name,
                fresh=fresh,
                retry_failed=retry_failed,
                dry_run=dry_run,
                observer=observer,
            )
    except KeyboardInterrupt:
        make_console(stderr=True).print("interrupted; settled cells are kept, the same command goes on", markup=False)
        return EXIT_INTERRUPTED
    if as_json:
        sys.stdout.write(sweep_json(result.summary, result.estimate) + "\n")
    else:
        make_console().print(sweep_report(result.summary, result.rows, result.estimate))
    ids = [cell.record_id for cell in result.summary.cells if cell.record_id in result.records]
    report_beside([result.records[record_id] for record_id in ids if record_id], report)
    return 0  # a cell that failed is a row like any other
