"""Figures as data: what a verb found, as rows of numbers that know their unit, their interval and whether to use them.

A verb returns rows in tables. The printers in `show/` know units, intervals and doubts, and nothing of verbs, so a table, a page and a
document cannot disagree: nobody computes or rounds a figure twice. A new figure is one `Figure` where it is known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Any, Literal

import msgspec

from redline.model.fields import Frozen
from redline.model.note import Note
from redline.model.units import format_bytes, format_count, format_ratio, format_seconds, format_share, significant

WIDEST = 4.0
"""A figure whose interval spans more than this factor has no number in what people read: nobody can use it."""
NO_NUMBER = "n/a"
TOO_NOISY = "too noisy"
LONGEST_NAME = 40
"""Characters of a recipe in a sentence, so that the sentence takes two lines of a terminal at most."""
DOUBTED = "~"
"""Stands before a number that is doubted and still says something."""

Better = Literal["higher", "lower", "neither"]
Fact = str | int | float | bool | None
"""A fact identifies a row or says something of it in words, such as a recipe, a batch or a verdict."""


class Figure(Frozen):
    """A figure is a kind of number: its stable name, what a table calls it, its unit and which direction is better.

    Units are `s`, `B`, `x` (a ratio), `share` (of one), `change` (a signed share), `error` (relative, often tiny), `FLOP`, `count` (of many things, such as parameters), `B/s`, `FLOP/s`, `J`,
    `W`, `Hz`, `°C`, or nothing for a plain number; `{item}/s` is a rate of the items that the workload counts.
    """

    name: str
    unit: str = ""
    header: str = ""
    """A table calls it this. Where this is empty, it uses the name with spaces."""
    better: Better = "neither"
    doc: str = ""

    def __call__(
        self,
        value: float | None,
        low: float | None = None,
        high: float | None = None,
        *,
        doubt: Note | None = None,
        item: str | None = None,
    ) -> Metric:
        """Returns a metric of this figure. A number that is not finite counts as not known."""
        known = [each if each is not None and math.isfinite(each) else None for each in (value, low, high)]
        return Metric(
            figure=self,
            unit=self.unit.format(item=item or "item"),
            value=known[0],
            low=known[1],
            high=known[2],
            doubt=doubt,
        )


class Metric(Frozen):
    """A metric is one number: its value, its 95 % interval where there is one, and why not to use it where that is so."""

    figure: Figure
    unit: str
    value: float | None
    low: float | None = None
    high: float | None = None
    """If only one end is known, the number is a bound: at least `low`, or at most `high`."""
    doubt: Note | None = None

    @property
    def name(self) -> str:
        return self.figure.name

    @property
    def header(self) -> str:
        """Returns the column's header: a rate of items is called by its unit, such as img/s."""
        is_of_items = "{item}" in self.figure.unit
        return self.figure.header or (self.unit if is_of_items else self.name.replace("_", " "))

    @property
    def has_interval(self) -> bool:
        return self.low is not None or self.high is not None

    @property
    def is_too_noisy(self) -> bool:
        """Returns whether its interval is so wide that a person could not use the number."""
        if self.value is None or self.low is None or self.high is None or self.low == self.high:
            return False
        if self.unit in ("share", "change", ""):  # differences and shares may be around zero; their scale is one
            return self.high - self.low > WIDEST
        return self.low <= 0 or self.high / self.low > WIDEST

    @property
    def half_width(self) -> float | None:
        """Returns half of the interval, relative to the value."""
        if self.low is None or self.high is None or not self.value:
            return None
        return (self.high - self.low) / (2 * abs(self.value))

    def __str__(self) -> str:
        """Returns what stands in a cell of a table, below a header that names the unit of a rate.

        There is no number where it is too noisy to use, and one that is doubted is marked.
        """
        if self.value is None:
            return NO_NUMBER
        if self.is_too_noisy:
            return TOO_NOISY
        number = written(self.value, self.unit, self.half_width)
        if self.unit == "x" and self.low is not None and self.high is not None:
            number += f" ({format_ratio(self.low)[:-1]}–{format_ratio(self.high)[:-1]})"
        if self.unit == "change" and self.low is not None and self.high is not None:
            number += f" ({written(self.low, 'change')} to {written(self.high, 'change')})"
        if (self.low is None) != (self.high is None):
            number = f"{'≥' if self.high is None else '≤'} {number}"
        return number if self.doubt is None else f"{DOUBTED}{number}"

    @property
    def in_words(self) -> str:
        """Returns what stands in a sentence: with the unit of a rate."""
        has_number = self.value is not None and not self.is_too_noisy
        return f"{self} {self.unit}" if has_number and self.unit not in WRITTEN else str(self)


