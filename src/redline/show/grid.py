"""A run or a grid in a terminal and as a document: its tables, its pairs, what failed and why, and what to do next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from redline.analyze.grid import Estimate, GridCell, GridSummary, Rung, UnderTargets
from redline.analyze.pairs import TIME_BAND, Pair, Replicate, is_same_recipe, names_in, pairs_of, process_spread
from redline.analyze.recommend.evidence import interval_text
from redline.analyze.summary import RunSummary
from redline.model.errors import SpecError
from redline.model.units import (
    counted,
    format_bytes,
    format_ratio,
    format_seconds,
    format_share,
    significant,
)
from redline.show.cells import (
    TRUST_STYLE,
    cheapest,
    energy_cells,
    energy_columns,
    error_cell,
    milliseconds,
    ratio_cell,
)
from redline.show.run import RunReport
from redline.show.terminal import Fitted, make_table, one_line
from redline.show.train import rate

VERDICT_STYLE = {"faster": "green", "slower": "red", "same": "", "inconclusive": "yellow"}
Decided = Sequence[Sequence[Replicate]]
"""The replicates of each group whose pairs were to be decided."""


def grid_fields(
    rows: Sequence[RunSummary],
    summary: GridSummary | None = None,
    pairs: Sequence[Pair] | None = None,
    rungs: Sequence[Rung] = (),
    estimate: Estimate | None = None,
    under: UnderTargets | None = None,
) -> dict[str, Any]:
    """The fields of a document; those about what was not asked for are left out."""
    known = {"pairs": pairs, "rungs": rungs or None, "estimate": estimate, "under_slo": under}
    cells = {} if summary is None else msgspec.to_builtins(summary)
    return {"results": rows, **cells, **{name: value for name, value in known.items() if value is not None}}


def grid_report(
    rows: Sequence[RunSummary],
    summary: GridSummary | None = None,
    *,
    decided: Decided = (),
    rungs: Sequence[Rung] = (),
    estimate: Estimate | None = None,
    under: UnderTargets | None = None,
    columns: Sequence[str] = (),
) -> RenderableType:
    """A table per workload, or of all cells where more than models and recipes differ; the next step last."""
    parts: list[RenderableType] = []
    if summary is not None and estimate is not None:
        parts += [_title(summary), _plan_table(summary), *_remarks(summary), Text(estimate_text(estimate))]
        last = "run it without --dry-run; you can stop it at any time, and --resume continues"
        return Group(*parts, Text(f"next: {last}", style="bold"))
    if summary is None or not (summary.sweeps or columns):
        report = RunReport(rows, with_next=not decided)
        parts += [report, *(_remarks(summary, failures=False) if summary is not None else ())]
    else:
        parts += [*_tables(summary, rows, rungs, columns), *_remarks(summary)]
        if under is not None:
            parts.append(Text(_under_sentence(under)))
        if not decided:
            parts.append(Text(f"next: {_next_step(summary)}", style="bold"))
    for replicates in decided:
        parts += _decisions(replicates)
    return Group(*parts)


def _remarks(summary: GridSummary, *, failures: bool = True) -> list[RenderableType]:
    parts = [
        Text(f"  {_name(cell)}: {cell.failure.told}", style="red")
        for cell in summary.cells
        if cell.failure and failures
    ]
    for reason, together in groupby(
        sorted(summary.left_out, key=lambda left: str(left.reason)), lambda left: left.reason
    ):
        names = list(dict.fromkeys(left.run or f"{left.model} {left.task} {left.recipe}" for left in together))
        parts.append(Text(f"  skipped ({one_line(str(reason))}): {'; '.join(map(one_line, names))}", style="dim"))
    return [*parts, *(Text(f"  {idle}", style="yellow") for idle in summary.idle_exclusions)]


def _under_sentence(under: UnderTargets) -> str:
    targets = [
        f"{what} within {format_seconds(seconds)}"
        for what, seconds in (("first token", under.targets.ttft_s), ("each token", under.targets.tpot_s))
        if seconds is not None
    ]
    kept = " and ".join(targets)
    if under.record_id is None:
        return f"no cell keeps its {kept}"
    where = f"batch {under.batch}, prompt {under.prompt}, {under.new_tokens} new tokens"
    speed = significant(under.decode_tokens_per_s or 0.0, 4)
    return f"fastest with {kept}: {under.recipe} at {where}, {speed} tokens/s ({len(under.kept)} cells keep it)"


def estimate_text(estimate: Estimate) -> str:
    if not estimate.known and not estimate.unknown:
        return "nothing left to measure"
    parts = []
    if estimate.known:
        parts.append(
            f"about {_duration(estimate.seconds)} for {estimate.known} cells whose models were measured before"
        )
    if estimate.unknown:
        models = ", ".join(estimate.unknown_models[:5]) + (" …" if len(estimate.unknown_models) > 5 else "")
        parts.append(f"no estimate for {estimate.unknown} cells: {models} not measured yet")
    return "time: " + "; ".join(parts)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _plan_table(summary: GridSummary) -> RenderableType:
    """In the order in which they will be measured."""
    table = make_table(None)
    axes = _axes(summary.cells)
    shown = (["run"] if any(cell.run for cell in summary.cells) else []) + ["model", "task", "recipe", *axes]
    for header in (*shown, "status"):
        table.add_column(header, overflow="fold", justify="right" if header in axes else "left")
    for cell in _combinations(summary.cells):
        values = (Text(str(value)) if (value := _axis(cell, name)) is not None else "–" for name in shown)
        table.add_row(*values, _status(cell, None))
    return Fitted(table, ("task",))


def _title(summary: GridSummary) -> Text:
    return Text(f"grid {summary.name} · {_counts(summary)}", style="bold")


def _counts(summary: GridSummary) -> str:
    counts = [f"{summary.planned} cells", f"{summary.done} done"]
    counts += [f"{summary.failed} failed"] if summary.failed else []
    return ", ".join([*counts, f"{summary.pending} to do"] if summary.pending else counts)


@dataclass(frozen=True)
class Line:
    """What one row of a table is about."""

    cell: GridCell
    row: RunSummary | None
    rung: Rung | None
    first: str
    """The recipe that the others of its table are compared with."""

    @property
    def half_width(self) -> float | None:
        interval = self.row.throughput_interval if self.row is not None else None
        return interval.half_width if interval else None


def _of_row(figure: Callable[[RunSummary], str | None]) -> Callable[[Line], str | Text]:
    """A cell of a row that was measured; a dash where there is nothing to say."""
    return lambda line: (figure(line.row) if line.row is not None and line.row.failure is None else None) or "–"


def _of_training(figure: Callable[[Any], str | None]) -> Callable[[Line], str | Text]:
    return _of_row(lambda row: figure(row.training) if row.training is not None else None)


def _of_rung(figure: Callable[[Rung], str | None]) -> Callable[[Line], str | Text]:
    return lambda line: (figure(line.rung) if line.rung is not None else None) or "–"


def _times(gain: float | None) -> str | None:
    return None if gain is None else f"{significant(gain, 3)}×"


def _memory(row: RunSummary) -> str | None:
    held = (row.memory.peak_reserved_bytes or row.memory.peak_rss_bytes) if row.memory else None
    return None if held is None else significant(held / 1e6, 4)


def _change(row: RunSummary) -> str | None:
    change = row.vs_first.memory_change if row.vs_first else None
    return None if change is None else f"{100 * change:+.0f} %"


def _versus(line: Line) -> str:
    """Only against the recipe in the column's header: what was measured with others is not comparable with it."""
    row = line.row
    return ratio_cell(row) if row is not None and row.vs_first and row.vs_first.recipe == line.first else "–"


