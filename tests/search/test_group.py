"""Recipes measured together: the ratio is the true one, whatever drifts, and what breaks or is stopped stays data."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from redline.analyze.rows import row_of
from redline.analyze.statistics import Interval, median_interval, paired_ratio
from redline.analyze.summary import RunSummary, summarize
from redline.model.environment import Memory as BlockMemory
from redline.model.errors import StoreError
from redline.model.protocol import (
    FailureReply,
    Measure,
    OnProgress,
    Prepare,
    Progress,
    Reply,
    Request,
    Squeeze,
    SqueezeReply,
)
from redline.model.record import Block, Closed, Failure, RunRecord
from redline.model.spec import LaunchSpec, MeasureSpec, Recipe, RunSpec, WorkloadSpec
from redline.search import run
from redline.search.group import SOLO_BLOCKS, Entry, Group
from redline.search.observer import Observer
from redline.search.run import UntilPrecise, measure_together
from redline.store import History
from redline.testing.fake import FakeDoor, FakeSession
from redline.testing.landscape import Landscape

BRIEF = MeasureSpec(min_samples=10, tail_samples=10, min_rounds=6, target_half_width=0.5, cpu_target_half_width=0.5)
"""Content after six rounds, whatever the noise."""

OOM = Failure(stage="build", kind="oom", message="out of memory")
CRASH = Failure(stage="build", kind="crash", message="the worker died of SIGSEGV")


def spec_of(
    recipe: str = "baseline", measure: MeasureSpec = BRIEF, *, task: str = "infer", door: str = "fork", **changes: Any
) -> RunSpec:
    return RunSpec(
        workload=WorkloadSpec(model="resnet50", batch=32, task=task),  # type: ignore[arg-type]
        recipe=Recipe.parse(recipe),
        measure=msgspec.structs.replace(measure, **changes),
        launch=LaunchSpec(door=door),  # type: ignore[arg-type]
    )


class Notebook:
    """A journal that remembers the order of what it was told."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, str]] = []
        self.blocks: dict[str, list[Block]] = {}
        self.finished: dict[str, RunRecord] = {}

    def begin(self, record: RunRecord) -> None:
        self.entries.append(("begin", record.id))

    def append(self, record_id: str, block: Block) -> None:
        self.entries.append(("append", record_id))
        self.blocks.setdefault(record_id, []).append(block)

    def finish(self, record: RunRecord) -> None:
        self.entries.append(("finish", record.id))
        self.finished[record.id] = record

    def of(self, record_id: str) -> list[str]:
        return [what for what, whose in self.entries if whose == record_id]


Judge = Callable[["WatchedDoor", RunSpec, Request], Reply | None]
"""May answer in the bench's place, or raise."""


class WatchedDoor:
    """A fake door that sees every request, who was paused meanwhile, and may step in."""

    def __init__(self, landscape: Landscape, judge: Judge = lambda door, spec, request: None) -> None:
        self._door = FakeDoor(landscape)
        self.judge = judge
        self.sessions: list[WatchedSession] = []
        self.seen: list[tuple[str, Request]] = []
        self.paused_meanwhile: list[tuple[str, Request, set[str]]] = []

    def open(self, spec: RunSpec | None = None) -> WatchedSession:
        assert spec is not None
        session = WatchedSession(self, spec, self._door.open(spec))
        self.sessions.append(session)
        return session

    def close(self) -> None:
        self._door.close()

    def others(self, than: RunSpec) -> list[WatchedSession]:
        return [session for session in self.sessions if session.spec is not than and not session.is_closed]

    def rounds(self) -> list[tuple[int, list[str]]]:
        """Who was measured, round after round, in order."""
        blocks = [(request.round, name) for name, request in self.seen if isinstance(request, Measure)]
        return [(number, [name for _, name in visits]) for number, visits in groupby(blocks, key=lambda one: one[0])]


class WatchedSession:
    def __init__(self, door: WatchedDoor, spec: RunSpec, inner: FakeSession) -> None:
        self._door = door
        self._inner = inner
        self.spec = spec
        self.name = str(spec.recipe)
        self.is_closed = False

    @property
    def paused(self) -> bool:
        return self._inner.paused

    def ask(self, request: Request, on_progress: OnProgress | None = None) -> Reply:
        self._door.seen.append((self.name, request))
        asleep = {other.name for other in self._door.others(self.spec) if other.paused}
        self._door.paused_meanwhile.append((self.name, request, asleep))
        return self._door.judge(self._door, self.spec, request) or self._inner.ask(request, on_progress)

    def begin(self, request: Request) -> None:
        self._begun = request

    def wait(self, on_progress: OnProgress | None = None, timeout_s: float | None = None) -> Reply | None:
        return self.ask(self._begun, on_progress)

    def pause(self) -> None:
        self._inner.pause()

    def resume(self) -> None:
        self._inner.resume()

    def close(self) -> Closed:
        self.is_closed = True
        return self._inner.close()

    def kill(self) -> None:
        self.close()


def together(
    landscape: Landscape, *specs: RunSpec, judge: Judge = lambda door, spec, request: None, seed: int = 0
) -> tuple[list[RunRecord], WatchedDoor, Notebook]:
    door, journal = WatchedDoor(landscape, judge), Notebook()
    return measure_together(specs, door, journal, seed=seed), door, journal


def interrupting(when: Callable[[RunSpec, Request], bool]) -> Judge:
    def judge(door: WatchedDoor, spec: RunSpec, request: Request) -> Reply | None:
        if when(spec, request):
            raise KeyboardInterrupt
        return None

    return judge


def crowded(recipe: str) -> Judge:
    """Out of memory as long as somebody else is there."""

    def judge(door: WatchedDoor, spec: RunSpec, request: Request) -> Reply | None:
        crowd = str(spec.recipe) == recipe and door.others(spec)
        return FailureReply(failure=OOM) if isinstance(request, Prepare) and crowd else None

    return judge


