"""The answer of a table of measurements in one sentence, with the conditions that make it true."""

from __future__ import annotations

from collections.abc import Sequence

from redline.analyze.batch import SloTargets
from redline.analyze.pairs import TIME_BAND
from redline.model.metrics import Fact, Headline, Metric, Row, Table, in_words


def headline_of(table: Table, slo: SloTargets | None = None) -> Headline:
    """The answer in one sentence, with the conditions that make it true where the rows differ in them."""
    rows = [row for row in table.rows if row.metrics]
    if not rows:
        told = "Nothing could be measured" if any(row.failure for row in table.rows) else "Nothing is measured yet"
        return Headline(template=f"{told}.")
    if slo:
        return _under_targets(table, rows, slo)
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


def _under_targets(table: Table, rows: Sequence[Row], slo: SloTargets) -> Headline:
    kept = [row for row in rows if row.get("keeps_target")]
    if not kept:
        return Headline(template="No cell keeps {target}.", figures={"target": str(slo)})
    name = "decode_rate" if all("decode_rate" in row for row in kept) else "throughput"
    best = max(kept, key=lambda row: row.value(name))
    speed: Fact | Metric = best[name]
    figures = {"called": table.called(best), "target": str(slo), "speed": speed, "count": len(kept)}
    return Headline(template="Fastest with {target}: {called}, {speed} ({count} keep it).", figures=figures)


def _sentence(table: Table, row: Row, template: str, speed: Row | None = None) -> Headline:
    """A sentence about one row; `where` names the conditions in which the table's rows differ."""
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
