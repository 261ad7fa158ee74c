"""This answers the messages of the door: what was asked is prepared, measured, profiled, trained or served, and closed.

A failure is an answer too. How a step is prepared is in `prepare.py`. Questions (`Ask`) need torch but no run.
"""

from __future__ import annotations

import statistics
from typing import Any

import msgspec

from redline.bench.capture import capture
from redline.bench.count.count import answer_count
from redline.bench.count.facts import facts_of
from redline.bench.data.source import check_data
from redline.bench.device import Device, open_device, resolve_device
from redline.bench.device.failure import failure_from, is_out_of_memory
from redline.bench.doctor import health
from redline.bench.environment import describe
from redline.bench.measure.blocks import least_memory, measure_block
from redline.bench.measure.ceilings import measure_ceilings
from redline.bench.measure.generation import measure_generations
from redline.bench.measure.operators import answer_operators
from redline.bench.memory import answer_memory
from redline.bench.prepare import Workbench
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
from redline.bench.workload.generation import GenerateStep
from redline.bench.workload.ranks import Ranks, refuse_more_than_fit, refuse_shared_devices, where_is_main_thread
from redline.bench.workload.sources.user import HANDED_OVER, remember_live
from redline.bench.workload.workload import Workload
from redline.model.errors import BenchError, RedlineError, UsageError
from redline.model.protocol import (
    AllReduce,
    Ask,
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
    BlockReply,
    CeilingsAnswer,
    Checked,
    CheckedSpecs,
    Close,
    ClosedReply,
    EnvironmentAnswer,
    FailureReply,
    Feed,
    Load,
    LoadReply,
    Measure,
    ModelNames,
    OnProgress,
    Position,
    Prepare,
    Profile,
    Progress,
    Question,
    Reply,
    Request,
    Snippet,
    Squeeze,
    SqueezeReply,
    SwitchChoices,
    TraceReply,
    TrainEpoch,
)
from redline.model.record import Capabilities, Closed, Failure
from redline.model.spec import RunSpec, WorkloadSpec
from redline.model.work import Facts