class TestTheRatio:
    """Against a landscape whose truth is known: noise that remembers, a tail, and a drift that hits all alike."""

    CPU = {"device_kind": "cpu", "noise_sigma": 0.03, "noise_rho": 0.5, "tail_share": 0.02, "drift_sigma": 0.05}
    GPU = {"device_kind": "cuda", "noise_sigma": 0.005, "drift_sigma": 0.02}
    STOPPING = MeasureSpec(min_samples=10, tail_samples=10, cpu_target_half_width=0.02, target_half_width=0.01)
    """Stops when its interval is narrow, so that it ends after more rounds or fewer by chance."""

    @staticmethod
    def ratios(step_s: Any, world: dict[str, Any], measure: MeasureSpec, runs: int) -> list[tuple[float, float, float]]:
        found = []
        for seed in range(runs):
            landscape = Landscape(step_s=step_s, seed=seed, **world)
            specs = [spec_of(recipe, measure, max_seconds=8.0) for recipe in ("baseline", "fp16")]
            records = measure_together(specs, FakeDoor(landscape), Notebook(), seed=seed)
            versus = summarize(records)[1].vs_first
            assert versus is not None
            assert versus.low is not None
            assert versus.high is not None
            found.append((versus.low, versus.ratio, versus.high))
        return found

    @pytest.mark.parametrize("world", [CPU, GPU], ids=["cpu", "gpu"])
    def test_lies_in_its_interval_as_often_as_that_says(self, world: dict[str, Any]) -> None:
        truth = 0.05 / 0.03
        found = self.ratios({"baseline": 0.05, "fp16": 0.03}, world, self.STOPPING, 400)
        covered = sum(low <= truth <= high for low, _, high in found) / len(found)
        # Over 1500 runs it is 97 %, a little more than the 95 % it promises: intervals of ranks are. Of 400 runs at
        # that rate, less than 93 % or more than 99 % comes about once in two hundred draws of the seeds.
        assert 0.93 <= covered <= 0.99
        assert float(np.median([ratio for _, ratio, _ in found])) == pytest.approx(truth, rel=0.01)

    @pytest.mark.parametrize("world", [CPU, GPU], ids=["cpu", "gpu"])
    @pytest.mark.parametrize("measure", [BRIEF, STOPPING], ids=["fixed rounds", "stopping by the interval"])
    def test_of_equals_is_called_a_difference_one_time_in_twenty(
        self, world: dict[str, Any], measure: MeasureSpec
    ) -> None:
        found = self.ratios(0.05, world, measure, 400)
        false_alarms = sum(not low <= 1 <= high for low, _, high in found) / len(found)
        assert 0.02 <= false_alarms <= 0.08

    def test_of_equals_that_follow_each_other_would_be_called_one_far_more_often(self) -> None:
        """The same drift, the same statistics, no interleaving: so the test above can fail."""
        alarms = 0
        for seed in range(100):
            door = FakeDoor(Landscape(step_s=0.05, seed=seed, **self.GPU))
            medians = []
            for recipe in ("baseline", "fp16"):
                (record,) = measure_together([spec_of(recipe)], door, Notebook(), seed=seed)
                blocks = [block for block in record.blocks if block.kind == "throughput"]
                medians.append({block.round: float(np.median(block.samples)) for block in blocks})
            paired = paired_ratio(*medians)
            assert paired is not None
            alarms += not paired.low <= 1 <= paired.high
        assert alarms > 25

    def test_above_one_means_faster_than_the_first(self) -> None:
        records, _, _ = together(Landscape(step_s={"baseline": 0.02, "fp16": 0.01}), spec_of(), spec_of("fp16"))
        first, second = summarize(records)
        assert first.vs_first is None
        assert second.vs_first is not None
        assert second.vs_first.ratio == pytest.approx(2.0, rel=0.02)


class TestRounds:
    recipes = ("baseline", "fp16", "bf16", "tf32")

    def run(self, seed: int = 0) -> tuple[list[RunRecord], WatchedDoor]:
        specs = [spec_of(recipe, min_rounds=12) for recipe in self.recipes]
        records, door, _ = together(Landscape(step_s=0.02, device_kind="cpu"), *specs, seed=seed)
        return records, door

    def test_visit_everybody_once_before_anybody_twice(self) -> None:
        _, door = self.run()
        rounds = door.rounds()
        assert [number for number, _ in rounds] == list(range(12))
        for _, visited in rounds:
            assert sorted(visited) == sorted(self.recipes)

    def test_visit_in_an_order_that_is_shuffled_anew(self) -> None:
        _, door = self.run()
        orders = [tuple(visited) for _, visited in door.rounds()]
        assert len(set(orders)) > 6
        # Nobody is always first: being first would be part of what is compared.
        assert len({order[0] for order in orders}) > 2

    def test_are_shuffled_by_the_seed(self) -> None:
        assert self.run(1)[1].rounds() == self.run(1)[1].rounds()
        assert self.run(1)[1].rounds() != self.run(2)[1].rounds()

    def test_pair_the_blocks_that_were_measured_next_to_each_other(self) -> None:
        records, _ = self.run()
        started = [{block.round: block.started_at for block in record.blocks} for record in records]
        assert all(rounds.keys() == set(range(12)) for rounds in started)
        for number in range(11):
            assert max(rounds[number] for rounds in started) < min(rounds[number + 1] for rounds in started)

    def test_share_a_group_whose_records_keep_their_places(self) -> None:
        records, _ = self.run()
        assert [str(record.spec.recipe) for record in records] == list(self.recipes)
        assert [record.position for record in records] == [0, 1, 2, 3]
        assert len({record.group for record in records}) == 1
        assert records[0].group
        assert len({record.id for record in records}) == 4

    def test_of_one_alone_have_no_group(self) -> None:
        (record,), _, _ = together(Landscape(step_s=0.02), spec_of())
        assert record.group is None
        assert record.stopped == "target"

    def test_of_nobody_are_none(self) -> None:
        assert together(Landscape(step_s=0.02))[0] == []

    def test_hold_both_kinds_of_block_where_a_gpu_infers_and_one_elsewhere(self) -> None:
        for device, task, kinds in (
            ("cuda", "infer", {"throughput", "latency"}),
            ("rocm", "infer", {"throughput", "latency"}),
            ("cuda", "train", {"throughput"}),
            ("cpu", "infer", {"throughput"}),
            ("cpu", "train", {"throughput"}),
        ):
            (record,), _, _ = together(Landscape(step_s=0.02, device_kind=device), spec_of(task=task))  # type: ignore[arg-type]
            assert {block.kind for block in record.blocks} == kinds
            assert Counter(block.round for block in record.blocks) == dict.fromkeys(range(6), len(kinds))

    def test_ask_for_blocks_as_the_spec_says(self) -> None:
        _, door, _ = together(Landscape(step_s=0.02), spec_of(block_seconds=0.5, settle_seconds=0.1))
        asked = [request for _, request in door.seen if isinstance(request, Measure)]
        assert {(request.seconds, request.settle_seconds) for request in asked} == {(0.5, 0.1)}