COLUMNS: dict[str, Callable[[Line], str | Text]] = {
    "items/s": _of_row(lambda row: rate(row.throughput_per_s)),
    "±": lambda line: format_share(line.half_width) if line.half_width is not None else "–",
    "sustained": _of_row(lambda row: None if row.sustained_per_s is None else significant(row.sustained_per_s, 3)),
    "speed-up": _versus,
    "mean ms": _of_row(lambda row: milliseconds(row.latency_s.mean, None) if row.latency_s else None),
    "p50 ms": _of_row(lambda row: milliseconds(row.latency_s.p50, None) if row.latency_s else None),
    "p95 ms": _of_row(lambda row: milliseconds(row.latency_s.p95, None) if row.latency_s else None),
    "p99 ms": _of_row(lambda row: milliseconds(row.latency_s.p99, None) if row.latency_s else None),
    "TTFT": _of_row(lambda row: format_seconds(row.ttft_s)),
    "TPOT": _of_row(lambda row: format_seconds(row.tpot_s.p50 if row.tpot_s else None)),
    "memory MB": _of_row(_memory),
    "memory change": _of_row(_change),
    "rel. error": lambda line: error_cell(line.row.numerics) if line.row is not None else "–",
    "bound": _of_row(lambda row: row.bound.label),
    "epoch": _of_training(lambda row: f"{'~' if row.state == 'cut' else ''}{format_seconds(row.epoch_s)}"),
    "samples/s": _of_training(lambda row: rate(row.samples_per_s)),
    "accuracy": _of_training(lambda row: format_share(row.accuracy)),
    "steps": _of_training(lambda row: str(sum(epoch.steps for epoch in row.epochs))),
    "data wait": _of_training(lambda row: format_share(row.data_wait_share)),
    "memory": _of_training(lambda row: format_bytes(row.peak_bytes)),
    "top operator": _of_rung(lambda rung: rung.top_operator),
    "× last": _of_rung(lambda rung: _times(rung.gain_over_last)),
    "× first": _of_rung(lambda rung: _times(rung.gain_over_first)),
    "status": lambda line: _status(line.cell, line.row),
}
"""What a table of a grid can show of each row, by the column's name in a file of runs."""
TRAINED = ("epoch", "samples/s", "accuracy", "steps", "memory", "top operator", "× last", "× first", "status")
EXPENDABLE = (
    "power", "GPU busy", "rel. error", "p99 ms", "steps", "top operator", "memory", "memory MB", "memory change", "p95 ms", "mean ms",
    "p50 ms", "bound", "data wait", "±", "accuracy", "× last", "epoch",
)  # fmt: skip
"""Columns that a narrow terminal hides, in this order."""