WRITTEN = ("s", "B", "x", "share", "change", "error", "FLOP", "count", "B/s", "FLOP/s", "J", "W", "Hz", "°C", "")
"""Units that stand beside the number in a cell, or that need no word. Any other is the header of its column."""


def written(value: float, unit: str, half_width: float | None = None) -> str:
    """Returns a number in its unit, with as many digits as its interval supports and one more."""
    digits = 4 if half_width is not None and half_width <= 0.02 else 3
    match unit:
        case "s":
            return format_seconds(value, digits)
        case "B":
            return format_bytes(value)
        case "x":
            return format_ratio(value)
        case "share":
            return format_share(value)
        case "change":
            return f"{value:+.1%}"
        case "error":
            return f"{value:.1e}" if value else "0"
        case "FLOP" | "count":
            return format_count(value)
        case "B/s":
            return f"{format_bytes(value)}/s"
        case "FLOP/s":
            number = format_count(value)
            return f"{number}FLOP/s" if number[-1:].isalpha() else f"{number} FLOP/s"
        case "Hz":
            return f"{value / 1e6:.0f} MHz"
        case "°C":
            return f"{value:.0f} °C"
        case "J" if abs(value) < 1:
            return f"{significant(value * 1e3, 3)} mJ"
        case "J" | "W":
            return f"{significant(value, 3)} {unit}"
        case "" if value == int(value):
            return str(int(value))
    return (
        significant(value, digits)
        if abs(value) < 10**digits
        else significant(round(value), len(str(round(abs(value)))))
    )


class Row(Frozen):
    """A row is one line of a table: what it is about, and its figures."""

    facts: Mapping[str, Fact]
    """They identify it (model, recipe, batch, …) or say something of it in words."""
    metrics: tuple[Metric, ...] = ()
    notes: tuple[Note, ...] = ()
    """These are worth knowing of this row alone."""
    failure: str = ""
    """This says why it has no figures."""
    depth: int = 0
    """Its first fact is indented so far, for rows that form a tree."""
    is_detail: bool = False
    """It is shown with -v, in documents and on pages only."""
    record_id: str = ""

    def __post_init__(self) -> None:
        """A fact and a figure of one name would hide each other in every table."""
        assert not self.facts.keys() & {metric.name for metric in self.metrics}, sorted(self.facts)

    def __getitem__(self, name: str) -> Metric | Fact:
        """Returns a figure or a fact by its name."""
        for metric in self.metrics:
            if metric.name == name:
                return metric
        return self.facts[name]

    def get(self, name: str) -> Metric | Fact:
        return self[name] if name in self else None  # noqa: SIM401  (this is how it is defined)

    def metric(self, name: str) -> Metric | None:
        found = self.get(name)
        return found if isinstance(found, Metric) else None

    def value(self, name: str) -> float:
        """Returns the number of a figure, or 0 where it is not known."""
        found = self.metric(name)
        return (found.value if found is not None else None) or 0.0

    def __contains__(self, name: object) -> bool:
        return name in self.facts or any(metric.name == name for metric in self.metrics)

    def cell(self, name: str) -> str:
        """Returns what stands in a table under this name, or nothing where the row has nothing of that name."""
        found = self.get(name)
        return "" if found is None else "yes" if found is True else "no" if found is False else str(found)


