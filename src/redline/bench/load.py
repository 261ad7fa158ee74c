"""This runs a model behind a queue in real time, with a step for every batch size that may form."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from torch import Tensor

from redline.bench.device.base import Device
from redline.bench.device.failure import kind_of, one_line
from redline.bench.measure.blocks import quiet_collector
from redline.bench.recipe.compose import set_up
from redline.bench.workload.batch import Axes
from redline.bench.workload.inputs import Inputs
from redline.bench.workload.step import InferenceStep, Setup, make_step
from redline.bench.workload.structure import map_leaves, named_tensors
from redline.model.arrivals import Served, bucket_of, doubling_buckets, run_arrivals
from redline.model.errors import BenchError, RedlineError
from redline.model.protocol import Load
from redline.model.spec import RunSpec

WARM_STEPS = 3
"""Each batch size runs this often before any request comes, because libraries choose their kernels on the first calls."""
SPIN_S = 0.0005
"""The system wakes a sleeper about this late, so the rest of a wait is spent looking at the clock."""


class RealClock:
    """This clock counts the seconds since it was made."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._started

    def wait_until(self, moment_s: float) -> None:
        """Sleeps until shortly before the moment, and then looks at the clock until it has come."""
        while (left := moment_s - self.now()) > 0:
            if left > SPIN_S:
                time.sleep(left - SPIN_S)


class LoadRunner:
    """This holds the prepared model at every batch size up to the largest.

    A recipe that neither compiles nor records runs each size as it comes, on the first rows of the largest batch's
    inputs. Other recipes are prepared once for each power of two, and a batch in between is padded.
    """

    def __init__(self, spec: RunSpec, setup: Setup, step: InferenceStep, on_size: Callable[[int], None]) -> None:
        assert spec.load is not None
        self._load, self._device = spec.load, setup.device
        fixed = setup.capabilities.compiles or setup.capabilities.records_graph or not _can_be_cut(setup)
        self._steps: dict[int, Callable[[], Any]] = {}
        if fixed:
            for size in doubling_buckets(spec.load.max_batch)[:-1]:
                on_size(size)
                with _naming_batch(size):
                    self._steps[size] = _built_at(spec, size, setup.device)
            self._steps[spec.load.max_batch] = step
        else:
            self._steps = {size: _cut(step, setup, size) for size in range(1, spec.load.max_batch + 1)}
        self._sizes = tuple(sorted(self._steps))
        self._context = step.context
        self._warm_up()
        setup.settle()  # the other batch sizes have loaded kernels of their own

    def _warm_up(self) -> None:
        with self._context():
            for size, run in self._steps.items():
                with _naming_batch(size):
                    for _ in range(WARM_STEPS):
                        run()
                    self._device.synchronize()

    def run(self, request: Load) -> Served:
        self._device.synchronize()
        with self._context(), quiet_collector():
            served = run_arrivals(request.arrivals_s, self._load, RealClock(), self._run_batch, request.deadline_s)
        return msgspec.structs.replace(served, rate=request.rate, seed=request.seed)

    def _run_batch(self, size: int) -> int:
        """Runs a batch of this size, padded where necessary, and returns the size that ran."""
        bucket = bucket_of(size, self._sizes)
        self._steps[bucket]()
        self._device.synchronize()
        return bucket


@contextmanager
def _naming_batch(size: int) -> Iterator[None]:
    """Within this context an error names the batch it came with, because a model may take only some sizes."""
    try:
        yield
    except Exception as error:
        if isinstance(error, RedlineError):
            raise
        raise BenchError(kind_of(error, "warmup"), f"at batch {size}: {one_line(error)}") from error


def _can_be_cut(setup: Setup) -> bool:
    """Returns whether everything that holds items is a tensor, of which the first rows can be taken without a copy."""
    axes = setup.workload.axes
    tensors = {path for path, _ in named_tensors(setup.args)} | {path for path, _ in named_tensors(setup.kwargs)}
    return bool(axes) and all(isinstance(axis, int) and path in tensors for path, axis in (axes or {}).items())


def _cut(step: InferenceStep, setup: Setup, size: int) -> Callable[[], Any]:
    """Returns the step over the first rows of its inputs."""
    assert setup.workload.axes is not None
    with step.given(*_first_rows((setup.args, setup.kwargs), setup.workload.axes, size)):
        return step.plain()


def _first_rows(inputs: Inputs, axes: Axes, size: int) -> Inputs:
    def cut(path: str, leaf: Any) -> Any:
        axis = axes.get(path)
        return leaf.narrow(axis, 0, size) if isinstance(leaf, Tensor) and isinstance(axis, int) else leaf

    args, kwargs = inputs
    return map_leaves(args, cut), map_leaves(kwargs, cut)


def _built_at(spec: RunSpec, size: int, device: Device) -> InferenceStep:
    """Returns a step with a model of its own for this size. A second shape would turn one compiled program dynamic, and slower."""
    smaller = msgspec.structs.replace(spec.workload, batch=size)
    setup = set_up(msgspec.structs.replace(spec, workload=smaller), device)
    setup.let_originals_go()
    step = make_step(setup, smaller.optimizer)
    assert isinstance(step, InferenceStep)
    with step.context():
        step()
    return step