class TestWhoIsDone:
    """Of a long step few fit into a block, so that its samples take more rounds."""

    landscape = Landscape(step_s={"baseline": 0.01, "fp16": 0.1, "bf16": 0.01}, device_kind="cpu")

    def test_rests_while_the_others_go_on(self) -> None:
        specs = [spec_of(recipe, min_samples=30) for recipe in ("fp16", "baseline", "bf16")]
        records, _, _ = together(self.landscape, *specs)
        slow, quick, other = (len(record.blocks) for record in records)
        assert quick == other == BRIEF.min_rounds
        assert slow > BRIEF.min_rounds

    def test_goes_on_where_it_is_what_the_others_are_set_against(self) -> None:
        specs = [spec_of(recipe, min_samples=30) for recipe in ("baseline", "fp16", "bf16")]
        records, _, _ = together(self.landscape, *specs)
        first, slow, quick = (len(record.blocks) for record in records)
        assert first == slow > quick == BRIEF.min_rounds
        assert [record.stopped for record in records] == ["target"] * 3
        versus = summarize(records)[1].vs_first
        assert versus is not None
        assert versus.ratio == pytest.approx(0.1, rel=0.05)


class TestStopping:
    def test_when_the_interval_is_narrow_enough(self) -> None:
        measure = MeasureSpec(target_half_width=0.01, tail_samples=30)
        (record,), _, _ = together(Landscape(step_s=0.02, noise_sigma=0.03), spec_of(measure=measure))
        assert record.stopped == "target"
        for kind in ("throughput", "latency"):
            interval = median_interval([block.samples for block in record.blocks if block.kind == kind])
            assert interval is not None
            assert interval.half_width <= 0.01

    def test_not_before_the_fewest_rounds_and_samples(self) -> None:
        quiet = {"noise_sigma": 1e-6, "device_kind": "cpu"}
        (record,), _, _ = together(Landscape(step_s=0.01, **quiet), spec_of(min_rounds=9))
        assert len(record.blocks) == 9
        (record,), _, _ = together(Landscape(step_s=0.25, **quiet), spec_of(min_rounds=2, min_samples=17))
        assert sum(len(block.samples) for block in record.blocks) == 17

    def test_at_the_ceiling_with_what_there_is(self) -> None:
        (record,), _, _ = together(
            Landscape(step_s=0.02, noise_sigma=0.2, device_kind="cpu"),
            spec_of(cpu_target_half_width=0.001, max_seconds=1.0, min_rounds=100),
        )
        assert record.stopped == "ceiling"
        walls = [block.wall_s for block in record.blocks]
        assert sum(walls[:-1]) < 1.0 <= sum(walls)

    def test_once_the_target_is_plainly_out_of_reach(self) -> None:
        (record,), _, _ = together(
            Landscape(step_s=0.02, noise_sigma=0.3, device_kind="cpu"),
            spec_of(cpu_target_half_width=0.001, max_seconds=20.0),
        )
        assert record.stopped == "unreachable"
        timed_s = sum(block.wall_s for block in record.blocks)
        assert 0.25 * 20.0 <= timed_s < 0.5 * 20.0

    def test_not_yet_while_it_may_still_be_reached(self) -> None:
        """A quarter of its time says that it is not there yet, and that the rest may be enough."""
        landscape = Landscape(step_s=0.02, noise_sigma=0.07, device_kind="cpu")
        (record,), _, _ = together(landscape, spec_of(cpu_target_half_width=0.01, max_seconds=20.0))
        assert record.stopped == "target"
        assert 0.25 * 20.0 < sum(block.wall_s for block in record.blocks) < 20.0

    def test_where_the_bench_breaks(self) -> None:
        broken = Failure(stage="measure", kind="timeout", message="hung")
        (record,), _, _ = together(Landscape(step_s=0.02, failure=broken), spec_of())
        assert (record.stopped, record.failure) == ("failed", broken)

    def test_a_cpu_is_held_to_its_own_wider_target(self) -> None:
        measure = MeasureSpec(target_half_width=1e-6, cpu_target_half_width=0.05, max_seconds=5.0)
        (on_cpu,), _, _ = together(Landscape(step_s=0.01, device_kind="cpu"), spec_of(measure=measure))
        (on_gpu,), _, _ = together(Landscape(step_s=0.01), spec_of(measure=measure))
        assert (on_cpu.stopped, on_gpu.stopped) == ("target", "unreachable")


