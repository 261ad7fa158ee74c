"""A measurement as a row of figures: what every table, page, picture, CSV and JSON shows of it.

`FIGURES` is the one table of what can be known of a measurement: a new figure is one line there. `row_of` makes the row, and `table_of`
puts several side by side with the conditions in which they differ; what all of them share goes to the title.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from redline.analyze.summary import RunSummary, name_of
from redline.analyze.trust import DISQUALIFYING, error_text
from redline.model.conditions import condition_words
from redline.model.figures import LATENCY_P50, LATENCY_P95, LATENCY_P99, MEMORY, THROUGHPUT, TPOT, TTFT
from redline.model.metrics import Fact, Figure, Metric, Row, Table
from redline.model.note import Note, note

Value = float | tuple[float | None, float | None, float | None] | None
"""A number, or one with both ends of its interval."""
Reader = Callable[[RunSummary], Value]

RATIO = Figure(
    name="ratio", unit="x", header="vs first", better="higher", doc="Time of the first over time of this one."
)
HALF_WIDTH = Figure(name="half_width", unit="share", header="±", better="lower", doc="Of the throughput's interval.")
COST = Figure(
    name="cost_per_million", header="per million", better="lower", doc="Of a million items, at the given price."
)


def _latency(name: str) -> Reader:
    def read(row: RunSummary) -> Value:
        value = getattr(row.latency_s, name, None)
        if name != "p50" or row.latency_s is None:
            return value
        return value, row.latency_s.low, row.latency_s.high

    return read


def _throughput(row: RunSummary) -> Value:
    interval = row.throughput_interval
    return row.throughput_per_s, interval.low if interval else None, interval.high if interval else None


def _ratio(row: RunSummary) -> Value:
    return None if row.vs_first is None else (row.vs_first.ratio, row.vs_first.low, row.vs_first.high)


def _half_width(row: RunSummary) -> Value:
    return row.throughput_interval.half_width if row.throughput_interval else None


def _memory(row: RunSummary) -> Value:
    held = row.memory
    if row.training is not None:
        return row.training.peak_bytes
    return None if held is None else held.peak_reserved_bytes or held.peak_rss_bytes


def _of(part: str, name: str) -> Reader:
    """A field of one of the row's parts, where there is such a part."""
    return lambda row: getattr(getattr(row, part), name, None)


def _own(name: str) -> Reader:
    return lambda row: getattr(row, name)


def _phase(name: str) -> Reader:
    return lambda row: (row.phases_s or {}).get(name)


def _trained_or(own: str, trained: str) -> Reader:
    """A field of the row; of a training that of its whole epochs."""
    return lambda row: getattr(row.training, trained) if row.training is not None else getattr(row, own)


FIGURES: tuple[tuple[Figure, Reader], ...] = (
    (THROUGHPUT, _throughput),
    (HALF_WIDTH, _half_width),
    (RATIO, _ratio),
    (Figure(name="sustained", unit="{item}/s", header="sustained/s", better="higher", doc="By the wall clock, where the machine stalled."), _own("sustained_per_s")),
    (LATENCY_P50, _latency("p50")),
    (Figure(name="latency_p90", unit="s", header="p90", better="lower", doc="Needs 64 samples."), _latency("p90")),
    (LATENCY_P95, _latency("p95")),
    (LATENCY_P99, _latency("p99")),
    (Figure(name="latency_mean", unit="s", header="mean", better="lower"), _latency("mean")),
    (Figure(name="samples", doc="Timed steps."), _latency("n")),
    *((Figure(name=phase, unit="s", better="lower", doc="A phase of a training step."), _phase(phase)) for phase in ("forward", "backward", "optimizer")),
    (TTFT, _own("ttft_s")),
    (TPOT, _of("tpot_s", "p50")),
    (Figure(name="tpot_p95", unit="s", header="TPOT p95", better="lower"), _of("tpot_s", "p95")),
    (Figure(name="prefill_rate", header="prefill tok/s", better="higher", doc="Prompt tokens read per second."), _own("prefill_tokens_per_s")),
    (Figure(name="decode_rate", header="decode tok/s", better="higher", doc="Tokens written per second."), _own("decode_tokens_per_s")),
    (Figure(name="bandwidth_share", unit="share", header="of copy", better="higher", doc="What a decode step reads, over what memory could."), _own("bandwidth_share")),
    (Figure(name="weights", unit="B"), _own("weight_bytes")),
    (Figure(name="cache_size", unit="B", doc="Of the keys and values."), _own("cache_bytes")),
    (Figure(name="epoch_time", unit="s", header="epoch", better="lower", doc="Median of the whole epochs."), _of("training", "epoch_s")),
    (Figure(name="accuracy", unit="share", better="higher", doc="On held-out data, after the last epoch."), _of("training", "accuracy")),
    (Figure(name="train_loss", better="lower"), _of("training", "train_loss")),
    (Figure(name="data_wait", unit="share", header="data wait", better="lower"), _of("training", "data_wait_share")),
    (MEMORY, _memory),
    (Figure(name="memory_change", unit="share", doc="Over that of the first."), _of("vs_first", "memory_change")),
    (Figure(name="rel_error", unit="error", header="rel. error", better="lower", doc="‖Δ‖/‖y‖ against strict fp32."), _of("numerics", "rel_error")),
    (Figure(name="signal_error", unit="error", header="signal error", better="lower", doc="The distance over what depends on the input: the verdict goes by it."), _of("numerics", "rel_l2")),
    (Figure(name="tolerance", unit="error", doc="What the signal error may be: 4 times what rounding does."), _of("numerics", "tolerance")),
    (Figure(name="of_peak", unit="share", header="of peak", better="higher", doc="Of the measured ceiling."), _of("roofline", "efficiency")),
    (Figure(name="headroom", unit="x", header="left", better="lower", doc="Measured time over the roofline's."), _of("roofline", "headroom")),
    (Figure(name="flops", unit="FLOP", doc="Products of one step."), _own("flops")),
    (Figure(name="energy_per_item", unit="J", header="energy/item", better="lower"), _trained_or("energy_per_item_j", "energy_per_sample_j")),
    (Figure(name="power", unit="W", doc="Mean over the metered blocks."), _own("power_w")),
    (Figure(name="utilisation", unit="share", doc="Of the device."), _trained_or("utilisation", "utilisation")),
    (COST, _trained_or("cost_per_million", "cost_per_million")),
    *((Figure(name=f"{name}_time", unit="s", header=header, doc="Before the first step.", better="lower"), _of("cold_start_s", f"{name}_s")) for name, header in (("import", "import"), ("start", "worker"), ("build", "build"), ("first_call", "first call"), ("compile", "compiling"))),
)  # fmt: skip
"""Every figure of a measurement, with what reads it. The first are those that a reader looks for first."""
COLD = ("import_time", "start_time", "build_time", "first_call_time", "compile_time")

