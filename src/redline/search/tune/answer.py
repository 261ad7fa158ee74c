"""The answer of a search in one sentence, from its own ranking."""

from __future__ import annotations

from redline.analyze.pairs import TIME_BAND
from redline.model.spec import BASELINE
from redline.model.units import format_seconds, format_share, significant
from redline.search.tune.result import Ranked, TuneSummary, Winner

WORTH_TELLING = 1.25
"""By this factor or more: what a ratio of one process is worth is told beside it."""
WIDEST = 4.0
"""The upper end of an interval over its lower one, beyond which its figures help nobody, as everywhere (`model/metrics.py`)."""


def answer(found: TuneSummary) -> str:
    """The result of the search in one sentence."""
    leader = found.leader
    codes = {each.code for each in found.notes}
    if leader is None:
        late, wild = "baseline-too-slow" in codes, "not-finite" in codes
        does = "was not ready within the budget" if late else "itself does not run here"
        return f"no answer: the baseline {'gives numbers that are not finite' if wild else does}"
    if found.winner is not None:
        told = f"{'winner' if found.has_answer else 'best so far'}: {_told(found, found.winner)}"
        return told + (f"; {found.headroom:.1f}× left to the roofline" if found.headroom is not None else "")
    if leader.recipe == BASELINE:
        if "not-repeatable" in codes:
            return "no answer: the baseline itself does not give the same twice; nothing can be compared with it"
        if found.trials > 1:
            return f"no winner: {_nothing_faster(found)}"
        if "no-signal" in codes:
            return "no answer: only the baseline was tried; nothing can be compared with it"
        why = "there is nothing else to try here" if found.has_answer else "there was no time for anything else"
        why = "what else was begun was not ready in time" if "given-up" in codes else why
        return f"no answer: only the baseline was tried; {why}"
    so_far = "no winner" if found.has_answer else "best so far, but not certain"
    return f"{so_far}: whether it {_beats(found)} the baseline is not decided for {_told(found, leader)}"


WRONG_NUMBERS = ("above-tolerance", "unresolved", "not-finite", "no-signal")
"""Codes of recipes that may not be recommended for what they compute."""


def _nothing_faster(found: TuneSummary) -> str:
    ended = "" if found.has_answer else "; the search ended before all that may be faster was tried"
    undecided = _undecided(found)
    if undecided is not None:
        told = f"{undecided.recipe} was measured at {ratio_told(undecided)}, which decides nothing"
        return f"nothing that was tried surely {_beats(found)} the baseline; {told}{ended}"
    rejected = {each.recipe: each.code for each in found.rejected}
    faster = [row for row in found.ranking if row.recipe != BASELINE and row.ratio > 1 + TIME_BAND]
    sound = " and kept its numbers" if any(rejected.get(row.recipe) in WRONG_NUMBERS for row in faster) else ""
    unraced = [row.recipe for row in faster if row.recipe not in rejected and row.verdict == "faster"]
    ended += f"; {unraced[0]} was faster in one process and was not raced" if unraced else ""
    return f"nothing that was tried{sound} {_beats(found)} the baseline{ended}"


def _undecided(found: TuneSummary) -> Ranked | None:
    """The first that was raced against the baseline and may be faster for all that its interval says."""
    rows = (row for row in found.ranking if row.recipe != BASELINE and row.verdict == "inconclusive")
    return next((row for row in rows if row.high is not None and row.high > 1 + TIME_BAND), None)


def _beats(found: TuneSummary) -> str:
    return "needs less energy than" if found.objective == "energy" else "is faster than"


def _told(found: TuneSummary, leader: Winner) -> str:
    by = "the items per joule of the baseline" if found.objective == "energy" else "the baseline"
    told = f"{leader.recipe}, {leader.ratio:.2f}× {by}"
    told += _interval(leader.low, leader.high) or f", seen in one process only{_off(leader.may_be_off)}"
    rate = leader.throughput_per_s
    if rate is not None:
        told += f", {significant(rate, max(3, len(str(round(rate)))))} {leader.item or 'item'}/s"
    if leader.ttft_s is not None:
        told += f", first token after {format_seconds(leader.ttft_s)}"
    if leader.tpot_s is not None:
        told += f", then {format_seconds(leader.tpot_s)} per token"
    if leader.bandwidth_share is not None:
        told += f" ({format_share(leader.bandwidth_share)} of the copy bandwidth)"
    if leader.energy_per_item_j is not None:
        told += f", {significant(leader.energy_per_item_j * 1e3, 3)} mJ/{leader.item or 'item'}"
    if leader.cost_per_million is not None:
        told += f", {significant(leader.cost_per_million, 3)} per million"
    return told + (f" at batch {leader.batch}" if leader.batch else "")


def ratio_told(row: Ranked) -> str:
    if row.recipe == BASELINE:
        return "–"
    told, off = _interval(row.low, row.high), row.may_be_off
    if not told and off is not None and off >= WORTH_TELLING:
        told = _interval(row.ratio / off, row.ratio * off, "~")
    return f"{row.ratio:.2f}×{told}"


def _off(factor: float | None) -> str:
    """What a ratio without an interval is worth, where that is little: beside other processes, say."""
    if factor is None or factor < WORTH_TELLING:
        return ""
    return f" and may be off by {significant(min(factor, WIDEST), 2)}×"


def _interval(low: float | None, high: float | None, mark: str = "") -> str:
    """In brackets; what two processes that do not agree at all say has no figures worth reading."""
    if not low or not high:
        return ""
    return f" ({mark}{low:.2f}–{high:.2f})" if high / low < WIDEST else " (too wide to tell)"