def check_columns(columns: Any, where: str) -> tuple[str, ...]:
    if not isinstance(columns, list | tuple) or not all(isinstance(name, str) for name in columns):
        raise SpecError(f"{where}: columns must be a list of names, got {columns!r}")
    unknown = next((name for name in columns if name not in COLUMNS), None)
    if unknown is not None:
        raise SpecError(f"{where}: unknown column {unknown!r}; there are {', '.join(COLUMNS)}")
    return tuple(columns)


def _tables(
    summary: GridSummary, rows: Sequence[RunSummary], rungs: Sequence[Rung], columns: Sequence[str]
) -> list[RenderableType]:
    """One table per model and task, so that recipe and numbers fit beside each other; one for all runs that have names."""
    by_record = {record_id: row for row in rows for record_id in (row.replicate_ids or (row.record_id,))}
    by_rung = {(rung.record_id, rung.run): rung for rung in rungs}
    parts: list[RenderableType] = [_title(summary)]
    has_names = any(cell.run for cell in summary.cells)
    cells = list(summary.cells) if has_names else _in_reading_order(summary.cells)
    for (model, task), together in groupby(cells, key=lambda cell: ("", "") if has_names else (cell.model, cell.task)):
        own = _combinations(together)
        measured = [row for cell in own if (row := by_record.get(cell.record_id or "")) is not None]
        firsts = Counter(row.vs_first.recipe for row in measured if row.vs_first is not None)
        first = firsts.most_common(1)[0][0] if firsts else ""
        energy = energy_columns(measured, "item", on_gpu=any(row.device != "cpu" for row in measured))
        shown = columns or _columns(measured, task, bool(firsts))
        axes = _axes(own)
        heads = ["run"] if has_names else ["recipe", *axes]
        table = make_table(None if has_names else Text(f"{model} · {task}", style="bold"))
        for head in heads:
            table.add_column(head, justify="left" if head in ("run", "recipe") else "right", overflow="fold")
        for name in shown:
            header = (
                f"vs {first}"[:24]
                if name == "speed-up" and first
                else "tok/s"
                if name == "items/s" and task == "generate"
                else name
            )
            if name == "status":
                for metered in energy.values():
                    table.add_column(metered, justify="right", no_wrap=True)
                table.add_column(name, overflow="fold", min_width=len("shared-cpu,"))
            else:
                table.add_column(header, justify="right", no_wrap=name != "top operator", overflow="fold")
        for cell in own:
            row = by_record.get(cell.record_id or "")
            line = Line(cell, row, _rung_of(cell, by_rung), first)
            told: list[str | Text] = [_head(cell, head, row) for head in heads]
            for name in shown:
                if name == "status":
                    figures = energy_cells(row) if row is not None and row.failure is None else {}
                    told += [figures.get(metered, "–") for metered in energy]
                told.append(COLUMNS[name](line))
            table.add_row(*told)
        parts += [Fitted(table, EXPENDABLE), *map(Text, _curves(measured)), *cheapest(measured)]
    return [*parts, *_training_remarks(summary, rungs, by_record)]


