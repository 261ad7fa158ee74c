"""What a table of a run says below its rows: remarks about single rows, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from redline.analyze.pairs import TIME_BAND
from redline.analyze.recommend import is_decided
from redline.analyze.summary import RunSummary, VersusFirst
from redline.model.spec import BASELINE
from redline.model.units import format_ratio, format_share
from redline.show.cells import (
    ratio_cell,
    rounded,
)

LONGER = "--decide or --effort strict measures longer, a quieter machine helps too"


APART = 1.05
"""On a machine with a steady speed, two estimates of the same ratio differ by at most this factor."""


UNKNOWN_BATCH = (
    "the batch is unknown, so steps are counted: let the factory take batch, or declare batch_axis or items "
    "('redline history show' says what was tried)"
)


def remarks(rows: Sequence[RunSummary]) -> list[Text]:
    """Why rows failed, why numbers are not to be trusted, why numerics did not pass."""
    told = (
        [Text(f"  {UNKNOWN_BATCH}", style="dim")]
        if any(row.batch_from == "unknown" and row.task != "step" for row in rows)
        else []
    )
    for row in rows:
        if row.failure:
            told.append(Text(f"  {row.recipe}: {row.failure.told}", style="red"))
            continue
        if not row.verdict.trusted:
            told += [Text(f"  {row.recipe}: {reason}", style="yellow") for reason in row.verdict.reasons]
        if row.numerics and row.numerics.is_wrong:
            told.append(Text(f"  {row.recipe}: numerics: {row.numerics.reason}", style="red"))
        elif _is_quantized(row):
            told.append(
                Text(
                    f"  {row.recipe}: quantized: only a check on your own data tells whether the accuracy is acceptable"
                )
            )
        if row.sustained_per_s is not None:
            share = f"{rounded(row.sustained_per_s, None)} {row.item or 'item'}/s sustained by the wall clock"
            told.append(Text(f"  {row.recipe}: {share}: the machine stalled between steps", style="yellow"))
        told += _contradiction(row, rows)
        shown = row.verdict.noted("measured-separately", "contended", "others-at-work", "masked-positions")
        shown += row.verdict.noted("wide-interval", "spread", "outliers") if row.verdict.trusted else []
        told += [Text(f"  {row.recipe}: {each}", style="dim") for each in shown]
    return told


def _contradiction(row: RunSummary, rows: Sequence[RunSummary]) -> list[Text]:
    """A remark where the interleaved ratio contradicts the throughput column, which pools all rounds."""
    versus = row.vs_first
    beside = [each for each in rows if (each.model, each.task, each.batch) == (row.model, row.task, row.batch)]
    first = next((each for each in beside if versus is not None and each.recipe == versus.recipe), None)
    if versus is None or versus.low is None or versus.high is None or first is None:
        return []
    if row.throughput_per_s is None or not first.throughput_per_s:
        return []
    pooled = row.throughput_per_s / first.throughput_per_s
    if versus.low / APART <= pooled <= versus.high * APART:
        return []
    said = f"{format_ratio(pooled)} by overall throughput, but {format_ratio(versus.ratio)} interleaved"
    return [
        Text(f"  {row.recipe}: {said}: the machine's speed changed between rounds, so rely on neither", style="yellow")
    ]


def next_step(rows: Sequence[RunSummary]) -> str:
    """What to do with what was found. Several models have one line: about the first there is something to say about."""
    measured = [row for row in rows if row.failure is None]
    if not rows:
        return "next: nothing to measure; name a model"
    if not measured:
        return f"next: nothing could be measured; 'redline history show {rows[0].record_id[:13]}' has the whole error"
    by_model: dict[str, list[RunSummary]] = {}
    for row in measured:
        by_model.setdefault(row.model, []).append(row)
    if len(by_model) == 1:
        return f"next: {_next_of(measured)}"
    model, own = next(((model, own) for model, own in by_model.items() if _fastest(own)), next(iter(by_model.items())))
    return f"next: {' '.join(model.split())}: {_next_of(own)}"


def _next_of(measured: Sequence[RunSummary]) -> str:
    """About rows of one model."""
    first = measured[0]
    if (best := _fastest(measured)) is not None and best.vs_first is not None:
        if not is_decided(best):
            return (
                f"{best.recipe} looks fastest ({ratio_cell(best)}), but its times are doubted: measure again on a quieter "
                "machine or with a larger batch"
            )
        told = f"{best.recipe} is the fastest here that has acceptable outputs ({ratio_cell(best)})"
        if best.bound.label == "host" and best.worth_trying:
            return f"{told}; it is host-bound: {_try(best)}"
        return f"{told}; 'redline history show {best.record_id[:13]}' has the details"
    if (undecided := next((row for row in measured if _is_undecided(row)), None)) is not None:
        return f"inconclusive: {undecided.recipe} {_open_question(undecided.vs_first)}; {LONGER}"
    if first.bound.evidence.code == "outside-operators" and not any(row.vs_first for row in measured):
        return _look_closer(first, "profile", "shows what it does outside of operators, which is most of the step")
    if not any(row.vs_first for row in measured) and first.worth_trying:
        return _try(first)
    if (host := next((row for row in measured if row.bound.label == "host"), None)) is not None:
        return f"{host.recipe} is host-bound: {_try(host) if host.worth_trying else 'a larger batch gives the device more to do'}"
    if not any(row.vs_first for row in measured):
        return _look_closer(first, "profile", "shows where its time goes")
    faster = [row for row in measured if row.vs_first and (row.vs_first.low or 0) > 1]
    if any(map(_is_quantized, faster)):
        return "only quantized recipes are faster than the first here; check them on your own data, or try others"
    if any(row.numerics and row.numerics.method == "unchecked" for row in faster):
        best = max(faster, key=lambda row: row.vs_first.ratio if row.vs_first else 0.0)
        assert best.vs_first is not None
        return f"{best.recipe} is the fastest here ({format_ratio(best.vs_first.ratio)}); its outputs were not compared with fp32"
    if faster:
        return "only recipes without acceptable outputs are faster than the first here; try others"
    if first.worth_trying:
        return f"no recipe here is faster than the first; {_try(first)}"
    is_tunable = first.task != "step" and first.conditions.ranks == 1
    command, what = ("tune", "searches for one") if is_tunable else ("profile", "shows where its time goes")
    return f"no recipe here is faster than the first; {_look_closer(first, command, what)}"


def _fastest(measured: Sequence[RunSummary]) -> RunSummary | None:
    """Surely faster than the first, with acceptable outputs."""
    sound = [row for row in measured if row.vs_first and row.vs_first.verdict == "faster" and _may_be_recommended(row)]
    return max(sound, key=lambda row: row.vs_first.ratio if row.vs_first else 0.0, default=None)


def _try(row: RunSummary) -> str:
    """The command that compares this row with what may help, ready to be typed."""
    recipes = [row.recipe, *row.worth_trying]
    if (line := row.command("run", recipes)) is None:
        given = "task='generate'" if row.task == "generate" else "inputs"
        return f"redline.run(model, {given}, recipes={recipes!r}) compares it with what may help here"
    return f"'{line}' compares it with what may help here"


def _look_closer(row: RunSummary, command: str, what: str) -> str:
    if row.model.startswith("watch:"):
        return f"'redline watch --profile -- …' on {row.model.removeprefix('watch:')} shows where its time goes"
    recipes = [row.recipe] if command == "profile" and row.recipe != BASELINE else []
    if (line := row.command(command, recipes)) is None:
        live = row.model.partition(":")[2] if row.task == "step" else "model, inputs"
        return f"redline.{command}({live}) {what}"
    return f"'{line}' {what}"


def _open_question(versus: VersusFirst | None) -> str:
    """What its interval leaves open."""
    if versus is not None and versus.low is not None and versus.low > 1:
        return f"is faster than the first, but maybe by less than {format_share(TIME_BAND)}"
    if versus is not None and versus.high is not None and versus.high < 1:
        return f"is slower than the first, but maybe by less than {format_share(TIME_BAND)}"
    return "may be faster or slower than the first"


def _is_undecided(row: RunSummary) -> bool:
    """Its interval allows both for a gain and for none."""
    versus = row.vs_first
    if versus is None or not _may_be_recommended(row):
        return False
    return versus.verdict == "inconclusive"


def _may_be_recommended(row: RunSummary) -> bool:
    return row.numerics is not None and row.numerics.passed and not _is_quantized(row)


def _is_quantized(row: RunSummary) -> bool:
    return row.capabilities is not None and row.capabilities.quantizes