class TestTheTail:
    @staticmethod
    def samples(record: RunRecord, kind: str) -> int:
        return sum(len(block.samples) for block in record.blocks if block.kind == kind)

    def test_of_inference_is_waited_for_where_latency_is_told(self) -> None:
        (record,), _, _ = together(Landscape(step_s=0.1), spec_of(tail_samples=130))
        assert record.stopped == "target"
        assert 130 <= self.samples(record, "latency") < 130 + 3
        (row,) = summarize([record])
        assert row.latency_s is not None
        assert row.latency_s.p95 is not None
        assert row.latency_s.p99 is None

    def test_of_inference_on_a_cpu_lies_in_the_only_blocks_there_are(self) -> None:
        (record,), _, _ = together(Landscape(step_s=0.1, device_kind="cpu"), spec_of(tail_samples=130))
        assert 130 <= self.samples(record, "throughput") < 130 + 3

    def test_of_training_nobody_asks_for(self) -> None:
        (record,), _, _ = together(Landscape(step_s=0.1), spec_of(tail_samples=130, task="train"))
        assert self.samples(record, "throughput") < 30

    def test_ends_at_the_ceiling_too(self) -> None:
        (record,), _, _ = together(Landscape(step_s=0.1), spec_of(tail_samples=10_000, max_seconds=5.0))
        assert record.stopped == "ceiling"


class TestASiblingThatFails:
    @pytest.mark.parametrize("stage", ["build", "compile", "numerics", "warm-up"])
    def test_before_it_is_timed_is_recorded_while_the_others_go_on(self, stage: str) -> None:
        broken = Failure(stage=stage, kind="crash", message="gone")
        landscape = Landscape(step_s=0.02, failure={"fp16": broken, "*": None})
        records, door, journal = together(landscape, spec_of(), spec_of("fp16"), spec_of("bf16"))
        assert [record.stopped for record in records] == ["target", "failed", "target"]
        assert records[1].failure == broken
        assert (records[1].blocks, records[1].key) == ((), None)
        assert len({record.group for record in records}) == 1
        assert journal.of(records[1].id) == ["finish"]
        assert summarize(records)[2].vs_first is not None
        assert all(session.is_closed for session in door.sessions)

    def test_while_it_is_timed_keeps_the_blocks_it_had(self) -> None:
        broken = Failure(stage="measure", kind="oom", message="out of memory")
        landscape = Landscape(step_s=0.02, device_kind="cpu", failure={"fp16": broken, "*": None}, fails_after_blocks=3)
        records, door, journal = together(landscape, spec_of(), spec_of("fp16"), spec_of("bf16"))
        assert [record.stopped for record in records] == ["target", "failed", "target"]
        assert records[1].failure == broken
        assert [block.round for block in records[1].blocks] == [0, 1, 2]
        assert [len(record.blocks) for record in records] == [6, 3, 6]
        assert journal.of(records[1].id) == ["begin", "append", "append", "append", "finish"]
        asked = [request for name, request in door.seen if name == "fp16" and isinstance(request, Measure)]
        assert len(asked) == 4  # a broken one is not asked again
        row = summarize(records)[1]
        assert (row.vs_first, row.throughput_per_s) == (None, None)

    def test_is_kept_still_like_the_others(self) -> None:
        """Its process may be alive, with threads that spin."""
        broken = Failure(stage="measure", kind="user", message="ValueError: this forward")
        landscape = Landscape(step_s=0.02, device_kind="cpu", failure={"fp16": broken, "*": None}, fails_after_blocks=1)
        _, door, _ = together(landscape, spec_of(), spec_of("fp16"))
        late = [asleep for name, request, asleep in door.paused_meanwhile if getattr(request, "round", 0) > 1]
        assert late
        assert all("fp16" in asleep for asleep in late)

    def test_and_is_the_first_leaves_the_others_without_a_ratio(self) -> None:
        landscape = Landscape(step_s=0.02, failure={"baseline": CRASH, "*": None})
        records, _, _ = together(landscape, spec_of(), spec_of("fp16"), spec_of("bf16"))
        assert [record.stopped for record in records] == ["failed", "target", "target"]
        rows = summarize(records)
        assert [row.vs_first for row in rows] == [None, None, None]
        assert rows[1].throughput_per_s == pytest.approx(32 / 0.02, rel=0.02)

    def test_takes_nothing_from_a_run_in_which_all_fail(self) -> None:
        records, door, journal = together(Landscape(step_s=0.02, failure=CRASH), spec_of(), spec_of("fp16"))
        assert [record.failure for record in records] == [CRASH, CRASH]
        assert [what for what, _ in journal.entries] == ["finish", "finish"]
        assert all(session.is_closed for session in door.sessions)

    def test_by_answering_out_of_turn_has_broken_too(self) -> None:
        def judge(door: WatchedDoor, spec: RunSpec, request: Request) -> Reply | None:
            confused = isinstance(request, Measure) and request.round == 2 and spec.recipe.switches
            return Progress(stage="build") if confused else None

        records, _, _ = together(Landscape(step_s=0.02), spec_of(), spec_of("fp16"), judge=judge)
        assert records[0].stopped == "target"
        assert records[1].failure is not None
        assert (records[1].failure.kind, records[1].stopped) == ("crash", "failed")
        assert "Progress" in records[1].failure.message


