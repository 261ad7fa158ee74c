"""What an earlier search of the same workload leaves a new one: where to begin, what may break, what preparing takes.

They are hints. Nothing is left out or recommended because of them, as the code of a model may have changed since.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec

from redline.model.identity import device_key
from redline.model.note import Note, note
from redline.model.record import Prepared
from redline.search.tune.costs import prepare_s
from redline.search.tune.estimates import Records
from redline.search.tune.lessons import EXACTLY
from redline.search.tune.record import Earlier, Trial, TuneRecord, TuneSpec, differences
from redline.search.tune.space import BASELINE, Space, Switches
from redline.search.tune.tuner import Tuner
from redline.search.tune.winner import recommended


def earlier_of(kept: TuneRecord, records: Records, asked: TuneSpec, space: Space) -> Earlier | None:
    """What the last search under this name knows; None where it asked something else, or did not time its baseline."""
    first = _first(kept, space)
    prepared = _prepared(first, records)
    if first is None or prepared is None or differences(kept.tune, asked):
        return None
    winner = recommended(kept, records)
    return Earlier(
        at=kept.created_at,
        winner=winner if winner is not None and _switches(space, winner) else None,
        model_hash=prepared.workload.model_hash,
        device=device_key(prepared.environment),
        doubted=tuple(
            lesson.switches
            for lesson in kept.lessons
            if lesson.scope != "recipe" and lesson.reason.about not in EXACTLY and lesson.reason.code != "no-signal"
        ),
        prepare_s=dict(_prepare_s(kept, records, space, first.cost_s)),
        given_up=tuple(each for each in kept.given_up if _switches(space, each.recipe)),
    )


def _prepare_s(kept: TuneRecord, records: Records, space: Space, plain_s: float) -> Iterator[tuple[str, float]]:
    """Of switches that take time to prepare: what the last recipe with one of them took beyond the baseline."""
    for trial in kept.trials:
        slow = [each for each in _switches(space, trial.recipe) if prepare_s(space.by_switch[each]) > 0]
        if len(slow) == 1 and _prepared(trial, records) is not None:
            yield slow[0], max(trial.cost_s - plain_s, 0.0)


def _switches(space: Space, recipe: str) -> Switches:
    """Those of a recipe; none where it cannot be had any more."""
    words = frozenset(recipe.split("+")) - {space.text(BASELINE)}
    return words if words <= space.by_switch.keys() and space.is_valid(words) else BASELINE


def _first(tune: TuneRecord, space: Space) -> Trial | None:
    """The trial of the baseline."""
    return next((trial for trial in tune.trials if trial.recipe == space.text(BASELINE)), None)


def _prepared(trial: Trial | None, records: Records) -> Prepared | None:
    record = records.get(trial.record_id) if trial is not None else None
    return record.prepared if record is not None else None


def earlier_note(earlier: Earlier) -> Note:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(earlier.at))
    found = f"its best, {earlier.winner}, comes first where it fits" if earlier.winner else "it found nothing faster"
    doubts = f"; {', '.join('+'.join(part) for part in earlier.doubted)} broke then" if earlier.doubted else ""
    return note("earlier", f"begins with what the search of {when} knew: {found}{doubts}")


def forget_another_model(tuner: Tuner) -> None:
    """Drop what is known from before where the baseline shows that the model or the device is another now."""
    earlier, first = tuner.tune.earlier, _first(tuner.tune, tuner.space)
    prepared = _prepared(first, tuner.records)
    if earlier is None or prepared is None:
        return
    is_same_model = earlier.model_hash == prepared.workload.model_hash
    if is_same_model and earlier.device == device_key(prepared.environment):
        return
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(earlier.at))
    what = "device or its software" if is_same_model else "model"
    notes = [each for each in tuner.tune.notes if each.code != "earlier"]
    told = note("earlier-unlike", f"the {what} is another than in the search of {when}: nothing is taken from it")
    tuner.keep(earlier=None, notes=(*notes, told))


def leading_then(tuner: Tuner) -> list[Switches]:
    """The winner of the search before, where there was one: the first that is worth a trial."""
    earlier = tuner.tune.earlier
    known = _switches(tuner.space, earlier.winner) if earlier is not None and earlier.winner else BASELINE
    return [known] if known else []


def with_earlier(record: TuneRecord, earlier: Earlier | None) -> TuneRecord:
    if earlier is None:
        return record
    return msgspec.structs.replace(record, earlier=earlier, notes=(*record.notes, earlier_note(earlier)))
