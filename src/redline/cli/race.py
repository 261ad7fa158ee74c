"""`redline race`: heat by heat, then who is faster, the table or the document."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from redline.analyze.race import Pair
from redline.cli.main import EXIT_FAILED_ROW
from redline.cli.progress import LiveObserver
from redline.racing import race_specs
from redline.record import RunRecord
from redline.report.race import pair_line, race_json, race_report
from redline.report.terminal import make_console
from redline.search.race import RaceObserver
from redline.spec_table import specs_from_table


class LiveRace(LiveObserver, RaceObserver):
    """One moving line per recipe of the heat, and after each heat how the pairs stand."""

    def __init__(self) -> None:
        super().__init__()
        self._heat = ""

    def heat(self, number: int, planned: int, recipes: Sequence[str]) -> None:
        self._heat = f"heat {number} of {planned}"

    def name_of(self, record: RunRecord) -> str:
        return f"{self._heat} {record.spec.recipe}"

    def closed(self, record: RunRecord) -> None:
        super().closed(record)
        self.forget(record)

    def stands(self, pairs: Sequence[Pair]) -> None:
        for pair in pairs:
            self.say(Text(f"{self._heat}: {pair_line(pair)}", style="dim"), on_stdout=False)


def race_and_print(table: Mapping[str, Any], *, replicates: int, as_json: bool) -> int:
    specs = specs_from_table(table, where="race")
    with LiveRace() as observer:
        result = race_specs(specs, replicates=replicates, observer=observer)
    if as_json:
        sys.stdout.write(race_json(result.heats))
    else:
        make_console().print(race_report(result.heats))
    return EXIT_FAILED_ROW if any(record.failure for record in result.records) else 0
