"""A race in a terminal and as a document: each recipe once, set against the first, then every pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from redline.analyze.race import TIME_BAND, Pair, Replicate, is_same_recipe, names_in, pair_of, pairs_of, process_spread
from redline.analyze.recommend.evidence import interval_text
from redline.analyze.replicates import Process, joined_row
from redline.analyze.summary import CeilingsOf, RunSummary, first_of_each_group, summarize
from redline.analyze.trust import farthest
from redline.model.units import format_ratio, format_share
from redline.report.cells import error_cell, headline, rounded
from redline.report.export import JsonDocument, json_document
from redline.report.terminal import Fitted, make_table

VERDICT_STYLE = {"faster": "green", "slower": "red", "same": "", "inconclusive": "yellow"}


def race_json(replicates: Sequence[Replicate], ceilings_of: CeilingsOf | None = None) -> JsonDocument:
    """`results` as a run has them, replicate after replicate; `racers` over all of them; `pairs` are what the race says."""
    records = [record for replicate in replicates for record in replicate]
    racers = list(joined_racers(replicates, ceilings_of).values())
    rows = summarize(records, ceilings_of)
    told = {"results": rows, "racers": racers, "pairs": pairs_of(replicates), "replicates": len(replicates)}
    return json_document("race", told)


def joined_racers(replicates: Sequence[Replicate], ceilings_of: CeilingsOf | None = None) -> dict[str, RunSummary]:
    """By name, one row over all processes of a recipe: what every other output says of it."""
    records = [record for replicate in replicates for record in replicate]
    names = [name for replicate in replicates for name in names_in(replicate)]
    together: dict[str, list[Process]] = {}
    for name, record, row in zip(names, records, summarize(records, ceilings_of), strict=True):
        together.setdefault(name, []).append((record, row))
    firsts = first_of_each_group(records)
    return {name: joined_row(processes, firsts) for name, processes in together.items()}


def race_report(replicates: Sequence[Replicate], ceilings_of: CeilingsOf | None = None) -> RenderableType:
    rows = summarize([record for replicate in replicates for record in replicate], ceilings_of)
    racers: dict[str, list[RunSummary]] = {}
    for name, row in zip((name for replicate in replicates for name in names_in(replicate)), rows, strict=True):
        racers.setdefault(name, []).append(row)
    joined = joined_racers(replicates, ceilings_of)
    names = list(racers)
    table = make_table(Text(headline(rows), style="bold"))
    item = next((row.item for row in rows if row.item), "item")
    table.add_column("recipe", overflow="fold", min_width=12)
    for header in (f"{item}/s", "±", "processes", f"vs {names[0]}"[:24], "verdict", "rel. error"):
        table.add_column(header, justify="right", no_wrap=True)
    for name, own in racers.items():
        table.add_row(Text(name), *_cells(name, names[0], replicates, own, joined[name]))
    pairs = [pair for pair in pairs_of(replicates) if pair.a != names[0]]
    told = [Text(f"  {pair_line(pair)}", style=VERDICT_STYLE[pair.verdict]) for pair in pairs]
    told += [Text(f"  {row.recipe}: {row.failure.told}", style="red") for row in rows if row.failure]
    return Group(
        Fitted(table, ("rel. error", "processes", "±", "verdict")),
        *told,
        *_contention_notes(rows),
        *_spread_note(replicates),
        Text(_next_step(replicates, racers), style="bold"),
    )


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


def _cells(
    name: str, first: str, replicates: Sequence[Replicate], rows: Sequence[RunSummary], joined: RunSummary
) -> list[str | Text]:
    if joined.throughput_per_s is None:
        return ["failed", *["–"] * 5]
    pair = pair_of(replicates, first, name) if name != first else None
    ratio = "–"
    if pair is not None:
        ratio = format_ratio(pair.ratio) + (
            f" ({interval_text(pair.low, pair.high)})" if pair.low and pair.high else ""
        )
    interval = joined.throughput_interval
    return [
        rounded(joined.throughput_per_s, interval.half_width if interval else None),
        format_share(interval.half_width) if interval else "–",
        str(sum(row.throughput_per_s is not None for row in rows)),
        ratio,
        Text(pair.verdict, style=VERDICT_STYLE[pair.verdict]) if pair else "–",
        error_cell(farthest(row.numerics for row in rows)),
    ]


def _contention_notes(rows: Sequence[RunSummary]) -> list[Text]:
    told = {row.recipe: each for row in rows for each in row.verdict.noted("contended")}
    return [Text(f"  {recipe}: {each}", style="dim") for recipe, each in told.items()]


def _spread_note(replicates: Sequence[Replicate]) -> list[Text]:
    spread = process_spread(replicates)
    if spread is None:
        return []
    told = f"  processes of one recipe differ by ±{format_share(spread[0] ** 0.5)}; the intervals include that"
    return [Text(told, style="dim")]


def _next_step(replicates: Sequence[Replicate], racers: Mapping[str, Sequence[RunSummary]]) -> str:
    names = list(racers)
    sound = [name for name, rows in racers.items() if not any(row.failure for row in rows)]
    fit = [name for name in sound if not any(row.numerics and row.numerics.is_wrong for row in racers[name])]
    if len(sound) < 2:
        failed = next(row.record_id for rows in racers.values() for row in rows if row.failure)
        return f"next: fewer than two recipes ran; 'redline history show {failed[:13]}' has the whole error"
    pairs = {(pair.a, pair.b): pair for pair in pairs_of(replicates)}
    if not pairs:
        return "next: no replicate finished, so nothing is known; run the same command again"
    if all(is_same_recipe(replicates, *pair) for pair in pairs):
        return f"next: {_noise_floor(list(pairs.values()))}"
    if any(pair.verdict == "inconclusive" for pair in pairs.values()):
        longer = f"--replicates {2 * len(replicates)} or --effort strict measures longer"
        return f"next: not every pair is decided within ±{TIME_BAND:.0%}; {longer}"
    if not fit:
        return "next: no recipe here has acceptable outputs"
    ratios = {name: pairs[names[0], name].ratio for name in fit if (names[0], name) in pairs}
    best = max(fit, key=lambda name: ratios.get(name, 1.0 if name == names[0] else 0.0))
    return f"next: {best} is the fastest here that has acceptable outputs"


def _noise_floor(pairs: Sequence[Pair]) -> str:
    """For a recipe that raced itself: what the intervals leave open is what two equal recipes may differ by here."""
    bounds = [bound for pair in pairs for bound in (pair.low, pair.high) if bound is not None]
    if not bounds:
        return "one replicate says nothing about other processes; --replicates 3 shows the noise floor"
    far = max(max(bound, 1 / bound) - 1 for bound in bounds)
    wrong = any(pair.verdict in ("faster", "slower") for pair in pairs)
    told = f"one recipe was raced against itself: differences up to ±{format_share(far)} are noise on this machine"
    return f"{told}; a verdict of faster or slower here is false: the machine is not quiet" if wrong else told
