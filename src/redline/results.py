"""What a notebook gets back: rows to look at, records behind them, text, JSON and plots of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.record import RunRecord

if TYPE_CHECKING:
    from redline.analyze.batch import BatchFinding
    from redline.analyze.summary import CeilingsOf, RunSummary
    from redline.analyze.sweep import Estimate, SweepCell, SweepSummary


class RunResult(Sequence["RunSummary"]):
    """The rows of a run, with the records they were derived from."""

    def __init__(self, records: Sequence[RunRecord], ceilings_of: CeilingsOf | None = None) -> None:
        from redline.analyze.summary import summarize

        self.records = list(records)
        self.rows = summarize(self.records, ceilings_of)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __str__(self) -> str:
        from redline.report.run import run_table_text

        return run_table_text(self.rows)

    def to_json(self) -> str:
        from redline.report.export import export_json

        return export_json(self.records, summarize=lambda _: self.rows)


class SweepResult(Sequence["SweepCell"]):
    """The cells of a sweep as they stand, with the records that settled them."""

    def __init__(
        self,
        summary: SweepSummary,
        records: Mapping[str, RunRecord] | None = None,
        estimate: Estimate | None = None,
    ) -> None:
        self.summary = summary
        self.records = dict(records or {})
        self.estimate = estimate
        """Of a dry run: how long what is left may take."""

    def __len__(self) -> int:
        return len(self.summary.cells)

    def __getitem__(self, index: Any) -> Any:
        return self.summary.cells[index]

    def __str__(self) -> str:
        from redline.report.sweep import sweep_report
        from redline.report.terminal import as_text

        return as_text(sweep_report(self.summary, self.rows, self.estimate))

    @property
    def rows(self) -> list[RunSummary]:
        """What was measured, cell by cell; a cell that is still waiting has no row."""
        from redline.analyze.summary import summarize

        ids = [cell.record_id for cell in self.summary.cells]
        return summarize([self.records[record_id] for record_id in ids if record_id in self.records])

    def to_json(self) -> str:
        from redline.report.sweep import sweep_json

        return sweep_json(self.summary, self.estimate)


class BatchResult(Sequence["BatchFinding"]):
    """What was found, one entry per recipe."""

    def __init__(self, findings: Sequence[BatchFinding]) -> None:
        self.findings = list(findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __getitem__(self, index: Any) -> Any:
        return self.findings[index]

    def __str__(self) -> str:
        from redline.report.batch import batch_report
        from redline.report.terminal import as_text

        return as_text(batch_report(self.findings))

    @property
    def max_batch(self) -> int | None:
        """Of the first recipe."""
        return self.findings[0].max_batch

    def to_json(self) -> str:
        from redline.report.batch import batch_json

        return batch_json(self.findings)

    def plot(self, path: str | Path) -> Path:
        """Throughput, latency and memory against the batch, as a PNG."""
        from redline.report.batch_plot import plot_batches

        return plot_batches(self.findings, Path(path))
