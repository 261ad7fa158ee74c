"""Quantized recipes proven by the user's own check: as soon as one is the fastest, and before the last race."""

from __future__ import annotations

from redline.analyze.tune.estimates import quantizing_of
from redline.analyze.tune.record import Metric
from redline.protocol import Ask, AskMetric, FailureReply, MetricAnswer
from redline.search.tune.space import Steps
from redline.search.tune.tuner import Tuner

NEAR = 0.1
"""Only those within this of the fastest are worth the check, which may take long."""


def prove(tuner: Tuner) -> None:
    """Run the check on every quantized recipe that is among the fastest."""
    check, known = tuner.asked.check, tuner.seen()
    if check is None or not known:
        return
    fastest = min(each.log_s for each in known.values())
    done = {metric.recipe for metric in tuner.tune.metrics}
    for steps, each in sorted(known.items(), key=lambda item: item[1].log_s):
        is_quantized = bool(quantizing_of(steps, tuner.tune))
        if is_quantized and each.recipe not in done and each.log_s <= fastest + NEAR and not tuner.is_only_shown(steps):
            tuner.observer.stage(f"your check on {each.recipe}")
            tuner.keep(metrics=(*tuner.tune.metrics, ask_metric(tuner, steps, check)))


def prove_fastest(tuner: Tuner) -> None:
    """While the search goes on: it should not go by a recipe that may not win."""
    check, known = tuner.asked.check, tuner.seen()
    if check is None or not known:
        return
    steps, fastest = min(known.items(), key=lambda item: item[1].log_s)
    is_asked = any(metric.recipe == fastest.recipe for metric in tuner.tune.metrics)
    if quantizing_of(steps, tuner.tune) and not is_asked and not tuner.is_only_shown(steps):
        tuner.observer.stage(f"your check on {fastest.recipe}")
        tuner.keep(metrics=(*tuner.tune.metrics, ask_metric(tuner, steps, check)))


def ask_metric(tuner: Tuner, steps: Steps, check: str) -> Metric:
    spec, recipe = tuner.trial_spec(steps), tuner.space.text(steps)
    session = tuner.door.open()
    try:
        reply = session.ask(Ask(question=AskMetric(spec=spec, check=check)))
    finally:
        session.close()
    if isinstance(reply, MetricAnswer):
        return Metric(recipe=recipe, value=reply.value, baseline=reply.baseline)
    why = reply.failure.message if isinstance(reply, FailureReply) else f"the bench answered {type(reply).__name__}"
    return Metric(recipe=recipe, value=None, baseline=None, failure=why)
