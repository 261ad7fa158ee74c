"""A profile in the terminal: what limits the step first, then the tables, the next step last."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from redline.analyze.profile import Profile
from redline.analyze.profile_diff import Changed, ProfileDiff, counts
from redline.errors import SpecError
from redline.report.export import harmless
from redline.report.terminal import PIPE_WIDTH, plain_table
from redline.trace.classes import printable
from redline.trace.kernels import KernelRow
from redline.trace.operators import OperatorRow
from redline.units import format_bytes, format_seconds, format_share

DEFAULT_ROWS = 12
LABEL_LENGTH = 120
Sort = Literal["device", "host", "memory", "calls"]
SORTS: dict[Sort, str] = {"device": "device time", "host": "host time", "memory": "memory taken", "calls": "calls"}
PERFETTO = "https://ui.perfetto.dev"


def profile_text(profile: Profile, rows: int = DEFAULT_ROWS) -> str:
    console = Console(width=PIPE_WIDTH, no_color=True, highlight=False, force_terminal=False)
    with console.capture() as captured:
        console.print(ProfileReport(profile, rows))
    return captured.get()


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
        yield _grid(facts(profile))
        tables = [
            _ranks(profile) if len(profile.ranks) > 1 else None,
            _classes(profile),
            _kernels(profile, rows) if profile.kernels else None,
            _copies(profile) if profile.copies else None,
            _counters(profile) if profile.counters else None,
            _operators(profile, rows, self._sort) if profile.operators else None,
        ]
        for table in tables:
            if table is not None:
                yield from ("", table)
        yield ""
        yield from _findings(profile)
        yield from (Text(f"note: {note}", style="dim") for note in profile.notes)
        yield from (Text(hint, style="dim") for hint in hints(profile))


def title(profile: Profile) -> str:
    capture = profile.capture
    if capture is None:
        return " · ".join(profile.sources)
    parts = [
        capture.model,
        capture.task,
        capture.recipe,
        f"batch {capture.batch}" if capture.batch else "",
        f"{capture.device_name} ({capture.device})" if capture.device_name else capture.device,
        f"{profile.steps_seen} steps" if profile.steps_seen else "",
        f"under {capture.tool}",
    ]
    return " · ".join(part for part in parts if part)


def hints(profile: Profile) -> Iterator[str]:
    """Where to look further."""
    trace = profile.capture.trace if profile.capture else None
    if trace and trace.endswith(".json.gz"):
        yield f"trace: {trace}"
        yield f"open it at {PERFETTO} (it stays in the browser), or: tensorboard --logdir {trace.rpartition('/')[0]}"
        assert profile.capture is not None
        yield f"compare: redline profile --diff {profile.capture.record_id[:13]} OTHER compares it with another"
    elif profile.capture is None:
        yield f"the whole timeline: open the file at {PERFETTO} (it stays in the browser)"
    elif trace:
        yield f"files of {profile.capture.tool}: {trace}"


def facts(profile: Profile) -> Iterator[tuple[str, str]]:
    timeline, idle, launches = profile.timeline, profile.idle, profile.launches
    if profile.lost:
        yield "lost", "; ".join(profile.lost.reasons)
    yield "bound", f"{profile.bound.label}: {profile.bound.evidence}"
    if profile.host.ratio is None and not profile.has_device:
        yield "timeline", f"{_time(timeline.span_s)}, in operators {_part(timeline.busy_s, timeline.span_s)}"
    else:
        yield (
            "timeline",
            f"{_time(timeline.span_s)}: busy {_part(timeline.busy_s, timeline.span_s)}, "
            f"idle {_part(timeline.idle_s, timeline.span_s)}; computing {_time(timeline.compute_s)}, communicating "
            f"{_time(timeline.communication_s)} (exposed {_time(timeline.exposed_communication_s)}), "
            f"copying {_time(timeline.copy_s)}",
        )
    if timeline.idle_s and profile.has_device:
        data = f" (in the data loader {_time(idle.data_wait_s)})" if idle.data_wait_s else ""
        yield (
            "idle",
            f"host wait {_time(idle.host_wait_s)}{data}, launch gaps {_time(idle.launch_gap_s)}, "
            f"other {_time(idle.other_s)}",
        )
    yield from _step_facts(profile)
    if profile.phases:
        bottleneck = f"; bottleneck: {profile.bottleneck}" if profile.bottleneck else ""
        # The profile has sums over all steps; a person compares phases with the time of one step.
        steps = profile.steps.count if profile.steps else 1
        of_what = "per step, under the profiler" if profile.steps else "of the whole trace"
        told = ", ".join(
            _phase(phase.name, phase.host_s / steps, phase.device_s / steps, profile) for phase in profile.phases
        )
        yield "phases", f"{told} ({of_what}){bottleneck}"
    if launches.calls:
        yield (
            "launches",
            f"{launches.calls:,} for {launches.work:,} pieces of work, {_time(launches.mean_call_s)} of host each; "
            f"median kernel {_time(launches.median_kernel_s)}, {format_share(launches.short_share)} of them ≤ 10 µs",
        )
    if profile.host.ratio is not None:
        host = profile.host
        yield (
            "host/device",
            f"{host.ratio:.2f}: {host.verdict} (host busy {_time(host.busy_s)}, blocked {_time(host.blocked_s)})",
        )


def _step_facts(profile: Profile) -> Iterator[tuple[str, str]]:
    steps, capture = profile.steps, profile.capture
    if steps is not None:
        spread = f", spread {format_share(steps.spread)}" if steps.spread is not None else ""
        yield "steps", f"{steps.count}, mean {_time(steps.mean_s)} ({_time(steps.min_s)}–{_time(steps.max_s)}{spread})"
    if capture is not None and capture.step_s:
        slower = f", {steps.mean_s / capture.step_s:.2f}× under it" if steps else ""
        yield (
            "profiler",
            f"a step takes {_time(capture.step_s)} without it{slower}; capturing took {_time(capture.capture_s)}",
        )


def _phase(name: str, host_s: float, device_s: float, profile: Profile) -> str:
    return f"{name} {_time(host_s)} host, {_time(device_s)} device" if profile.has_device else f"{name} {_time(host_s)}"


def _ranks(profile: Profile) -> Table:
    table = plain_table("devices")
    table.add_column("rank")
    table.add_column("device", justify="right")
    for header in ("span", "busy", "idle", "communicating", "exposed", "host wait"):
        table.add_column(header, justify="right", no_wrap=True)
    for rank in profile.ranks:
        timeline = rank.timeline
        table.add_row(
            str(rank.rank) if rank.rank is not None else rank.source.rpartition("/")[2],
            str(rank.device),
            _time(timeline.span_s),
            _part(timeline.busy_s, timeline.span_s),
            _part(timeline.idle_s, timeline.span_s),
            _time(timeline.communication_s),
            _time(timeline.exposed_communication_s),
            _time(rank.idle.host_wait_s),
        )
    return table


def _classes(profile: Profile) -> Table:
    table = plain_table("time by class")
    for header in ("class", "total", "share", "calls"):
        table.add_column(header, justify="left" if header == "class" else "right", no_wrap=True)
    for row in profile.classes:
        table.add_row(row.name, _time(row.total_s), format_share(row.share), f"{row.calls:,}")
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
            Text(row.short_name), row.kernel_class, f"{row.calls:,}", *map(_time, times), format_share(row.share)
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
            Text(_label(row.name)), f"{row.calls:,}", _time(row.total_s), format_share(row.share), size, speed
        )
    return table


def _counters(profile: Profile) -> Table:
    table = plain_table("hardware counters")
    for header in ("kernel", "counter", "value", "verdict", "meaning"):
        table.add_column(header, overflow="fold", justify="right" if header == "value" else "left")
    names = {row.name: row.short_name for row in profile.kernels}
    for row in profile.counters:
        value = format_bytes(row.value) if row.unit == "bytes" else format_share(row.value)
        kernel = "all" if row.kernel is None else names.get(row.kernel, _label(row.kernel))
        table.add_row(Text(kernel), row.name, value, row.verdict, row.meaning if row.kernel is None else "")
    return table


def _operators(profile: Profile, rows: int, sort: Sort) -> Table:
    table = plain_table(f"operators, by {SORTS[sort]}")
    table.add_column("operator", overflow="fold")
    headers = ["calls", "host self", "host total"]
    headers += ["device self", "device total"] if profile.has_device else []
    with_memory = any(row.device_allocated_bytes or row.cpu_allocated_bytes for row in profile.operators)
    headers += ["allocated"] if with_memory else []
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    for row in sorted(profile.operators, key=lambda row: -_rank(row, sort))[:rows]:
        cells = [f"{row.calls:,}", _time(row.cpu_self_s), _time(row.cpu_total_s)]
        cells += [_time(row.device_self_s), _time(row.device_total_s)] if profile.has_device else []
        allocated = row.device_allocated_bytes if profile.has_device else row.cpu_allocated_bytes
        cells += [format_bytes(allocated)] if with_memory else []
        table.add_row(Text(_label(f"{row.name} {row.dims}" if row.dims else row.name)), *cells)
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
    for finding in profile.findings:
        yield Text(f"{finding.code} (at most {finding.gain_bound:.2f}× faster): {finding.evidence}", style="yellow")
        yield Text(f"  next: {finding.next}", style="bold")


def _grid(lines: Iterator[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, value in lines:
        grid.add_row(Text(name, style="dim"), Text(value))
    return grid


def _label(text: str) -> str:
    """A name from a trace, which is not trusted and may be very long."""
    shown = printable(text[: LABEL_LENGTH + 1])
    return shown if len(shown) <= LABEL_LENGTH else shown[:LABEL_LENGTH] + "…"


def _part(value: float, whole: float) -> str:
    return f"{_time(value)} ({format_share(value / whole) if whole else 'n/a'})"


def _time(value: float | None) -> str:
    return format_seconds(value) if value else ("n/a" if value is None else "0")


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


STYLE = {"faster": "green", "vanished": "green", "slower": "red", "appeared": "red"}


class DiffReport:
    def __init__(self, diff: ProfileDiff, rows: int = DEFAULT_ROWS) -> None:
        self._diff = diff
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        diff = self._diff
        yield Text(f"before: {diff.before}", style="bold")
        yield Text(f"after:  {diff.after}", style="bold")
        yield _table(f"per {diff.unit}", [diff.step, diff.busy], 2)
        yield _table("classes", diff.classes, len(diff.classes))
        if diff.kernels:
            yield _table(f"kernels: {_told(diff.kernels)}", diff.kernels, self._rows)
        if diff.operators:
            yield _table(f"operators: {_told(diff.operators)}", diff.operators, self._rows)
        if diff.findings_gone:
            yield Text(f"resolved: {', '.join(diff.findings_gone)}", style="green")
        if diff.findings_new:
            yield Text(f"new: {', '.join(diff.findings_new)}", style="red")
        yield from (Text(f"note: {note}", style="dim") for note in diff.notes)


def _table(title: str, rows: Sequence[Changed], most: int) -> Table:
    table = plain_table(title)
    table.add_column("name", overflow="fold")
    for header in ("before", "after", "difference", "ratio", "calls"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows[:most]:
        change = row.after_s - row.before_s
        calls = f"{row.calls_before:.4g} → {row.calls_after:.4g}"
        ratio = f"{row.ratio:.2f}×" if row.ratio is not None else "–"
        table.add_row(
            Text(row.short_name),
            format_seconds(row.before_s) if row.before_s else "–",
            format_seconds(row.after_s) if row.after_s else "–",
            f"{'+' if change > 0 else '−' if change < 0 else ''}{format_seconds(abs(change))}",
            ratio,
            calls,
            Text(row.change, style=STYLE.get(row.change, "dim")),
        )
    if len(rows) > most:
        table.caption = f"and {len(rows) - most} that changed less: --rows {len(rows)} or --json shows all"
    return table


def _told(rows: Sequence[Changed]) -> str:
    return ", ".join(f"{count} {change}" for change, count in sorted(counts(rows).items()))
