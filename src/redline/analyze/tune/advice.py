"""What a search recommends, in the place of what its single records would suggest."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from redline.analyze.recommend import Advice
from redline.analyze.tune.finding import BASELINE, TuneFinding, Winner


def with_winner(advice: Sequence[Advice], finding: TuneFinding) -> list[Advice]:
    """The search saw every recipe in several processes: the best of its heats alone would flatter."""
    winner = finding.winner
    if winner is None:
        return [each for each in advice if each.kind != "recipe"]

    def told(each: Advice) -> Advice:
        return msgspec.structs.replace(
            each,
            headline=_headline(finding, winner),
            details=(*_details(finding, winner), *(line for line in each.details[1:] if each.recipe == winner.recipe)),
            recipe=winner.recipe,
            batch=winner.batch,
            record_id=winner.record_id,
            ratio=winner.ratio if winner.recipe != BASELINE else None,
            low=winner.low,
            high=winner.high,
        )

    return [told(each) if each.kind == "recipe" else each for each in advice]


def _headline(finding: TuneFinding, winner: Winner) -> str:
    if winner.recipe == BASELINE:
        return f"Nothing that was tried beats the baseline of {finding.model}"
    does = "trains" if finding.task == "train" else "runs"
    where = finding.device_name or finding.device
    return f"{winner.recipe} {does} {finding.model} {winner.ratio:.2f}× as fast as {BASELINE} on {where}"


def _details(finding: TuneFinding, winner: Winner) -> list[str]:
    if winner.low is None or winner.high is None:
        proof = "seen in one process only: the budget ended before others could be asked"
    else:
        proof = f"{winner.ratio:.2f}× ({winner.low:.2f}–{winner.high:.2f}) over fresh processes, measured in turns"
    lines = [proof]
    for step in finding.steps:
        between = f" ({step.low:.2f}–{step.high:.2f})" if step.low is not None and step.high is not None else ""
        lines.append(f"without {step.step} it takes {step.gain:.2f}×{between} as long")
    if winner.compile_s:
        lines.append(f"compiling takes {winner.compile_s:.1f} s")
    return lines