class BenchSession:
    """A session is one workload under one recipe, from `Prepare` to `Close`."""

    def __init__(
        self,
        on_progress: OnProgress,
        *,
        import_s: float | None = None,
        start_s: float | None = None,
        isolated: bool = True,
        handed_over: dict[str, Any] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._on_progress = on_progress
        self._isolated = isolated
        self._handed_over = handed_over or {}
        HANDED_OVER.update(self._handed_over)
        self._ranks = ranks or Ranks()
        self._stage = "start"
        self._entered = 0
        cold = {"import_s": import_s, "start_s": start_s}
        self._bench = Workbench(self._enter, on_progress, self._ranks, cold, isolated=isolated)

    def handle(self, request: Request) -> Reply:
        """Returns the reply to a request. Any exception becomes a `Failure` with the stage it happened in, and so does `sys.exit`.

        Only Ctrl-C goes through, if the bench runs in the person's own process.
        """
        try:
            return self._answer(request)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and not self._isolated:
                raise
            failure = failure_from(error, self._stage)
            if not isinstance(error, RedlineError) and failure.kind == "user":
                failure = self._with_inputs(failure)
            if not isinstance(request, Ask):
                self._bench.forget()
            return FailureReply(failure=failure)

    def _with_inputs(self, failure: Failure) -> Failure:
        """Returns the failure with the inputs that nobody asked for: a text may be too long, or the default batch too small."""
        by_code = {known.code: known for known in self._bench.notes}
        default = by_code.get("default-batch")
        about = by_code.get("prompt") or (None if default is None else f"{default}; --batch sets another")
        return msgspec.structs.replace(failure, message=f"{failure.message} ({about})") if about else failure

    def position(self) -> Position:
        """Returns how far the session has come. Another thread asks while this one is busy."""
        waits, where = where_is_main_thread()
        return Position(stage=self._stage, entered=self._entered, steps=self._ranks.steps, waits=waits, where=where)

    def _answer(self, request: Request) -> Reply:
        if isinstance(request, Ask):
            self._enter("ask")
            return answer(request.question, self._on_progress)
        if isinstance(request, Prepare):
            return self._bench.prepare(request)
        if isinstance(request, Close):
            return ClosedReply(closed=self._close())
        self._stage = type(request).__name__.lower()
        bench, step, device = self._bench, self._bench.step, self._bench.device
        if step is None or device is None:
            raise BenchError("crash", f"asked to {self._stage} before anything was prepared")
        if isinstance(request, TrainEpoch | Feed):
            return self._train(request)
        if isinstance(request, Load):
            if bench.load_runner is None:
                raise BenchError("crash", "asked for a load where no load was prepared")
            return LoadReply(served=bench.load_runner.run(request))
        if isinstance(request, Profile):
            return TraceReply(trace=capture(step, device, request, bench.eager_model))
        if isinstance(request, Squeeze):
            return SqueezeReply(needed_bytes=least_memory(step, device, bench.memory_limit_bytes))
        if isinstance(request, AllReduce):
            return self._ranks.probe(request, device)
        assert isinstance(request, Measure)  # `Where` is answered beside the session
        if isinstance(step, GenerateStep):
            return BlockReply(block=measure_generations(step, device, request, bench.step_estimate_s))
        block = measure_block(step, device, request, bench.step_estimate_s, self._ranks)
        bench.step_estimate_s = statistics.median(block.samples)
        return BlockReply(block=block)

    def _train(self, request: TrainEpoch | Feed) -> Reply:
        if self._bench.training is None:
            raise BenchError("crash", f"asked to {self._stage} where no training was prepared")
        if isinstance(request, Feed):
            return self._bench.training.feed(request)
        self._enter("epoch", str(request.number))
        return self._bench.training.epoch(request.number)

    def _close(self) -> Closed:
        closed = self._bench.put_back()
        for name in self._handed_over:
            HANDED_OVER.pop(name, None)
        return closed

    def _enter(self, stage: str, detail: str = "") -> None:
        self._stage = stage
        self._entered += 1
        self._on_progress(Progress(stage=stage, detail=detail))


def answer(question: Question, on_progress: OnProgress = lambda progress: None) -> Reply:
    """Returns the answer to a question that needs torch but no run."""
    match question:
        case AskEnvironment(device=device, threads=threads):
            return EnvironmentAnswer(environment=describe(open_device(device, threads)))
        case AskModels(pattern=pattern):
            models, missing = list_models(pattern)
            return ModelNames(models=tuple(models), missing=tuple(missing))
        case AskCheck(specs=specs):
            return CheckedSpecs(answers=tuple(map(check, specs)))
        case AskSwitches(spec=spec):
            return choices_for(spec)
        case AskSnippet(spec=spec):
            return Snippet(code=snippet_of(spec))
        case AskMetric():
            return metric_of(question.spec, question.check, question.baseline)
        case AskCount(spec=spec):
            return answer_count(spec)
        case AskMemory():
            return answer_memory(question.spec)
        case AskCeilings(device=device, threads=threads):
            return CeilingsAnswer(ceilings=measure_ceilings(open_device(device, threads), on_progress))
        case AskOperators():
            return answer_operators(question)
        case AskHealth():
            return health()


def choices_for(spec: RunSpec) -> SwitchChoices:
    """Returns the switches that this workload can be given, judged by what a few real steps of it on its device show."""
    device = open_device(spec.device, spec.threads)
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
    """Returns what a few steps show, or None if a plain step does not fit into memory. A recipe that needs less may still run."""
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
    """Returns what can be known before anything is built: whether names, files, exclusions and the device are right."""
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
    """Raises a `UsageError` if the ranks do not fit on this machine. A rendezvous brings other machines, which are not known yet."""
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
    """Returns the part of a workload that can be checked before the data are read, which decide the image size."""
    if spec.train is None or spec.workload.image_size is not None:
        return spec.workload
    return msgspec.structs.replace(spec.workload, classes=None)
