"""A profile in the terminal: the findings first, then what limits the step, then the tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from redline.analyze.profile import Profile
from redline.analyze.profile_ranks import RankTime
from redline.model.errors import SpecError
from redline.model.units import format_bytes, format_share
from redline.show.profile_facts import facts, hints, title, told_part, told_time
from redline.show.terminal import Fitted, plain_table
from redline.trace.names import label_of
from redline.trace.operators import OperatorRow

DEFAULT_ROWS = 12
_NOTHING_MORE = re.compile(r"(,\[\])+\]$")
"""Inputs behind the last tensor, which have no shape."""
Sort = Literal["device", "host", "memory", "calls"]
SORTS: dict[Sort, str] = {"device": "device time", "host": "host time", "memory": "memory taken", "calls": "calls"}


def sort_named(word: str | None) -> Sort | None:
    """The order that a word names; a word that names none is refused."""
    for known in SORTS:
        if word == known:
            return known
    if word is not None:
        raise SpecError(f"sort must be one of {', '.join(SORTS)}, got {word!r}")
    return None


class ProfileReport:
    def __init__(self, profile: Profile, rows: int = DEFAULT_ROWS, sort: Sort | None = None) -> None:
        self._profile = profile
        self._rows = rows
        self._sort: Sort = sort or ("device" if profile.has_device else "host")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        profile, rows = self._profile, self._rows
        yield Text(title(profile), style="bold")
        yield from _findings(profile)
        yield ""
        yield _grid(facts(profile))
        tables = [
            _ranks(profile) if len(profile.ranks) > 1 else None,
            _classes(profile),
            _kernels(profile, rows) if profile.kernels else None,
            _copies(profile) if profile.copies else None,
            _counters(profile) if profile.counters else None,
            _operators(profile, rows, self._sort) if profile.operators else None,
            _limits(profile, rows) if profile.limits else None,
            _waits(profile, rows) if profile.waits and profile.has_device else None,
            _collectives(profile, rows) if profile.collectives else None,
            _parts(profile, rows) if profile.parts else None,
        ]
        for table in tables:
            if table is not None:
                yield from ("", Fitted(table, _expendable(table)))
        yield ""
        yield from (Text(f"note: {note}", style="dim") for note in profile.notes)
        yield from (Text(hint, style="dim") for hint in hints(profile))


_DETAILS = (
    "min",
    "max",
    "FLOP/B",
    "format",
    "alg. GB/s",
    "mean",
    "host self",
    "device self",
    "of it backward",
    "calls",
)
"""What a narrow terminal can do without, before shares and limits go."""


def _expendable(table: Table) -> list[str]:
    """All but what it is, and how long it takes: details first, then from the right."""
    names = [str(column.header) for column in table.columns]
    kept = {names[0], "total", "device total", "host total", "measured", "value"}
    details = [name for name in _DETAILS if name in names]
    return details + [name for name in reversed(names) if name not in kept and name not in details]


def _ranks(profile: Profile) -> Table:
    table = plain_table("devices")
    table.add_column("rank")
    for header in ("busy", "idle", "communicating", "rank wait", "exposed", "span", "host wait", "device"):
        table.add_column(header, justify="right", no_wrap=True)
    for rank in profile.ranks:
        timeline = rank.timeline
        table.add_row(
            _rank_label(rank),
            told_part(timeline.busy_s, timeline.span_s),
            told_part(timeline.idle_s, timeline.span_s),
            told_time(timeline.communication_s),
            told_time(rank.waiting_s),
            told_time(timeline.exposed_communication_s),
            told_time(timeline.span_s),
            told_time(rank.idle.host_wait_s),
            str(rank.device),
        )
    if any(rank.waiting_s for rank in profile.ranks):
        table.caption = "rank wait: in collectives, until the last rank arrived"
    return table


def _rank_label(rank: RankTime) -> str:
    if rank.process is not None:
        return f"process {rank.process}"
    return str(rank.rank) if rank.rank is not None else rank.source.rpartition("/")[2]


def _classes(profile: Profile) -> Table:
    table = plain_table("time by class")
    for header in ("class", "total", "share", "calls"):
        table.add_column(header, justify="left" if header == "class" else "right", no_wrap=True)
    for row in profile.classes:
        table.add_row(row.name, told_time(row.total_s), format_share(row.share), f"{row.calls:,}")
    table.caption = f"not classified (other): {format_share(profile.unclassified_share)}"
    return table


def _kernels(profile: Profile, rows: int) -> Table:
    many = len(profile.kernels)
    table = plain_table(f"kernels: {profile.kernels_for_most} of {many} take 80 % of the time")
    table.add_column("kernel", overflow="fold")
    table.add_column("class", no_wrap=True)
    for header in ("calls", "total", "mean", "min", "max", "share"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in profile.kernels[:rows]:
        times = (row.total_s, row.mean_s, row.min_s, row.max_s)
        table.add_row(
            Text(row.short_name), row.kernel_class, f"{row.calls:,}", *map(told_time, times), format_share(row.share)
        )
    if many > rows:
        table.caption = f"and {many - rows} more: --rows {many}, --json or --csv FILE shows all, with whole names"
    return table


def _copies(profile: Profile) -> Table:
    table = plain_table("copies and fills")
    table.add_column("direction", overflow="fold")
    for header in ("calls", "total", "share", "bytes", "GB/s"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in profile.copies:
        speed = "n/a" if row.bytes_per_s is None else f"{row.bytes_per_s / 1e9:.1f}"
        size = format_bytes(row.bytes)
        table.add_row(
            Text(label_of(row.name)), f"{row.calls:,}", told_time(row.total_s), format_share(row.share), size, speed
        )
    return table


def _counters(profile: Profile) -> Table:
    table = plain_table("hardware counters")
    for header in ("kernel", "counter", "value", "verdict", "meaning"):
        table.add_column(header, overflow="fold", justify="right" if header == "value" else "left")
    names = {row.name: row.short_name for row in profile.kernels}
    for row in profile.counters:
        value = format_bytes(row.value) if row.unit == "bytes" else format_share(row.value)
        kernel = "all" if row.kernel is None else names.get(row.kernel, label_of(row.kernel))
        table.add_row(Text(kernel), row.name, value, row.verdict, row.meaning if row.kernel is None else "")
    return table


def _operators(profile: Profile, rows: int, sort: Sort) -> Table:
    table = plain_table(f"operators, by {SORTS[sort]}")
    table.add_column("operator", overflow="fold")
    headers = ["calls", "host self", "host total"]
    headers += ["device self", "share", "device total"] if profile.has_device else []
    with_memory = any(row.device_allocated_bytes or row.cpu_allocated_bytes for row in profile.operators)
    headers += ["allocated"] if with_memory else []
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    for row in sorted(profile.operators, key=lambda row: -_rank(row, sort))[:rows]:
        cells = [f"{row.calls:,}", told_time(row.cpu_self_s), told_time(row.cpu_total_s)]
        on_device = [told_time(row.device_self_s), format_share(row.device_share), told_time(row.device_total_s)]
        cells += on_device if profile.has_device else []
        allocated = row.device_allocated_bytes if profile.has_device else row.cpu_allocated_bytes
        cells += [format_bytes(allocated)] if with_memory else []
        table.add_row(Text(label_of(f"{row.name} {row.dims}" if row.dims else row.name)), *cells)
    if profile.has_device:
        graphs, others = (
            sum(row.device_share for row in profile.operators if row.source in sources)
            for sources in (("graph",), ("no-operator", "no-launch"))
        )
        parts = [f"replayed by graphs: {format_share(graphs)}"] if graphs else []
        parts += [f"without an operator: {format_share(others)}"] if others else []
        table.caption = "of the device's time " + ", ".join(parts) if parts else None
    return table


def _limits(profile: Profile, rows: int) -> Table:
    table = plain_table("operators against the device's limits, by device time")
    table.add_column("operator", overflow="fold")
    table.add_column("format", no_wrap=True)
    for header in ("calls", "device", "TFLOP/s", "GB/s", "FLOP/B", "of the limit"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("limited by", no_wrap=True)
    for row in profile.limits[:rows]:
        reached = "in cache" if row.in_cache else format_share(row.efficiency) if row.efficiency is not None else "n/a"
        table.add_row(
            Text(label_of(f"{row.name} {_NOTHING_MORE.sub(']', row.dims)}")),
            row.number_format,
            f"{row.calls:,}",
            told_time(row.device_s),
            f"{row.flops_per_s / 1e12:.1f}" if row.flops else "–",
            f"{row.bytes_per_s / 1e9:,.0f}",
            f"{row.intensity:.0f}" if row.flops else "–",
            reached,
            row.limited_by or "n/a",
        )
    return table


def _waits(profile: Profile, rows: int) -> Table:
    table = plain_table("where the host waited for the device")
    for header in ("call", "operator", "Python function"):
        table.add_column(header, overflow="fold")
    for header in ("calls", "blocked", "idle it caused"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in profile.waits[: min(rows, 5)]:
        cells = (Text(row.call), Text(row.operator or "–"), Text(row.frame or "–"))
        table.add_row(*cells, f"{row.calls:,}", told_time(row.blocked_s), told_time(row.idle_s))
    return table


def _collectives(profile: Profile, rows: int) -> Table:
    table = plain_table("collectives")
    table.add_column("collective", overflow="fold")
    for header in (
        "message",
        "ranks",
        "calls",
        "mean",
        "max",
        "hidden",
        "waiting",
        "transfer",
        "alg. GB/s",
        "bus GB/s",
    ):
        table.add_column(header, justify="right", no_wrap=True)
    for row in profile.collectives[:rows]:
        speeds = (row.algorithm_bytes_per_s, row.bus_bytes_per_s)
        table.add_row(
            Text(f"{row.name} {row.dtype}".strip()),
            format_bytes(row.message_bytes),
            str(row.group_size or "n/a"),
            f"{row.calls:,}",
            told_time(row.mean_s),
            told_time(row.max_s),
            told_part(row.hidden_s, row.total_s),
            told_time(row.wait_s),
            told_time(row.transfer_s),
            *("n/a" if speed is None else f"{speed / 1e9:.1f}" for speed in speeds),
        )
    known = "against the other ranks" if profile.stragglers else "against the fastest call of the same size"
    table.caption = f"waiting: {known}"
    if profile.stragglers:
        late = profile.stragglers[0]
        table.caption += (
            f"; {late.label} came last in {late.last} of {late.collectives}, mean skew {told_time(late.skew_s)}"
        )
    return table


def _parts(profile: Profile, rows: int) -> Table:
    table = plain_table("time by module and annotation, each with what is inside it")
    table.add_column("module or annotation", overflow="fold")
    for header in ("calls", "host", "device", "of it backward", "self", "share"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in profile.parts[:rows]:
        name = row.path if row.kind == "module" else f"{row.path} (annotation)"
        times = (row.host_s, row.device_s, row.backward_s, row.device_self_s)
        table.add_row(Text(name), f"{row.calls:,}", *map(told_time, times), format_share(row.share))
    if len(profile.parts) > rows:
        table.caption = f"and {len(profile.parts) - rows} more: --rows {len(profile.parts)} or --json shows all"
    return table


def _rank(row: OperatorRow, sort: Sort) -> float:
    if sort == "memory":
        return row.device_allocated_bytes + row.cpu_allocated_bytes
    if sort == "calls":
        return row.calls
    return row.device_self_s if sort == "device" else row.cpu_self_s


def _findings(profile: Profile) -> Iterator[RenderableType]:
    if not profile.findings:
        yield Text("nothing stands out: no diagnosis applies", style="bold")
        return
    for number, finding in enumerate(profile.findings, start=1):
        saves = (
            f"{told_time(finding.saves_s)} of {told_time(profile.whole_s)}, at most {finding.gain_bound:.2f}× faster"
        )
        yield Text(f"{number}. {finding.code} ({saves}): {finding.evidence}", style="yellow")
        yield Text(f"   next: {finding.next}", style="bold")


def _grid(lines: Iterator[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, value in lines:
        grid.add_row(Text(name, style="dim"), Text(value))
    return grid


STYLE = {"faster": "green", "vanished": "green", "slower": "red", "appeared": "red"}
