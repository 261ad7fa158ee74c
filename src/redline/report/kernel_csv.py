"""The kernel table as CSV, in the layout of `rocprof --stats`: what reads one reads the other."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from redline.report.export import harmless
from redline.trace.kernels import KernelRow

COLUMNS = ("Name", "Calls", "TotalDurationNs", "AverageNs", "Percentage")


def kernel_csv(rows: Sequence[KernelRow]) -> str:
    text = io.StringIO()
    # rocprof quotes names and nothing else.
    writer = csv.writer(text, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        total = round(row.total_s * 1e9)
        mean = round(total / row.calls) if row.calls else 0
        writer.writerow((harmless(row.name), row.calls, total, mean, round(row.share * 100, 6)))
    return text.getvalue()
