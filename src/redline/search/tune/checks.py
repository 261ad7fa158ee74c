"""The user's own check, run on the model as it is, on all that go to the last race, and on the winner."""

from __future__ import annotations

from redline.model.errors import UsageError
from redline.model.protocol import Ask, FailureReply
from redline.model.questions import AskMetric, MetricAnswer
from redline.search.tune.lessons import metric_of, quantizing_of
from redline.search.tune.record import Metric
from redline.search.tune.reserve import choose_finalists
from redline.search.tune.space import BASELINE, Switches
from redline.search.tune.tuner import Tuner
from redline.search.tune.winner import recommended

PROOF_NEAR = 0.1
"""Of the quantized recipes only those within this of the fastest are worth the check, which may take long."""


def check_model_as_it_is(tuner: Tuner) -> None:
    """Run the check on the baseline before anything is measured: a check that cannot be run is an error."""
    if tuner.asked.check is None or metric_of(tuner.space.text(BASELINE), tuner.tune) is not None:
        return
    tuner.observer.stage("your check on the model as it is")
    metric = _ask_metric(tuner, BASELINE)
    if metric.failure is not None:
        raise UsageError(f"your check {tuner.asked.check} cannot be run on the model as it is: {metric.failure}")
    tuner.keep(metrics=(*tuner.tune.metrics, metric))


def prove(tuner: Tuner) -> None:
    """Run the check on every recipe that goes to the last race, and on quantized ones that are nearly as fast."""
    known = tuner.seen()
    if tuner.asked.check is None or not known:
        return
    fastest = min(each.log_s for each in known.values())
    for switches, each in sorted(known.items(), key=lambda item: item[1].log_s):
        is_near = each.log_s <= fastest + PROOF_NEAR
        if quantizing_of(switches, tuner.tune) and is_near and not tuner.is_only_shown(switches):
            _run_check(tuner, switches)
    # Each that falls makes room for another.
    while unchecked := [each for each in choose_finalists(tuner) if not _is_checked_by_user(tuner, each)]:
        _run_check(tuner, unchecked[0])


def prove_fastest(tuner: Tuner) -> None:
    """While the search goes on: it should not go by a recipe that may not win."""
    known = tuner.seen()
    if tuner.asked.check is None or not known:
        return
    switches, _ = min(known.items(), key=lambda item: item[1].log_s)
    if quantizing_of(switches, tuner.tune) and not tuner.is_only_shown(switches):
        _run_check(tuner, switches)


def prove_winner(tuner: Tuner) -> None:
    """Run the check on what will be recommended, which may have been simplified since the last race; even over budget."""
    if tuner.asked.check is None:
        return
    while (chosen := recommended(tuner.tune, tuner.records)) is not None:
        switches = tuner.space.switches_of(chosen)
        if _is_checked_by_user(tuner, switches):
            return
        _run_check(tuner, switches)


def _is_checked_by_user(tuner: Tuner, switches: Switches) -> bool:
    return metric_of(tuner.space.text(switches), tuner.tune) is not None


def _run_check(tuner: Tuner, switches: Switches) -> None:
    """Once for each recipe."""
    if not _is_checked_by_user(tuner, switches):
        tuner.observer.stage(f"your check on {tuner.space.text(switches)}")
        tuner.keep(metrics=(*tuner.tune.metrics, _ask_metric(tuner, switches)))


def _ask_metric(tuner: Tuner, switches: Switches) -> Metric:
    assert tuner.asked.check is not None
    spec, recipe = tuner.trial_spec(switches), tuner.space.text(switches)
    known = metric_of(tuner.space.text(BASELINE), tuner.tune)
    session = tuner.door.open()
    try:
        question = AskMetric(spec=spec, check=tuner.asked.check, baseline=known.value if known else None)
        reply = session.ask(Ask(question=question))
    except BaseException:
        session.kill()  # closing would wait for a check that nobody wants any more
        raise
    session.close()
    if isinstance(reply, MetricAnswer):
        return Metric(recipe=recipe, value=reply.value, baseline=reply.baseline)
    why = reply.failure.told if isinstance(reply, FailureReply) else f"the bench answered {type(reply).__name__}"
    return Metric(recipe=recipe, value=None, baseline=None, failure=why)
