"""A block times what it says it times: on a CPU and on a device that runs behind its host, in time that is made up."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from redline.bench.device import cpu
from redline.bench.device.cpu import CpuDevice
from redline.bench.measure import blocks
from redline.bench.measure.blocks import OVERRUN, measure_block, plan_steps
from redline.bench.workload.step import InferenceStep, Mark, Setup, no_mark
from redline.bench.workload.workload import assemble
from redline.model.note import note
from redline.model.protocol import Measure
from redline.model.record import Block, BlockKind, Capabilities, Memory, TelemetrySample, Warmup
from redline.model.spec import MeasureSpec

KINDS: tuple[BlockKind, ...] = ("latency", "throughput")
TRAINING = {"forward": 0.25, "backward": 0.5, "optimizer": 0.25}


class Clock:
    """Host time, which passes only when somebody works or waits."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s

    def perf_counter_ns(self) -> int:
        return round(self.now_s * 1e9)

    def time(self) -> float:
        return 1_700_000_000.0 + self.now_s

    def pass_by(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (blocks, cpu):
        monkeypatch.setattr(module, "time", clock)
    return clock


class Steps:
    """A timed step that takes what it is told, in phases, and keeps what it saw while it ran."""

    def __init__(
        self,
        work: Callable[[float], None],
        times_s: Iterable[float],
        phases: dict[str, float] | None = None,
        log: list[str] | None = None,
    ) -> None:
        self._work = work
        self._times: Iterator[float] = iter(times_s)
        self._shares = phases or {"forward": 1.0}
        self.phases = tuple(self._shares)
        self.log = [] if log is None else log
        self.collector_was_on: list[bool] = []
        self.in_context = False

    def __call__(self, mark: Mark = no_mark) -> None:
        assert self.in_context
        self.log.append("step")
        self.collector_was_on.append(gc.isenabled())
        seconds = next(self._times)
        for share in self._shares.values():
            self._work(seconds * share)
            mark()

    def plain(self, mark: Mark = no_mark) -> Callable[[], Any]:
        return partial(self, mark)

    @contextmanager
    def context(self) -> Iterator[None]:
        self.in_context = True
        yield
        self.in_context = False


class Accelerator(CpuDevice):
    """Works through a queue in its own time while the host runs ahead; synchronising makes the host wait."""

    kind = "cuda"
    clock = "device"

    def __init__(self, host: Clock, issue_s: float) -> None:
        super().__init__()
        self.log: list[str] = []
        self._host = host
        self._issue_s = issue_s
        self._done_at_s = 0.0
        self._joules = 0.0

    def work(self, seconds: float) -> None:
        """Issued by the host in `issue_s`; begins when that is done and all before it are."""
        self._host.pass_by(self._issue_s)
        self._done_at_s = max(self._done_at_s, self._host.now_s) + seconds
        self._joules += 100 * seconds

    def synchronize(self) -> None:
        self.log.append("synchronize")
        self._host.now_s = max(self._host.now_s, self._done_at_s)

    def mark(self) -> float:
        self.log.append("mark")
        return max(self._done_at_s, self._host.now_s)

    def seconds_between(self, marks: Sequence[float]) -> list[float]:
        assert marks[-1] <= self._host.now_s, "asked before everything had happened"
        return [later - earlier for earlier, later in pairwise(marks)]

    def reset_peaks(self) -> None:
        self.log.append("reset peaks")

    def memory(self) -> Memory:
        self.log.append("memory")
        return Memory(peak_reserved_bytes=4096)

    def look(self, at_s: float, *, neighbours: bool = False) -> TelemetrySample:
        return TelemetrySample(at_s=at_s, foreign=("somebody",) if neighbours else ())

    def energy_j(self) -> float:
        return self._joules


def request(kind: BlockKind = "throughput", seconds: float = 0.25, settle_s: float = 0.0, **changes: Any) -> Measure:
    return Measure(kind=kind, seconds=seconds, settle_seconds=settle_s, **changes)


class TestThePlan:
    @pytest.mark.parametrize(
        ("step_s", "asked", "plan"),
        [
            (0.01, request(seconds=0.25), (0, 25)),
            (0.01, request(seconds=0.25, settle_s=0.02), (2, 25)),
            (0.009, request(seconds=0.25, settle_s=0.02), (3, 28)),
            (0.015, request(seconds=0.25, settle_s=0.02), (2, 17)),
            # A step as long as the settling itself still has one before it,
            (0.19, request(seconds=0.25, settle_s=0.02), (1, 1)),
            # a much longer one is not disturbed by what settles,
            (0.2, request(seconds=0.25, settle_s=0.02), (0, 1)),
            # and one longer than the block is timed once.
            (3.0, request(seconds=0.25, settle_s=0.02), (0, 1)),
            (0.001, request(seconds=1.0, settle_s=0.02, max_steps=5), (20, 5)),
            (0.5, request(seconds=1.0, max_steps=5), (0, 2)),
            # A clock that read nothing must not ask for endless steps.
            (0.0, request(seconds=0.25, settle_s=0.02, max_steps=3), (200_000, 3)),
        ],
    )
    def test_says_how_many_steps_settle_and_how_many_are_timed(
        self, step_s: float, asked: Measure, plan: tuple[int, int]
    ) -> None:
        assert plan_steps(asked, step_s) == plan


class TestOnACpu:
    @staticmethod
    def block(clock: Clock, asked: Measure, times_s: Iterable[float], estimate_s: float, **settings: Any) -> Block:
        return measure_block(Steps(clock.pass_by, times_s, **settings), CpuDevice(), asked, estimate_s)

    @pytest.mark.parametrize("kind", KINDS)
    def test_samples_are_what_the_steps_took_and_what_settles_is_kept_apart(
        self, clock: Clock, kind: BlockKind
    ) -> None:
        times, began = [0.030, 0.020, 0.010, 0.011, 0.012, 0.013, 0.014], clock.time()
        block = self.block(clock, request(kind, 0.05, settle_s=0.02, round=7), times, 0.01)
        assert block.settling == pytest.approx(times[:2])
        assert block.samples == pytest.approx(times[2:])
        assert block.wall_s == pytest.approx(sum(times))
        assert (block.kind, block.clock, block.unit) == (kind, "host", "s")
        assert (block.started_at, block.round) == (began, 7)
        assert (block.issue_s, block.phases) == ((), {})  # nothing runs ahead, and there is but one phase
        assert block.memory.peak_rss_bytes
        assert len(block.telemetry) >= 1

    def test_phases_are_those_of_further_steps(self, clock: Clock) -> None:
        times = [*[0.010] * 20, 0.020, 0.040]
        block = self.block(clock, request(seconds=0.2), times, 0.01, phases=TRAINING)
        assert block.samples == pytest.approx([0.010] * 20)
        assert block.phases == {name: pytest.approx([share * 0.020, share * 0.040]) for name, share in TRAINING.items()}

    @pytest.mark.parametrize(("number", "looks"), [(0, 1), (1, 0)])
    def test_phases_of_few_long_steps_are_looked_at_once(self, clock: Clock, number: int, looks: int) -> None:
        asked = request(seconds=0.03, round=number)
        block = self.block(clock, asked, itertools.repeat(0.01), 0.01, phases=TRAINING)
        assert [len(parts) for parts in block.phases.values()] == [looks] * 3 * looks

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("phases", [None, TRAINING], ids=["inference", "training"])
    @pytest.mark.parametrize(
        ("first", "then", "settle_s", "settling", "samples"),
        [
            ([], 0.3, 0.0, [], [0.3] * 4),  # a block ends once it is plain that it takes longer
            ([], 4.0, 0.5, [4.0], [4.0]),  # also while it settles, with one step to show
            ([0.01, 30.0], 0.01, 0.1, [0.01, 30.0], [0.01]),  # and without the hiccup that made it late,
            ([], 0.03, 0.0, [], [0.03] * 25),  # but within bounds it goes on to its last step
            ([], 0.01, 2.0, [0.01] * 200, [0.01] * 25),  # and is given the time to settle on top
        ],
    )
    def test_a_block_that_takes_longer_than_its_stale_estimate_ends_in_time(
        self,
        clock: Clock,
        kind: BlockKind,
        phases: Any,
        first: Any,
        then: float,
        settle_s: float,
        settling: Any,
        samples: Any,
    ) -> None:
        times_s = itertools.chain(first, itertools.repeat(then))
        block = self.block(clock, request(kind, 0.25, settle_s=settle_s), times_s, 0.01, phases=phases)
        assert block.settling == pytest.approx(settling)
        assert block.samples == pytest.approx(samples)
        if then == 0.3:
            assert OVERRUN * 0.25 < block.wall_s <= OVERRUN * 0.25 + 0.3


class TestOnAnAccelerator:
    @staticmethod
    def block(
        clock: Clock,
        kind: BlockKind = "throughput",
        *,
        settle_s: float = 0.02,
        work_s: float = 0.01,
        issue_s: float = 0.001,
        phases: dict[str, float] | None = None,
        estimate_s: float | None = None,
    ) -> tuple[Block, list[str]]:
        device = Accelerator(clock, issue_s / len(phases or "1"))
        step = Steps(device.work, itertools.repeat(work_s), phases, log=device.log)
        return measure_block(step, device, request(kind, 0.1, settle_s), estimate_s or work_s), device.log

    def test_a_throughput_block_never_waits_between_its_steps_and_is_timed_by_the_device(self, clock: Clock) -> None:
        block, log = self.block(clock)
        assert block.clock == "device"
        assert block.samples == pytest.approx([0.01] * 10)
        assert block.issue_s == pytest.approx([0.001] * 12)
        assert block.wall_s == pytest.approx(12 * 0.01 + 0.001)
        first = log.index("step")
        last = len(log) - 1 - log[::-1].index("step")
        assert log.count("step") == 12
        assert "synchronize" in log[:first]
        assert "synchronize" not in log[first : last + 1]
        assert log[last + 1 :].count("synchronize") == 1

    def test_a_latency_block_waits_after_every_step_and_is_timed_by_the_host(self, clock: Clock) -> None:
        block, log = self.block(clock, "latency")
        assert (block.clock, block.issue_s) == ("host", ())
        assert block.samples == pytest.approx([0.011] * 10)
        assert block.settling == pytest.approx([0.011] * 2)
        assert log.count("step") == 12
        for position, event in enumerate(log):
            if event == "step":
                assert log[position + 1] == "synchronize"

    def test_peaks_energy_and_neighbours_are_those_of_the_block(self, clock: Clock) -> None:
        block, log = self.block(clock, settle_s=0.0)
        assert block.memory == Memory(peak_reserved_bytes=4096)
        assert log.index("reset peaks") < log.index("step")
        assert log[-1] == "memory"
        assert block.energy_j == pytest.approx(10 * 0.01 * 100)
        assert block.telemetry[-1].foreign == ("somebody",)

    def test_waiting_for_a_slow_host_counts_as_throughput(self, clock: Clock) -> None:
        block, _ = self.block(clock, work_s=0.001, issue_s=0.01)
        assert median(block.samples) == pytest.approx(0.01)
        assert median(block.issue_s) == pytest.approx(0.01)

    def test_phases_are_told_by_the_device_in_further_steps(self, clock: Clock) -> None:
        block, log = self.block(clock, phases=TRAINING)
        assert block.phases == {name: pytest.approx([share * 0.01]) for name, share in TRAINING.items()}
        timed = log[: len(log) - 1 - log[::-1].index("memory")]
        assert timed.count("mark") == 1 + 12

    def test_short_steps_are_not_marked_one_by_one(self, clock: Clock) -> None:
        block, log = self.block(clock, settle_s=0.002, work_s=1e-4, issue_s=1e-5)
        assert block.steps_per_sample == 5
        assert (len(block.settling), len(block.samples)) == (4, 200)
        assert block.samples == pytest.approx([1e-4] * 200)
        assert len(block.issue_s) == 1020 == log.count("step")
        assert log.count("mark") == 1 + 204

    @pytest.mark.parametrize(("kind", "issue_s", "steps"), [("throughput", 0.5, 10), ("latency", 0.001, 1)])
    def test_a_host_that_runs_ahead_cannot_tell_that_a_block_is_late_and_one_that_waits_ends_it(
        self, clock: Clock, kind: BlockKind, issue_s: float, steps: int
    ) -> None:
        """It would end on a number of steps that depends on the depth of the queue."""
        block, _ = self.block(clock, kind, settle_s=0.0, work_s=0.5, issue_s=issue_s, estimate_s=0.01)
        assert len(block.samples) == steps


class TestTheCollector:
    @pytest.fixture(autouse=True)
    def _as_it_was(self) -> Iterator[None]:
        was_on = gc.isenabled()
        yield
        (gc.enable if was_on else gc.disable)()

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("was_on", [True, False])
    def test_is_off_inside_a_block_and_afterwards_as_it_was(self, clock: Clock, kind: BlockKind, was_on: bool) -> None:
        (gc.enable if was_on else gc.disable)()
        steps = Steps(clock.pass_by, [0.01] * 5)
        measure_block(steps, CpuDevice(), request(kind, 0.03, settle_s=0.02), 0.01)
        assert steps.collector_was_on == [False] * 5
        assert gc.isenabled() == was_on

    @pytest.mark.parametrize("kind", KINDS)
    def test_is_as_it_was_also_after_a_step_that_raises(self, clock: Clock, kind: BlockKind) -> None:
        gc.enable()

        def breaks(seconds: float) -> None:
            raise RuntimeError("this forward")

        with pytest.raises(RuntimeError, match="this forward"):
            measure_block(Steps(breaks, [0.01]), CpuDevice(), request(kind), 0.01)
        assert gc.isenabled()
        assert not [thread for thread in threading.enumerate() if thread.name == "redline-telemetry"]


class Ticks(TorchDispatchMode):
    """Every operator takes a second."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._clock.now_s += 1.0
        return func(*args, **(kwargs or {}))


class Works(torch.nn.Module):
    """Three operators, and as much Python as it is told."""

    def __init__(self, clock: Clock, python_s: float) -> None:
        super().__init__()
        self._clock, self._python_s = clock, python_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._clock.now_s += self._python_s
        return x.mul(2).add(1).relu()


@pytest.mark.parametrize(("python_s", "share"), [(0.0, 1.0), (1.0, 0.75), (9.0, 0.25)])
def test_what_is_not_spent_in_operators_is_python(
    monkeypatch: pytest.MonkeyPatch, python_s: float, share: float
) -> None:
    clock = Clock()
    monkeypatch.setattr(blocks, "time", clock)
    model = Works(clock, python_s)
    workload = assemble(model, ((torch.ones(2),), {}), task="infer", source="test", identity="", seed=0)
    setup = Setup(workload=workload, device=CpuDevice(), model=model, args=workload.args, kwargs=workload.kwargs)
    spec, warmup = MeasureSpec(), Warmup(steady=True, reason=note("steady", ""), samples=(99.0, 3.0 + python_s))
    with Ticks(clock):
        assert blocks.operators_share(InferenceStep(setup), setup, spec, warmup) == share
        setup.switches["compile"] = Capabilities(compiles=True)
        assert blocks.operators_share(InferenceStep(setup), setup, spec, warmup) is None