IDENTITY = ("run", "model", "task", "recipe", "batch", "device")
"""Facts that every row has. `batch` and `recipe` are what was measured, as it was resolved."""


def metric_of(row: RunSummary, name: str) -> Metric | None:
    """One figure of a measurement by its name; None where it is not known."""
    figure, read = next((figure, read) for figure, read in FIGURES if figure.name == name)
    return _metric(row, figure, read(row))


def _metric(row: RunSummary, figure: Figure, value: Value) -> Metric | None:
    value, low, high = value if isinstance(value, tuple) else (value, None, None)
    if value is None:
        return None
    doubt = doubt_of(row) if figure in (THROUGHPUT, LATENCY_P50) else None
    if figure is RATIO and row.vs_first is not None:
        if low is None or high is None:
            doubt = note("few-rounds", "too few common rounds for an interval")
        elif row.vs_first.first_doubted:
            doubt = note("noisy", f"the times of {row.vs_first.recipe} are doubted", about="first")
    made = figure(value, low, high, doubt=doubt, item=row.item)
    # An interval belongs to its own figure: where that has no number, its width has none either.
    return None if figure is HALF_WIDTH and (speed := metric_of(row, "throughput")) and speed.is_too_noisy else made


def doubt_of(row: RunSummary) -> Note | None:
    """Why its times are not to be relied on; None where they are sound."""
    if row.failure is not None or row.verdict.settles:
        return None
    named = DISQUALIFYING & set(row.verdict.labels)
    reasons = [reason for reason in row.verdict.reasons if named or reason.about == "throughput"]
    # A process that took the processors explains more than the scatter it caused.
    reasons.sort(key=lambda reason: reason.code in ("wide-interval", "few-samples"))
    return reasons[0] if reasons else note("noisy", ", ".join(row.verdict.labels), about="throughput")


def trust_words(row: RunSummary) -> str:
    told = ", ".join(row.verdict.labels)
    if row.verdict.labels == ("noisy",) and not row.verdict.doubts("throughput"):
        return "noisy (latency)"  # the throughput beside it is sound
    return told


def numerics_words(row: RunSummary) -> str | None:
    """What the check of the outputs says: an error that passes, or why there is none."""
    if row.numerics is None:
        return None
    if row.numerics.is_wrong:
        return "too far"
    return "passed" if row.numerics.is_compared else error_text(row.numerics)


def facts_of(row: RunSummary) -> dict[str, Fact]:
    """What identifies it: model, recipe, batch, device, and the conditions it was measured under."""
    facts: dict[str, Fact] = {
        "model": row.model,
        "task": row.task,
        "recipe": name_of(row),
        "batch": row.batch,
        "device": row.device,
    }
    for name, value in msgspec.to_builtins(row.conditions).items():
        if value not in (None, "", [], 0) and not (name == "ranks" and value == 1):
            facts[name] = ", ".join(value) if isinstance(value, list) else value
    if row.device != "cpu":
        facts.pop("threads", None)
    return facts


