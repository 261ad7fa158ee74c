"""From what a watched process heard to its steps, rates and shares: loops whose parts take as long as they are told to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from redline.analyze.ranks import late_rank
from redline.analyze.watch import Reader, Steps, drift_of, growth_of, main_logs, rates_of, wait_for
from redline.bench.watch.spool import KINDS
from redline.model.record import PHASES, Block, Rates, RunRecord
from redline.model.spec import RunSpec, WorkloadSpec


class Loop:
    """A program that is watched: each method is a part of its loop."""

    def __init__(self, **process: Any) -> None:
        self.at = 100.0
        self.rows: list[tuple[str, float, float, float, int]] = []
        self._process = process

    def fact(self, kind: str) -> dict[str, Any]:
        return self._process if kind == "process" else {}

    def hear(self, kind: str, key: float = 0.0, value: float = 0.0) -> Loop:
        assert kind in KINDS
        self.rows.append((kind, key, value, self.at, len(self.rows)))
        return self

    def part(self, kind: str, seconds: float, key: float = 0.0, begin: float = 0.0, end: float = 0.0) -> Loop:
        return self.hear(kind, key, begin).gap(seconds).hear(f"{kind} ended", key, end)

    def gap(self, seconds: float) -> Loop:
        self.at += seconds
        return self

    def new_pass(self, *, workers: int = 0) -> Loop:
        return self.part("data", 0.0, 7.0, 1.0 + workers)

    def batch(self, seconds: float, samples: float = 8.0) -> Loop:
        return self.part("data", seconds, 7.0, 0.0, samples)

    def exhausted(self, seconds: float = 0.0) -> Loop:
        return self.part("data", seconds, 7.0, 0.0, -1.0)

    def forward(
        self, seconds: float, *, model: float = 1.0, samples: float = 8.0, grads: bool = True, trains: bool = True
    ) -> Loop:
        return self.part("forward", seconds, model, grads + 2.0 * trains, samples)

    def quiet(self, seconds: float, samples: float = 8.0) -> Loop:
        return self.forward(seconds, samples=samples, grads=False)

    def backward(self, seconds: float, *, waits: float = 0.0) -> Loop:
        """A rank that waits for the gradients of others does so at the end."""
        self.hear("backward").gap(seconds - waits)
        return (self.hear("waiting") if waits else self).gap(waits).hear("backward ended")

    def optimizer(self, seconds: float, number: float = 0.0, *, full: bool = True) -> Loop:
        return self.part("optimizer", seconds, number, 0.0, float(full))

    def learn(self) -> Loop:
        return self.forward(2).backward(3).optimizer(1)

    def train(
        self, count: int = 1, *, slower: float = 1.0, samples: float = 8.0, number: float = 0.0, model: float = 1.0
    ) -> Loop:
        """Steps of 0.1 s with a loader: a tenth of it is waiting for data."""
        for _ in range(count):
            self.batch(0.01 * slower, samples).forward(0.02 * slower, model=model).backward(0.03 * slower)
            self.optimizer(0.04 * slower, number)
        return self

    @property
    def reader(self) -> Reader:
        reader = Reader()
        reader.read(self.rows)
        return reader

    @property
    def rates(self) -> Rates:
        return rates_of([self])

    def phases(self, step: int = -1) -> dict[str, float]:
        """What one step's time went to, without what took none."""
        steps = Steps(self.reader)
        apart = {"validation": steps.validation_s[step], "saving": steps.saving_s[step]}
        found = dict(zip(PHASES, steps.phases_s[step], strict=True)) | apart
        return {name: round(float(seconds), 9) for name, seconds in found.items() if round(float(seconds), 9)}


def test_a_plain_loop_has_its_rates_and_shares() -> None:
    rates = Loop().train(50).rates
    assert (rates.steps, rates.samples) == (50, 400)
    assert rates.steps_per_s == rates.whole_steps_per_s == pytest.approx(10.0)
    assert rates.samples_per_s == pytest.approx(80.0)
    usual = {"data": 0.1, "forward": 0.2, "backward": 0.3, "optimizer": 0.4}
    assert {name: share for name, share in rates.shares.items() if share} == pytest.approx(usual)


