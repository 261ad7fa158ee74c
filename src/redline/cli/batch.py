"""`redline batch`: a line per trial as it comes, then the answers side by side, the document or the plot."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from redline.analyze.batch import BatchTrial, Purpose
from redline.api import find_batch_specs
from redline.cli.main import EXIT_FAILED_ROW
from redline.cli.progress import LiveObserver
from redline.record import RunRecord
from redline.report.batch import batch_json, found_report, search_title, trial_header, trial_line
from redline.report.batch_plot import check_place
from redline.report.terminal import make_console
from redline.search.batch import BatchObserver
from redline.spec_table import specs_from_table
from redline.units import parse_seconds

WORDS = {"largest": "the largest batch", "knee": "the knee", "slo": "the latency target"}


class LiveBatches(LiveObserver, BatchObserver):
    """Prints the table as it grows."""

    def __init__(self, *, on_stdout: bool) -> None:
        super().__init__()
        self._on_stdout = on_stdout
        self._title = ""
        self._purpose: Purpose = "largest"

    def trying(self, batch: int, purpose: Purpose) -> None:
        self._purpose = purpose

    def opened(self, record: RunRecord) -> None:
        workload = record.spec.workload
        title = search_title(workload.model, workload.task, str(record.spec.recipe))
        if title != self._title:
            self._title = title
            self.say(Text(title, style="bold"), on_stdout=self._on_stdout)
            self.say(Text(trial_header()), on_stdout=self._on_stdout)
        super().opened(record)

    def name_of(self, record: RunRecord) -> str:
        return f"batch {record.spec.workload.batch} for {WORDS[self._purpose]}"

    def closed(self, record: RunRecord) -> None:
        self.forget(record)

    def tried(self, trial: BatchTrial) -> None:
        self.say(trial_line(trial), on_stdout=self._on_stdout)


def find_and_print(
    table: Mapping[str, Any], *, slo_p95: str | None, max_batch: int | None, plot: Path | None, as_json: bool
) -> int:
    specs = specs_from_table(table, where="batch")
    slo_p95_s = parse_seconds(slo_p95) if slo_p95 is not None else None
    if plot is not None:
        check_place(plot)
    with LiveBatches(on_stdout=not as_json) as observer:
        result = find_batch_specs(specs, slo_p95_s=slo_p95_s, max_batch=max_batch, observer=observer)
    if plot is not None:
        result.plot(plot)
    if as_json:
        sys.stdout.write(batch_json(result.findings) + "\n")
    else:
        console = make_console()
        console.print(found_report(result.findings))
        if plot is not None:
            console.print(f"plot: {plot}", markup=False)
    return EXIT_FAILED_ROW if any(found.max_batch is None for found in result) else 0