class TestOutOfMemory:
    def test_beside_siblings_is_tried_again_alone(self) -> None:
        records, door, journal = together(
            Landscape(step_s=0.02), spec_of(), spec_of("fp16"), spec_of("bf16"), judge=crowded("fp16")
        )
        assert [record.stopped for record in records] == ["target"] * 3
        first, alone, other = records
        assert alone.failure is None
        assert (alone.group, alone.position) == (None, 1)
        assert first.group == other.group is not None
        assert [(each.code, each.about) for each in alone.notes] == [("measured-separately", "memory")]
        rows = summarize(records)
        assert rows[1].vs_first is None
        assert rows[2].vs_first is not None
        # It begins when the others are over, and what did not fit left no trace.
        assert journal.of(alone.id)[0] == "begin"
        assert set(journal.finished) == {record.id for record in records}
        begun = journal.entries.index(("begin", alone.id))
        assert max(journal.entries.index(("finish", record.id)) for record in (first, other)) < begun
        assert all(session.is_closed for session in door.sessions)

    def test_alone_as_well_is_a_failure(self) -> None:
        landscape = Landscape(step_s=0.02, memory_bytes={"fp16": 2**30, "*": 2**20}, memory_limit_bytes=2**25)
        records, door, _ = together(landscape, spec_of(), spec_of("fp16"))
        assert records[0].stopped == "target"
        assert records[1].failure is not None
        assert (records[1].failure.kind, records[1].stopped, records[1].group) == ("oom", "failed", None)
        assert [session.name for session in door.sessions] == ["baseline", "fp16", "fp16"]

    def test_with_nobody_beside_it_is_not_tried_twice(self) -> None:
        landscape = Landscape(step_s=0.02, memory_bytes={"baseline": 2**30, "*": 2**20}, memory_limit_bytes=2**25)
        records, door, _ = together(landscape, spec_of(), spec_of("fp16"))
        assert [record.stopped for record in records] == ["failed", "target"]
        assert [session.name for session in door.sessions] == ["baseline", "fp16"]

    def test_is_the_only_failure_tried_again(self) -> None:
        landscape = Landscape(step_s=0.02, failure={"fp16": CRASH, "*": None})
        _, door, _ = together(landscape, spec_of(), spec_of("fp16"))
        assert [session.name for session in door.sessions] == ["baseline", "fp16"]


class TestCtrlC:
    @staticmethod
    def interrupted(*specs: RunSpec, judge: Judge, **landscape: Any) -> tuple[WatchedDoor, Notebook]:
        door = WatchedDoor(Landscape(**{"step_s": 0.02, **landscape}), judge)
        journal = Notebook()
        with pytest.raises(KeyboardInterrupt):
            measure_together(specs, door, journal)
        assert all(session.is_closed for session in door.sessions)
        return door, journal

    @staticmethod
    def in_round(number: int, recipe: str = "fp16") -> Judge:
        return interrupting(
            lambda spec, request: (
                isinstance(request, Measure) and request.round == number and str(spec.recipe) == recipe
            )
        )

    def test_while_timing_leaves_every_record_finished_with_its_blocks(self) -> None:
        _, journal = self.interrupted(
            spec_of(), spec_of("fp16"), judge=self.in_round(3), device_kind="cpu", noise_sigma=0.1
        )
        first, second = journal.finished.values()
        assert [first.stopped, second.stopped] == ["interrupted", "interrupted"]
        assert [block.round for block in second.blocks] == [0, 1, 2]
        assert len(first.blocks) in (3, 4)
        for record in (first, second):
            assert journal.blocks[record.id] == list(record.blocks)
            assert journal.of(record.id) == ["begin", *["append"] * len(record.blocks), "finish"]
            assert record.failure is None
            assert record.closed is not None

    def test_between_the_two_blocks_of_a_round_keeps_the_one_that_was_done(self) -> None:
        judge = interrupting(
            lambda spec, request: isinstance(request, Measure) and request.round == 2 and request.kind == "latency"
        )
        _, journal = self.interrupted(spec_of(), judge=judge)
        (record,) = journal.finished.values()
        assert Counter(block.kind for block in record.blocks) == {"throughput": 3, "latency": 2}
        assert journal.blocks[record.id] == list(record.blocks)

    def test_while_preparing_the_second_keeps_the_first(self) -> None:
        judge = interrupting(lambda spec, request: isinstance(request, Prepare) and bool(spec.recipe.switches))
        door, journal = WatchedDoor(Landscape(step_s=0.02), judge), Notebook()
        with pytest.raises(KeyboardInterrupt):
            measure_together([spec_of(), spec_of("fp16")], door, journal)
        (record,) = journal.finished.values()
        assert (str(record.spec.recipe), record.stopped) == ("baseline", "interrupted")
        assert record.blocks
        assert all(block.solo for block in record.blocks), "what it ran before the second came is kept"
        assert door.sessions[0].is_closed

    def test_does_not_make_a_failure_an_interruption(self) -> None:
        broken = Failure(stage="measure", kind="crash", message="gone")
        _, journal = self.interrupted(
            spec_of(),
            spec_of("fp16"),
            judge=self.in_round(4, "baseline"),
            failure={"fp16": broken, "*": None},
            fails_after_blocks=1,
        )
        first, second = journal.finished.values()
        assert (first.stopped, second.stopped) == ("interrupted", "failed")
        assert second.failure == broken

    @pytest.mark.parametrize("door", ["fork", "inline"])
    def test_finishes_one_that_is_measured_alone(self, door: str) -> None:
        """Inline specs, and one that did not fit beside the others, are alone; they are no less worth keeping."""
        without_fit = crowded("fp16")
        stop = self.in_round(2)

        def judge(watched: WatchedDoor, spec: RunSpec, request: Request) -> Reply | None:
            return (without_fit(watched, spec, request) if door == "fork" else None) or stop(watched, spec, request)

        _, journal = self.interrupted(spec_of(door=door), spec_of("fp16", door=door), judge=judge, device_kind="cpu")
        done, stopped = journal.finished.values()
        assert (done.stopped, stopped.stopped) == ("target", "interrupted")
        assert [block.round for block in stopped.blocks] == [0, 1]
        assert stopped.notes

    def test_leaves_in_the_real_history_what_was_measured(self, own_history: Path) -> None:
        door = WatchedDoor(Landscape(step_s=0.02, device_kind="cpu"), self.in_round(3))
        with History.open(own_history) as history:
            with pytest.raises(KeyboardInterrupt):
                measure_together([spec_of(), spec_of("fp16")], door, history)
            assert {row.status for row in history.rows()} == {"interrupted"}
            records = history.latest_group()
        assert [str(record.spec.recipe) for record in records] == ["baseline", "fp16"]
        assert [block.round for block in records[1].blocks] == [0, 1, 2]
        versus = summarize(records)[1].vs_first
        assert versus is not None
        assert versus.low is None  # three rounds are too few for an interval

    def test_is_not_the_only_thing_that_ends_a_run(self) -> None:
        """A history that cannot be written ends it too, and whatever was prepared is closed."""

        class Full(Notebook):
            def append(self, record_id: str, block: Block) -> None:
                if block.round == 2 and not block.solo:
                    raise StoreError("the disk is full")
                super().append(record_id, block)

        door, journal = WatchedDoor(Landscape(step_s=0.02)), Full()
        with pytest.raises(StoreError, match="the disk is full"):
            measure_together([spec_of(), spec_of("fp16")], door, journal)
        assert [record.stopped for record in journal.finished.values()] == ["interrupted", "interrupted"]
        assert all(session.is_closed for session in door.sessions)


