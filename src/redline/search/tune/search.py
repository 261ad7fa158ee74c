"""The search as a sentence: explore, race the last few, take the winner apart, choose its batch."""

from __future__ import annotations

from redline.analyze.tune.finding import winner_of
from redline.search.tune.batches import batch_share_s, choose_batch
from redline.search.tune.explore import explore
from redline.search.tune.finals import ablate, decide, simplify, untold_steps
from redline.search.tune.proof import prove
from redline.search.tune.tuner import Tuner

NOTHING_RUNS = "nothing could be timed: the baseline itself does not run here"


def search(tuner: Tuner) -> None:
    """To the end, of the budget at the latest, or to Ctrl-C: what is known then is kept, and the state says which."""
    if tuner.tune.state == "done":
        return
    try:
        tuner.kept_back_s = batch_share_s(tuner)
        tuner.observer.stage("trying recipes")
        explore(tuner)
        if tuner.baseline() is None:
            tuner.keep(state="done", notes=(*tuner.tune.notes, NOTHING_RUNS))
            return
        tuner.kept_back_s = batch_share_s(tuner)
        prove(tuner)
        tuner.observer.stage("racing the last few")
        decide(tuner)
        _note_a_short_race(tuner)
        if winner_of(tuner.tune, tuner.records) is not None:
            tuner.observer.stage("what each step brings")
            ablate(tuner)
            simplify(tuner)
            tuner.kept_back_s = 0.0
            choose_batch(tuner)
            ablate(tuner)  # with what was kept back for the batch and not needed
            _note_untold_steps(tuner)
        tuner.keep(state="out-of-budget" if tuner.is_short else "done")
    except KeyboardInterrupt:
        tuner.keep(state="interrupted")


def _note_a_short_race(tuner: Tuner) -> None:
    heats, planned = len(tuner.tune.finals), tuner.asked.replicates
    if heats < planned and winner_of(tuner.tune, tuner.records) not in (None, "baseline"):
        note = f"the budget ended before the last race had its {planned} heats (it had {heats}): give it more"
        tuner.ran_short(note)


def _note_untold_steps(tuner: Tuner) -> None:
    steps = untold_steps(tuner)
    if steps:
        note = f"the budget ended before it was known what these bring: {', '.join(steps)}; give it more"
        tuner.ran_short(note)
