"""CUDA graphs record a step once and replay it, so that the host launches one thing instead of hundreds.

What a graph reads and writes stays where it was when it was recorded. So inputs are copied into the graph's own before every
replay. This is part of the timing, because whoever deploys a graph must do it too. The next replay overwrites what a graph returned.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from redline.bench.device.base import Device
from redline.bench.device.failure import is_out_of_memory
from redline.bench.recipe.base import (
    ALL_MODELS,
    GRAPHS,
    NEEDS_STATIC_CACHE,
    RecipeCode,
    RecipeSwitch,
    data_dependence,
    leave_fast_path,
    registered,
    write_without_fast_path,
)
from redline.bench.recipe.plain import CallForm
from redline.bench.recipe.rounding import unchanged_afterwards
from redline.bench.workload.inputs import Inputs
from redline.bench.workload.ranks import world_size
from redline.bench.workload.step import (
    COUNTS_STEPS,
    INITIAL_GRADIENT_SCALE,
    InferenceStep,
    Mark,
    Setup,
    TrainingStep,
    no_mark,
)
from redline.model.errors import BenchError
from redline.model.protocol import SwitchNeed
from redline.model.record import Capabilities
from redline.model.spec import OptimizerName, Switch, Task
from redline.model.work import Facts

PADDED = nn.TransformerEncoder
"""Only the fast path of this layer stands in the way. With a mask it reads lengths on the host, which cannot be recorded."""
WARMUPS = 3
"""This many steps run before recording, in which libraries pick algorithms, the compiler compiles and the optimizer makes its state."""


class Recording:
    """A recording is work that was recorded over copies of a setup's inputs."""

    def __init__(self, setup: Setup, work: Callable[[], Any]) -> None:
        self._setup = setup
        given = setup.args, setup.kwargs
        setup.args, setup.kwargs = pytree.tree_map_only(Tensor, torch.clone, given)
        self._form = CallForm(setup.args, setup.kwargs)
        self._inputs = self._form.tensors(setup.args, setup.kwargs)
        try:
            self._replay, self._output = setup.device.record_graph(work, WARMUPS)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            why = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise BenchError("unsupported", f"graphs cannot record this step: {why}") from error
        finally:
            setup.args, setup.kwargs = given

    def step(self, mark: Mark) -> Callable[[], Any]:
        """Returns a replay with the inputs that the setup has now, as the body of a loop."""
        given = self._form.tensors(self._setup.args, self._setup.kwargs)
        pairs, replay, output = list(zip(self._inputs, given, strict=True)), self._replay, self._output

        def step() -> Any:
            for own, new in pairs:
                own.copy_(new)
            replay()
            mark()
            return output

        return step


class Recorded(ABC):
    """Such a step is recorded at its first call, and replayed from then on."""

    _setup: Setup
    _recording: Recording | None = None

    def __call__(self, mark: Mark = no_mark) -> Any:
        return self.record().step(mark)()

    def plain(self, mark: Mark = no_mark) -> Callable[[], Any]:
        return partial(self, mark) if self._recording is None else self._recording.step(mark)

    def record(self) -> Recording:
        """Returns the recording, which is made at the first call."""
        self._recording = self._recording or Recording(self._setup, super().__call__)  # type: ignore[misc]
        return self._recording


class GraphedInference(Recorded, InferenceStep):
    """A forward is one graph here."""


class GraphedTraining(Recorded, TrainingStep):
    """Forward, loss, backward and optimizer are one graph, which is recorded at the first call. Its phases cannot be told apart."""

    phases: ClassVar[tuple[str, ...]] = ("step",)

    def __init__(self, setup: Setup, optimizer: OptimizerName) -> None:
        if optimizer in COUNTS_STEPS:
            setup.optimizer_options["capturable"] = True
        super().__init__(setup, optimizer)

    def over(self, inputs: Callable[[], Inputs], mark: Mark = no_mark) -> Callable[[], Tensor]:
        def step() -> Tensor:
            self._setup.args, self._setup.kwargs = inputs()
            return self(mark)

        return step

    def record(self) -> Recording:
        """Returns a recording that leaves no trace of the steps before it, so that training begins with the first replay."""
        if self._recording is not None:
            return self._recording
        with unchanged_afterwards(self._setup.workload.model):
            recording = super().record()
        # The state is set in place, because the graph holds these very tensors. Momentum, moments and step counts begin at zero.
        with torch.no_grad():
            for leaf in pytree.tree_leaves(list(self._optimizer.state.values())):
                if isinstance(leaf, Tensor):
                    leaf.zero_()
        if self._scaler.is_enabled():
            assert self._scaler._scale is not None
            assert self._scaler._growth_tracker is not None
            self._scaler._scale.fill_(INITIAL_GRADIENT_SCALE)
            self._scaler._growth_tracker.zero_()
        return recording

    def recover(self) -> None:
        """Lets the next call record again, because a replay that broke leaves the graph unusable."""
        super().recover()
        self._recording = None


@registered
class Graphs(RecipeSwitch):
    name = "graphs"
    summary = "the whole step in one CUDA graph: the forward, or forward, loss, backward and optimizer"
    stage = GRAPHS
    relieves = "host"
    does = Capabilities(records_graph=True, dissolves_modules=True)
    leaves_program = True
    tasks = ALL_MODELS

    def __init__(self, switch: Switch, task: Task) -> None:
        super().__init__(switch, task)
        if task == "generate":
            self.needs = (NEEDS_STATIC_CACHE,)
        if task == "train":
            why = (
                "GradScaler asks the host whether to skip a step, which a graph cannot; add fused-optimizer, which decides on "
                "the GPU, or use amp-bf16, which needs no scaling"
            )
            self.needs = (SwitchNeed(beside="amp", wants=("fused-optimizer",), reason=why),)

    def refused_by(self, device: Device) -> str | None:
        if self.task == "train" and world_size() > 1:
            between = "compile:reduce-overhead records what lies between"
            return f"a step that waits for other ranks is not recorded; {between}"
        return device.graph_refusal()

    def unsuited(self, model: nn.Module, facts: Facts | None) -> str | None:
        if facts is None:
            return None
        if facts.synchronises or (facts.synchronises is None and facts.reads):
            where = f" ({', '.join(facts.reads[:3])})" if facts.reads else ""
            return f"the step waits for the device by itself{where}, which cannot be recorded"
        dependence = data_dependence(facts)
        return f"a recorded step repeats what it did, and this one {dependence}" if dependence else None

    def apply(self, setup: Setup) -> None:
        setup.shortens_launches = True
        leave_fast_path(setup, PADDED)
        setup.records_decode = self.task == "generate"
        if not setup.records_decode:
            setup.step_class = GraphedInference if self.task == "infer" else GraphedTraining

    def write(self, code: RecipeCode) -> None:
        code.shortens_launches = code.is_graphed = True
        write_without_fast_path(code, PADDED)
        if self.task != "generate":
            code.carry(CallForm)