class Table(Frozen):
    """Rows with something in common."""

    name: str
    """Programs know it by this: it is the key in a document and the name of a CSV file."""
    rows: tuple[Row, ...]
    title: str = ""
    columns: tuple[str, ...] = ()
    """A person sees these at first, the most important first. The others come with -v, in documents and on pages."""
    is_detail: bool = False
    """It is shown with -v, in documents and on pages only."""
    is_list: bool = False
    """Its facts are sentences: a terminal shows numbered paragraphs in the place of columns."""

    def only(self, names: tuple[str, ...]) -> Table:
        """Returns the same table with these columns alone; one without a choice of columns stays whole."""
        if not names:
            return self
        rows = tuple(
            msgspec.structs.replace(
                row,
                facts={name: value for name, value in row.facts.items() if name in names},
                metrics=tuple(metric for metric in row.metrics if metric.name in names),
            )
            for row in self.rows
        )
        return msgspec.structs.replace(self, rows=rows)

    def as_detail(self) -> Table:
        """Returns the same table, for -v, documents and pages only."""
        return msgspec.structs.replace(self, is_detail=True)

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of all columns: those that are shown first, then the others in the order in which they appear."""
        found = dict.fromkeys(self.columns)
        for row in self.rows:
            found |= dict.fromkeys([*row.facts, *(metric.name for metric in row.metrics)])
        return tuple(name for name in found if any(name in row for row in self.rows))

    def header(self, name: str) -> str:
        for row in self.rows:
            found = row.get(name)
            if isinstance(found, Metric):
                return found.header
        return name.replace("_", " ")

    def is_number(self, name: str) -> bool:
        return any(isinstance(row.get(name), Metric | int | float) for row in self.rows)

    @property
    def keys(self) -> tuple[str, ...]:
        """Returns the columns that tell a row from its neighbours: the facts with which `columns` begins."""
        known = tuple(name for name in self.columns if name in self.names)
        return (
            tuple(takewhile(lambda name: all(row.metric(name) is None for row in self.rows), known)) or self.names[:1]
        )

    def called(self, row: Row) -> str:
        """Returns what a sentence calls a row: the facts in which it differs from its neighbours, such as `fp16, batch 8`."""
        keys = self.keys
        apart = [name for name in keys if len({row.cell(name) for row in self.rows}) > 1] or keys[:1]
        return ", ".join(in_words(name, row.get(name)) for name in apart if row.cell(name))


def in_words(name: str, value: Metric | Fact) -> str:
    """Returns a fact as it stands in a sentence: a name stands by itself, and a number or a size has its setting in front, such as batch
    8."""
    is_name = isinstance(value, str) and not value[:1].isdigit()
    return str(value) if is_name else f"{name.replace('_', ' ')} {value}"


class Headline(Frozen):
    """The answer in one sentence. Its numbers are figures of the rows, so that it cannot contradict them."""

    template: str
    figures: Mapping[str, Metric | Fact] = {}

    def __str__(self) -> str:
        return re.sub(r"\{(\w+)\}", lambda name: _in_words(self.figures[name[1]]), self.template)


def _in_words(value: Metric | Fact) -> str:
    return value.in_words if isinstance(value, Metric) else shortened(str(value))


def shortened(text: str) -> str:
    """Returns a long recipe without its middle switches, such as `fp16+channels-last+…+graphs`; its row has all of them."""
    switches = text.split("+")
    if len(text) <= LONGEST_NAME or len(switches) < 4 or " " in text:
        return text
    return "+".join((*switches[:2], "…", switches[-1]))


class Block(Frozen):
    """Text that is shown as it is: code to paste, a chart made of letters."""

    title: str
    text: str
    is_detail: bool = False


def disturbances(rows: Iterable[Row]) -> Iterator[Note]:
    """Yields what disturbed the figures that are too noisy to be shown; each reason once."""
    seen = set[Note]()
    for metric in (metric for row in rows for metric in row.metrics):
        if metric.is_too_noisy and metric.doubt is not None and metric.doubt not in seen:
            seen.add(metric.doubt)
            yield metric.doubt


def plain(value: Any) -> Any:
    """Returns a fact or a metric as JSON has it: a metric is an object of value, unit, low, high and doubt."""
    if not isinstance(value, Metric):
        return value
    found: dict[str, Any] = {"value": value.value}
    found |= {"unit": value.unit} if value.unit else {}
    found |= {"low": value.low, "high": value.high} if value.has_interval else {}
    return found | ({"doubt": {"code": value.doubt.code, "text": str(value.doubt)}} if value.doubt is not None else {})


# Several verbs share these figures. Each is named once: its column, its CSV field and its key in a document.

THROUGHPUT = Figure(name="throughput", unit="{item}/s", better="higher", doc="Items per second, by the median step.")
LATENCY_P50 = Figure(name="latency_p50", unit="s", header="p50", better="lower", doc="The median time of a step.")
LATENCY_P95 = Figure(name="latency_p95", unit="s", header="p95", better="lower", doc="Needs 130 samples.")
LATENCY_P99 = Figure(name="latency_p99", unit="s", header="p99", better="lower", doc="Needs 662 samples.")
MEMORY = Figure(
    name="memory", unit="B", better="lower", doc="What must fit: reserved by the allocator, on a CPU resident."
)
MEMORY_SHARE = Figure(
    name="memory_share", unit="share", header="share", better="lower", doc="Needed memory over the limit."
)
RATIO = Figure(
    name="ratio", unit="x", header="vs first", better="higher", doc="Time of the first over time of this one."
)
TTFT = Figure(name="ttft", unit="s", header="TTFT", better="lower", doc="The median time to the first token.")
TPOT = Figure(name="tpot", unit="s", header="TPOT", better="lower", doc="The time per further token.")
REL_ERROR = Figure(
    name="rel_error",
    unit="error",
    header="rel. error",
    better="lower",
    doc="The distance of the outputs from those of strict fp32, ‖Δ‖/‖y‖.",
)
COMPILE = Figure(name="compile_time", unit="s", header="compiling", better="lower", doc="Before the first step.")
SUSTAINABLE_RATE = Figure(
    name="sustainable_rate",
    unit="req/s",
    header="sustains",
    better="higher",
    doc="The highest rate that keeps the target.",
)
