"""This module sets a workload up for a recipe and makes the timed step of it. Inference is one forward. Training is
forward, loss, backward and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch.utils import _pytree as pytree

from redline.bench.device.base import Device
from redline.bench.device.process import end_compile_pool
from redline.bench.workload.called import TrainsItself, name_of, plain_call
from redline.bench.workload.inputs import Inputs, Untouched, contents, input_tensors
from redline.bench.workload.structure import is_plain
from redline.bench.workload.workload import INPUTS_ARE_RESTORED, Workload
from redline.model.errors import BenchError
from redline.model.note import note
from redline.model.record import Capabilities
from redline.model.spec import OptimizerName, Task

Mark = Callable[[], None]

LEARNING_RATE = 0.01
OPTIMIZER_SETTINGS: dict[OptimizerName, dict[str, Any]] = {
    "sgd": {"lr": LEARNING_RATE, "momentum": 0.9},
    "adam": {"lr": LEARNING_RATE / 10},
    "adamw": {"lr": LEARNING_RATE / 10},
}
COUNTS_STEPS: tuple[OptimizerName, ...] = ("adam", "adamw")
"""These optimizers count their steps on the host, unless `capturable` says that a graph will replay them."""
INITIAL_GRADIENT_SCALE = 2.0**10
"""This is lower than torch's 2¹⁶, which overflows and skips the first steps of most models. So the loss decreases from the first step."""


def no_mark() -> None:
    """Records nothing. It is for steps whose phases are not looked at."""