def plain_table(
    summary: GridSummary, rows: Sequence[RunSummary], rungs: Sequence[Rung], columns: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """All cells in one table of plain texts: its headers and its rows."""
    by_record = {record_id: row for row in rows for record_id in (row.replicate_ids or (row.record_id,))}
    by_rung = {(rung.record_id, rung.run): rung for rung in rungs}
    has_names = any(cell.run for cell in summary.cells)
    cells = _combinations(summary.cells if has_names else _in_reading_order(summary.cells))
    heads = ["run"] if has_names else ["model", "recipe", *_axes(cells)]
    shown = columns or _columns(rows, cells[0].task if cells else "", any(row.vs_first for row in rows))
    lines = []
    for cell in cells:
        row = by_record.get(cell.record_id or "")
        first = row.vs_first.recipe if row is not None and row.vs_first is not None else ""
        line = Line(cell, row, _rung_of(cell, by_rung), first)
        lines.append([str(_head(cell, head, row)) for head in heads] + [str(COLUMNS[name](line)) for name in shown])
    return [*heads, *shown], lines


def _rung_of(cell: GridCell, rungs: Mapping[tuple[str, str], Rung]) -> Rung | None:
    names = (cell.run, f"{cell.recipe}, batch {cell.batch}")
    return next((rungs[cell.record_id or "", name] for name in names if (cell.record_id or "", name) in rungs), None)


def _columns(rows: Sequence[RunSummary], task: str, compares: bool) -> tuple[str, ...]:
    if any(row.training is not None for row in rows):
        return TRAINED
    stalled = ("sustained",) if any(row.sustained_per_s is not None for row in rows) else ()
    versus = ("speed-up",) if compares else ()
    last = ("TTFT", "TPOT") if task == "generate" else ("p50 ms", "p95 ms")
    return ("items/s", "±", *stalled, *versus, *last, "memory MB", "status")


def _head(cell: GridCell, head: str, row: RunSummary | None) -> Text:
    value = _axis(cell, head)
    if value is None and head == "batch" and row is not None:
        value = row.batch  # the model's own default
    return Text("–" if value is None else one_line(str(value)))


def _axis(cell: GridCell, name: str) -> Any:
    return cell.axes[name] if name in cell.axes else getattr(cell, name, None)


def _axes(cells: Sequence[GridCell]) -> list[str]:
    """Settings that tell these rows apart, and the batch."""
    names = dict.fromkeys(name for cell in cells for name in cell.axes)
    apart = [name for name in names if len({str(_axis(cell, name)) for cell in cells}) > 1]
    return apart if "batch" in apart or not any(cell.batch for cell in cells) else [*apart, "batch"]


def _training_remarks(
    summary: GridSummary, rungs: Sequence[Rung], by_record: dict[str, RunSummary]
) -> list[RenderableType]:
    """What limits each training, whose speed is doubted, and which is the fastest."""
    trained = [(rung, row) for rung in rungs if (row := by_record.get(rung.record_id)) is not None and row.training]
    if not trained:
        return []
    parts = [Text(f"  {one_line(rung.run)}: {one_line(rung.limit)}", style="dim") for rung, _ in trained if rung.limit]
    doubts = [(rung, doubt) for rung, row in trained if row.training for doubt in row.training.doubts]
    parts += [
        Text(f"  {one_line(rung.run)}: not to be relied on: {one_line(str(doubt))}", style="yellow")
        for rung, doubt in doubts
    ]
    steps = [
        sum(epoch.steps for epoch in row.training.epochs)
        for _, row in trained
        if row.training and row.training.accuracy is not None
    ]
    if steps and max(steps) >= 1.5 * min(steps):
        told = f"accuracy is that after so many steps, {min(steps)} to {max(steps)} here"
        parts.append(
            Text(f"{told}: larger batches take fewer in as many epochs, so it does not compare recipes", style="dim")
        )
    if any(row.training and row.training.state == "cut" for _, row in trained):
        parts.append(
            Text(
                "~ the time was over before the epoch was: what a whole epoch would have taken at that speed",
                style="dim",
            )
        )
    ran = [(rung, row.training) for rung, row in trained if row.training and row.training.samples_per_s]
    if len(ran) > 1:
        best, training = max(ran, key=lambda pair: pair[1].samples_per_s or 0.0)
        gain = f"{_times(best.gain_over_first)} the first" if best.gain_over_first else "the first itself"
        told = f"{one_line(best.run) or training.recipe}: {rate(training.samples_per_s)} samples/s, {gain}"
        doubted = "not decided, because some speeds are not to be relied on: " if doubts else ""
        parts.append(Text(doubted + told + (f"; {best.limit}" if best.limit else ""), style="bold"))
    return list(parts)


def _curves(rows: Sequence[RunSummary]) -> list[str]:
    """Time per token against tokens per second as the batch grows, one line per recipe and lengths."""
    curves: dict[tuple[Any, ...], dict[int, RunSummary]] = {}
    for row in rows:
        if row.tpot_s is not None and row.decode_tokens_per_s is not None and row.batch is not None:
            key = row.recipe, row.conditions.threads, row.conditions.prompt, row.conditions.new_tokens
            curves.setdefault(key, {})[row.batch] = row
    lines = []
    for (recipe, _, prompt, new_tokens), points in curves.items():
        if len(points) < 2:
            continue
        line = ", ".join(
            f"{format_seconds(row.tpot_s.p50)} at {significant(row.decode_tokens_per_s, 3)} tok/s (batch {batch})"
            for batch, row in sorted(points.items())
            if row.tpot_s is not None and row.decode_tokens_per_s is not None
        )
        lines.append(f"time per token, {recipe}, prompt {prompt}, {new_tokens} new tokens: {line}")
    return lines


def _combinations(cells: Iterable[GridCell]) -> list[GridCell]:
    """One cell for all replicates of a combination: one that failed, else one that is done."""
    kept: dict[tuple[Any, ...], GridCell] = {}
    copies: Counter[tuple[Any, ...]] = Counter()
    for cell in cells:
        same = cell.run, cell.model, cell.task, cell.recipe, *map(str, cell.axes.values()), cell.replicate
        copies[same] += 1  # a recipe that is compared with itself has a row for each
        key = (*same[:-1], copies[same])
        known = kept.get(key)
        if known is None or (known.failure is None and (cell.failure is not None or known.status == "pending")):
            kept[key] = cell
    return list(kept.values())


def _status(cell: GridCell, row: RunSummary | None) -> Text:
    if cell.failure is not None:
        return Text(f"failed: {cell.failure.kind} at {cell.failure.stage}", style="red")
    if row is None:
        return Text(cell.status, style="dim")
    doubts = ["numerics ✗"] if row.numerics is not None and row.numerics.is_wrong else []
    bound = [f"{row.bound.label}-bound"] if row.bound.label not in ("unknown", "device") else []
    return Text(
        ", ".join([*row.verdict.labels, *doubts, *bound]), style=TRUST_STYLE.get(row.verdict.labels[0], "yellow")
    )


def _in_reading_order(cells: Iterable[GridCell]) -> list[GridCell]:
    """Sorted by model, task, recipe and axes; they were measured in another order."""
    cells = list(cells)
    models, recipes = ({name: at for at, name in enumerate(dict.fromkeys(names))} for names in (
        [cell.model for cell in cells], [cell.recipe for cell in cells]))  # fmt: skip

    def place(cell: GridCell) -> tuple[Any, ...]:
        others = [value for name, value in cell.axes.items() if name not in ("batch", "prompt", "new_tokens")]
        return (
            models[cell.model],
            cell.task,
            [(isinstance(value, str), value if isinstance(value, int | float | str) else 0) for value in others],
            recipes[cell.recipe],
            cell.prompt or 0,
            cell.new_tokens or 0,
            cell.batch or 0,
        )

    return sorted(cells, key=place)


def _name(cell: GridCell) -> str:
    if cell.run:
        return one_line(cell.run)
    parts = [cell.model, cell.task, cell.recipe, f"batch {cell.batch}" if cell.batch else ""]
    parts += [f"prompt {cell.prompt}" if cell.prompt else ""]
    parts += [f"{cell.new_tokens} new tokens" if cell.new_tokens else ""]
    parts.append(counted(cell.threads, "thread") if cell.threads else "")
    parts.append(f"replicate {cell.replicate}" if cell.replicate > 1 else "")
    return " ".join(part for part in parts if part)


def _next_step(summary: GridSummary) -> str:
    if summary.pending:
        return "the same command with --resume continues with the rest"
    if summary.failed:
        failed = next(cell.record_id or "" for cell in summary.cells if cell.status == "failed")
        return f"'redline history show {failed[:13]}' has the whole error; --retry-failed tries failed cells again"
    return "all cells are done; 'redline history export' writes them as CSV"


def pair_line(pair: Pair) -> str:
    """As a sentence about the second."""
    if pair.low is None or pair.high is None:
        return f"{pair.b} runs at {pair.ratio:.3f}× {pair.a} so far"
    words = {
        "faster": "faster than",
        "slower": "slower than",
        "same": "the same as",
        "inconclusive": "undecided against",
    }
    return f"{pair.b} is {words[pair.verdict]} {pair.a}: {pair.ratio:.3f}× ({interval_text(pair.low, pair.high)})"


def _decisions(replicates: Sequence[Replicate]) -> list[RenderableType]:
    """Every pair with its verdict, how far processes lie apart, and what to do with it."""
    pairs = pairs_of(replicates)
    parts: list[RenderableType] = [Text(f"  {pair_line(pair)}", style=VERDICT_STYLE[pair.verdict]) for pair in pairs]
    spread = process_spread(replicates)
    if spread is not None:
        told = f"  processes of one recipe differ by ±{format_share(spread[0] ** 0.5)}; the intervals include that"
        parts.append(Text(told, style="dim"))
    return [*parts, Text(f"next: {_next_of(replicates, pairs)}", style="bold")]


def _next_of(replicates: Sequence[Replicate], pairs: Sequence[Pair]) -> str:
    named = [
        (name, record) for replicate in replicates for name, record in zip(names_in(replicate), replicate, strict=True)
    ]
    names = list(dict.fromkeys(name for name, _ in named))
    failed = {name: record for name, record in named if record.failure is not None}
    sound = [name for name in names if name not in failed]
    wrong = {
        name
        for name, record in named
        if record.prepared is not None and record.prepared.numerics is not None and record.prepared.numerics.is_wrong
    }
    if len(sound) < 2 and failed:
        first = next(iter(failed.values()))
        return f"fewer than two recipes ran; 'redline history show {first.id[:13]}' has the whole error"
    if not pairs:
        return "no replicate finished, so nothing is known; run the same command again"
    if all(is_same_recipe(replicates, pair.a, pair.b) for pair in pairs):
        return _noise_floor(pairs)
    if any(pair.verdict == "inconclusive" for pair in pairs):
        longer = f"--replicates {2 * len(replicates)} or --effort strict measures longer"
        return f"not every pair is decided within ±{TIME_BAND:.0%}; {longer}"
    fit = [name for name in sound if name not in wrong]
    if not fit:
        return "no recipe here has acceptable outputs"
    ratios = {pair.b: pair.ratio for pair in pairs if pair.a == names[0]}
    best = max(fit, key=lambda name: ratios.get(name, 1.0 if name == names[0] else 0.0))
    gain = f" ({format_ratio(ratios[best])})" if best in ratios else ""
    return f"{best} is the fastest here that has acceptable outputs{gain}"


def _noise_floor(pairs: Sequence[Pair]) -> str:
    """What the intervals of a recipe against itself leave open is what two equal recipes may differ by here."""
    bounds = [bound for pair in pairs for bound in (pair.low, pair.high) if bound is not None]
    if not bounds:
        return "one replicate says nothing about other processes; --replicates 3 shows the noise floor"
    far = max(max(bound, 1 / bound) - 1 for bound in bounds)
    wrong = any(pair.verdict in ("faster", "slower") for pair in pairs)
    told = f"one recipe was compared with itself: differences up to ±{format_share(far)} are noise on this machine"
    return f"{told}; a verdict of faster or slower here is false: the machine is not quiet" if wrong else told
