"""This leads from a spec to a step that can be timed: it opens the device, builds the workload, applies the recipe, checks the
numerics and warms up.

`Workbench.prepare` is the bench's main path. It keeps what it has made so far, so that everything can be given back wherever it fails.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import torch

from redline.bench.count.count import counted_work, refuse_no_values, shown_model
from redline.bench.data.source import open_data
from redline.bench.device import Device, open_device, resolve_device
from redline.bench.environment import describe, few_threads, refuse_other_checkout, remember_flags
from redline.bench.load import LoadRunner
from redline.bench.measure.blocks import few_steps, operators_share, reach_steady_state
from redline.bench.measure.generation import generation_info
from redline.bench.recipe.compose import applicable_recipes, apply_recipe, blaming, suspect_of
from redline.bench.recipe.difference import Answer, answer_of
from redline.bench.recipe.numerics import (
    AnyReference,
    Timed,
    numerics_of,
    perhaps_differentiating,
    reference_of,
    with_sketch,
)
from redline.bench.recipe.rounding import unchanged_afterwards, unchanged_buffers
from redline.bench.recipe.switches.compiler import (
    cache_state,
    compilations,
    compile_seconds,
    compile_together,
    graph_breaks,
)
from redline.bench.train.epochs import seed_everything
from redline.bench.train.session import TrainingSession, fitted
from redline.bench.workload.build import build_workload, settle_batch
from redline.bench.workload.called import OwnStep, TrainsItself, name_of, refuse_what_has_not_run
from redline.bench.workload.generation import GenerateStep
from redline.bench.workload.inputs import Inputs
from redline.bench.workload.ranks import Ranks, gradient_bytes
from redline.bench.workload.signal import give_signal
from redline.bench.workload.sources.user import remember_live
from redline.bench.workload.step import InferenceStep, Setup, TrainingStep, make_step
from redline.bench.workload.workload import Workload
from redline.model.errors import BenchError
from redline.model.note import Note, note
from redline.model.protocol import OnProgress, Prepare, PreparedReply, Progress, TrainingProgress
from redline.model.record import Closed, ColdStart, Memory, Numerics, Prepared, Warmup, WorkloadInfo
from redline.model.spec import RunSpec
from redline.model.work import WorkCount

ONE_STEP = "epochs need a module with loss(output, target); 'redline run --task train' measures one step of it"


class Workbench:
    """A session has one workbench: its device, its workload and its step, in whatever state of readiness."""

    def __init__(
        self, enter: Callable[..., None], on_progress: OnProgress, ranks: Ranks, cold: dict[str, Any], *, isolated: bool
    ) -> None:
        self._enter = enter
        """This tells the desk which stage begins, and a detail of it."""
        self._on_progress = on_progress
        self._ranks = ranks
        self._cold = cold
        """These are the times of the cold start, as far as they are known."""
        self._isolated = isolated
        self.device: Device | None = None
        self.step: Timed | None = None
        self.training: TrainingSession | None = None
        self.load_runner: LoadRunner | None = None
        self.eager_model: torch.nn.Module | None = None
        self.notes: list[Note] = []
        self.step_estimate_s = 0.0
        self.memory_limit_bytes: int | None = None
        self._spec: RunSpec
        self._own_step: OwnStep | None = None
        self._restore_flags = remember_flags()
        self._give_back_model: Callable[[], None] = lambda: None
        self._returned = Answer()
        """A function of the user's returned this at its first call."""

    def prepare(self, request: Prepare) -> PreparedReply:
        """Makes the step ready that was asked for, and returns what is known about it before anything is timed."""
        self._spec = request.spec
        if request.spec.train is not None:
            return self._prepare_training(request)
        helps = request.sharing == "helps"
        prepared = self._prepare_bare(helps) if request.bare or helps else self._prepare(request)
        return PreparedReply(prepared=prepared)

    def _prepare(self, request: Prepare) -> Prepared:
        spec, device = request.spec, self._open_device()
        with few_threads(device):
            workload, reference = self._build(device), None
            if spec.measure.check_numerics and workload.step is None:
                self._enter("reference", "strict fp32")
                reference = reference_of(spec, workload, device, self._ranks)
        info = workload.info()
        applicable = () if spec.measure.sparing else applicable_recipes(workload.model, device, workload.task)
        setup = self._apply(workload, device)
        step = self._first_call(setup, shares=request.sharing == "shares")
        numerics = self._numerics(reference, step, setup)
        del reference
        setup.let_originals_go()
        self._release(device)
        work = self._count(setup, modules=request.modules)
        setup.settle()
        warmup = self._warm_up(step, device)
        self.step = step
        self.step_estimate_s = statistics.median(warmup.samples[-2 * spec.measure.warmup_window :])
        self.eager_model = None if setup.capabilities.dissolves_modules else shown_model(workload)
        if spec.load is not None:
            assert isinstance(step, InferenceStep)
            self.load_runner = LoadRunner(spec, setup, step, lambda size: self._enter("compile", f"batch {size}"))
        gc.collect()
        gc.freeze()  # later collections, between blocks, then look at little
        self._enter("ready")
        with step.context():
            synchronises = device.synchronises(step)
        is_rank, watch = self._ranks.is_rank, not spec.measure.sparing
        return self._prepared(
            setup,
            info,
            numerics=numerics,
            warmup=warmup,
            applicable=applicable,
            step_synchronises=synchronises,
            operators_share=None if is_rank else operators_share(step, setup, spec.measure, warmup),
            work=work,
            ranks=self._ranks.info(device, info.items_per_step),
            gradient_bytes=gradient_bytes(workload.model) if workload.task == "train" and is_rank else None,
            generation=generation_info(step, device, watch=watch) if isinstance(step, GenerateStep) else None,
        )

    def _prepare_bare(self, helps: bool) -> Prepared:
        """Prepares only what is needed to run the step, for a profiler from outside.

        With `helps`, it prepares only what is compiled one by one, for other processes, which find it in the cache.
        """
        device = self._open_device()
        workload = self._build(device, calibrate=False)
        info = workload.info()
        setup = self._apply(workload, device)
        warmup, why = Warmup(), "only its blocks were compiled"
        if helps:
            self._enter("compile", str(self._spec.recipe))
            with self._make_step(setup).context():
                compile_together(setup, self._spec)
        else:
            step, why = self._first_call(setup), "not checked under an external profiler"
            setup.let_originals_go()
            self._enter("warm-up")
            with step.context():
                warmup = few_steps(lambda: (step(), device.synchronize()))
            self.step, self.step_estimate_s = step, warmup.samples[-1]
        self._enter("ready")
        numerics = Numerics(method="skipped", reason=note("unchecked", why))
        return self._prepared(setup, info, numerics=numerics, warmup=warmup)

    def _prepare_training(self, request: Prepare) -> PreparedReply:
        """Prepares for epochs on data. Nothing is compared with fp32, because losses and accuracy will tell."""
        assert request.spec.train is not None
        device = self._open_device()
        self._enter("data", request.spec.train.data.name)
        seed_everything(request.spec.seed, 0)  # the user's loaders may split their data at random, before any epoch
        data = open_data(request.spec.train.data, request.spec.workload)
        self._spec, size, inputs = fitted(request.spec, data)
        workload = self._build(device, inputs)
        info = workload.info()
        if isinstance(workload.model, TrainsItself):
            raise BenchError("user", f"{info.class_name} trains itself by its training_step: {ONE_STEP}")

        def tell(progress: TrainingProgress) -> None:
            self._on_progress(Progress(stage="epoch", detail=str(progress.epoch), training=progress))

        training = TrainingSession(self._spec, data, size, workload, device, tell)
        info = workload.info()
        setup = self._apply(workload, device)
        training.make_ready(setup)
        step = self._first_call(setup)
        assert isinstance(step, TrainingStep)
        training.begin(setup, step)
        self.training, self.step = training, step
        work = self._count(setup)
        setup.settle()
        self._enter("ready")
        judged = note("unchecked", "a training is judged by its losses and its accuracy")
        warmup = Warmup(steady=True, reason=note("not-waited-for", "every step of a training counts"))
        numerics = Numerics(method="unchecked", reason=judged)
        prepared = self._prepared(setup, info, numerics=numerics, warmup=warmup, work=work, data=training.info)
        return PreparedReply(prepared=prepared)

    def _prepared(self, setup: Setup, info: WorkloadInfo, **fields: Any) -> Prepared:
        """Returns what is said of every prepared step, together with the `fields` of this one."""
        return Prepared(
            workload=msgspec.structs.replace(info, notes=tuple(setup.workload.notes)),
            environment=describe(setup.device),
            cold_start=ColdStart(**self._cold),
            memory=setup.device.memory(),
            recipe_notes=tuple(note("switch", text, about=switch) for switch, text in setup.notes.items()),
            switches=setup.switches,
            isolated=self._isolated,
            **fields,
        )

    def _open_device(self) -> Device:
        spec = self._spec
        self._enter("device", spec.device)
        resolved = self._ranks.rank.device_of(resolve_device(spec.device))
        self._ranks.set_threads(spec.threads)
        self.device = open_device(resolved)
        if self._ranks.is_rank:
            self._enter("ranks")
            self._ranks.join(self.device, spec.launch.prepare_timeout_s)
        self.memory_limit_bytes = spec.launch.memory_limit_bytes
        self.device.limit_memory(self.memory_limit_bytes, isolated=self._isolated)
        return self.device

    def _build(self, device: Device, inputs: Inputs | None = None, *, calibrate: bool = True) -> Workload:
        """Builds the workload on the device, with its batch and its calibration.

        If `inputs` are given, they are of the kind that the data give, and the data take their place later. They need neither a
        batch nor calibration.
        """
        spec = self._spec
        self._enter("build", spec.workload.model)
        started = time.perf_counter()
        torch.manual_seed(spec.seed)
        self._give_back_model = remember_live(spec.workload)
        workload = build_workload(spec.workload, spec.seed, inputs=inputs)
        refuse_no_values(workload.model)
        self._own_step, self.notes = workload.step, workload.notes
        self._ranks.share(workload, spec.workload.batch)  # otherwise the global batch fills the memory of every device
        build_s = time.perf_counter() - started
        settles, sparing = inputs is None, spec.measure.sparing
        if settles and sparing:
            # This is done off the device, which then sees what a plain loop would show it, and nothing else.
            self._make_ready(workload, calibrate)
        started = time.perf_counter()
        workload.to(device.torch_device)
        device.synchronize()
        self._cold["build_s"] = build_s + time.perf_counter() - started
        if settles and not sparing:
            self._make_ready(workload, calibrate)
        self._ranks.level(workload.model)
        return workload

    def _make_ready(self, workload: Workload, calibrate: bool) -> None:
        """Settles the batch, and calibrates what needs it."""
        spec = self._spec
        if workload.task == "generate":  # its batch is the prompt's, and language models have no statistics
            return
        self._enter("batch")
        if not self._ranks.has_share:
            settle_batch(workload, spec.workload)
            self._ranks.share(workload, spec.workload.batch, ask=True)
        if calibrate:
            self._enter("calibrate")
            workload.notes += give_signal(workload, spec.seed, sparing=spec.measure.sparing)

    def _apply(self, workload: Workload, device: Device) -> Setup:
        spec = self._spec
        self._enter("recipe", str(spec.recipe))
        setup = apply_recipe(spec.recipe, workload, device, self._ranks.distribute)
        if self._ranks.several:
            setup.before_step.append(self._ranks.count_step)
        if not spec.measure.check_numerics:
            setup.let_originals_go()
        self._release(device)
        device.reset_peaks()
        return setup

    def _first_call(self, setup: Setup, *, shares: bool = False) -> Timed:
        """Makes the step, runs it once and returns it. Compiling happens here, and so do the checks after the first call.

        With `shares`, other processes prepare the same and compile some of the blocks that are compiled one by one.
        """
        spec = self._spec
        stage = "compile" if setup.capabilities.compiles else "first-call"
        self._enter(stage, str(spec.recipe))
        step = self._make_step(setup)
        started = time.perf_counter()
        # A training begins with weights and an optimizer that have seen nothing, and so does what it is compared with.
        checks, is_function = spec.measure.check_numerics or spec.train is not None, setup.task == "step"
        starts_again, shares = setup.task == "train" and checks, shares and bool(setup.compiled_blocks)
        # If nothing is compared, no values are put back, because the copies for that would be part of what must fit.
        undoing: AbstractContextManager[None] = setup.watching_inputs()
        if checks:
            undoing = (unchanged_afterwards if starts_again else unchanged_buffers)(setup.workload.model)

        def call() -> None:
            with step.context(), blaming(suspect_of(spec, setup), setup, stage):
                if is_function:
                    torch.manual_seed(spec.seed)  # what it returns is compared with what it returned at other commits
                if shares:
                    compile_together(setup, spec)
                result = step()
                refuse_what_has_not_run(result, name_of(setup.workload.model))
                for check in setup.after_first_call:
                    check()
            if is_function and checks:
                self._returned = answer_of(result)

        with undoing:
            perhaps_differentiating(setup.workload, setup.device, call)
            setup.device.synchronize()
            seconds = time.perf_counter() - started
        self._note_first_call(setup, seconds, shared=shares)
        if spec.launch.folder:
            refuse_other_checkout(spec.launch.folder)
        if is_function and (unseen := setup.device.unseen_work()) is not None:
            raise BenchError("user", f"the function computes on {unseen}, which is not waited for: give --device cuda")
        # Training starts again from the same weights, with an optimizer that has seen nothing.
        return self._make_step(setup) if starts_again else step

    def _make_step(self, setup: Setup) -> Timed:
        return GenerateStep(setup) if setup.task == "generate" else make_step(setup, self._spec.workload.optimizer)

    def _note_first_call(self, setup: Setup, seconds: float, *, shared: bool = False) -> None:
        self._cold |= {"first_call_s": seconds, "shared": shared}
        if setup.capabilities.compiles:
            compiler = {"compile_s": compile_seconds(), "compile_cache": cache_state(), "graph_breaks": graph_breaks()}
            self._cold |= compiler

    def _numerics(self, reference: AnyReference | None, step: Timed, setup: Setup) -> Numerics:
        if reference is not None:
            if setup.switches:
                self._enter("numerics", str(self._spec.recipe))
            return numerics_of(reference, step, setup)
        why = "it was not asked for" if setup.task != "step" else "a function is timed as it is"
        reason = note("unchecked", f"not checked: {why}")
        unchecked = Numerics(method="unchecked", reason=reason, finite=self._returned.is_finite)
        return with_sketch(unchecked, self._returned)

    def _count(self, setup: Setup, *, modules: bool = False) -> WorkCount | None:
        # `GenerationInfo` says more about a generation, and a trial near the edge of memory is asked nothing else.
        if setup.task == "generate" or self._spec.measure.sparing:
            return None
        self._enter("count")
        work = counted_work(setup, self._spec.workload.optimizer)
        return work if work is None or modules else msgspec.structs.replace(work, modules=())

    def _warm_up(self, step: Timed, device: Device) -> Warmup:
        self._enter("warm-up")
        device.reset_peaks()
        with step.context():
            step()  # this call decides what the plain step is made of
            run = step.plain()
            return reach_steady_state(
                lambda: (run(), device.synchronize()),
                self._spec.measure,
                compilations=compilations,
                is_accelerator=device.is_accelerator,
                tell=lambda text: self._enter("warm-up", text),
                agreed=self._ranks.agreed,
            )

    def _release(self, device: Device) -> None:
        """Gives back the memory that only comparing needed.

        If nothing is compared, the question is how much fits, and the trial runs as a plain loop would. What casts left in
        the allocator's cache then stays. Under 16 GiB on an H200, a plain loop of ResNet-50 in fp16 fitted a batch of 2836
        after casting its inputs on the device, and a batch of 2148 if the inputs had come in fp16.
        """
        if not self._spec.measure.sparing:
            device.release_cache()

    def put_back(self) -> Closed:
        """Puts flags, devices and ranks back as they were before, and returns the memory at the end."""
        memory = self.device.memory() if self.device else Memory()
        self.forget()
        self._ranks.leave()
        self._restore_flags()
        if self.device is not None:
            self.device.restore()
            if self.memory_limit_bytes is not None:
                self.device.cap_allocator(None)
        return Closed(memory=memory)

    def forget(self) -> None:
        """Lets go of the model, so that an inline session leaves the memory as it found it."""
        for closable in (self.training, self._own_step):
            if closable is not None:
                closable.close()
        self.step = self.eager_model = self.load_runner = self.training = self._own_step = None
        self._give_back_model()
        gc.unfreeze()
        if self.device is not None:
            self.device.release_cache()