@dataclass
class Setup:
    """This is a workload on its way through a recipe. A switch changes the part that it is about and nothing else."""

    workload: Workload
    device: Device
    model: Callable[..., Any]
    args: Untouched[tuple[Any, ...]] = Untouched()  # noqa: RUF009  (a descriptor, which keeps a value per object)
    kwargs: Untouched[dict[str, Any]] = Untouched()  # noqa: RUF009  (a descriptor, which keeps a value per object)
    autocast_dtype: torch.dtype | None = None
    scales_gradients: bool = False
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    decode: Callable[..., torch.Tensor] | None = None
    """In a generation this is a compiled decode step with its choice of the token. `model` still reads the prompt."""
    records_decode: bool = False
    """In a generation, it is true if the decode step is recorded as a graph."""
    step_class: type[InferenceStep] | type[TrainingStep] | None = None
    """This runs in place of the plain step of the task, if a switch brings a step of its own."""
    switches: dict[str, Capabilities] = field(default_factory=dict)
    """It maps each switch of the recipe to what it does to the program."""
    compiled_blocks: Sequence[str] = ()
    """These modules are compiled one by one, when they are first called."""
    before_step: list[Callable[[], None]] = field(default_factory=list)
    after_first_call: list[Callable[[], None]] = field(default_factory=list)
    """Switches call these checks once a step has run. A check raises if the switch did not do what its name says."""
    shortens_launches: bool = False
    """It is true for a step that is compiled or recorded. Once it has run, all its kernels are loaded, and how soon
    they start may be what counts."""
    distributed: torch.nn.parallel.DistributedDataParallel | None = None
    """This is the model as several ranks train it, below any compiler."""
    is_sharded: bool = False
    """It is true if a switch has spread the weights over the ranks."""
    input_changes: list[Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=list)
    changes_inputs: bool = False
    """It is true if a call was seen to change a container or an object among its inputs. Every step then gets new ones."""
    is_watched: bool = True
    """It is true if the next call of the model will show whether it changes its inputs."""
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def task(self) -> Task:
        return self.workload.task

    @property
    def capabilities(self) -> Capabilities:
        """Returns what the whole recipe does to the program."""
        return Capabilities.together(self.switches.values())

    @property
    def runs_one_by_one(self) -> bool:
        """Returns True if the operators of the model run one by one, because nothing is compiled, traced or recorded."""
        merged = self.capabilities.compiles or self.capabilities.dissolves_modules or self.step_class is not None
        return self.task in ("infer", "train") and not merged

    def settle(self) -> None:
        """Call this once everything has run, because then nothing is left to compile and no kernel is left to load."""
        end_compile_pool()
        if self.shortens_launches and (why := self.device.shorten_launches()) is not None:
            self.notes["launches"] = why

    def change_inputs(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Changes every input tensor, now and whenever other inputs are put in its place."""
        self.input_changes.append(change)
        self.args, self.kwargs = pytree.tree_map_only(torch.Tensor, change, (self.args, self.kwargs))

    def prepared_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns fresh fp32 inputs as this recipe wants them."""
        for change in self.input_changes:
            args, kwargs = pytree.tree_map_only(torch.Tensor, change, (args, kwargs))
        return args, kwargs

    def begin_with_originals(self) -> None:
        """Restores the inputs before every step, if the model writes into them."""
        if self.workload.originals is None:
            return
        own = [tensor for _, tensor in input_tensors((self.args, self.kwargs))]
        self._restore(
            own, [tensor.clone() for _, tensor in input_tensors(self.prepared_inputs(*self.workload.originals))]
        )

    @contextmanager
    def watching_inputs(self) -> Iterator[None]:
        """Hold this around the first step if nothing is compared. Inputs that the step writes into are then restored before every step.

        The copies are kept off the device, because memory is counted there.
        """
        if self.workload.originals is not None or self.task not in ("infer", "train"):
            yield
            return
        own = [tensor for _, tensor in input_tensors((self.args, self.kwargs)) if is_plain(tensor)]
        kept, before = [tensor.detach().to("cpu", copy=True) for tensor in own], [tensor._version for tensor in own]
        yield
        if [tensor._version for tensor in own] != before:
            self._restore(own, [copy.to(tensor.device) for copy, tensor in zip(kept, own, strict=True)])
            self._note_restored()

    def _restore(self, own: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]) -> None:
        """Restores these before every step from now on."""

        def restore() -> None:
            with torch.no_grad():
                for tensor, original in zip(own, kept, strict=True):
                    if tensor.grad_fn is not None and not tensor._is_view():
                        # The last training step may have written something with a gradient into the tensor.
                        tensor.detach_()
                    tensor.copy_(original)

        self.before_step.append(restore)

    def let_originals_go(self) -> None:
        """Keeps only the inputs that this recipe works on, because the fp32 ones beside them would count as the recipe's memory."""
        self.workload.args, self.workload.kwargs = self.args, self.kwargs

    def autocast(self, *, cache: bool = True) -> torch.autocast:
        """Returns a new autocast context, which is entered once per step, as a server does once per request."""
        return torch.autocast(
            self.device.autocast_type,
            dtype=self.autocast_dtype,
            enabled=self.autocast_dtype is not None,
            cache_enabled=cache,
        )

    def call(
        self, loss: Callable[[Any], torch.Tensor] | None = None, *, plain: bool = False, marked: bool = False
    ) -> Callable[[], Any]:
        """Returns the model's call on its inputs, and the loss of what it answers, as a plain loop would write it.

        `plain` means that earlier calls have shown what they do with their inputs. If inputs stay as they are, all calls get the same
        ones. `marked` means that somebody looks at the phases or the modules of the call, so that the module itself must be called.
        """
        forward: Callable[[], Any] = self._watched_call
        if plain and self.changes_inputs:
            forward = lambda: self.model(*self.args, **self.kwargs)  # noqa: E731
        elif marked:
            forward = partial(self.model, *self.args, **self.kwargs)
        elif plain:
            forward = plain_call(self.model, self.args, self.kwargs)
        return self.under_autocast(forward if loss is None else lambda: loss(forward()))

    def under_autocast(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Returns the work in the recipe's number format. Without autocast it returns the work itself, which then costs nothing more."""
        if self.autocast_dtype is None:
            return work

        def under_autocast() -> Any:
            with self.autocast():
                return work()

        return under_autocast

    def _watched_call(self) -> Any:
        """Calls the model. The first call shows whether it changes a container or an object among its inputs."""
        args, kwargs = self.args, self.kwargs
        before = contents((args, kwargs)) if self.is_watched else None
        output = self.model(*args, **kwargs)
        if self.is_watched:
            self.is_watched = False
            self.changes_inputs = contents((args, kwargs)) != before
            if self.changes_inputs:
                self._note_restored()
        return output

    def _note_restored(self) -> None:
        if not any(known.code == "input" for known in self.workload.notes):
            self.workload.notes.append(note("input", INPUTS_ARE_RESTORED))


class TimedStep(Protocol):
    """This step can be timed. A call finds out what is to be done; `plain` returns what it then does, and nothing else."""

    phases: ClassVar[tuple[str, ...]]
    """These are the names of its parts. The step calls `mark` at the end of each, so the last mark is the end of the step."""

    def __call__(self, mark: Mark = no_mark) -> Any: ...

    def plain(self, mark: Mark = no_mark) -> Callable[[], Any]:
        """Returns the step as the body of a plain loop. What can be settled once is settled here, after the first call."""

    def context(self) -> AbstractContextManager[Any]:
        """Returns a context that is held around a row of steps."""

    def recover(self) -> None:
        """Forgets a step that broke half-way, so that the next one starts clean."""


class InferenceStep:
    phases: ClassVar[tuple[str, ...]] = ("forward",)

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    def __call__(self, mark: Mark = no_mark) -> Any:
        return self._body(self._setup.call(), mark)()

    def plain(self, mark: Mark = no_mark) -> Callable[[], Any]:
        return self._body(self._setup.call(plain=True, marked=mark is not no_mark), mark)

    def _body(self, forward: Callable[[], Any], mark: Mark) -> Callable[[], Any]:
        before = tuple(self._setup.before_step)
        if not before and mark is no_mark:
            return forward

        def step() -> Any:
            for prepare in before:
                prepare()
            output = forward()
            mark()
            return output

        return step

    def context(self) -> AbstractContextManager[Any]:
        return self._setup.workload.context()

    def recover(self) -> None:
        """Does nothing, because a broken forward leaves nothing behind."""

    @property
    def workload(self) -> Workload:
        return self._setup.workload

    def on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the output for other inputs of the same shapes, outside any timing."""
        with self.given(args, kwargs), self.context():
            return self()

    @contextmanager
    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Gives the step these inputs while the context is held."""
        held = self._setup.args, self._setup.kwargs
        self._setup.args, self._setup.kwargs = args, kwargs
        try:
            yield
        finally:
            self._setup.args, self._setup.kwargs = held


class CalledStep(InferenceStep):
    """It calls a function of the user's as it is. The function sees to gradients itself."""

    phases: ClassVar[tuple[str, ...]] = ("step",)

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()


class TrainingStep:
    phases: ClassVar[tuple[str, ...]] = ("forward", "backward", "optimizer")

    def __init__(self, setup: Setup, optimizer: OptimizerName) -> None:
        self._setup = setup
        self._optimizer = make_optimizer(optimizer, setup.workload.model, **setup.optimizer_options)
        self._scaler = make_scaler(setup)
        self._loss: Callable[[Any], torch.Tensor] | None = None
        """The last call computed this loss. It is None before the first call."""

    def __call__(self, mark: Mark = no_mark) -> torch.Tensor:
        loss = self._body(self._setup.call(self._loss_with_gradient), mark)()
        self._loss = self._setup.workload.loss.chosen
        return loss.detach()

    def _loss_with_gradient(self, output: Any) -> torch.Tensor:
        loss = self._setup.workload.loss(output)
        if not loss.requires_grad:
            raise BenchError("user", "no gradient reaches the loss: does the model run under torch.no_grad()?")
        return loss

    def plain(self, mark: Mark = no_mark) -> Callable[[], Any]:
        loss = self._loss or self._setup.workload.loss
        return self._body(self._setup.call(loss, plain=True, marked=mark is not no_mark), mark)

    def over(self, inputs: Callable[[], Inputs], mark: Mark = no_mark) -> Callable[[], torch.Tensor]:
        """Returns the plain step on inputs that change from step to step, after the first call."""
        model, loss = self._setup.model, self._setup.workload.loss.chosen
        assert loss is not None

        def forward() -> torch.Tensor:
            args, kwargs = inputs()
            return loss(model(*args, **kwargs))

        return self._body(self._setup.under_autocast(forward), mark)

    def _body(self, forward: Callable[[], torch.Tensor], mark: Mark) -> Callable[[], torch.Tensor]:
        before, optimizer, scaler = tuple(self._setup.before_step), self._optimizer, self._scaler
        is_scaled = scaler.is_enabled()

        def step() -> torch.Tensor:
            for prepare in before:
                prepare()
            loss = forward()
            mark()
            if is_scaled:
                scaler.scale(loss).backward()
                mark()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                mark()
                optimizer.step()
            optimizer.zero_grad()
            mark()
            return loss

        return step

    def alone(self, mark: Mark) -> Callable[[], Any] | None:
        """Returns what this rank does by itself in a step, forward and backward, as the body of a loop.

        No gradient is averaged, so the rank waits for no other one, and no weight changes. Returns None if the ranks do not
        average gradients through DDP.
        """
        distributed, optimizer, scaler = self._setup.distributed, self._optimizer, self._scaler
        if distributed is None:
            return None
        forward = self._setup.call(self._loss or self._setup.workload.loss, plain=True)

        def step() -> None:
            with distributed.no_sync():
                loss = forward()
                mark()
                scaler.scale(loss).backward()
                mark()
            optimizer.zero_grad()

        return step

    def context(self) -> AbstractContextManager[Any]:
        return torch.enable_grad()

    def recover(self) -> None:
        """Drops the gradients and makes a new scaler. Half of the gradients may be there, and the old scaler may think
        that it has already unscaled them."""
        self._optimizer.zero_grad(set_to_none=True)
        self._scaler = make_scaler(self._setup)

    def eagerly(self, mark: Mark = no_mark) -> torch.Tensor:
        """Runs one step without compiler or graph, for a batch of another size than they were made for."""
        compiled, self._setup.model = self._setup.model, self._setup.workload.model
        try:
            return TrainingStep.__call__(self, mark)
        finally:
            self._setup.model = compiled

    def learn_at(self, rate: float) -> None:
        """Sets the learning rate. A graph reads it from the device's memory."""
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    @property
    def gradient_scale(self) -> float | None:
        """Returns the scale of gradients, or None if they are not scaled. Reading it waits for the device."""
        return float(self._scaler.get_scale()) if self._scaler.is_enabled() else None

    def optimizer_state(self) -> Iterator[tuple[torch.Tensor, Any]]:
        """Yields each parameter with what the optimizer keeps of it."""
        yield from self._optimizer.state.items()


def make_step(setup: Setup, optimizer: OptimizerName) -> InferenceStep | TrainingStep:
    """Returns the step of the setup's task. It is the plain one, or the one that a switch brings."""
    plain: dict[Task, type[InferenceStep] | type[TrainingStep]]
    plain = {"infer": InferenceStep, "train": TrainingStep, "step": CalledStep}
    kind = setup.step_class or plain[setup.task]
    return kind(setup, optimizer) if issubclass(kind, TrainingStep) else kind(setup)


def make_scaler(setup: Setup) -> torch.amp.GradScaler:
    kind = setup.device.autocast_type
    return torch.amp.GradScaler(kind, init_scale=INITIAL_GRADIENT_SCALE, enabled=setup.scales_gradients)


def make_optimizer(name: OptimizerName, model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    if isinstance(model, TrainsItself):
        if options:
            own = f"{type(model.module).__name__} brings its own optimizer"
            raise BenchError("unsupported", f"{', '.join(options)} cannot be set: {own}")
        return model.optimizer()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise BenchError("user", f"{name_of(model)} has no parameter with a gradient: there is nothing to train")
    if options.get("fused") and parameters[0].is_cuda:
        # One launch handles a few dozen of the parameters. Small ones among the large would leave most of the device idle
        # in each launch.
        parameters.sort(key=torch.Tensor.numel, reverse=True)
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    return kinds[name](parameters, **{**OPTIMIZER_SETTINGS[name], **options})