class TestCompany:
    """Processes that take turns on a GPU may change each other; whoever deploys a recipe runs it alone."""

    SWITCHES = {"baseline": 0.010, "fp16": 0.002}

    def row(self, measure: MeasureSpec = BRIEF, **landscape: Any) -> tuple[RunSummary, RunRecord]:
        truth = Landscape(**{"step_s": self.SWITCHES, "noise_sigma": 0.002, **landscape})
        records, _, _ = together(truth, spec_of("baseline", measure), spec_of("fp16", measure))
        return summarize(records)[1], records[1]

    @pytest.mark.parametrize("factor", [0.92, 1.05])
    def test_the_figures_are_those_alone_and_it_is_said(self, factor: float) -> None:
        row, _ = self.row(contended_factor={"baseline": 1.0, "fp16": factor})
        assert row.throughput_per_s == pytest.approx(32 / 0.002, rel=0.005)
        assert row.latency_s is not None
        assert row.latency_s.p50 == pytest.approx(0.002, rel=0.005)
        (noted,) = row.verdict.noted("contended")
        assert noted in row_of(row).notes
        assert re.search(
            r"8\.[67]\d? ?% faster" if factor < 1 else r"4\.[78]\d? ?% slower", str(noted).replace("\u2009", " ")
        ), noted
        assert row.vs_first is not None
        assert row.vs_first.ratio == pytest.approx(5.0, rel=0.01)
        low, high = sorted((5.0, 5.0 / factor))
        assert row.vs_first.low is not None
        assert row.vs_first.high is not None
        assert row.vs_first.low <= low < high <= row.vs_first.high, "the ratio in turns is not ruled out"

    def test_without_any_the_turns_count(self) -> None:
        row, record = self.row()
        assert not row.verdict.noted("contended")
        assert row.latency_s is not None
        in_turns = [block for block in record.blocks if block.kind == "latency" and not block.solo]
        assert row.latency_s.n == sum(len(block.samples) for block in in_turns)

    def test_a_single_recipe_and_a_cpu_have_none(self) -> None:
        (single,), _, _ = together(Landscape(step_s=0.01), spec_of())
        assert not any(block.solo for block in single.blocks)
        _, on_cpu = self.row(device_kind="cpu", contended_factor=0.9)
        assert not any(block.solo for block in on_cpu.blocks)

    def test_a_session_that_breaks_alone_is_a_failed_row(self) -> None:
        broken = Failure(stage="measure", kind="crash", message="gone")
        records, _, _ = together(
            Landscape(step_s=0.01, failure={"fp16": broken, "*": None}), spec_of(), spec_of("fp16"), spec_of("bf16")
        )
        assert [record.stopped for record in records] == ["target", "failed", "target"]


class TestInline:
    def run(self, **landscape: Any) -> tuple[list[RunRecord], WatchedDoor, Notebook]:
        specs = [spec_of(recipe, door="inline") for recipe in ("baseline", "fp16")]
        return together(Landscape(**{"step_s": 0.02, **landscape}), *specs)

    def test_specs_are_measured_one_after_the_other(self) -> None:
        records, door, journal = self.run()
        names = [name for name, _ in door.seen]
        assert [name for name, _ in groupby(names)] == ["baseline", "fp16"]
        ends = journal.entries.index(("finish", records[0].id))
        assert ends < journal.entries.index(("begin", records[1].id))
        assert [record.position for record in records] == [0, 1]

    def test_have_no_ratio_and_say_why(self) -> None:
        records, _, _ = self.run()
        assert [record.group for record in records] == [None, None]
        assert [row.vs_first for row in summarize(records)] == [None, None]
        for record in records:
            assert [(each.code, each.about) for each in record.notes] == [("measured-separately", "inline")]

    def test_that_fail_do_not_stop_the_next(self) -> None:
        records, _, _ = self.run(failure={"baseline": CRASH, "*": None})
        assert [record.stopped for record in records] == ["failed", "target"]

    def test_alone_needs_no_excuse(self) -> None:
        (record,), _, _ = together(Landscape(step_s=0.02), spec_of(door="inline"))
        assert record.notes == ()


