"""The report as Markdown: what was found, what to do, the tables it rests on, where and how it was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby

from redline import __version__
from redline.analyze.recommend import held_bytes, rate_figure, ratio_text
from redline.analyze.replicates import Line
from redline.analyze.summary import RunSummary
from redline.analyze.train import where_time_goes
from redline.analyze.trust import error_text
from redline.model.identity import Benchmark, Subject, across_devices, benchmark_of
from redline.model.metrics import Table
from redline.model.record import RunRecord
from redline.model.units import counted, format_bytes, format_ratio, format_seconds, format_share, significant
from redline.search.tune.gains import waterfall
from redline.show.cells import energy_cells, energy_columns, generation_cells
from redline.show.contents import METHOD, Contents, machines_of
from redline.show.result import Result
from redline.show.result import markdown as printed
from redline.show.tables import epoch_rows
from redline.show.terminal import markdown_line, markdown_table
from redline.show.tune import tune_markdown

MOST_ROWS = 400
"""Of the tables; results.csv has all of them."""
KERNELS = 10


def markdown(contents: Contents, pictures: Mapping[str, str]) -> str:
    """`pictures`: file names by what they show."""
    parts = [
        _head(contents),
        _advice(contents),
        _pictures(pictures),
        _results(contents),
        _trainings(contents),
        _across(contents),
        _knees(contents),
        _cold_starts(contents),
        tune_markdown(contents.searches, MOST_ROWS),
        _gains(contents),
        _profiles(contents),
        _environment(contents),
        ["## Method", "", *(f"- {line}" for line in METHOD)],
        [
            "---",
            "",
            f"Made by Redline {__version__} from its records. `results.csv` and `results.json` hold every number.",
        ],
    ]
    return "\n\n".join("\n".join(part) for part in map(list, parts) if part) + "\n"


def _head(contents: Contents) -> Iterator[str]:
    yield markdown_line("# {}", contents.title)
    yield ""
    yield markdown_line("**{}**", contents.headline)
    failed = sum(row.failure is not None for row in contents.rows)
    times = [record.created_at for record in contents.records]
    if times:
        yield ""
        span = " to ".join(dict.fromkeys(_day(each) for each in (min(times), max(times))))
        yield f"{len(contents.rows)} records{f', {failed} failed' if failed else ''}, measured {span} (UTC)."
    for each in contents.notes:
        yield markdown_line("\n> {}", each)


def _trainings(contents: Contents) -> Iterator[str]:
    if not contents.trainings:
        return
    yield "## Training on data"
    for row in contents.trainings[:MOST_ROWS]:
        yield ""
        facts = (row.model, f"{row.stem} stem" if row.stem else "", row.data, row.recipe, f"batch {row.batch}")
        title = " · ".join([*filter(None, facts), row.device_name or row.device])
        yield printed(Result(verb="train", tables=(Table(name="epochs", title=title, rows=tuple(epoch_rows(row))),)))
        yield ""
        if row.failure is not None:
            yield markdown_line("- failed: {}", row.failure)
        if told := where_time_goes(row):
            yield markdown_line("- where the time goes: {}", told)
        yield markdown_line("- bound: {}: {}", row.bound.label, row.bound.evidence)
        yield from (markdown_line("- {}", note) for note in row.notes)


def _across(contents: Contents) -> Iterator[str]:
    """The same workload and recipe wherever it ran, the slowest first; only where somebody asked for it."""
    found: dict[Benchmark, list[tuple[RunSummary, RunRecord]]] = {}
    for line in contents.lines if contents.across else ():
        if line.row.throughput_per_s and not line.is_capture:
            found.setdefault(across_devices(benchmark_of(line.record)), []).append((line.row, line.record))
    cells: list[Sequence[object]] = []
    for benchmark, rows in found.items():
        rows.sort(key=lambda pair: pair[0].throughput_per_s or 0.0)
        slowest = rows[0][0].throughput_per_s or math.inf
        for row, record in rows if len(rows) > 1 else ():
            threads = record.prepared.environment.threads if record.prepared is not None else None
            what = f"{benchmark.model} · {benchmark.task} · batch {benchmark.batch or '–'} · {benchmark.recipe}"
            rate = row.throughput_per_s or 0.0
            device = row.device_name or row.device
            cells.append([what, device, threads or "–", rate_figure(rate), f"{rate / slowest:.3g}×"])
    if cells:
        yield "## Across devices and thread counts"
        yield ""
        yield "As asked for: these rows differ in where they ran, so there is no interval."
        yield ""
        yield from markdown_table(["workload", "device", "threads", "items/s", "× the slowest"], cells)


def _advice(contents: Contents) -> Iterator[str]:
    if not contents.advice:
        return
    yield "## What to do"
    yield ""
    for subject, together in groupby(contents.advice, key=lambda each: each.subject):
        yield markdown_line("### {}", subject)
        yield ""
        for each in together:
            yield markdown_line("- **{}**", each.headline)
            yield from (markdown_line("  - {}", detail) for detail in each.details)
        yield ""


def _pictures(pictures: Mapping[str, str]) -> Iterator[str]:
    if not pictures:
        return
    yield "## Pictures"
    yield ""
    for title, path in pictures.items():
        yield markdown_line("![{}]", title) + f"({path})"
        yield ""


def _results(contents: Contents) -> Iterator[str]:
    if not contents.rows:
        return
    yield "## Results"
    together: dict[Subject, list[Line]] = {}
    every = contents.lines
    newest = sorted(line.measured_at for line in every)[-MOST_ROWS:]
    for line in every:
        if line.measured_at < newest[0]:
            continue
        together.setdefault(line.subject, []).append(line)
    for subject, lines in together.items():
        yield ""
        yield markdown_line("### {}", subject)
        yield ""
        repeated = any(len(line.rates) > 1 for line in lines)
        measured = [line.row for line in lines if line.row.failure is None]
        item = next((line.row.item for line in lines if line.row.item), "items")
        metered = energy_columns(measured, item, on_gpu=any(row.device != "cpu" for row in measured))
        rows = [
            [*_result(line), *_metered(line.row, metered), *([line.told] if repeated else [])]
            for line in _in_order(lines)
        ]
        headers = [*_headers(item, subject.task), *metered.values(), *(["processes"] if repeated else [])]
        yield from markdown_table(headers, rows)
        yield from _remarks([line.row for line in lines])
    if len(every) > MOST_ROWS:
        yield f"\n{len(every) - MOST_ROWS} older ones are in `results.csv`."
    yield ""
    yield (
        "`±` is the 95 % interval of the speed: of the median step within one process, or over all processes where the "
        "same was measured more than once; `processes` then says how many there are and how much they differ. A ratio with "
        "an interval was measured interleaved."
    )


def _metered(row: RunSummary, columns: Iterable[str]) -> list[str]:
    """Energy, power, utilisation and cost, where any row of the table has them."""
    cells = energy_cells(row) if row.failure is None else {}
    return [cells.get(name, "–") for name in columns]


TOKEN_HEADERS = ("TTFT", "TPOT", "TPOT p95", "prefill tok/s", "decode tok/s", "cache")


def _headers(item: str, task: str) -> list[str]:
    times = TOKEN_HEADERS if task == "generate" else ("p50", "p95")
    return ["recipe", "batch", f"{item}/s", "±", *times, "memory", "vs first", "rel. error", "bound", "verdict"]


def _result(line: Line) -> list[str]:
    row = line.row
    name = row.recipe + (" (beside a profile)" if line.is_capture else "")
    batch = "–" if row.batch is None else str(row.batch)
    if row.failure is not None:
        unknown = len(_headers("", row.task)) - 3
        return [name, batch, *["–"] * unknown, f"failed: {row.failure.kind} at {row.failure.stage}"]
    latency, interval = row.latency_s, row.throughput_interval
    times = [format_seconds(latency.p50 if latency else None), format_seconds(latency.p95 if latency else None)]
    if row.task == "generate":
        times = [str(cells) for name, cells in generation_cells(row).items() if name in TOKEN_HEADERS]
    return [
        name,
        batch,
        _speed(row),
        format_share(interval.half_width if interval else None),
        *times,
        format_bytes(held_bytes(row)),
        _versus(row),
        error_text(row.numerics, with_steps=True),
        row.bound.label,
        ", ".join(row.verdict.labels),
    ]


def _speed(row: RunSummary) -> str:
    if row.throughput_per_s is None:
        return "–"
    sustained = "" if row.sustained_per_s is None else f" (sustained {rate_figure(row.sustained_per_s)})"
    return rate_figure(row.throughput_per_s) + sustained


def _versus(row: RunSummary) -> str:
    if row.vs_first is None:
        return "–"
    return ratio_text(row) if row.vs_first.low is not None else f"{format_ratio(row.vs_first.ratio)} (few rounds)"


def _remarks(rows: Sequence[RunSummary]) -> Iterator[str]:
    told = []
    for row in rows:
        where = f"{row.recipe} at batch {row.batch}" if row.batch else row.recipe
        if row.failure is not None:
            told.append(markdown_line("- {} failed: {}", where, row.failure.told))
        elif not row.verdict.trusted:
            told += [markdown_line("- {}: {}", where, reason) for reason in row.verdict.reasons]
    if told:
        yield ""
        yield from told


def _knees(contents: Contents) -> Iterator[str]:
    known = [(curve, curve.knee) for curve in contents.curves if curve.knee is not None]
    if not known:
        return
    yield "## Where larger batches stop paying"
    yield ""
    rows = [
        [curve.subject, curve.recipe, knee.batch, f"{knee.share:.0%}", significant(knee.limit_per_s, 4)]
        for curve, knee in known
    ]
    yield from markdown_table(["subject", "recipe", "knee", "of the limit", "limit, items/s"], rows, left=2)


def _cold_starts(contents: Contents) -> Iterator[str]:
    rows: list[Sequence[object]] = []
    told = set()
    for subject, row in zip(contents.subjects, contents.rows, strict=True):
        cold = row.cold_start_s
        if cold is None or cold.compile_s is None:
            continue
        start = (subject, row.recipe, row.batch, cold.compile_cache)
        if start not in told:  # a race opens its recipes again and again
            told.add(start)
            times = (cold.build_s, cold.first_call_s, cold.compile_s)
            batch = "–" if row.batch is None else row.batch
            rows.append([subject, row.recipe, batch, *map(format_seconds, times), cold.compile_cache or "–"])
    if not rows:
        return
    yield "## Compiling"
    yield ""
    headers = ["subject", "recipe", "batch", "build", "first call", "of it compiling", "cache"]
    yield from markdown_table(headers, rows[-MOST_ROWS:], left=2)


def _gains(contents: Contents) -> Iterator[str]:
    if contents.gain_paths:
        yield "## From the baseline to the fastest recipe"
    for path in contents.gain_paths:
        yield ""
        yield markdown_line("### {}", path.title)
        yield ""
        rows = [[bar.label, bar.told, format_seconds(bar.seconds)] for bar in waterfall(path)]
        yield from markdown_table(["recipe", "", "time of a step"], rows, left=2)


def _profiles(contents: Contents) -> Iterator[str]:
    if not contents.profiles:
        return
    yield "## Profiles"
    for profile in contents.profiles:
        capture = profile.capture
        name = f"{capture.model} · {capture.task} · {capture.recipe} · batch {capture.batch}" if capture else "trace"
        yield ""
        yield markdown_line("### {}", name)
        yield ""
        yield markdown_line("Bound: {}. {}.", profile.bound.label, profile.bound.evidence)
        yield ""
        for finding in profile.findings:
            gain = f"{finding.gain_bound:.2f}×"
            yield markdown_line("- **{}**, at most {} faster without it: {}", finding.code, gain, finding.evidence)
            yield markdown_line("  - next: {}", finding.next)
        yield ""
        classes = [
            [row.name, format_seconds(row.total_s), format_share(row.share), row.calls] for row in profile.classes
        ]
        yield from markdown_table(["class", "total", "share", "calls"], classes)
        if profile.kernels:
            yield ""
            kernels = [
                [row.short_name, row.kernel_class, row.calls, format_seconds(row.total_s), format_share(row.share)]
                for row in profile.kernels[:KERNELS]
            ]
            yield from markdown_table(["kernel", "class", "calls", "total", "share"], kernels, left=2)


def _environment(contents: Contents) -> Iterator[str]:
    machines = machines_of(contents.records)
    if not machines:
        return
    yield "## Environment"
    for machine in machines:
        yield ""
        yield markdown_line("### {} ({})", machine.device, counted(machine.records, "record"))
        yield ""
        yield from (markdown_line("- {}: {}", name, value) for name, value in machine.facts)


def _in_order(lines: Sequence[Line]) -> list[Line]:
    recipes = {recipe: index for index, recipe in enumerate(dict.fromkeys(line.row.recipe for line in lines))}
    return sorted(lines, key=lambda line: (recipes[line.row.recipe], line.row.batch or 0))


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
