"""What is to be said beside a result: what it was measured on, what disturbed it, what was not proven or not finished."""

from __future__ import annotations

from collections.abc import Mapping

from redline.analyze.summary import RunSummary
from redline.model.note import Note, note
from redline.model.record import Numerics
from redline.model.spec import BASELINE
from redline.model.units import significant
from redline.search.tune.estimates import Records
from redline.search.tune.lessons import metric_of, rejection
from redline.search.tune.record import TuneRecord
from redline.search.tune.winner import Winner, replicates_of, winner_of


def notes_of(
    tune: TuneRecord, records: Records, rows: Mapping[str, RunSummary], leader: Winner | None, numerics: Numerics | None
) -> tuple[Note, ...]:
    """`numerics`: the farthest that the leader was seen from strict fp32."""
    winner = leader if leader is not None and leader.is_certain else None
    return (
        *tune.notes,
        *_check_notes(winner, tune),
        *_batch_notes(leader, tune, records),
        *_disturbance_notes(leader, rows),
        *_scope_notes(winner, tune, numerics),
        *_comparison_notes(winner, records),
        *_given_up_notes(tune),
    )


def _given_up_notes(tune: TuneRecord) -> list[Note]:
    """What was begun, and not prepared in time in any session."""
    tried, longest = {trial.recipe for trial in tune.trials}, dict[str, float]()
    for each in tune.given_up:
        longest[each.recipe] = max(each.seconds, longest.get(each.recipe, 0.0))
    return [
        note("given-up", f"{recipe} was given up: {seconds:.0f} s were not enough to prepare it", about=recipe)
        for recipe, seconds in longest.items()
        if recipe not in tried
    ]


DISTURBANCES = ("shared-cpu", "shared-gpu", "throttled", "others-at-work")
"""Doubts about times that are not the recipe's doing."""


def _disturbance_notes(leader: Winner | None, rows: Mapping[str, RunSummary]) -> list[Note]:
    if leader is None:
        return []
    found = rows[leader.record_id].verdict
    notes = [note(each.code, f"{leader.recipe}: {each}", about=leader.recipe) for each in found.noted("contended")]
    for each in (*found.reasons, *found.notes):
        if each.code in DISTURBANCES:
            doubt = "" if leader.recipe == BASELINE else "; undisturbed it may be faster, and its gain another"
            remedy = ": run it again when they have ended" if each.code == "shared-cpu" else ""
            text = f"{leader.recipe}: {each}{doubt}{remedy}"
            notes.append(note(each.code, text, about=leader.recipe))
    return notes


MUCH_DOUBLE = 0.2
"""Of the operators' time: a model that computes with 64 bits in so much of it does so on purpose."""
DIGITS = {"bf16": 2, "fp16": 3, "tf32": 3}
"""Decimal digits that a number format keeps, about."""


def _scope_notes(winner: Winner | None, tune: TuneRecord, numerics: Numerics | None) -> list[Note]:
    """What the gain was measured on, where other inputs may show another; and digits that a person asked for and loses."""
    if winner is None or tune.facts is None:
        return []
    notes, facts = [], tune.facts
    if facts.branches or facts.varies_shapes:
        what = "runs other operators" if facts.branches else "gives its operators other shapes"
        text = (
            f"the model {what} on other values of its inputs, and was timed with its own: elsewhere the gain may differ"
        )
        notes.append(note("one-branch", text))
    digits = DIGITS.get(numerics.number_format) if numerics is not None else None
    if facts.double_share >= MUCH_DOUBLE and numerics is not None and digits is not None:
        kept = f"{numerics.number_format} keeps about {digits} of its 16 digits"
        text = f"the model computes in float64, and {kept}: where they matter, search with --tolerance 1e-6"
        notes.append(note("fewer-digits", text))
    return notes


LEFT_OUT_OF_COMPARISON = ("masked-positions", "one-input-set")
"""What a workload says about how its outputs are compared."""


def _comparison_notes(winner: Winner | None, records: Records) -> list[Note]:
    """What the verdict on the winner's numbers leaves out."""
    if winner is None:
        return []
    prepared = (each.prepared for each in records.values() if str(each.spec.recipe) == winner.recipe)
    found = (each for one in prepared if one is not None for each in one.workload.notes)
    return list(dict.fromkeys(each for each in found if each.code in LEFT_OUT_OF_COMPARISON))


def _check_notes(winner: Winner | None, tune: TuneRecord) -> list[Note]:
    if winner is None or tune.tune.check is None or metric_of(winner.recipe, tune) is not None:
        return []
    return [note("check-not-run", f"your check has not been run on {winner.recipe}: it is not proven")]


def _batch_notes(winner: Winner | None, tune: TuneRecord, records: Records) -> list[Note]:
    """What the search for the batch saw, where the winner is told elsewhere or is another there."""
    if winner is None or not tune.batches:
        return []
    raced = {
        record.spec.workload.batch
        for replicate in replicates_of(tune.batch_replicates, records)
        for record in replicate
    }
    if winner.batch in raced:
        first = winner_of(tune, records)
        if first == winner.recipe:
            return []
        why = _why_not(first, winner, tune, records)
        return [note("other-winner", f"{first} won at the first batch, but not at batch {winner.batch}: {why}")]
    found = ", ".join(
        f"{choice.recipe} {significant(choice.throughput_per_s, 3)} {winner.item or 'item'}/s at batch {choice.batch}"
        for choice in tune.batches
    )
    if any(each.code == "batch-not-raced" for each in tune.notes):
        why = "they were not compared there"
    elif raced:
        why = "none of them may be recommended there"
    else:
        why = (
            "the budget ended before they were compared there"
            if tune.state in ("done", "out-of-budget")
            else "they have not been compared there yet"
        )
    return [note("batch-not-raced", f"the search for the batch, each recipe by itself, measured {found}; {why}")]


def _why_not(first: str | None, winner: Winner, tune: TuneRecord, records: Records) -> str:
    """Why the winner at the first batch is not the one at the batch that was found."""
    there = [
        each
        for replicate in replicates_of(tune.batch_replicates, records)
        for each in replicate
        if str(each.spec.recipe) == first
    ]
    lost = next((reason for each in there if (reason := rejection(each, tune)) is not None), None)
    return f"it fails there ({lost})" if lost else f"{winner.recipe} is as fast there, or faster"