class TestPreparingTogether:
    """Several sessions are prepared at the same time, and stand still while one is timed."""

    @staticmethod
    def group(door: FakeDoor, journal: Notebook | None = None) -> Group:
        return Group(door, journal or Notebook(), Observer(), random.Random(0))

    def test_takes_as_long_as_the_slowest(self) -> None:
        door = FakeDoor(Landscape(step_s=0.001, compile_s={"compile": 30.0, "fp16": 10.0}))
        with self.group(door) as group:
            slow, quick = group.start(spec_of("compile"), 0), group.start(spec_of("fp16"), 1)
            assert not group.is_ready(slow, timeout_s=0.5)
            assert group.is_ready(quick)
            assert door.clock_s < 15
            assert group.admit(quick) is not None
            assert group.admit(slow) is not None
            assert door.clock_s < 35
        contended = [record.prepared.cold_start.contended for record in group.done.values() if record.prepared]
        assert contended == [True, True], "what compiling took is marked"

    def test_nobody_prepares_while_another_is_timed(self) -> None:
        door = FakeDoor(Landscape(step_s=0.02, compile_s={"compile": 30.0, "fp16": 1.0}))
        with self.group(door) as group:
            slow = group.start(spec_of("compile"), 0)
            quick = group.open(spec_of("fp16"), 1)
            assert quick is not None
            before_s = door.clock_s
            group.measure_solo(quick)
            group.measure(UntilPrecise())
            timed_s = door.clock_s - before_s
            group.admit(slow)
            assert door.clock_s - before_s - timed_s > 25

    def test_out_of_memory_beside_others_may_fit_alone(self) -> None:
        oom = Failure(stage="build", kind="oom", message="no room")
        door = FakeDoor(Landscape(step_s=0.02, failure={"fp16": oom, "*": None}))
        with self.group(door) as group:
            first, other = group.start(spec_of("fp16"), 0), group.start(spec_of("bf16"), 1)
            assert group.admit(first) is None
            assert (group.crowded, 0 in group.done) == ([0], False)
            assert group.admit(other) is not None

    def test_what_is_given_up_leaves_nothing(self) -> None:
        door, journal = WatchedDoor(Landscape(step_s=0.02)), Notebook()
        with Group(door, journal, Observer(), random.Random(0)) as group:
            group.start(spec_of("fp16"), 0)
        assert journal.entries == []
        assert all(session.is_closed for session in door.sessions)


class TestTheJournal:
    def test_hears_of_a_record_before_its_blocks_and_of_its_end_last(self) -> None:
        records, _, journal = together(Landscape(step_s=0.02), spec_of(), spec_of("fp16"), spec_of("bf16"))
        for record in records:
            assert journal.of(record.id) == ["begin", *["append"] * len(record.blocks), "finish"]
            assert journal.blocks[record.id] == list(record.blocks)
            assert journal.finished[record.id] == record

    def test_hears_of_everybody_before_the_first_turn(self) -> None:
        records, _, journal = together(Landscape(step_s=0.02), spec_of(), spec_of("fp16"), spec_of("bf16"))
        alone = sum(block.solo for record in records for block in record.blocks)
        order = [what for what, _ in journal.entries]
        assert order[: 3 + alone].count("begin") == 3
        assert order[-3:] == ["finish"] * 3

    def test_hears_of_a_block_as_soon_as_it_is_measured(self) -> None:
        """Not at the end of the round: what is killed in between would take it along."""
        heard: list[int] = []
        journal = Notebook()

        def judge(door: WatchedDoor, spec: RunSpec, request: Request) -> Reply | None:
            if isinstance(request, Measure):
                heard.append(sum(len(blocks) for blocks in journal.blocks.values()))
            return None

        measure_together([spec_of(), spec_of("fp16")], WatchedDoor(Landscape(step_s=0.02), judge), journal)
        assert heard == list(range(len(heard)))

    def test_gets_a_key_that_names_the_thing_measured(self) -> None:
        landscape = Landscape(step_s=0.02)
        (first, other), _, _ = together(landscape, spec_of(), spec_of("fp16"))
        (again,), _, _ = together(landscape, spec_of())
        assert first.key == again.key != other.key
        assert first.id != again.id


class TestKeepingStill:
    recipes = ("baseline", "fp16", "bf16")

    def run(self, device: str, *recipes: str) -> WatchedDoor:
        specs = [spec_of(recipe) for recipe in recipes or self.recipes]
        return together(Landscape(step_s=0.02, device_kind=device), *specs)[1]  # type: ignore[arg-type]

    def test_on_a_cpu_everybody_else_is_paused_while_one_is_measured(self) -> None:
        door = self.run("cpu")
        measured = [(name, asleep) for name, request, asleep in door.paused_meanwhile if isinstance(request, Measure)]
        assert measured
        for name, asleep in measured:
            assert asleep == set(self.recipes) - {name}

    def test_on_a_cpu_whoever_is_ready_is_paused_while_the_next_is_prepared(self) -> None:
        door = self.run("cpu")
        prepared = [asleep for _, request, asleep in door.paused_meanwhile if isinstance(request, Prepare)]
        assert prepared == [set(), {"baseline"}, {"baseline", "fp16"}]

    @pytest.mark.parametrize("device", ["cuda", "rocm"])
    def test_a_gpu_worker_just_sleeps_and_is_never_paused(self, device: str) -> None:
        assert all(not asleep for _, _, asleep in self.run(device).paused_meanwhile)

    def test_one_alone_is_never_paused(self) -> None:
        door = self.run("cpu", "baseline")
        assert not door.sessions[0].paused


class TestTheObserver:
    class Witness(Observer):
        def __init__(self) -> None:
            self.heard: list[tuple[Any, ...]] = []

        def opened(self, record: RunRecord) -> None:
            self.heard.append(("opened", str(record.spec.recipe)))

        def progress(self, record: RunRecord, progress: Progress) -> None:
            self.heard.append(("progress", str(record.spec.recipe), progress.stage))

        def measured(self, record: RunRecord, rounds: int, interval: Any, target: float) -> None:
            self.heard.append(("measured", str(record.spec.recipe), rounds, interval, target))

        def closed(self, record: RunRecord) -> None:
            self.heard.append(("closed", str(record.spec.recipe), record.stopped))

    def test_is_told_what_happens(self) -> None:
        witness = self.Witness()
        landscape = Landscape(step_s=0.02, device_kind="cpu", failure={"fp16": CRASH, "*": None})
        measure_together([spec_of(), spec_of("fp16")], FakeDoor(landscape), Notebook(), witness)
        stages = [event[2] for event in witness.heard if event[:2] == ("progress", "baseline")]
        assert stages == ["build", "compile", "numerics", "warm-up"]
        assert witness.heard[0] == ("opened", "baseline")
        assert ("closed", "fp16", "failed") in witness.heard
        assert witness.heard[-1] == ("closed", "baseline", "target")
        told = [event for event in witness.heard if event[0] == "measured"]
        assert [event[2] for event in told] == list(range(1, 7))
        assert {event[4] for event in told} == {BRIEF.cpu_target_half_width}
        assert told[-1][3] is not None
        assert math.isclose(told[-1][3].median, 0.02, rel_tol=0.02)


