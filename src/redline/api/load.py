"""`redline.load`: latency under requests that arrive by themselves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Unpack

import msgspec
from rich.console import RenderableType

from redline.analyze.load import LoadSummary, load_of, ratios_to_first
from redline.api.settings import OtherSettings, specs_of, takes_settings
from redline.api.workspace import Workspace, use
from redline.model.arrivals import LoadSpec, rate_of, read_arrivals
from redline.model.errors import SpecError
from redline.model.fields import MOST_ROWS, seconds_of
from redline.model.record import RunRecord
from redline.model.spec import RunSpec
from redline.model.spec_table import layered
from redline.search.load import SECONDS, LoadQuestion, require_measurable, run_rates
from redline.show.export import JsonDocument, json_document
from redline.show.load import load_report, plot_loads
from redline.show.notebook import Shown

MOST_RATE = 1e7
"""Requests per second: no process counts faster."""


class LoadResult(Shown, Sequence[LoadSummary]):
    """One curve per model and recipe, with the records they were derived from."""

    def __init__(self, records: Sequence[RunRecord]) -> None:
        self.records = list(records)
        self.rows = [load_of(record) for record in self.records]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def report(self) -> RenderableType:
        return load_report(self.rows)

    def frame_rows(self) -> Sequence[Any]:
        return [point for row in self.rows for point in row.points]

    @property
    def failed(self) -> bool:
        return any(row.failure is not None for row in self.rows)

    @property
    def sustainable_rate(self) -> float | None:
        """Of the first recipe."""
        return self.rows[0].sustainable_rate

    def to_json(self) -> JsonDocument:
        """One curve is a document of its own; several are a list under `loads`, with their ratios to the first."""
        several = {"loads": self.rows, "vs_first": ratios_to_first(self.rows)}
        return json_document("load", self.rows[0] if len(self.rows) == 1 else several)

    def plot(self, path: str | Path | None = None) -> Any:
        """Latency against rate, as a PNG."""
        return super().plot() if path is None else plot_loads(self.rows, Path(path))


@takes_settings
def load(
    model: Any,
    inputs: Any | None = None,
    *,
    rate: Any = None,
    recipes: str | Iterable[str] = "baseline",
    max_batch: int = LoadSpec().max_batch,
    max_wait: float | str = LoadSpec().max_wait_s,
    slo_p99: float | str | None = None,
    arrivals: str | Path | None = None,
    seconds: float | None = None,
    workspace: Workspace | None = None,
    **settings: Unpack[OtherSettings],
) -> LoadResult:
    """Latency and batch sizes while requests arrive at random, at each of several rates.

    `rate`: requests per second, as a number, a list, "50,200" or "50..2000" (doubling). `arrivals`: a file with one
    moment in seconds per line, replayed at its own rate or at each `rate`. Requests wait for at most `max_wait` to be
    put together into batches of at most `max_batch`. Latency counts from the intended arrival, so a server that falls
    behind cannot hide it. `slo_p99`: the p99 that the sustainable rate must keep.
    """
    recorded = None if arrivals is None else read_arrivals(Path(arrivals))
    if rate is None and recorded is None:
        raise SpecError("give the requests per second as rate, such as 50..2000, or an arrival file")
    rates = parse_rates(rate) if rate is not None else (rate_of(recorded or (0.0, 1.0)),)
    slo_s = seconds_of("slo_p99", slo_p99) if slo_p99 is not None else None
    wait_s = seconds_of("max_wait", max_wait, zero_too=True)
    batching = LoadSpec(max_batch=max_batch, max_wait_s=wait_s, slo_p99_s=slo_s)
    with use(workspace) as opened:
        table = layered({"effort": "normal"}, settings, {"batch": max_batch})
        specs, working = specs_of(opened, model, inputs, recipes=recipes, **table)
        specs = [msgspec.structs.replace(spec, load=batching) for spec in specs]
        question = LoadQuestion(
            rates=rates,
            seconds=_duration(seconds, specs[0]),
            arrivals_s=recorded,
            refine=len(rates) > 1,
        )
        require_measurable(question)
        return LoadResult(run_loads(specs, question, working))


def run_loads(specs: Sequence[RunSpec], question: LoadQuestion, workspace: Workspace) -> list[RunRecord]:
    """Check all specs first, then load one after the other: two servers on one device would load each other."""
    records = []
    for spec in workspace.checked(specs):
        with workspace.lock(spec.device):
            door = workspace.door(spec.launch)
            records.append(run_rates(spec, question, door, workspace.journal, workspace.observer))
    return records


def parse_rates(value: Any) -> tuple[float, ...]:
    """Rates as a person writes them: 200, "50,100,200", "50..2000" (doubling, both ends included)."""
    if isinstance(value, str) and not all(text.strip() for text in value.split(",")):
        raise SpecError(f"rate must be numbers of requests per second, such as 50..2000, got {value!r}")
    texts = str(value).split(",") if isinstance(value, str) else [str(each) for each in _listed(value)]
    rates: list[float] = []
    for text in texts:
        low, dots, high = text.partition("..")
        first, last = _rate(low, text), _rate(high if dots else low, text)
        if last < first:
            raise SpecError(f"rate {text!r} goes from high to low: write {high}..{low}")
        rates += _doubled(first, last)
    return tuple(sorted(set(rates)))


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple | set) else [value]


def _rate(text: str, whole: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        raise SpecError(f"rate must be numbers of requests per second, such as 50..2000, got {whole!r}") from None
    if not 0 < rate <= MOST_RATE:
        raise SpecError(f"rate must be above 0 and at most {MOST_RATE:.0f} requests per second, got {text}")
    return rate


def _doubled(low: float, high: float) -> list[float]:
    count = math.ceil(math.log2(high / low) - 1e-9)
    if count > MOST_ROWS:
        raise SpecError(f"rate {low}..{high} is too wide")
    return [*(low * 2**step for step in range(count)), high]


def _duration(seconds: float | None, spec: RunSpec) -> float:
    if seconds is None:
        return SECONDS[spec.measure.effort]
    return seconds_of("seconds", seconds)
