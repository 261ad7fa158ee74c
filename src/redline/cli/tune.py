"""`redline tune`: the leader so far while it searches, then the report or the document."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from redline.analyze.race import Pair
from redline.analyze.tune.record import TuneRecord
from redline.cli.main import EXIT_FAILED_ROW, EXIT_INTERRUPTED
from redline.cli.progress import LiveObserver
from redline.cli.report import report_beside
from redline.record import RunRecord
from redline.report.folder import check_folder
from redline.report.terminal import make_console
from redline.report.tune import tune_json, tune_report
from redline.search.tune.tuner import TuneObserver
from redline.tuning import tune


class LiveTune(LiveObserver, TuneObserver):
    """A line that stays for each trial, and who leads; one that moves for what is happening."""

    def __init__(self) -> None:
        super().__init__()
        self._place = ""
        self._leader = ""

    def planned(self, tune: TuneRecord, recipes: int, budget_s: float) -> None:
        self._stay(f"tune {tune.name}: {recipes} recipes are possible, {budget_s:.0f} s at most")

    def stage(self, words: str) -> None:
        self._stay(words)

    def attempting(self, recipe: str, number: int, why: str) -> None:
        self._place = f"[{number}]"
        self._why = why

    def attempted(self, recipe: str, said: str) -> None:
        self._stay(f"{self._place} {recipe} ({self._why}): {said}")

    def leads(self, recipe: str, ratio: float) -> None:
        told = f"leader: {recipe}, {ratio:.2f}× the baseline"
        if told != self._leader:
            self._leader = told
            self._stay(told)

    def heat(self, number: int, planned: int, recipes: Sequence[str]) -> None:
        self._place = f"heat {number} of {planned}"

    def stands(self, pairs: Sequence[Pair]) -> None:
        """The report tells it."""

    def name_of(self, record: RunRecord) -> str:
        return f"{self._place} {record.spec.recipe}"

    def closed(self, record: RunRecord) -> None:
        self.forget(record)

    def _stay(self, words: str) -> None:
        self.say(Text(words, style="dim"), on_stdout=False)


def tune_and_print(given: Mapping[str, Any], *, as_json: bool, report: Path | None = None) -> int:
    if report is not None:
        check_folder(report)
    settings = dict(given)
    model = settings.pop("model")
    for name in ("steps", "without"):
        if name in settings:
            settings[name] = [word.strip() for word in settings[name].split(",") if word.strip()]
    if str(settings.get("batch", "")).isdecimal():
        settings["batch"] = int(settings["batch"])
    with LiveTune() as observer:
        result = tune(model, **settings, observer=observer)
    if as_json:
        sys.stdout.write(tune_json(result.finding) + "\n")
    else:
        make_console().print(tune_report(result.finding))
    report_beside(list(result.records.values()), report, tunes=[result.finding])
    if result.finding.state == "interrupted":
        return EXIT_INTERRUPTED
    return 0 if result.winner is not None else EXIT_FAILED_ROW