class TestTheRule:
    """`UntilPrecise` at its edges: a target of 5 %, a ceiling of 60 s."""

    def entry(self, width: float, timed_s: float, monkeypatch: pytest.MonkeyPatch) -> Entry:
        interval = Interval(low=1 - width, median=1.0, high=1 + width, n=99, n_effective=99.0)
        monkeypatch.setattr(Entry, "interval", lambda entry, kind: interval)
        monkeypatch.setattr(run, "_has_enough_samples", lambda entry: True)
        spec = spec_of(measure=MeasureSpec(max_seconds=60.0, cpu_target_half_width=0.125))
        return Entry(
            record=RunRecord(id="r", spec=spec), session=FakeDoor(Landscape(step_s=0.01)).open(spec), timed_s=timed_s
        )

    @pytest.mark.parametrize(
        ("width", "timed_s", "reason"),
        [
            (0.125, 1.0, "target"),  # exactly
            (0.126, 1.0, None),
            (0.126, 60.0, "ceiling"),  # exactly
            (0.126, 59.9, None),
            (0.125, 60.0, "target"),
            (0.5, 15.0, None),  # a quarter is over, and four times the ceiling is needed: not more
            (0.51, 15.0, "unreachable"),
            (0.51, 14.9, None),  # too early to tell
            (0.43, 15.0, None),  # in proportion to the square: 178 s
        ],
    )
    def test_says_why_it_is_over(
        self, width: float, timed_s: float, reason: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert UntilPrecise()._reason(self.entry(width, timed_s, monkeypatch)) == reason

    def test_the_first_goes_on_until_its_time_is_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        first, other = (self.entry(0.1, timed_s, monkeypatch) for timed_s in (59.9, 1.0))
        first.stopped = "target"
        assert UntilPrecise().visited([first, other]) == [other, first]
        first.timed_s = 60.0
        assert UntilPrecise().visited([first, other]) == [other]

    def test_without_enough_samples_only_the_ceiling_ends_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        entry = self.entry(0.1, 59.9, monkeypatch)
        monkeypatch.setattr(run, "_has_enough_samples", lambda entry: False)
        assert UntilPrecise()._reason(entry) is None
        entry.timed_s = 60.0
        assert UntilPrecise()._reason(entry) == "ceiling"


def test_what_is_given_up_is_killed_and_no_longer_pending() -> None:
    with Group(FakeDoor(Landscape(step_s=0.01)), Notebook(), Observer(), random.Random(0)) as opened:
        pending = opened.start(spec_of(), 0)
        assert opened.pending == [pending]
        opened.cancel(pending)
        assert opened.pending == []
    assert not opened.done


@pytest.mark.parametrize("follows", [False, True])
def test_after_others_a_block_passes_that_is_not_kept(follows: bool) -> None:
    door = WatchedDoor(Landscape(step_s=0.01))
    with Group(door, Notebook(), Observer(), random.Random(0)) as opened:
        entry = opened.open(spec_of(), 0)
        assert entry is not None
        opened.measure_solo(entry, "throughput", follows_others=follows)
        asked = sum(isinstance(request, Measure) for _, request in door.seen)
        assert asked == len(entry.record.blocks) + follows
        assert len(entry.record.blocks) == SOLO_BLOCKS


@pytest.mark.parametrize(
    ("asked", "stopped", "needed"), [(True, "target", 7), (False, "target", None), (True, "interrupted", None)]
)
def test_the_least_memory_is_asked_for_after_a_whole_run(asked: bool, stopped: Any, needed: int | None) -> None:
    spec = spec_of(squeeze_memory=asked)

    class Session(FakeSession):
        def ask(self, request: Request, on_progress: OnProgress | None = None) -> Reply:
            return SqueezeReply(needed_bytes=7) if isinstance(request, Squeeze) else super().ask(request, on_progress)

        def close(self) -> Closed:
            return Closed(memory=BlockMemory(allocator_retries=3))

    session = FakeDoor(Landscape(step_s=0.01)).open(spec)
    session.__class__ = Session
    with Group(FakeDoor(Landscape(step_s=0.01)), Notebook(), Observer(), random.Random(0)) as opened:
        record = opened.close(Entry(record=RunRecord(id="r", spec=spec), session=session, stopped=stopped))
    assert record.closed is not None
    assert (record.closed.memory.needed_bytes, record.closed.memory.allocator_retries) == (needed, 3)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_the_sessions_of_a_round_feed_a_gpu_from_one_processor_and_those_of_the_next_from_another(kind: str) -> None:
    """Processors of a shared machine differ; a CPU's own steps have all of them, and blocks alone any."""
    door = WatchedDoor(Landscape(step_s=0.01, device_kind=kind))
    measure_together([spec_of("baseline"), spec_of("fp16")], door, Notebook())
    turns: dict[int, set[int | None]] = {}
    timed = [request for _, request in door.seen if isinstance(request, Measure)]
    alone = 2 * SOLO_BLOCKS * 2 if kind == "cuda" else 0  # two sessions, throughput and latency
    assert {request.turn for request in timed[:alone]} <= {None}
    for request in timed[alone:]:
        turns.setdefault(request.round, set()).add(request.turn)
    assert len(turns) >= 6
    assert all(len(used) == 1 for used in turns.values())
    if kind == "cpu":
        assert set().union(*turns.values()) == {None}
    else:
        assert len(set().union(*turns.values())) == len(turns)
