"""What searches recommend, in the place of what their single records would suggest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from redline.analyze.accuracy import farthest
from redline.analyze.recommend import Advice, costs, may_recommend, noise_remark, work
from redline.analyze.subject import Subject
from redline.analyze.summary import RunSummary
from redline.analyze.tune.certainty import certainty_of, winner_verdict
from redline.analyze.tune.finding import TuneFinding, Winner
from redline.spec import BASELINE


def with_winners(
    advice: Sequence[Advice],
    tunes: Sequence[TuneFinding],
    subjects: Mapping[str, Subject],
    rows: Mapping[str, RunSummary],
) -> list[Advice]:
    """A search saw its recipes in several processes: the best of its heats alone would flatter.

    `tunes`: newest last; of several that asked the same about one subject and batch, one that ended speaks before one
    that was cut short, then the newest. `subjects` and `rows`: by record.
    """
    searched: dict[Subject, dict[tuple[int | None, str], TuneFinding]] = {}
    for tune in sorted(tunes, key=lambda tune: tune.has_answer):
        subject = next((subjects[record_id] for record_id in tune.record_ids if record_id in subjects), None)
        if subject is not None:
            batch = tune.winner.batch if tune.winner else None
            searched.setdefault(subject, {})[batch, tune.objective] = tune
    suggested = {each.subject: each for each in advice if each.kind == "recipe"}
    about = list(dict.fromkeys([*(each.subject for each in advice), *searched]))
    told: list[Advice] = []
    for subject in about:
        own = suggested.get(subject)
        winners = _winners(subject, list(searched[subject].values()), rows) if subject in searched else []
        # A search that found nothing speaks for what it measured, and for nothing else.
        measured = {record_id for tune in searched.get(subject, {}).values() for record_id in tune.record_ids}
        told += winners or ([own] if own is not None and own.record_id not in measured else [])
        told += [each for each in advice if each.subject == subject and each.kind != "recipe"]
    return told


def _winners(subject: Subject, tunes: Sequence[TuneFinding], rows: Mapping[str, RunSummary]) -> list[Advice]:
    found = [(tune, tune.winner) for tune in tunes if tune.winner is not None]
    several = len({winner.batch for _, winner in found}) > 1
    found = [(tune, winner) for tune, winner in found if winner.recipe != BASELINE or tune.state == "done"]
    # The first is the headline of the page: what is decided goes before what is not.
    found.sort(key=lambda each: certainty_of(each[1]) != "decided")
    return [_advice(subject, tune, winner, rows, name_batch=several) for tune, winner in found]


def _advice(
    subject: Subject, tune: TuneFinding, winner: Winner, rows: Mapping[str, RunSummary], *, name_batch: bool
) -> Advice:
    where = f" at batch {winner.batch}" if name_batch else ""
    if _may_be_no_faster(winner):
        return _stay(subject, tune, winner, rows, where)
    is_decided = certainty_of(winner) == "decided"
    return Advice(
        subject=subject,
        kind="recipe",
        headline=_headline(tune, winner, where),
        details=(*_details(tune, winner, rows), *_costs(tune, winner, rows)),
        recipe=winner.recipe,
        batch=winner.batch,
        record_id=winner.record_id,
        ratio=winner.ratio if is_decided else None,
        low=winner.low if is_decided else None,
        high=winner.high if is_decided else None,
    )


def _may_be_no_faster(winner: Winner) -> bool:
    has_ratio = winner.recipe != BASELINE and math.isfinite(winner.ratio)
    return has_ratio and certainty_of(winner) == "undecided"


def _stay(subject: Subject, tune: TuneFinding, winner: Winner, rows: Mapping[str, RunSummary], where: str) -> Advice:
    first = next((row for row in _there(tune, winner, rows) if row.recipe == BASELINE), None)
    return Advice(
        subject=subject,
        kind="recipe",
        headline=f"Stay with {BASELINE} for {work(subject)}{where}: nothing that was tried is clearly faster",
        details=(f"next best: {winner.recipe}, {_proof(tune, winner, rows)}",),
        recipe=BASELINE,
        batch=winner.batch,
        record_id=first.record_id if first is not None else "",
    )


def _headline(finding: TuneFinding, winner: Winner, where: str) -> str:
    if winner.recipe == BASELINE:
        return f"Nothing that was tried beats the baseline of {finding.model}{where}"
    if not math.isfinite(winner.ratio):
        return (
            f"{winner.recipe} is the fastest that was found for {finding.model}{where}; the baseline itself has no time"
        )
    device = finding.device_name or finding.device
    faster = f"{winner.ratio:.2f}× as fast as {BASELINE} on {device}{where}"
    if certainty_of(winner) == "one process":
        did = "trained" if finding.task == "train" else "ran"
        return f"{winner.recipe} {did} {finding.model} {faster} in one process: whether it does in others is not known"
    does = "trains" if finding.task == "train" else "runs"
    return f"{winner.recipe} {does} {finding.model} {faster}"


def _details(finding: TuneFinding, winner: Winner, rows: Mapping[str, RunSummary]) -> list[str]:
    lines = [_proof(finding, winner, rows)]
    for step in finding.steps:
        between = f" ({step.low:.2f}–{step.high:.2f})" if step.low is not None and step.high is not None else ""
        lines.append(f"without {step.step} it takes {step.gain:.2f}×{between} as long")
    return lines


def _proof(finding: TuneFinding, winner: Winner, rows: Mapping[str, RunSummary]) -> str:
    verdict = winner_verdict(finding, winner)
    doubt = f": {verdict}" if verdict != "faster" and winner.recipe != BASELINE else ""
    if not math.isfinite(winner.ratio) or winner.low is None or winner.high is None:
        row = rows.get(winner.record_id)
        ratio = f"{winner.ratio:.2f}×, " if math.isfinite(winner.ratio) else ""
        only = f"{ratio}seen in one process only, the budget ended before others could be asked{doubt}"
        return only + (noise_remark(row) if row is not None else "")
    return f"{winner.ratio:.2f}× ({winner.low:.2f}–{winner.high:.2f}) over fresh processes, measured in turns{doubt}"


def _costs(tune: TuneFinding, winner: Winner, rows: Mapping[str, RunSummary]) -> list[str]:
    """By its first trial, which compiled from cold, and the longest check of its answers; nothing of another batch."""
    there = _there(tune, winner, rows)
    best = next((row for row in there if row.recipe == winner.recipe), None)
    first = next((row for row in there if row.recipe == BASELINE), None)
    if best is None or first is None or winner.recipe == BASELINE:
        return []
    checked = farthest(row.numerics for row in there if row.recipe == winner.recipe)
    return list(costs(msgspec.structs.replace(best, numerics=checked), first))


def _there(tune: TuneFinding, winner: Winner, rows: Mapping[str, RunSummary]) -> list[RunSummary]:
    """What may be recommended of all that was measured at the winner's batch."""
    own = [rows[record_id] for record_id in tune.record_ids if record_id in rows]
    return [row for row in own if row.batch == winner.batch and may_recommend(row)]
