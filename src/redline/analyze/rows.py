"""This module makes a row of figures of a measurement, which every table, page, picture, CSV and JSON shows.

`FIGURES` is the one table of what can be known of a measurement: a new figure is one line there. `row_of` makes the row, and `table_of`
puts several side by side with the conditions in which they differ; what all of them share goes to the title.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from redline.analyze.measurement import Measurement, name_of
from redline.analyze.pairs import TIME_BAND
from redline.analyze.trust import DISQUALIFYING, error_text
from redline.model.identity import condition_words
from redline.model.metrics import (
    COMPILE,
    LATENCY_P50,
    LATENCY_P95,
    LATENCY_P99,
    MEMORY,
    RATIO,
    REL_ERROR,
    THROUGHPUT,
    TPOT,
    TTFT,
    Fact,
    Figure,
    Headline,
    Metric,
    Row,
    Table,
    in_words,
)
from redline.model.note import Note, note

FIGURES: tuple[tuple[Figure, str | Callable[[Measurement], float | None]], ...] = (
    (THROUGHPUT, "throughput_per_s throughput_interval.low throughput_interval.high"),
    (Figure(name="half_width", unit="share", header="±", better="lower", doc="Of the throughput's interval."), "throughput_interval.half_width"),
    (RATIO, "vs_first.ratio vs_first.low vs_first.high"),
    (Figure(name="sustained", unit="{item}/s", header="sustained/s", better="higher", doc="By the wall clock, where the machine stalled."), "sustained_per_s"),
    (LATENCY_P50, "latency_s.p50 latency_s.low latency_s.high"),
    (Figure(name="latency_p90", unit="s", header="p90", better="lower", doc="Needs 64 samples."), "latency_s.p90"),
    (LATENCY_P95, "latency_s.p95"),
    (LATENCY_P99, "latency_s.p99"),
    (Figure(name="latency_mean", unit="s", header="mean", better="lower"), "latency_s.mean"),
    (Figure(name="latency_std", unit="s", header="std", better="lower", doc="Standard deviation of the step's time."), "latency_s.std"),
    (Figure(name="samples", doc="Timed steps."), "latency_s.n"),
    *((Figure(name=phase, unit="s", better="lower", doc="A phase of the step."), f"phases_s.{phase}") for phase in ("forward", "backward", "prefill", "decode")),
    (Figure(name="optimizer_step", unit="s", better="lower", doc="A phase of the step; `optimizer` names which one it is."), "phases_s.optimizer"),
    (TTFT, "ttft_s"),
    (TPOT, "tpot_s.p50"),
    (Figure(name="tpot_p95", unit="s", header="TPOT p95", better="lower"), "tpot_s.p95"),
    (Figure(name="prefill_rate", unit="tok/s", header="prefill tok/s", better="higher", doc="Prompt tokens read per second."), "generation.prefill_tokens_per_s"),
    (Figure(name="decode_rate", unit="tok/s", header="decode tok/s", better="higher", doc="Tokens written per second."), "generation.decode_tokens_per_s"),
    (Figure(name="bandwidth_share", unit="share", header="of copy", better="higher", doc="What a decode step reads, over what memory could."), "generation.bandwidth_share"),
    (Figure(name="weights", unit="B"), "generation.weight_bytes"),
    (Figure(name="cache_size", unit="B", doc="Of the keys and values."), "generation.cache_bytes"),
    (Figure(name="epoch_time", unit="s", header="epoch", better="lower", doc="Median of the whole epochs."), "training.epoch_s"),
    (Figure(name="accuracy", unit="share", better="higher", doc="On held-out data, after the last epoch."), "training.accuracy"),
    (Figure(name="steps", doc="Of all epochs together."), "training.steps"),
    (Figure(name="train_loss", better="lower"), "training.train_loss"),
    (Figure(name="val_loss", header="held-out loss", better="lower"), "training.val_loss"),
    (Figure(name="data_wait", unit="share", header="data wait", better="lower"), "training.data_wait_share"),
    (MEMORY, "training.peak_bytes|memory.peak_reserved_bytes|memory.peak_rss_bytes"),
    (Figure(name="memory_change", unit="share", doc="Over that of the first."), "vs_first.memory_change"),
    (Figure(name="memory_allocated", unit="B", header="allocated", better="lower", doc="The peak of what tensors took."), "memory.peak_allocated_bytes"),
    (REL_ERROR, "numerics.rel_error"),
    (Figure(name="signal_error", unit="error", header="signal error", better="lower", doc="The distance over what depends on the input: the verdict goes by it."), "numerics.rel_l2"),
    (Figure(name="tolerance", unit="error", doc="What the signal error may be: 4 times what rounding does."), "numerics.tolerance"),
    (Figure(name="of_peak", unit="share", header="of peak", better="higher", doc="Of the measured ceiling."), "roofline.efficiency"),
    (Figure(name="headroom", unit="x", header="left", better="lower", doc="Measured time over the roofline's."), "roofline.headroom"),
    (Figure(name="flops", unit="FLOP", doc="Products of one step."), "prepared.work.total_flops"),
    (Figure(name="energy_per_item", unit="J", header="energy/item", better="lower"), "energy.per_item_j"),
    (Figure(name="power", unit="W", doc="Mean over the metered blocks."), "energy.power_w"),
    (Figure(name="utilisation", unit="share", header="busy", doc="Of the device."), "utilisation"),
    (Figure(name="cost_per_million", header="per million", better="lower", doc="Of a million items, at the given price."), "cost_per_million"),
    (Figure(name="sustainable_rate", unit="req/s", header="sustains", better="higher", doc="The highest rate that keeps the target."), "load.sustainable_rate"),
    *((Figure(name=f"{name}_time", unit="s", header=header, doc="Before the first step.", better="lower"), f"cold_start_s.{name}_s") for name, header in (("import", "import"), ("start", "worker"), ("build", "build"), ("first_call", "first call"))),
    (COMPILE, "cold_start_s.compile_s"),
)  # fmt: skip
"""Every figure of a measurement, with where its value (and both ends of its interval) is found: of several places, joined by `|`, the first
that has it; or a function that computes it from the measurement and its record. The first are those that a reader looks for first."""

IDENTITY = ("run", "model", "task", "recipe", "batch", "device")
"""Facts that every row has. `batch` and `recipe` are what was measured, as it was resolved."""
NAMED = ("run", "model", "task", "prompt", "new_tokens", "batch")
"""These facts tell a row apart that was not measured."""
WORDS = (
    "trust",
    "bound",
    "numerics",
    "verdict",
    "compared_with",
    "processes",
    "cache",
    "compile_cache",
    "limit",
)
"""These facts describe a row rather than what was asked for, so they do not identify it."""  # fmt: skip


def found_at(row: Any, places: str) -> Any:
    """Returns the value in the first of these places that has one."""
    for place in places.split("|"):
        value = row
        for name in place.split("."):
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        if value is not None:
            return value
    return None


def metric_of(row: Measurement, name: str) -> Metric | None:
    """Returns one figure of a measurement by its name, or None where it is not known."""
    return next((made for figure, places in FIGURES if figure.name == name and (made := _metric(row, figure, places))), None)  # fmt: skip


def _metric(row: Measurement, figure: Figure, places: str | Callable[[Measurement], float | None]) -> Metric | None:
    value, *ends = (found_at(row, part) for part in places.split(" ")) if isinstance(places, str) else [places(row)]
    if value is None:
        return None
    low, high = ends or (None, None)
    doubt = doubt_of(row) if figure in (THROUGHPUT, LATENCY_P50) else None
    if figure is RATIO and row.vs_first is not None:
        figure = msgspec.structs.replace(RATIO, header=f"vs {row.vs_first.recipe or 'first'}"[:24])
        doubt = None if row.vs_first.low is not None else note("few-rounds", "too few common rounds for an interval")
    if figure.name == "epoch_time" and row.training is not None and row.training.state == "cut":
        doubt = note(
            "interrupted", "the time was over before the epoch was: what a whole one would have taken at that speed"
        )
    # An interval belongs to its own figure: where that has no number, its width has none either.
    if figure.name == "half_width" and (speed := metric_of(row, "throughput")) and speed.is_too_noisy:
        return None
    return figure(value, low, high, doubt=doubt, item=row.item)


def doubt_of(row: Measurement) -> Note | None:
    """Returns why its times are not to be relied on, or None where they are sound."""
    if row.failure is not None or row.verdict.settles:
        return None
    named = DISQUALIFYING & set(row.verdict.labels)
    reasons = [reason for reason in row.verdict.reasons if named or reason.about == "throughput"]
    # The more telling reason comes first: a process that took the processors explains more than the scatter it caused.
    reasons.sort(key=_explains_little)
    return reasons[0] if reasons else note("noisy", ", ".join(row.verdict.labels), about="throughput")


def _explains_little(reason: Note) -> bool:
    """Returns whether a reason says only that times scatter, and not what scattered them."""
    return reason.code in ("wide-interval", "few-samples", "steady", "not-steady")


def trust_words(row: Measurement) -> str:
    is_wrong = row.numerics is not None and row.numerics.is_wrong
    labels: list[str] = [label for label in row.verdict.labels if not (is_wrong and label == "valid")]
    if labels == ["noisy"] and not row.verdict.doubts("throughput"):
        labels = ["noisy (latency)"]  # the throughput beside it is sound
    return ", ".join([*labels, *(["wrong outputs ✗"] if is_wrong else [])])


def numerics_words(row: Measurement) -> str | None:
    """Returns what the check of the outputs says: that the error passes, and why, or why there is none."""
    if row.numerics is None:
        return None
    if row.numerics.is_wrong:
        return "wrong"
    if row.quantizes:
        return "quantized"
    return "passed" if row.numerics.is_compared else error_text(row.numerics)


def verdict_words(row: Measurement) -> str | None:
    """Returns what the interval of the ratio decides. Noise is part of the interval; what spoilt the times of a side is not."""
    if row.vs_first is None:
        return None
    is_spoilt = row.vs_first.first_doubted or DISQUALIFYING & set(row.verdict.labels)
    return "undecided" if is_spoilt or row.vs_first.verdict == "inconclusive" else row.vs_first.verdict


def facts_of(row: Measurement) -> dict[str, Fact]:
    """Returns what identifies it: model, recipe, batch, device, and the conditions it was measured under."""
    facts: dict[str, Fact] = {
        "model": row.model,
        "task": row.task,
        "recipe": name_of(row),
        "batch": row.batch,
        "device": row.device,
    }
    for name, value in row.conditions.items():
        if value and not (name == "ranks" and value == 1):
            facts[name] = ", ".join(value) if name == "inputs" else value
    if row.device != "cpu":
        facts.pop("threads", None)
    return facts


def row_of(row: Measurement) -> Row:
    """Returns all that is known of a measurement, with what to know about it."""
    facts = facts_of(row)
    if row.failure is not None:
        return Row(facts={**facts, "trust": "failed"}, failure=row.failure.line, record_id=row.record_id)
    metrics = (_metric(row, figure, places) for figure, places in FIGURES)
    words = {
        "verdict": verdict_words(row),
        "compared_with": row.vs_first.recipe if row.vs_first else None,
        "bound": row.bound.label,
        "numerics": numerics_words(row),
        "trust": trust_words(row),
        "processes": len(row.replicate_ids) or None,
        "cache": row.generation.where if row.generation is not None else None,
        "compile_cache": row.cold_start_s.compile_cache if row.cold_start_s else None,
    }
    return Row(
        facts={**facts, **{name: value for name, value in words.items() if value is not None}},
        metrics=tuple(metric for metric in metrics if metric is not None),
        notes=tuple(_notes(row)),
        record_id=row.record_id,
    )


def _notes(row: Measurement) -> Iterator[Note]:
    """Yields what to know about one row: why it is doubted, why its outputs do not pass, what else disturbed it."""
    if row.numerics is not None and row.numerics.is_wrong and row.numerics.reason is not None:
        yield note(row.numerics.reason.code, f"numerics: {row.numerics.reason}", about="numerics")
    if row.quantizes:
        yield note("quantizes", "quantized: only a check on your own data tells whether the accuracy is acceptable")
    speed = metric_of(row, "throughput")
    if not row.verdict.trusted:
        reasons = sorted(row.verdict.reasons, key=_explains_little)
        # How far the times scatter has no number either where they are too noisy, and what scattered them is known.
        is_explained = speed is not None and speed.is_too_noisy and not _explains_little(reasons[0])
        yield from (reason for reason in reasons if not (is_explained and _explains_little(reason)))
    if row.sustained_per_s is not None and speed is not None and not speed.is_too_noisy:
        sustained = THROUGHPUT(row.sustained_per_s, item=row.item).in_words
        yield note("not-steady", f"{sustained} sustained by the wall clock: the machine stalled between steps")
    if row.roofline is not None and row.roofline.error is not None:
        yield row.roofline.error
    if row.training is not None:
        yield from row.training.doubts
    codes = ["measured-separately", "contended", "others-at-work", "masked-positions", "left-out", "straggler", "oversubscribed"]  # fmt: skip
    yield from row.verdict.noted(*codes)  # type: ignore[arg-type]
    if row.verdict.trusted:
        yield from row.verdict.noted("spread")


def varying(rows: Sequence[Mapping[str, Fact]]) -> list[str]:
    """Returns the facts in which rows differ, in their order: the conditions that a sentence about one of them has to name."""
    names = dict.fromkeys(name for facts in rows for name in facts)
    return [name for name in names if len({str(facts.get(name)) for facts in rows}) > 1]


def table_of(
    rows: Sequence[Row], name: str, columns: Sequence[str] = (), title: str = ""
) -> tuple[Table, dict[str, Fact]]:
    """Returns a table of measurements, and what all of them share. The columns begin with what tells the rows apart."""
    known = [row.facts for row in rows if row.metrics] or [row.facts for row in rows]
    # A row that was not measured says of itself only what was asked for, and nothing where that is the default.
    asked = [[row.facts[key] for row in rows if row.facts.get(key) not in (None, "")] for key in NAMED]
    named = {key for key, values in zip(NAMED, asked, strict=True) if len(set(map(str, values))) > 1}
    apart = [key for key in dict.fromkeys([*NAMED, *varying(known)]) if key in named or key in varying(known)]
    shared = {key: value for key, value in known[0].items() if key not in apart} if known else {}
    own = tuple(
        msgspec.structs.replace(
            row,
            facts={key: value for key, value in row.facts.items() if key in (*IDENTITY, *WORDS) or key not in shared},
        )
        for row in rows
    )
    # Shapes of inputs follow from the batch, which says it better.
    conditions = [key for key in apart if key not in (*WORDS, "recipe") and not (key == "inputs" and "batch" in apart)]
    names_differ = len({row.facts.get("model") for row in rows}) > 1
    front = ["run"] if "run" in apart else ["model"] * names_differ + ["task"] * ("task" in apart) + ["recipe"]
    keys = [*front, *(key for key in conditions if key not in front and front != ["run"])]
    about = {key: value for key, value in shared.items() if key not in WORDS}
    return Table(name=name, title=title, rows=own, columns=(*keys, *(column for column in columns if column not in keys))), about  # fmt: skip


def title_of(about: Mapping[str, Fact], rows: Iterable[Measurement]) -> str:
    """Returns what was measured in all of these rows, and where, in one line."""
    row = next((row for row in rows if row.device_name), None) or next(iter(rows))
    words = condition_words(row.conditions, row.device)
    words = {name: text for name, text in words.items() if name not in ("torch", "driver")}  # they are shown with -v
    parts = [str(about[name]) for name in ("model", "task") if name in about]
    parts += [f"batch {about['batch']}"] if about.get("batch") else []
    parts += [words[name] for name in words if name in about]
    if "device" in about:
        parts.append(f"{row.device_name} ({row.device})" if row.device_name else row.device)
    return " · ".join(parts)


def columns_for(rows: Sequence[Measurement]) -> tuple[str, ...]:
    """Returns what a person sees first of these measurements, the most important first."""
    priced = ("cost_per_million",) if any(row.cost_per_million is not None for row in rows) else ()
    ratio = ("ratio",) if any(row.vs_first is not None for row in rows) else ()
    if any(row.training is not None for row in rows):
        return ("epoch_time", "throughput", "accuracy", "gain", "memory", *priced, "trust")
    if any(row.task == "generate" for row in rows):
        return ("throughput", *ratio, "trust", "ttft", "tpot", *priced, "rel_error", "memory")
    return ("throughput", *ratio, "trust", *priced, "rel_error", "latency_p50", "memory")


def headline_of(table: Table) -> Headline:
    """Returns the answer in one sentence, with the conditions that make it true where the rows differ in them."""
    rows = [row for row in table.rows if row.metrics]
    if not rows:
        told = "Nothing could be measured" if any(row.failure for row in table.rows) else "Nothing is measured yet"
        return Headline(template=f"{told}.")
    compared = [row for row in rows if row.metric("ratio") is not None]
    sound = [row for row in compared if row.get("numerics") not in ("wrong", "quantized", "not checked")]
    faster = [row for row in sound if row.get("verdict") == "faster"]
    if faster:
        return _sentence(table, max(faster, key=_ratio), "{recipe} is {ratio} as fast as {first}{where}: {speed}.")
    if any(row.get("verdict") == "faster" for row in compared):
        best = max((row for row in compared if row.get("verdict") == "faster"), key=_ratio)
        why = {"wrong": "its outputs are wrong", "quantized": "it is quantized, so check it on your own data"}
        reason = why.get(str(best.get("numerics")), "its outputs were not checked")
        return _sentence(table, best, "{recipe} is {ratio} as fast as {first}{where}, but " + reason + ".")
    if open_rows := [row for row in sound if row.get("verdict") == "undecided"]:
        best = max(open_rows, key=_ratio)
        if (found := best.metric("ratio")) is not None and found.is_too_noisy:
            return _sentence(table, best, "It is not decided whether {recipe} is faster than {first}{where}: the machine is too noisy.")  # fmt: skip
        return _sentence(table, best, "It is not decided whether {recipe} is faster than {first}{where}: {ratio}.")
    if compared:
        first = next((row for row in rows if row.get("recipe") == compared[0].get("compared_with")), rows[0])
        named = f"No recipe here is faster than {{first}} by more than {TIME_BAND:.0%}{{where}}"
        return _sentence(table, compared[0], f"{named}: {{speed}}.", speed=first)
    return _of_speeds(table, rows)


def _ratio(row: Row) -> float:
    return row.value("ratio")


def _of_speeds(table: Table, rows: Sequence[Row]) -> Headline:
    """Without a comparison: the speed of the one row, or the highest of rows that count the same items. Of loads alone: the highest rate."""
    timed = [row for row in rows if "throughput" in row]
    if not timed:
        sustaining = [row for row in rows if row.value("sustainable_rate")]
        # A wrong recipe is named only where no other sustains a rate.
        best = max(sustaining, key=lambda row: (row.get("numerics") != "wrong", row.value("sustainable_rate")), default=None)  # fmt: skip
        if best is None:
            return Headline(template="Nothing was timed.")
        wrong = ", but its outputs are wrong" if best.get("numerics") == "wrong" else ""
        return _sentence(table, best, f"{{model}} under {{recipe}} sustains {{rate}}{{where}}{wrong}.")
    best = max(timed, key=lambda row: row.value("throughput"))
    speed = best.metric("throughput")
    assert speed is not None
    if len(timed) == 1:
        if speed.is_too_noisy:
            return _sentence(table, best, "The speed of {model} is too noisy to be stated.")
        extra = "; the first token comes after {ttft}" if "ttft" in best else ""
        extra += ", and each further one after {tpot}" if "tpot" in best else ""
        return _sentence(table, best, "{model} under {recipe} reaches {speed}" + extra + ".")
    if len({metric.unit for row in timed if (metric := row.metric("throughput"))}) > 1:
        return Headline(template="{count} measurements, which count different items.", figures={"count": len(timed)})
    if speed.is_too_noisy or any(row.get("numerics") == "wrong" for row in timed):
        return Headline(template="{count} measurements, which have no common order.", figures={"count": len(timed)})
    return _sentence(table, best, "The highest throughput is {speed}: {called}.")


def _sentence(table: Table, row: Row, template: str, speed: Row | None = None) -> Headline:
    """Returns a sentence about one row; `where` names the conditions in which the table's rows differ."""
    told = [
        in_words(name, row.get(name))
        for name in table.keys
        if name not in ("recipe", "run") and row.cell(name) and len({other.cell(name) for other in table.rows}) > 1
    ]
    figures: dict[str, Metric | Fact] = {
        "recipe": row.get("recipe"),
        "model": row.get("model"),
        "first": row.get("compared_with"),
        "ratio": row.get("ratio"),
        "speed": (speed or row).get("throughput"),
        "rate": row.get("sustainable_rate"),
        "ttft": row.get("ttft"),
        "tpot": row.get("tpot"),
        "called": table.called(row),
        "where": f" ({', '.join(told)})" if told else "",
    }
    named = {name: value for name, value in figures.items() if f"{{{name}}}" in template}
    return Headline(template=template, figures=named)