def row_of(row: RunSummary) -> Row:
    """All that is known of a measurement, with what to know about it."""
    facts = facts_of(row)
    if row.failure is not None:
        why = f"{row.failure.kind} at {row.failure.stage}: {row.failure.told}"
        return Row(facts={**facts, "trust": "failed"}, failure=why, record_id=row.record_id)
    metrics = (_metric(row, figure, read(row)) for figure, read in FIGURES)
    words = {
        "bound": row.bound.label,
        "numerics": numerics_words(row),
        "trust": trust_words(row),
        "processes": len(row.replicate_ids) or None,
        "cache": row.cache,
        "compile_cache": row.cold_start_s.compile_cache if row.cold_start_s else None,
    }
    return Row(
        facts={**facts, **{name: value for name, value in words.items() if value is not None}},
        metrics=tuple(metric for metric in metrics if metric is not None),
        notes=tuple(_notes(row)),
        record_id=row.record_id,
    )


def _notes(row: RunSummary) -> Iterator[Note]:
    """What to know about one row: why it is doubted, why its outputs do not pass, what else disturbed it."""
    if row.numerics is not None and row.numerics.is_wrong and row.numerics.reason is not None:
        yield note(row.numerics.reason.code, f"numerics: {row.numerics.reason}", about="numerics")
    if row.capabilities is not None and row.capabilities.quantizes:
        yield note("quantizes", "quantized: only a check on your own data tells whether the accuracy is acceptable")
    if not row.verdict.trusted:
        yield from row.verdict.reasons
    speed = metric_of(row, "throughput")
    if row.sustained_per_s is not None and speed is not None and not speed.is_too_noisy:
        sustained = THROUGHPUT(row.sustained_per_s, item=row.item).in_words
        yield note("not-steady", f"{sustained} sustained by the wall clock: the machine stalled between steps")
    if row.roofline is not None and row.roofline.error is not None:
        yield row.roofline.error
    codes = ["measured-separately", "contended", "others-at-work", "masked-positions", "left-out", "also-failed", "straggler", "oversubscribed"]  # fmt: skip
    yield from row.verdict.noted(*codes)  # type: ignore[arg-type]
    if row.verdict.trusted:
        yield from row.verdict.noted("wide-interval", "spread", "outliers")


def varying(rows: Sequence[Mapping[str, Fact]]) -> list[str]:
    """The facts in which rows differ, in their order: the conditions that a sentence about one of them has to name."""
    names = dict.fromkeys(name for facts in rows for name in facts)
    return [name for name in names if len({str(facts.get(name)) for facts in rows}) > 1]


def table_of(
    rows: Sequence[Row], name: str, columns: Sequence[str] = (), title: str = ""
) -> tuple[Table, dict[str, Fact]]:
    """A table of measurements, and what all of them share. The columns begin with what tells the rows apart."""
    known = [row.facts for row in rows if not row.failure] or [row.facts for row in rows]
    shared = {key: value for key, value in known[0].items() if key not in varying(known)} if known else {}
    kept = (*IDENTITY, "trust", "bound", "numerics")
    own = tuple(
        msgspec.structs.replace(
            row, facts={key: value for key, value in row.facts.items() if key in kept or key not in shared}
        )
        for row in rows
    )
    conditions = [key for key in varying(known) if key not in (*_WORDS, "recipe")] if len(known) > 1 else []
    keys = [*(key for key in ("run", "model", "task") if key in conditions), "recipe"]
    keys = ["run"] if "run" in conditions else keys
    keys += [key for key in conditions if key not in keys and not ("run" in keys and key != "run")]
    about = {key: value for key, value in shared.items() if key not in _WORDS}
    return Table(name=name, title=title, rows=own, columns=(*keys, *columns)), about


_WORDS = ("trust", "bound", "numerics", "processes", "cache", "compile_cache")
"""What is said of a row rather than asked for: it does not identify it."""


def title_of(about: Mapping[str, Fact], rows: Iterable[RunSummary]) -> str:
    """What was measured in all of these rows, and where, in one line."""
    row = next((row for row in rows if row.device_name), None) or next(iter(rows))
    words = condition_words(row.conditions, row.device)
    parts = [str(about[name]) for name in ("model", "task") if name in about]
    parts += [f"batch {about['batch']}"] if about.get("batch") else []
    parts += [words[name] for name in words if name in about]
    if "device" in about:
        parts.append(f"{row.device_name} ({row.device})" if row.device_name else row.device)
    processes = about.get("processes")
    return " · ".join([*parts, *([f"{processes} processes each"] if processes else [])])


def columns_for(rows: Sequence[RunSummary]) -> tuple[str, ...]:
    """What a person sees first of these measurements, the most important first."""
    priced = ("cost_per_million",) if any(row.cost_per_million is not None for row in rows) else ()
    ratio = ("ratio",) if any(row.vs_first is not None for row in rows) else ()
    if any(row.training is not None for row in rows):
        return ("epoch_time", "throughput", "accuracy", "gain", "memory", *priced, "trust")
    if any(row.task == "generate" for row in rows):
        return ("throughput", *ratio, "trust", "ttft", "tpot", *priced, "rel_error", "memory")
    return ("throughput", *ratio, "trust", *priced, "rel_error", "latency_p50", "memory")
