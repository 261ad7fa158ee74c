"""The bench's main path: open the device, build the workload, apply the recipe, check the numerics, warm up, measure.

`BenchSession` answers the messages of the door. A failure is an answer too.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import msgspec
import torch

from redline.bench.capture import capture
from redline.bench.count.ask import count_step, shown_model
from redline.bench.count.count import because
from redline.bench.data.source import open_data
from redline.bench.device import Device, open_device, resolve_device
from redline.bench.device.failure import failure_from, is_out_of_memory
from redline.bench.environment import describe, few_threads, remember_flags
from redline.bench.load import Server
from redline.bench.measure.blocks import least_memory, measure_block, reach_steady_state
from redline.bench.measure.generation import generation_info, measure_generations
from redline.bench.questions import answer
from redline.bench.recipe.checks import GreedyReference
from redline.bench.recipe.compose import applicable_recipes, apply_recipe, blaming, number_format_of
from redline.bench.recipe.numerics import LossReference, OutputReference, forward
from redline.bench.recipe.rounding import unchanged_afterwards, unchanged_buffers
from redline.bench.recipe.switches.compiler import cache_state, compilations, compile_seconds, graph_breaks
from redline.bench.train.prepare import fitted
from redline.bench.train.session import TrainingSession
from redline.bench.workload.build import build_workload, settle_batch
from redline.bench.workload.called import OwnStep, TrainsItself, refuse_what_has_not_run
from redline.bench.workload.generation import GenerateStep
from redline.bench.workload.inputs import Inputs
from redline.bench.workload.ranks import Ranks, gradient_bytes, where_is_main_thread
from redline.bench.workload.signal import give_signal
from redline.bench.workload.sources.live import HANDED_OVER, remember_live
from redline.bench.workload.sources.user import check_inputs_of
from redline.bench.workload.step import InferenceStep, Setup, TrainingStep, make_step
from redline.bench.workload.workload import Workload
from redline.environment import Memory
from redline.errors import BenchError, RedlineError
from redline.note import Note, note
from redline.protocol import (
    AllReduce,
    Ask,
    BlockReply,
    Close,
    ClosedReply,
    FailureReply,
    Feed,
    Measure,
    OnProgress,
    Position,
    Prepare,
    PreparedReply,
    Profile,
    Progress,
    Reply,
    Request,
    Serve,
    ServedReply,
    Squeeze,
    SqueezeReply,
    TraceReply,
    TrainEpoch,
)
from redline.record import Closed, ColdStart, Failure, Numerics, Prepared, Warmup, WorkloadInfo
from redline.spec import RunSpec
from redline.training import TrainingProgress
from redline.work import WorkCount

T = TypeVar("T")

Timed = InferenceStep | TrainingStep | GenerateStep
Reference = OutputReference | LossReference | GreedyReference

ONE_STEP = (
    "on data Redline needs a module with loss(output, target); 'redline run --task train' measures one step of it"
)
BARE_WARMUP_STEPS = 2
NOT_WAITED_FOR = note("not-waited-for", "a steady state was not waited for")


class BenchSession:
    """One workload under one recipe, from `Prepare` to `Close`."""

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
        self._cold: dict[str, Any] = {"import_s": import_s, "start_s": start_s}
        self._isolated = isolated
        self._handed_over = handed_over or {}
        HANDED_OVER.update(self._handed_over)
        self._ranks = ranks or Ranks()
        self._stage = "start"
        self._entered = 0
        self._device: Device | None = None
        self._step: Timed | None = None
        self._training: TrainingSession | None = None
        self._server: Server | None = None
        self._eager_model: torch.nn.Module | None = None
        self._own_step: OwnStep | None = None
        self._notes: list[Note] = []
        self._step_estimate_s = 0.0
        self._memory_limit_bytes: int | None = None
        self._restore_flags = remember_flags()
        self._give_back_model: Callable[[], None] = lambda: None

    def handle(self, request: Request) -> Reply:
        """Any exception becomes a `Failure` with the stage it happened in, `sys.exit` too.

        Only Ctrl-C goes through, where the bench runs in the person's own process.
        """
        try:
            return self._answer(request)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and not self._isolated:
                raise
            failure = failure_from(error, self._stage)
            if not isinstance(error, RedlineError):
                failure = self._with_default(failure)
            if not isinstance(request, Ask):
                self._forget()
            return FailureReply(failure=failure)

    def _with_default(self, failure: Failure) -> Failure:
        """A model may want more items than the default, which nobody asked for."""
        chosen = next((each for each in self._notes if each.code == "default-batch"), None)
        if chosen is None or failure.kind != "user":
            return failure
        return msgspec.structs.replace(failure, message=f"{failure.message} ({chosen}; --batch sets another)")

    def position(self) -> Position:
        """How far it has come; asked by another thread, while this session is busy."""
        waits, where = where_is_main_thread()
        return Position(stage=self._stage, entered=self._entered, steps=self._ranks.steps, waits=waits, where=where)

    def _answer(self, request: Request) -> Reply:
        if isinstance(request, Ask):
            self._enter("ask")
            return answer(request.question, self._on_progress)
        if isinstance(request, Prepare):
            if request.spec.train is not None:
                return self._prepare_training(request)
            if request.bare:
                return PreparedReply(prepared=self._prepare_bare(request.spec))
            return PreparedReply(prepared=self._prepare(request.spec, modules=request.modules))
        if isinstance(request, Close):
            return ClosedReply(closed=self._close())
        self._stage = type(request).__name__.lower()
        if self._step is None or self._device is None:
            raise BenchError("crash", f"asked to {self._stage} before anything was prepared")
        if isinstance(request, TrainEpoch | Feed):
            return self._train(request)
        if isinstance(request, Serve):
            if self._server is None:
                raise BenchError("crash", "asked to serve where no load was prepared")
            return ServedReply(served=self._server.serve(request))
        if isinstance(request, Profile):
            return TraceReply(trace=capture(self._step, self._device, request, self._eager_model))
        if isinstance(request, Squeeze):
            return SqueezeReply(needed_bytes=least_memory(self._step, self._device, self._memory_limit_bytes))
        if isinstance(request, AllReduce):
            return self._ranks.probe(request, self._device)
        assert isinstance(request, Measure)  # `Where` is answered beside the session
        if isinstance(self._step, GenerateStep):
            return BlockReply(block=measure_generations(self._step, self._device, request, self._step_estimate_s))
        block = measure_block(self._step, self._device, request, self._step_estimate_s, self._ranks)
        self._step_estimate_s = statistics.median(block.samples)
        return BlockReply(block=block)

    def _prepare(self, spec: RunSpec, *, modules: bool = False) -> Prepared:
        device = self._open_device(spec)
        with few_threads(device):
            workload = self._build(spec, device)
            reference = self._reference(spec, workload, device)
        info = workload.info()
        applicable = () if spec.measure.sparing else applicable_recipes(workload.model, device, workload.task)
        setup = self._apply(spec, workload, device)
        step = self._first_call(spec, setup)
        info = msgspec.structs.replace(info, notes=tuple(workload.notes))
        numerics = self._numerics(spec, reference, step, setup)
        del reference
        setup.let_originals_go()
        self._release(spec, device)
        work, info = self._count(spec, setup, info, modules)
        warmup = self._warm_up(spec, step, device)
        self._step = step
        if spec.load is not None:
            assert isinstance(step, InferenceStep)
            self._server = Server(spec, setup, step, lambda size: self._enter("compile", f"batch {size}"))
        self._eager_model = None if setup.capabilities.dissolves_modules else shown_model(setup.workload)
        self._step_estimate_s = statistics.median(warmup.samples[-2 * spec.measure.warmup_window :])
        gc.collect()
        gc.freeze()  # later collections, between blocks, then look at little
        self._enter("ready")
        return Prepared(
            environment=describe(device),
            workload=info,
            cold_start=ColdStart(**self._cold),
            numerics=numerics,
            warmup=warmup,
            memory=device.memory(),
            recipe_notes=tuple(note("switch", text, about=switch) for switch, text in setup.notes.items()),
            switches=setup.switches,
            applicable=applicable,
            step_synchronises=self._synchronises(step, device),
            isolated=self._isolated,
            work=work,
            ranks=self._ranks.info(device, info.items_per_step),
            gradient_bytes=gradient_bytes(workload.model) if workload.task == "train" and self._ranks.is_rank else None,
            generation=generation_info(step, device, watch=not spec.measure.sparing)
            if isinstance(step, GenerateStep)
            else None,
        )

    def _prepare_bare(self, spec: RunSpec) -> Prepared:
        """For a profiler from outside: nothing that is not needed to run the step."""
        device = self._open_device(spec)
        workload = self._build(spec, device, calibrate=False)
        info = workload.info()
        setup = self._apply(spec, workload, device)
        step = self._first_call(spec, setup)
        info = msgspec.structs.replace(info, notes=tuple(workload.notes))
        setup.let_originals_go()
        warmup = self._few_steps(step, device)
        self._step = step
        self._step_estimate_s = warmup.samples[-1]
        self._enter("ready")
        return Prepared(
            environment=describe(device),
            workload=info,
            cold_start=ColdStart(**self._cold),
            numerics=Numerics(method="skipped", reason=note("unchecked", "not checked under an external profiler")),
            warmup=warmup,
            memory=device.memory(),
            recipe_notes=tuple(note("switch", text, about=switch) for switch, text in setup.notes.items()),
            switches=setup.switches,
            isolated=self._isolated,
        )

    def _prepare_training(self, request: Prepare) -> PreparedReply:
        """For epochs on data. Nothing is compared with fp32: losses and accuracy will tell."""
        assert request.spec.train is not None
        device = self._open_device(request.spec)
        self._enter("data", request.spec.train.data.name)
        data = open_data(request.spec.train.data, request.spec.workload)
        spec, size, inputs = fitted(request.spec, data)
        workload = self._build(spec, device, inputs, calibrate=False, settle=False)
        if isinstance(workload.model, TrainsItself):
            raise BenchError("user", f"{workload.info().class_name} trains itself by its training_step: {ONE_STEP}")
        training = TrainingSession(spec, data, size, workload, device, self._tell_training)
        info = workload.info()
        setup = self._apply(spec, workload, device)
        self._enter("compile" if setup.capabilities.compiles else "first-call", str(spec.recipe))
        self._note_first_call(setup, training.start(setup))
        work, info = self._count(spec, setup, info, modules=False)
        self._training, self._step = training, training.step
        if request.checkpoint is not None:
            training.resume(request.checkpoint)
        self._enter("ready")
        prepared = Prepared(
            environment=describe(device),
            workload=info,
            cold_start=ColdStart(**self._cold),
            numerics=Numerics(
                method="unchecked", reason=note("unchecked", "a training is judged by its losses and its accuracy")
            ),
            warmup=Warmup(steady=True, reason=note("not-waited-for", "every step of a training counts")),
            memory=device.memory(),
            recipe_notes=tuple(note("switch", text, about=switch) for switch, text in setup.notes.items()),
            switches=setup.switches,
            isolated=self._isolated,
            work=work,
            data=training.info,
        )
        return PreparedReply(prepared=prepared, epochs=tuple(training.epochs))

    def _train(self, request: TrainEpoch | Feed) -> Reply:
        if self._training is None:
            raise BenchError("crash", f"asked to {self._stage} where no training was prepared")
        if isinstance(request, Feed):
            return self._training.feed(request)
        self._enter("epoch", str(request.number))
        return self._training.epoch(request.number)

    def _tell_training(self, progress: TrainingProgress) -> None:
        self._on_progress(Progress(stage="epoch", detail=str(progress.epoch), training=progress))

    def _open_device(self, spec: RunSpec) -> Device:
        self._enter("device", spec.device)
        resolved = self._ranks.rank.device_of(resolve_device(spec.device))
        self._ranks.set_threads(spec.threads)
        self._device = open_device(resolved)
        if self._ranks.is_rank:
            self._enter("ranks")
            self._ranks.join(self._device, spec.launch.prepare_timeout_s)
        self._memory_limit_bytes = spec.launch.memory_limit_bytes
        self._device.limit_memory(self._memory_limit_bytes, isolated=self._isolated)
        return self._device

    def _build(
        self,
        spec: RunSpec,
        device: Device,
        inputs: Inputs | None = None,
        *,
        calibrate: bool = True,
        settle: bool = True,
    ) -> Workload:
        """`settle` False: the inputs are about to be replaced by those of the data, such as `inputs`, and need no batch."""
        self._enter("build", spec.workload.model)
        started = time.perf_counter()
        torch.manual_seed(spec.seed)
        self._give_back_model = remember_live(spec.workload)
        workload = build_workload(spec.workload, spec.seed, inputs=inputs)
        self._own_step, self._notes = workload.step, workload.notes
        self._ranks.share(workload, spec.workload.batch)  # before the global batch fills the memory of every device
        apart_s = 0.0
        if settle and spec.measure.sparing:
            # Off the device, which then sees what a plain loop would show it, and nothing else.
            apart_s = self._make_ready(workload, spec, calibrate=calibrate, sparing=True)
        workload.to(device.torch_device)
        device.synchronize()
        self._cold["build_s"] = time.perf_counter() - started - apart_s
        if settle and not spec.measure.sparing:
            self._make_ready(workload, spec, calibrate=calibrate)
        self._ranks.level(workload.model)
        return workload

    def _make_ready(self, workload: Workload, spec: RunSpec, *, calibrate: bool, sparing: bool = False) -> float:
        """Settle the batch and calibrate what needs it; says how many seconds that took."""
        started = time.perf_counter()
        if workload.task == "generate":  # its batch is the prompt's, and language models have no statistics
            return 0.0
        self._enter("batch")
        if not self._ranks.has_share:
            settle_batch(workload, spec.workload)
            self._ranks.share(workload, spec.workload.batch, ask=True)
        if calibrate:
            self._enter("calibrate")
            workload.notes += give_signal(workload, spec.seed, sparing=sparing)
        return time.perf_counter() - started

    def _reference(self, spec: RunSpec, workload: Workload, device: Device) -> Reference | None:
        if not spec.measure.check_numerics or workload.step is not None:
            return None
        self._enter("reference", "strict fp32")
        number_format = number_format_of(spec.recipe, workload.task, workload.model)
        if workload.task == "generate":
            return GreedyReference.of(workload, device, number_format)
        if workload.task == "infer":
            given = check_inputs_of(spec.workload, workload, spec.seed + 1)
            return self._perhaps_differentiating(
                workload, device, lambda: OutputReference.of(workload, device, number_format, spec.seed, given)
            )
        steps, optimizer = spec.measure.loss_path_steps, spec.workload.optimizer
        distribute, any_of = self._ranks.distribute, self._ranks.any_of
        return LossReference.of(workload, device, number_format, spec.seed, steps, optimizer, distribute, any_of)

    def _perhaps_differentiating(self, workload: Workload, device: Device, call: Callable[[], T]) -> T:
        """What `call` gives, with gradients possible where the model turns out to need them for its forward pass."""
        try:
            return call()
        except Exception as error:
            if is_out_of_memory(error) or not workload.differentiates(lambda: forward(workload, device)):
                raise
        return call()

    def _apply(self, spec: RunSpec, workload: Workload, device: Device) -> Setup:
        self._enter("recipe", str(spec.recipe))
        setup = apply_recipe(spec.recipe, workload, device, self._ranks.distribute)
        if self._ranks.several:
            setup.before_step.append(self._ranks.count_step)
        if not spec.measure.check_numerics:
            setup.let_originals_go()
        self._release(spec, device)
        device.reset_peaks()
        return setup

    def _first_call(self, spec: RunSpec, setup: Setup) -> Timed:
        compiles = setup.capabilities.compiles
        self._enter("compile" if compiles else "first-call", str(spec.recipe))
        step = self._make_step(spec, setup)
        started = time.perf_counter()
        starts_again = setup.task == "train" and spec.measure.check_numerics
        # Where nothing is compared, the copies that putting values back takes are no part of what must fit.
        held: AbstractContextManager[None] = setup.watching_inputs()
        if spec.measure.check_numerics:
            held = (unchanged_afterwards if starts_again else unchanged_buffers)(setup.workload.model)

        def call() -> None:
            with step.context(), blaming(_suspect(spec, setup), setup, self._stage):
                refuse_what_has_not_run(step(), type(setup.workload.model).__name__)

        with held:
            self._perhaps_differentiating(setup.workload, setup.device, call)
            setup.device.synchronize()
            seconds = time.perf_counter() - started
        self._note_first_call(setup, seconds)
        if setup.task == "step" and (unseen := setup.device.unseen_work()) is not None:
            raise BenchError("user", f"the function computes on {unseen}, which is not waited for: give --device cuda")
        # Training starts again from the same weights with an optimizer that has seen nothing.
        return self._make_step(spec, setup) if starts_again else step

    def _make_step(self, spec: RunSpec, setup: Setup) -> Timed:
        return GenerateStep(setup) if setup.task == "generate" else make_step(setup, spec.workload.optimizer)

    def _note_first_call(self, setup: Setup, seconds: float) -> None:
        self._cold["first_call_s"] = seconds
        if setup.capabilities.compiles:
            self._cold["compile_s"] = compile_seconds()
            self._cold["compile_cache"] = cache_state()
            self._cold["graph_breaks"] = graph_breaks()

    def _numerics(self, spec: RunSpec, reference: Reference | None, step: Timed, setup: Setup) -> Numerics:
        if reference is None:
            why = "the spec asked for none" if setup.task != "step" else "a function is timed as it is"
            return Numerics(method="unchecked", reason=note("unchecked", f"not checked: {why}"))
        if not spec.recipe.switches:
            return reference.as_numerics()
        self._enter("numerics", str(spec.recipe))
        if isinstance(reference, GreedyReference):
            assert isinstance(step, GenerateStep)
            return reference.judge(step)
        if isinstance(reference, OutputReference):
            assert isinstance(step, InferenceStep)
            return reference.judge(step, setup)
        assert isinstance(step, TrainingStep)
        return reference.judge(step, setup)

    def _count(
        self, spec: RunSpec, setup: Setup, info: WorkloadInfo, modules: bool
    ) -> tuple[WorkCount | None, WorkloadInfo]:
        """Nothing that goes wrong here may cost the measurement: it becomes a note."""
        if setup.task == "generate":
            return None, info  # what a token has to read says more; see `GenerationInfo`
        if spec.measure.sparing:  # a trial near the edge of memory, about which nothing else is asked
            return None, info
        if setup.is_sharded:
            why = note("work-not-counted", "work not counted: the weights are spread over the ranks")
            return None, msgspec.structs.replace(info, notes=(*info.notes, why))
        self._enter("count")
        try:
            return count_step(setup, spec.workload.optimizer, modules=modules), info
        except Exception as error:
            why = note("work-not-counted", f"work not counted: {because(error)}")
            return None, msgspec.structs.replace(info, notes=(*info.notes, why))

    def _warm_up(self, spec: RunSpec, step: Timed, device: Device) -> Warmup:
        self._enter("warm-up")
        device.reset_peaks()
        told = time.perf_counter()

        def tell(steps: int, seconds: float) -> None:
            nonlocal told
            if time.perf_counter() - told > 1.0:
                told = time.perf_counter()
                self._enter("warm-up", f"{steps} steps, {seconds:.0f} s")

        with step.context():
            return reach_steady_state(
                lambda: (step(), device.synchronize()),
                spec.measure,
                compilations=compilations,
                is_accelerator=device.is_accelerator,
                on_step=tell,
                agreed=self._ranks.agreed,
            )

    def _few_steps(self, step: Timed, device: Device) -> Warmup:
        self._enter("warm-up")
        samples = []
        with step.context():
            for _ in range(BARE_WARMUP_STEPS):
                started = time.perf_counter()
                step()
                device.synchronize()
                samples.append(time.perf_counter() - started)
        return Warmup(samples=tuple(samples), seconds=sum(samples), steady=False, reason=NOT_WAITED_FOR)

    def _synchronises(self, step: Timed, device: Device) -> bool | None:
        with step.context():
            return device.synchronises(step)

    def _release(self, spec: RunSpec, device: Device) -> None:
        """Give back what only comparing needed.

        Where nothing is compared, how much fits is the question, and the trial runs as a plain loop would. What casts
        left in the allocator's cache then stays: under 16 GiB on an H200 a plain loop of ResNet-50 in fp16 fitted a
        batch of 2836 after casting its inputs on the device, and of 2148 where they had come in fp16.
        """
        if not spec.measure.sparing:
            device.release_cache()

    def _close(self) -> Closed:
        memory = self._device.memory() if self._device else Memory()
        self._forget()
        self._ranks.leave()
        self._restore_flags()
        if self._device is not None:
            self._device.restore()
        if self._device is not None and self._memory_limit_bytes is not None:
            self._device.cap_allocator(None)
        for name in self._handed_over:
            HANDED_OVER.pop(name, None)
        return Closed(memory=memory)

    def _forget(self) -> None:
        """Let go of the model, so that an inline session leaves the memory as it found it."""
        self._step = self._eager_model = self._server = None
        if self._training is not None:
            self._training.close()
            self._training = None
        if self._own_step is not None:
            self._own_step.close()
            self._own_step = None
        self._give_back_model()
        gc.unfreeze()
        if self._device is not None:
            self._device.release_cache()

    def _enter(self, stage: str, detail: str = "") -> None:
        self._stage = stage
        self._entered += 1
        self._on_progress(Progress(stage=stage, detail=detail))


def _suspect(spec: RunSpec, setup: Setup) -> str | None:
    """The switch that a broken first call is put down to: the last of those that change the program, else the last.

    None where no numerics reference has run before: the model itself may be what is broken.
    """
    changing = [name for name, does in setup.switches.items() if does.compiles or does.records_graph]
    suspects = changing or list(setup.switches)
    return suspects[-1] if suspects and spec.measure.check_numerics else None