TRAINED = {"data": 0.01, "forward": 0.02, "backward": 0.03, "optimizer": 0.04}


MOMENTS: dict[str, tuple[Callable[[Loop], Loop], dict[str, float]]] = {
    "between forward and backward lies the loss": (
        lambda loop: loop.batch(2).gap(0.5).part("copy", 0.25).forward(3).gap(0.125).backward(5).optimizer(1),
        {"data": 2, "other": 0.5, "copy": 0.25, "forward": 3.125, "backward": 5, "optimizer": 1},
    ),
    "gradients may be reset between the loss and its backward pass": (
        lambda loop: loop.batch(1).forward(2).gap(0.5).part("zero_grad", 0.25).gap(0.5).backward(1).optimizer(1),
        {"data": 1, "forward": 3, "backward": 1, "optimizer": 1.25},
    ),
    "without a loader the batch is made before the model is used": (
        lambda loop: loop.gap(4).part("zero_grad", 1).gap(0.5).learn(),
        {"data": 4.5, "forward": 2, "backward": 3, "optimizer": 2},
    ),
    "so is each of several that are accumulated": (
        lambda loop: loop.gap(1).forward(2).backward(3).gap(1).learn(),
        {"data": 2, "forward": 4, "backward": 6, "optimizer": 1},
    ),
    "a batch that is made between a forward and its backward pass is data": (
        lambda loop: loop.hear("fetched", 0, 0.5).forward(2).gap(0.75).backward(3).optimizer(1),
        {"data": 0.5, "forward": 2.25, "backward": 3, "optimizer": 1},
    ),
    "bare weights have their forward pass before the backward pass": (
        lambda loop: loop.gap(4).backward(2).optimizer(1),
        {"forward": 4, "backward": 2, "optimizer": 1},
    ),
    "so has a model that is not found": (
        lambda loop: loop.batch(1).gap(4).backward(2).optimizer(1),
        {"data": 1, "forward": 4, "backward": 2, "optimizer": 1},
    ),
    "forward and backward in a closure are not the optimizer's": (
        lambda loop: loop.batch(1).hear("optimizer").forward(2).gap(0.25).backward(3).gap(0.5).hear("optimizer ended", 0, 1),
        {"data": 1, "forward": 2.25, "backward": 3, "optimizer": 0.5},
    ),
    "neither is what the closure does before its forward pass": (
        lambda loop: loop.batch(1).hear("optimizer").gap(4).forward(2).backward(3).hear("optimizer ended", 0, 1),
        {"data": 1, "other": 4, "forward": 2, "backward": 3},
    ),
    "a checkpoint of several files is saved as a whole": (
        lambda loop: loop.train().part("saving", 7).gap(1).part("saving", 2).gap(0.5),
        TRAINED | {"saving": 10, "other": 0.5},
    ),
    "an average of the weights is no batch": (
        lambda loop: loop.part("upkeep", 3).gap(1).learn(),
        {"other": 3, "data": 1, "forward": 2, "backward": 3, "optimizer": 1},
    ),
    "a teacher without gradients is part of the step": (
        lambda loop: loop.batch(1).quiet(2).forward(3).backward(1).optimizer(1),
        {"data": 1, "forward": 5, "backward": 1, "optimizer": 1},
    ),
    "so is a model that is trained in evaluation mode": (
        lambda loop: loop.batch(1).forward(3, trains=False).backward(1).optimizer(1),
        {"data": 1, "forward": 3, "backward": 1, "optimizer": 1},
    ),
    "a checkpoint is saved, and what watching takes is nobody's": (
        lambda loop: loop.train().part("saving", 7).part("pause", 30),
        TRAINED | {"saving": 7},
    ),
    "nobody waits for a batch when a loader is through": (
        lambda loop: loop.train().exhausted(5).new_pass(),
        TRAINED | {"other": 5},
    ),
    "a pass over a loader without gradients is validation": (
        lambda loop: loop.train().new_pass().batch(1).quiet(2).batch(1).forward(2, trains=False).exhausted(1).gap(1),
        TRAINED | {"validation": 7, "other": 1},
    ),
    "also where the loop over it is left early": (
        lambda loop: loop.train().batch(1).quiet(2).batch(1).quiet(2).gap(0.5),
        TRAINED | {"validation": 6.5},
    ),
    "an agent acts on fewer samples than it learns from": (
        lambda loop: loop.gap(0.25).quiet(0.5, 4).gap(1).quiet(0.5, 4).gap(1).forward(2, samples=64).backward(3).optimizer(1),
        {"acting": 3.25, "forward": 2, "backward": 3, "optimizer": 1},
    ),
    "what it is to learn from a target is no acting": (
        lambda loop: loop.quiet(0.5, 1).gap(1).part("zero_grad", 0).quiet(2, 64).gap(0.5).forward(2, samples=64).backward(3).optimizer(1),
        {"acting": 1.5, "data": 0.5, "forward": 4, "backward": 3, "optimizer": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MOMENTS)
def test_every_moment_of_a_step_belongs_to_one_phase(case: str) -> None:
    body, told = MOMENTS[case]
    assert body(body(Loop())).phases() == told


def test_passes_of_one_of_several_optimizers_are_part_of_every_step() -> None:
    """As the generator's for the critic, which takes two steps on each batch."""
    loop = Loop()
    for _ in range(20):
        loop.batch(0.1)
        for _ in range(2):
            loop.quiet(1.0).forward(1.0, model=2).backward(1.0).optimizer(1.0, 1)
        loop.forward(1.0).backward(1.0).optimizer(1.0, 0)
    assert (loop.rates.steps, loop.rates.run_s["validation"]) == (20, 0.0)
    assert loop.rates.steps_per_s == pytest.approx(1 / 11.1)


def test_the_whole_run_is_accounted_for() -> None:
    """First steps that compile, validation, a profiled step and a last checkpoint: what the rate leaves out has a name."""
    loop = Loop().new_pass()
    loop.train(2, slower=20).train(30).part("pause", 5.0, begin=1.0).train(1).train(10)
    loop.exhausted(0.5).new_pass().batch(1.0).quiet(2.0).exhausted().part("saving", 3.0)
    rates = loop.rates
    told = {name: seconds for name, seconds in rates.run_s.items() if seconds}
    assert sum(told.values()) == pytest.approx(loop.at - 100.0)
    assert (told["first steps"], told["validation"], told["saving"]) == pytest.approx((4.0, 3.0, 3.0))
    assert told["profiling"] == pytest.approx(5.1)
    assert (rates.first_steps, rates.steps) == (2, 43)
    assert rates.steps_per_s == pytest.approx(40 / 4.5)
    assert rates.whole_steps_per_s == pytest.approx(42 / (loop.at - 100.0 - 5.1))  # without the profiled step


@pytest.mark.parametrize(("part", "is_left_out"), [("batch", False), ("forward", True)])
def test_a_first_step_that_compiles_is_left_out_and_one_that_waits_for_workers_is_not(
    part: str, is_left_out: bool
) -> None:
    loop = Loop()
    getattr(loop, part)(2.0)
    assert loop.train(50).rates.first_steps == int(is_left_out)


def grouped(*calls: tuple[float, bool, float]) -> Loop:
    """Optimizer's number, whether a batch comes before it, and the model that it trains."""
    loop = Loop()
    for number, has_batch, model in calls:
        if has_batch:
            loop.batch(0.01)
        loop.forward(0.02, model=model).backward(0.03).optimizer(0.04, number)
    return loop


@pytest.mark.parametrize(
    ("calls", "steps"),
    [
        ([(0, True, 1), (1, False, 2)] * 10, 10),  # a GAN
        ([(0, True, 1), (1, True, 2)] * 10, 20),  # two models that take turns
        ([(0, False, 1), (1, False, 2)] * 10, 20),  # also without a loader
        ([(0, True, 1)] * 10 + [(1, True, 1)] * 10, 20),  # the training goes on with a new optimizer
        ([(n // 10, True, 1) for n in range(30)], 30),  # folds
        (([(0, True, 1)] * 5 + [(1, False, 1)]) * 4, 20),  # a critic that steps more often, each time on a batch of its own
        ([(0, True, 1), (0, False, 1), (1, False, 1)] * 10, 10),  # a batch that optimizers use unequally often
        ([(n % 2, n % 6 == 0, 1) for n in range(60)], 30),  # pairs of which several share a batch
    ],
)  # fmt: skip
def test_optimizers_make_steps_together_or_each_for_itself(calls: list[tuple[float, bool, float]], steps: int) -> None:
    assert grouped(*calls).rates.steps == steps


@pytest.mark.parametrize(
    ("body", "steps", "samples"),
    [
        (lambda loop: loop.batch(1).forward(2).backward(3), 5, 8),
        (lambda loop: loop.forward(2).backward(3), 5, 8),
        (lambda loop: loop.gap(1).backward(3), 5, 0),  # bare weights
        (lambda loop: loop.batch(1).forward(2).backward(3).forward(2).backward(3), 5, 8),  # inner steps
    ],
)  # fmt: skip
def test_without_an_optimizer_a_step_is_a_batch_or_a_backward_pass(
    body: Callable[[Loop], Any], steps: int, samples: int
) -> None:
    loop = repeat(steps, body).gap(60).hear("closed")
    assert (loop.rates.steps, loop.rates.samples) == (steps, steps * samples)
    assert loop.rates.run_s["other"] == 0.0  # what comes after the last step is not training any more


def repeat(count: int, body: Callable[[Loop], Any], loop: Loop | None = None) -> Loop:
    loop = loop or Loop()
    for _ in range(count):
        body(loop)
    return loop


def views(sizes: list[int]) -> Loop:
    loop = Loop()
    for size in sizes:
        loop.forward(1, samples=size)
    return loop.backward(1).optimizer(1)


def lean(loop: Loop) -> Loop:
    """A step of which only batches and ends are written down."""
    return loop.batch(0.01).gap(0.09).hear("optimizer ended", 0, 0)


COUNTS: dict[str, tuple[Loop, int, int]] = {
    "an optimizer within another takes one step with it": (Loop().hear("optimizer", 0).optimizer(1, 1).hear("optimizer ended", 0, 1), 1, 0),
    "passes before an optimizer's step are accumulated": (repeat(5, lambda loop: loop.forward(2).backward(3).learn()), 5, 80),
    "so are those with batches of a loader": (repeat(5, lambda loop: loop.batch(1).forward(2).backward(3).batch(1).learn()), 5, 80),
    "two equal batches are views of the same samples": (views([8, 8]), 1, 8),
    "so are three": (views([8, 8, 8]), 1, 8),
    "four are steps in time, as of agents that play": (views([8] * 4), 1, 32),
    "so are single ones": (views([1, 1]), 1, 2),
    "unequal batches are added": (views([8, 4]), 1, 12),
    "a closure that is called again sees the same samples":
        (repeat(3, lambda loop: loop.forward(1).backward(1), Loop().hear("optimizer")).hear("optimizer ended", 0, 1), 1, 8),
    "another optimizer is fed what its first full step was":
        (repeat(4, lambda loop: loop.optimizer(1, 1, full=False), Loop().learn().learn()).forward(2).backward(3).optimizer(1, 1), 7, 56),
    "a batch that is used again and again counts in each step": (repeat(100, Loop.learn, Loop().batch(0.01)), 100, 800),
    "truncated backpropagation uses a batch a few times": (repeat(10, lambda loop: repeat(8, Loop.learn, loop.batch(0.01))), 80, 80),
    "a program counts its steps itself": (repeat(10, lambda loop: loop.gap(2).hear("counted", 1, 5), Loop().hear("forward", 1, 3)), 10, 50),
    "what another thread has loaded is not fed": (Loop().batch(50, 99).hear("restart").learn(), 1, 8),
    "a replayed graph is a step": (repeat(3, lambda loop: loop.batch(1).part("replay", 4, 5).hear("counted", 1), Loop().train(3)), 6, 48),
    "batches of an earlier pass are no part of the training; those fetched ahead are":
        (Loop().new_pass().batch(9).batch(9).exhausted().gap(5).new_pass().batch(0.5).train(10), 10, 88),
}  # fmt: skip


@pytest.mark.parametrize("case", COUNTS)
def test_steps_and_their_samples_are_counted(case: str) -> None:
    loop, steps, samples = COUNTS[case]
    assert (loop.rates.steps, loop.rates.samples) == (steps, samples)
    assert loop.rates.run_s["data"] < 45  # what was read before belongs to nobody


def one_of_ten(at: int, body: Callable[[Loop], Any]) -> Loop:
    """Of each ten steps one comes after something else."""

    def steps(loop: Loop) -> Loop:
        body(repeat(at, Loop.learn, loop))
        return repeat(10 - at, Loop.learn, loop)

    return repeat(4, steps)


def quietly(loop: Loop) -> Loop:
    return loop.quiet(1, 50).gap(0.5).quiet(1, 50)


def unheard(loop: Loop) -> Loop:
    return loop.new_pass().batch(1).batch(1).exhausted()


RUNS: dict[str, tuple[Loop, dict[str, float]]] = {
    "rare passes without a loader are validation": (one_of_ten(9, quietly), {"validation": 10, "acting": 0}),
    "usual ones are part of the step": (repeat(40, lambda loop: quietly(loop).learn()), {"validation": 0, "acting": 0}),
    "an agent acts before it learns for the first time": (one_of_ten(0, lambda loop: loop.quiet(1, 1)), {"validation": 0, "acting": 4}),
    "who learnt before draws samples now and then": (one_of_ten(5, lambda loop: loop.quiet(1, 1)), {"validation": 4, "acting": 0}),
    "a rare pass in which no model is heard is validation": (repeat(4, lambda loop: unheard(loop.train(3))), {"validation": 8}),
    "a usual one is part of the step": (repeat(4, lambda loop: unheard(loop).learn()), {"validation": 0, "data": 8}),
}  # fmt: skip


@pytest.mark.parametrize("case", RUNS)
def test_time_in_which_nothing_is_trained_has_a_name(case: str) -> None:
    loop, told = RUNS[case]
    assert {name: loop.rates.run_s[name] for name in told} == pytest.approx(told)


def test_only_batches_are_steps_where_nothing_else_is_heard() -> None:
    """As with a step that is compiled as a whole: all of it is forward."""
    loop = Loop()
    for _ in range(2):
        loop.new_pass()
        for _ in range(5):
            loop.batch(1.0).gap(3.0)
        loop.exhausted()
    rates = loop.rates
    assert (rates.steps, rates.samples) == (10, 80)
    assert (rates.shares["data"], rates.shares["forward"]) == pytest.approx((0.25, 0.75))
    assert Steps(loop.reader).is_by_batch


def test_steps_that_are_only_counted_are_split_as_those_that_were_heard_in_full() -> None:
    loop = Loop().train(10)
    for _ in range(5):
        repeat(9, lean, loop).gap(0.05).train()
    rates = loop.rates
    assert (rates.steps, rates.samples) == (60, 480)
    seconds = 60 * 0.1 + 5 * 0.05
    assert rates.steps_per_s == pytest.approx(60 / seconds)
    assert rates.shares["data"] == pytest.approx(0.6 / seconds)
    assert rates.shares["forward"] == pytest.approx(1.2 / seconds)
    assert rates.shares["other"] == pytest.approx(0.25 / seconds)


def test_the_devices_clock_decides_where_there_is_one() -> None:
    """The host issues a step in 0.1 s; the device waits half of its time for data and is behind at the end."""
    loop = Loop()
    loop.hear("device", -1)
    for number in range(5):
        first = len(loop.rows)
        loop.train()
        last = len(loop.rows)
        for row in range(first, last):
            shares = [0.0, 0.5, 0.5, 0.7, 0.7, 0.9, 0.9, 1.0]
            loop.hear("device", row, number + shares[row - first])
    rates = loop.rates
    assert rates.device_clock
    assert (rates.shares["data"], rates.shares["forward"]) == pytest.approx((0.5, 0.2))
    assert rates.host_shares["data"] == pytest.approx(0.1)
    assert rates.steps_per_s == pytest.approx(5 / (0.5 + 4.5))


def test_the_starts_of_workers_are_told() -> None:
    loop = Loop()
    for _ in range(3):
        loop.new_pass(workers=2).batch(0.5).forward(1).backward(1).optimizer(1)
        loop.exhausted(0.25)
    assert (loop.reader.starts, loop.reader.ends) == (pytest.approx([0.5] * 3), pytest.approx([0.25] * 3))


def test_ranks_share_their_steps_and_add_their_samples() -> None:
    """A rank that starts late is as fast as the others; one that is not in step goes at its own pace."""
    lead, other = Loop(rank=0, world_size=2).train(50), Loop(rank=1, world_size=2).forward(3.0).train(50)
    assert rates_of([other, lead]).samples_per_s == pytest.approx(160.0)
    fewer = Loop(rank=1, world_size=2).train(25, slower=2)
    assert rates_of([lead, fewer]).samples_per_s == pytest.approx(80.0 + 40.0)
    again = Loop(rank=1, world_size=2).train(3)
    assert main_logs([again, other, lead]) == [lead, other]


@pytest.mark.parametrize("phase", ["forward", "backward", None])
def test_a_slow_rank_is_named_although_the_others_wait_for_it(phase: str | None) -> None:
    """All ranks take as long as the slowest, and what they wait is part of their backward pass."""
    parts = []
    for rank in range(3):
        is_late, loop = rank == 1, Loop(rank=rank, world_size=3)
        for _ in range(10):
            loop.batch(0.01).forward(0.5 if is_late and phase == "forward" else 0.1)
            own_s = 0.6 if is_late and phase == "backward" else 0.2
            all_s = 0.6 if phase == "backward" else 0.2 + 0.4 * (phase == "forward" and not is_late)
            loop.backward(all_s + 0.1, waits=all_s - own_s + 0.1).optimizer(0.01)
        parts.append(Steps(loop.reader).own_part(rank))
    block = Block(kind="throughput", clock="host", samples=parts[0].samples, ranks=tuple(parts))
    spec = RunSpec(workload=WorkloadSpec(model="watch:x"))
    late = late_rank(RunRecord(id="a", spec=spec, blocks=(block,)))
    assert (None if late is None else (late.rank, late.phase)) == (phase and (1, phase))
    if late is not None:
        assert late.seconds == pytest.approx(0.4)
        assert wait_for(late, parts) == pytest.approx(0.5)


def test_a_slow_end_of_the_last_step_is_an_outlier_like_any_other() -> None:
    loop = Loop().train(10).gap(1).train(10).gap(1).train(10)
    assert loop.exhausted(1.0).rates.outliers == 3
    assert loop.rates.outlier_share == pytest.approx(3 / (3 + 3.0), rel=0.01)


def test_nothing_is_made_up_where_nothing_was_seen() -> None:
    for logs in ([], [Loop()]):
        rates = rates_of(logs)
        assert (rates.steps, rates.steps_per_s, rates.samples_per_s, rates.shares) == (0, None, None, {})


def test_a_lasting_slowdown_is_told_with_when_it_began() -> None:
    random = np.random.default_rng(0)

    def steps(later: float, noise: float) -> Steps:
        loop = Loop()
        for number in range(1000):
            loop.train(slower=(1.0 if number < 600 else later) * random.lognormal(0, noise))
        return Steps(loop.reader)

    drift = drift_of(steps(1.4, 0.1))
    assert drift is not None
    assert 580 <= drift.step <= 620
    assert drift.ratio == pytest.approx(1.4, rel=0.05)
    assert drift.share_before == pytest.approx(600 / (600 + 400 * 1.4), rel=0.05)
    assert drift_of(steps(1.0, 0.4)) is None


def test_memory_that_grows_is_told_apart_from_memory_that_varies() -> None:
    leaking = [(float(n), int(1e9 + 5e6 * n)) for n in range(60)]
    assert growth_of(leaking) == pytest.approx(5e6, rel=0.2)
    assert growth_of([(float(n), int(1e9 + 4e8 * (n % 3))) for n in range(60)]) is None
    assert growth_of(leaking[:5]) is None
    assert growth_of([(float(n), int(1e9 + 5e7 * min(n, 20))) for n in range(80)]) is None  # caches that fill
