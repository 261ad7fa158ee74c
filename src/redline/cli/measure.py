"""Commands that measure: run the specs with live progress, print the table or the document, choose the exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from redline.api import checked, opened, run_specs
from redline.cli.main import EXIT_FAILED_ROW
from redline.cli.progress import LiveObserver
from redline.cli.report import report_beside
from redline.record import RunRecord
from redline.report.export import export_json
from redline.report.folder import check_folder
from redline.report.run import RunReport
from redline.report.terminal import make_console
from redline.spec import LaunchSpec, RunSpec
from redline.spec_table import specs_from_table


def run_and_print(specs: Sequence[RunSpec], *, as_json: bool, report: Path | None = None) -> int:
    from redline.analyze.summary import summarize
    from redline.store import ceilings_of

    if report is not None:
        check_folder(report)
    with LiveObserver() as observer:
        records = run_specs(specs, observer=observer)
    rows = summarize(records, ceilings_of(records))
    if as_json:
        sys.stdout.write(export_json(records, summarize=lambda _: rows))
    else:
        make_console().print(RunReport(rows))
    report_beside(records, report)
    return EXIT_FAILED_ROW if any(_failed(record) for record in records) else 0


def demo_specs(device: str) -> list[RunSpec]:
    with opened(LaunchSpec()) as door:
        found = checked(specs_from_table({"model": "resnet18", "device": device}), door)[0].device
    if found == "cpu":
        recipes = ["baseline", "channels-last", "channels-last+compile", "channels-last+compile:freeze"]
        table = {"model": "resnet18", "batch": 4, "recipe": recipes, "effort": "quick", "device": "cpu"}
    else:
        recipes = ["baseline", "amp+channels-last+compile", "fp16+channels-last+compile:reduce-overhead"]
        table = {"model": "resnet50", "batch": 32, "recipe": recipes, "device": found}
    return specs_from_table(table)


def _failed(record: RunRecord) -> bool:
    return record.failure is not None or not record.blocks
