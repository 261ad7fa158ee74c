"""Answers that need torch but no run."""

from __future__ import annotations

import msgspec
import torch

from redline.bench.count.count import answer_count
from redline.bench.count.facts import facts_of
from redline.bench.data.source import check_data
from redline.bench.device import Device, open_device, resolve_device
from redline.bench.device.failure import is_out_of_memory
from redline.bench.doctor import health
from redline.bench.environment import describe
from redline.bench.measure.ceilings import answer_ceilings
from redline.bench.measure.operators import answer_operators
from redline.bench.memory import answer_memory
from redline.bench.recipe.compose import switch_choices, switches_of
from redline.bench.recipe.numerics import metric_of
from redline.bench.recipe.snippet import snippet_of
from redline.bench.workload.build import (
    build_workload,
    check_model,
    fingerprint_of,
    list_models,
    settle_batch,
    understood,
)
from redline.bench.workload.ranks import refuse_more_than_fit, refuse_shared_devices
from redline.bench.workload.sources.user import remember_live
from redline.bench.workload.workload import Workload
from redline.model.errors import UsageError
from redline.model.protocol import (
    AskCeilings,
    AskCheck,
    AskCount,
    AskEnvironment,
    AskHealth,
    AskMemory,
    AskMetric,
    AskModels,
    AskOperators,
    AskSnippet,
    AskSwitches,
    Checked,
    CheckedSpecs,
    EnvironmentAnswer,
    ModelNames,
    OnProgress,
    Question,
    Reply,
    Snippet,
    SwitchChoices,
)
from redline.model.record import Capabilities
from redline.model.spec import RunSpec, WorkloadSpec
from redline.model.work import Facts


def answer(question: Question, on_progress: OnProgress = lambda progress: None) -> Reply:
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
        return choices_for(question.spec)
    if isinstance(question, AskSnippet):
        return Snippet(code=snippet_of(question.spec))
    if isinstance(question, AskMetric):
        return metric_of(question.spec, question.check, question.baseline)
    if isinstance(question, AskCount):
        return answer_count(question.spec)
    if isinstance(question, AskMemory):
        return answer_memory(question.spec, question.snapshot)
    if isinstance(question, AskCeilings):
        return answer_ceilings(question.device, question.threads, on_progress)
    if isinstance(question, AskOperators):
        return answer_operators(question)
    assert isinstance(question, AskHealth)
    return health()


def choices_for(spec: RunSpec) -> SwitchChoices:
    """The switches this workload can be given, judged by what a few real steps of it on its device show."""
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    device = open_device(resolve_device(spec.device))
    if device.is_accelerator:
        device.limit_memory(None, isolated=False)  # looks at what is free, and caps nothing
    give_back = remember_live(spec.workload)
    try:
        workload = build_workload(spec.workload, spec.seed)
        facts = None if spec.workload.task == "generate" else _facts(spec, workload, device)
        choices = switch_choices(workload.model, device, spec.workload.task, facts)
    finally:
        give_back()
    return SwitchChoices(choices=tuple(choices), facts=facts)


def _facts(spec: RunSpec, workload: Workload, device: Device) -> Facts | None:
    """None where a plain step does not fit into memory: a recipe that needs less of it may still run."""
    try:
        workload.to(device.torch_device)
        settle_batch(workload, spec.workload, ask=False)
        return facts_of(workload, device, spec.workload.optimizer, spec.seed)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    device.release_cache()
    return None


def check(spec: RunSpec) -> Checked:
    """Checks what can be known before anything is built: names, files, exclusions and the device."""
    try:
        check_model(_before_data(spec))
        spec = msgspec.structs.replace(spec, workload=understood(spec.workload))
        resolved = msgspec.structs.replace(spec, device=resolve_device(spec.device))
        _check_ranks(spec, resolved.device)
        switches = switches_of(spec.recipe, spec.workload.task)
        if spec.train is not None:
            check_data(spec.train.data, spec.workload)
        fingerprint = fingerprint_of(spec.workload)
    except UsageError as error:
        return Checked(spec=spec, usage=str(error))
    capabilities = Capabilities.together(switch.does for switch in switches)
    return Checked(spec=resolved, fingerprint=fingerprint, capabilities=capabilities)


def _check_ranks(spec: RunSpec, device: str) -> None:
    if spec.ranks == 1:
        return
    if ":" in spec.device:
        kind = device.partition(":")[0]
        raise UsageError(
            f"{spec.ranks} ranks take one GPU each, from the first on: give --device {kind} without a number"
        )
    if spec.launch.rendezvous is not None:
        return
    if device == "cpu":
        refuse_more_than_fit(spec.ranks)
    else:
        refuse_shared_devices(device.partition(":")[0], spec.ranks)


def _before_data(spec: RunSpec) -> WorkloadSpec:
    """The part of a training that can be checked before its data, which decide the image size, are read."""
    if spec.train is None or spec.workload.image_size is not None:
        return spec.workload
    return msgspec.structs.replace(spec.workload, classes=None)
