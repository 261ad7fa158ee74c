"""What is being measured now, as the history tells it, and pages of the history for a browser."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined

from redline import __version__
from redline.analyze.history import SMALLEST_CHANGE
from redline.model.fields import Frozen
from redline.model.units import format_seconds, significant
from redline.show.history import Listed, SeriesTrend

WIDTH, HEIGHT = 640, 160
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
STATIC = {"serve.js": "text/javascript", "serve.css": "text/css"}


class Readings(Frozen):
    """The last reading, as the measuring process took it: nothing else asks the device."""

    power_w: float | None = None
    temperature_c: float | None = None
    utilisation: float | None = None
    memory_used_bytes: int | None = None


class LiveRecord(Frozen):
    """A record that is being measured."""

    id: str
    model: str
    task: str
    recipe: str
    batch: int | None
    device: str
    since: float
    blocks: int = 0
    step_s: float | None = None
    """The median of its latest blocks."""
    epochs: int = 0
    total_epochs: int | None = None
    """For a training on data."""
    left_s: float | None = None
    readings: Readings = Readings()


class LiveSearch(Frozen):
    """A tune that is running, or was cut short."""

    name: str
    model: str
    trials: int
    state: Literal["running", "cut short"] = "running"
    leader: str | None = None
    ratio: float | None = None
    left_s: float = 0.0
    """At most: its budget."""


class LiveSweep(Frozen):
    """A sweep that goes on, was cut short, or is done since a moment."""

    name: str
    settled: int
    failed: int
    state: Literal["running", "cut short", "done"] = "done"
    total: int | None = None
    """Cells; None where the one who measured them is done."""
    now: str = ""
    """The cell that is being measured."""
    left_s: float | None = None
    leader: str | None = None
    """The fastest cell so far."""
    per_s: float | None = None
    readings: Readings = Readings()


class LiveWatch(Frozen):
    """A script that is being watched."""

    name: str
    since: float
    steps: int = 0
    now: str = ""
    readings: Readings = Readings()


class LiveState(Frozen):
    """What viewers are sent each time it changes."""

    records: tuple[LiveRecord, ...] = ()
    tunes: tuple[LiveSearch, ...] = ()
    sweeps: tuple[LiveSweep, ...] = ()
    watches: tuple[LiveWatch, ...] = ()
    stored: int = 0
    """Records in the history."""
    latest: str | None = None
    problem: str | None = None
    """Why the history cannot be read at the moment."""


def page(name: str, **values: Any) -> str:
    return _environment().get_template(f"{name}.html.j2").render(version=__version__, **values)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    """Names are not trusted: everything that a template fills in is escaped."""
    made = Environment(
        loader=PackageLoader("redline.show"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    made.filters |= {"seconds": format_seconds, "day": _day, "figure": lambda value: significant(value, 4)}
    return made


def static_file(name: str) -> tuple[str, str] | None:
    """Text and type of a file that pages use; None for any other name."""
    if name not in STATIC:
        return None
    return (files("redline.show") / "static" / name).read_text(encoding="utf-8"), STATIC[name]


def _day(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M")


class Picture(Frozen):
    """A trend as lines of an SVG."""

    points: str
    dots: tuple[tuple[float, float], ...]
    changes: tuple[tuple[float, bool], ...]
    """Where each is, and whether it got slower."""
    low: float
    high: float


def picture_of(series: SeriesTrend, width: int = WIDTH, height: int = HEIGHT) -> Picture:
    """Throughput by the order of records, from the slowest at the bottom to the fastest at the top.

    Speeds that differ by less than any change that is told lie near the middle: noise does not fill the picture.
    """
    speeds = [point.per_s for point in series.points]
    low, high = min(speeds), max(speeds)
    across, inset = (width - 8) / max(len(speeds) - 1, 1), 4 if len(speeds) > 1 else width / 2
    up = (height - 8) / max(high - low, SMALLEST_CHANGE * high)
    points = [
        (round(inset + index * across, 1), round(height / 2 - (speed - (low + high) / 2) * up, 1))
        for index, speed in enumerate(speeds)
    ]
    order = {point.record_id: index for index, point in enumerate(series.points)}
    return Picture(
        points=" ".join(f"{x},{y}" for x, y in points),
        dots=tuple(points) if len(points) <= 200 else (),
        changes=tuple((round(inset + order[each.record_id] * across, 1), each.ratio < 1) for each in series.changes),
        low=low,
        high=high,
    )


def start_page(series: Sequence[SeriesTrend], left_out: int, latest: Sequence[Listed]) -> str:
    shown = [(each, picture_of(each, 160, 28)) for each in series]
    return page("serve_start", series=shown, left_out=left_out, latest=latest)
