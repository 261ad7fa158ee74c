"""Answers that need torch but no run."""

from __future__ import annotations

import msgspec
import torch

from redline.bench.count.ask import answer_count
from redline.bench.device import open_device, resolve_device
from redline.bench.environment import describe
from redline.bench.health import health
from redline.bench.measure.ceilings import answer_ceilings
from redline.bench.recipe.compose import switch_choices, switches_of
from redline.bench.recipe.metric import metric_of
from redline.bench.recipe.snippet import snippet_of
from redline.bench.workload.build import build_workload, check_model, fingerprint_of, list_models
from redline.errors import UsageError
from redline.protocol import (
    AskCeilings,
    AskCheck,
    AskCount,
    AskEnvironment,
    AskHealth,
    AskMetric,
    AskModels,
    AskOperators,
    AskSnippet,
    AskSwitches,
    Checked,
    CheckedSpecs,
    EnvironmentAnswer,
    ModelNames,
    Question,
    Reply,
    Snippet,
    SwitchChoice,
    SwitchChoices,
)
from redline.record import Capabilities
from redline.spec import RunSpec


def answer(question: Question) -> Reply:
    if isinstance(question, AskEnvironment):
        if question.threads is not None:
            torch.set_num_threads(question.threads)
        return EnvironmentAnswer(environment=describe(open_device(resolve_device(question.device))))
    if isinstance(question, AskModels):
        models, missing = list_models(question.pattern)
        return ModelNames(models=tuple(models), missing=tuple(missing))
    if isinstance(question, AskCheck):
        return CheckedSpecs(answers=tuple(check(spec) for spec in question.specs))
    if isinstance(question, AskSwitches):
        return SwitchChoices(choices=tuple(choices_for(question.spec)))
    if isinstance(question, AskSnippet):
        return Snippet(code=snippet_of(question.spec))
    if isinstance(question, AskMetric):
        return metric_of(question.spec, question.check)
    if isinstance(question, AskCount):
        return answer_count(question.spec)
    if isinstance(question, AskCeilings):
        return answer_ceilings(question.device, question.threads)
    if isinstance(question, AskOperators):
        from redline.bench.measure.operators import answer_operators

        return answer_operators(question)
    assert isinstance(question, AskHealth)
    return health()


def choices_for(spec: RunSpec) -> list[SwitchChoice]:
    model = build_workload(spec.workload, spec.seed).model
    return switch_choices(model, open_device(resolve_device(spec.device)), spec.workload.task)


def check(spec: RunSpec) -> Checked:
    """What can be known before anything is built: names, files, exclusions, the device."""
    try:
        resolved = msgspec.structs.replace(spec, device=resolve_device(spec.device))
        switches = switches_of(spec.recipe, spec.workload.task)
        check_model(spec.workload)
        fingerprint = fingerprint_of(spec.workload)
    except UsageError as error:
        return Checked(spec=spec, usage=str(error))
    capabilities = Capabilities.together(switch.capabilities() for switch in switches)
    return Checked(spec=resolved, fingerprint=fingerprint, capabilities=capabilities)
