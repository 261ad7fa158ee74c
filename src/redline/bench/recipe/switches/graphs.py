"""CUDA graphs: a step recorded once and replayed, so that the host launches one thing instead of hundreds.

What a graph reads and writes stays where it was when it was recorded. So inputs are copied into its own before every
replay, inside the timing, as whoever deploys it must; and what it returns is overwritten by the next replay.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch.utils import _pytree as pytree

from redline.bench.device.base import Device
from redline.bench.device.failure import is_out_of_memory
from redline.bench.recipe.base import GRAPHS, NEEDS_STATIC_CACHE, SWITCHES, RecipeCode, RecipeSwitch, data_dependence
from redline.bench.recipe.fastpath import leave_fast_path, write_without_fast_path
from redline.bench.recipe.plain import CallForm
from redline.bench.recipe.rounding import unchanged_afterwards
from redline.bench.workload.ranks import world_size
from redline.bench.workload.step import COUNTS_STEPS, InferenceStep, Mark, Setup, TrainingStep, no_mark
from redline.model.errors import BenchError
from redline.model.questions import SwitchNeed
from redline.model.record import Capabilities
from redline.model.spec import OptimizerName, Task
from redline.model.work import Facts

PADDED = torch.nn.TransformerEncoder
"""With a mask it reads lengths on the host where it takes its fast path; without one, and in other layers, that can be recorded."""
WARMUPS = 3
"""Steps before recording: libraries pick their algorithms, the compiler compiles, the optimizer makes its state."""


class Recording:
    """Work recorded over a setup's inputs."""

    def __init__(self, setup: Setup, work: Callable[[], Any]) -> None:
        self._setup = setup
        given = setup.args, setup.kwargs
        setup.args, setup.kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, given)
        self._form = CallForm(setup.args, setup.kwargs)
        self._inputs = self._form.tensors(setup.args, setup.kwargs)
        try:
            self._replay, self.output = setup.device.record_graph(work, WARMUPS)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            why = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise BenchError("unsupported", f"graphs cannot record this step: {why}") from error
        finally:
            setup.args, setup.kwargs = given

    def replay(self) -> None:
        """With the inputs the setup has now."""
        for own, given in zip(self._inputs, self._form.tensors(self._setup.args, self._setup.kwargs), strict=True):
            own.copy_(given)
        self._replay()

    def plain_replay(self, mark: Mark) -> Callable[[], Any]:
        """A replay with the inputs that the setup has now, as the body of a loop."""
        given = self._form.tensors(self._setup.args, self._setup.kwargs)
        pairs, replay, output = list(zip(self._inputs, given, strict=True)), self._replay, self.output

        def step() -> Any:
            for own, new in pairs:
                own.copy_(new)
            replay()
            mark()
            return output

        return step


class GraphedInference(InferenceStep):
    """A forward recorded at the first call."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._recording: Recording | None = None

    def __call__(self, mark: Mark = no_mark) -> Any:
        if self._recording is None:
            self._recording = Recording(self._setup, super().__call__)
        self._recording.replay()
        mark()
        return self._recording.output

    def plain(self, mark: Mark = no_mark) -> Callable[[], Any]:
        return partial(self, mark) if self._recording is None else self._recording.plain_replay(mark)


class GraphedTraining(TrainingStep):
    """Forward, loss, backward and optimizer in one graph, recorded at the first call. Its phases cannot be told apart."""

    phases: ClassVar[tuple[str, ...]] = ("step",)

    def __init__(self, setup: Setup, optimizer: OptimizerName) -> None:
        if optimizer in COUNTS_STEPS:
            setup.optimizer_options["capturable"] = True
        super().__init__(setup, optimizer)
        self._recording: Recording | None = None

    def __call__(self, mark: Mark = no_mark) -> torch.Tensor:
        if self._recording is None:
            self._recording = self._recorded()
        self._recording.replay()
        mark()
        loss: torch.Tensor = self._recording.output
        return loss

    def plain(self, mark: Mark = no_mark) -> Callable[[], Any]:
        return partial(self, mark) if self._recording is None else self._recording.plain_replay(mark)

    def _recorded(self) -> Recording:
        """As if the steps before recording had never been: training begins with the first replay."""
        with unchanged_afterwards(self._setup.workload.model):
            recording = Recording(self._setup, super().__call__)
        self._forget_steps()
        return recording

    def _forget_steps(self) -> None:
        # In place, for the graph holds these very tensors. Zero is where momentum, moments and step counts begin.
        with torch.no_grad():
            for tensor in pytree.tree_leaves(list(self._optimizer.state.values())):
                if isinstance(tensor, torch.Tensor):
                    tensor.zero_()
            if self._scaler.is_enabled():
                assert self._scaler._scale is not None
                assert self._scaler._growth_tracker is not None
                self._scaler._scale.fill_(self._scaler._init_scale)
                self._scaler._growth_tracker.zero_()

    def record(self) -> None:
        """Record now, so that the first step of a training is one like the others."""
        if self._recording is None:
            self._recording = self._recorded()

    def restore(self, state: dict[str, Any]) -> None:
        """Into the tensors that the graph holds, which therefore must be there already."""
        self.record()
        live = self._optimizer.state_dict()
        with torch.no_grad():
            for own, kept in zip(_tensors(live["state"]), _tensors(state["optimizer"]["state"]), strict=True):
                own.copy_(kept)
            if self._scaler.is_enabled():
                assert self._scaler._scale is not None
                assert self._scaler._growth_tracker is not None
                self._scaler._scale.fill_(state["scaler"]["scale"])
                self._scaler._growth_tracker.fill_(state["scaler"]["_growth_tracker"])

    def recover(self) -> None:
        """A replay that broke leaves the graph unusable; the next call records it again."""
        super().recover()
        self._recording = None


def _tensors(state: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor)]


@SWITCHES.register("graphs")
class Graphs(RecipeSwitch):
    name = "graphs"
    summary = "the whole step in one CUDA graph: the forward, or forward, loss, backward and optimizer"
    stage = GRAPHS
    relieves = "host"
    does = Capabilities(records_graph=True, dissolves_modules=True)
    leaves_program = True
    needs: ClassVar[dict[Task, tuple[SwitchNeed, ...]]] = {
        "train": (
            SwitchNeed(
                beside="amp",
                wants=("fused-optimizer",),
                reason="GradScaler asks the host whether to skip a step, which a graph cannot; add fused-optimizer, "
                "which decides on the GPU, or use amp-bf16, which needs no scaling",
            ),
        ),
        "generate": (NEEDS_STATIC_CACHE,),
    }
    tasks: ClassVar[tuple[Task, ...]] = ("infer", "train", "generate")

    def refusal(self, device: Device, task: Task) -> str | None:
        if task == "train" and world_size() > 1:
            return (
                "a step that waits for other ranks is not recorded; compile:reduce-overhead records what lies between"
            )
        return device.graph_refusal()

    def irrelevance(self, model: torch.nn.Module, task: Task, facts: Facts | None) -> str | None:
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
        if setup.task == "generate":
            setup.records_decode = True
            return
        setup.step_class = GraphedInference if setup.task == "infer" else GraphedTraining

    def write(self, code: RecipeCode) -> None:
        code.shortens_launches = True
        write_without_fast_path(code, PADDED)
        code.is_graphed = True
        if code.task == "generate":
            return
        code.bring_in("from torch.utils._pytree import tree_flatten")
        code.carry(CallForm)
