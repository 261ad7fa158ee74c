"""Recipes measured together: the ratio is the true one, whatever drifts, and what breaks or is stopped stays data."""

from __future__ import annotations

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

from redline.analyze.measurement import measurements
from redline.analyze.pairs import ratio_of
from redline.analyze.rows import row_of
from redline.analyze.statistics import median_interval, paired_log
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
from redline.model.record import Memory as BlockMemory
from redline.model.spec import LaunchSpec, MeasureSpec, Recipe, RunSpec, WorkloadSpec
from redline.search.group import SOLO_BLOCKS, Entry, Group
from redline.search.observer import Observer
from redline.search.run import UntilPrecise, measure_together
from redline.store import History
from redline.testing.fake import FakeDoor, FakeSession
from redline.testing.landscape import Landscape

BRIEF = MeasureSpec(min_samples=10, tail_samples=10, min_rounds=6, target_half_width=0.5, cpu_target_half_width=0.5)
"""Content after six rounds, whatever the noise."""

OOM = Failure(stage="build", kind="oom", message="out of memory")
THREE = ("baseline", "fp16", "bf16")


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
"""It may answer in the place of the bench, or raise."""


class WatchedDoor(FakeDoor):
    """A fake door that sees every request and who was paused meanwhile, and that may step in."""

    def __init__(self, landscape: Landscape, judge: Judge | None = None) -> None:
        super().__init__(landscape)
        self.judge = judge
        self.sessions: list[Any] = []
        self.seen: list[tuple[str, Any, set[str]]] = []

    def open(self, spec: RunSpec | None = None) -> Any:
        session: Any = super().open(spec)
        session.__class__ = WatchedSession
        session.door, session.spec, session.is_closed = self, spec, False
        self.sessions.append(session)
        return session

    @property
    def names(self) -> list[str]:
        return [str(session.spec.recipe) for session in self.sessions]

    @property
    def timed(self) -> list[tuple[str, Any, set[str]]]:
        return [(name, request, asleep) for name, request, asleep in self.seen if isinstance(request, Measure)]

    def others(self, than: RunSpec) -> list[Any]:
        return [session for session in self.sessions if session.spec is not than and not session.is_closed]

    def all_closed(self) -> bool:
        return all(session.is_closed for session in self.sessions)

    def rounds(self) -> list[tuple[int, list[str]]]:
        """The recipes that were measured in each round, in order."""
        rounds = groupby(self.timed, key=lambda seen: seen[1].round)
        return [(number, [name for name, _, _ in visits]) for number, visits in rounds]


class WatchedSession(FakeSession):
    door: WatchedDoor
    spec: RunSpec

    def begin(self, request: Request) -> None:
        self.asked = request

    def wait(self, on_progress: OnProgress | None = None, timeout_s: float | None = None) -> Reply | None:
        asleep = {str(other.spec.recipe) for other in self.door.others(self.spec) if other.paused}
        self.door.seen.append((str(self.spec.recipe), self.asked, asleep))
        if self.door.judge and (reply := self.door.judge(self.door, self.spec, self.asked)):
            return reply
        super().begin(self.asked)
        return super().wait(on_progress)

    def close(self) -> Closed:
        self.is_closed = True
        return super().close()


def together(
    *recipes: str, judge: Judge | None = None, seed: int = 0, spec: dict[str, Any] | None = None, **truth: Any
) -> tuple[list[RunRecord], WatchedDoor, Notebook]:
    """Measures recipes together whose steps take 20 ms unless the truth says otherwise."""
    door, journal = WatchedDoor(Landscape(**{"step_s": 0.02, **truth}), judge), Notebook()
    specs = [spec_of(recipe, **(spec or {})) for recipe in recipes]
    return measure_together(specs, door, journal, seed=seed), door, journal


def alone(truth: dict[str, Any], **spec: Any) -> RunRecord:
    (record,), _, _ = together("baseline", spec=spec, **truth)
    return record


def versus_first(records: list[RunRecord]) -> Any:
    return measurements(records)[1].vs_first


def stops(records: list[RunRecord]) -> list[str | None]:
    return [record.stopped for record in records]


def samples(record: RunRecord, kind: str) -> int:
    return sum(len(block.samples) for block in record.blocks if block.kind == kind)


def breaks(recipe: str = "fp16", stage: str = "measure", after: int = 0) -> dict[str, Any]:
    """The truth of a world in which one recipe breaks."""
    broken = Failure(stage=stage, kind="crash", message="gone")
    return {"failure": {recipe: broken, "*": None}, "fails_after_blocks": after}


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
            versus = versus_first(records)
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
            paired = ratio_of(paired_log(*medians))
            alarms += not paired.low <= 1 <= paired.high
        assert alarms > 25


class TestRounds:
    recipes = ("baseline", "fp16", "bf16", "tf32")

    def run(self, seed: int = 0) -> tuple[list[RunRecord], WatchedDoor]:
        records, door, _ = together(*self.recipes, spec={"min_rounds": 12}, device_kind="cpu", seed=seed)
        return records, door

    def test_visit_everybody_once_before_anybody_twice_in_an_order_that_is_shuffled_anew(self) -> None:
        rounds = self.run()[1].rounds()
        assert [number for number, _ in rounds] == list(range(12))
        for _, visited in rounds:
            assert sorted(visited) == sorted(self.recipes)
        orders = {tuple(visited) for _, visited in rounds}
        assert len(orders) > 6
        # Nobody is always first: being first would be part of what is compared.
        assert len({order[0] for order in orders}) > 2

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
        (group,) = {record.group for record in records}
        assert group
        assert len({record.id for record in records}) == 4
        single = alone({})
        assert (single.group, single.stopped) == (None, "target")
        assert together()[0] == []

    @pytest.mark.parametrize(
        ("device", "task", "kinds"),
        [
            ("cuda", "infer", {"throughput", "latency"}),
            ("rocm", "infer", {"throughput", "latency"}),
            ("cuda", "train", {"throughput"}),
            ("cpu", "infer", {"throughput"}),
            ("cpu", "train", {"throughput"}),
        ],
    )
    def test_hold_both_kinds_of_block_where_a_gpu_infers(self, device: str, task: str, kinds: set[str]) -> None:
        record = alone({"device_kind": device}, task=task)
        assert {block.kind for block in record.blocks} == kinds
        assert Counter(block.round for block in record.blocks) == dict.fromkeys(range(6), len(kinds))


@pytest.mark.parametrize("order", [("fp16", "baseline", "bf16"), ("baseline", "fp16", "bf16")])
def test_who_is_done_rests_unless_the_others_are_set_against_it(order: tuple[str, ...]) -> None:
    """Of a long step few fit into a block, so that its samples take more rounds."""
    step_s = {"baseline": 0.01, "fp16": 0.1, "bf16": 0.01}
    records, _, _ = together(*order, spec={"min_samples": 30}, step_s=step_s, device_kind="cpu")
    blocks = {str(record.spec.recipe): len(record.blocks) for record in records}
    assert blocks["fp16"] > blocks["bf16"] == BRIEF.min_rounds
    assert blocks["baseline"] == blocks["fp16" if order[0] == "baseline" else "bf16"]
    assert stops(records) == ["target"] * 3
    if order[0] == "baseline":
        assert versus_first(records).ratio == pytest.approx(0.1, rel=0.05)


class TestStopping:
    def test_when_the_interval_is_narrow_enough(self) -> None:
        measure = MeasureSpec(target_half_width=0.01, tail_samples=30)
        record = alone({"noise_sigma": 0.03}, measure=measure)
        assert record.stopped == "target"
        for kind in ("throughput", "latency"):
            interval = median_interval([block.samples for block in record.blocks if block.kind == kind])
            assert interval.half_width <= 0.01

    def test_not_before_the_fewest_rounds_and_samples(self) -> None:
        quiet = {"noise_sigma": 1e-6, "device_kind": "cpu"}
        assert len(alone({"step_s": 0.01, **quiet}, min_rounds=9).blocks) == 9
        assert samples(alone({"step_s": 0.25, **quiet}, min_rounds=2, min_samples=17), "throughput") == 17

    @pytest.mark.parametrize(
        ("noise", "settings", "stopped", "least_s", "before_s"),
        [
            # At the ceiling it stops with what there is.
            (0.2, {"cpu_target_half_width": 0.001, "max_seconds": 1.0, "min_rounds": 100}, "ceiling", 1.0, 1.0),
            # After a quarter of the time it can be plain that the target is out of reach, or that the rest is enough.
            (0.3, {"cpu_target_half_width": 0.001, "max_seconds": 20.0}, "unreachable", 5.0, 9.7),
            (0.07, {"cpu_target_half_width": 0.01, "max_seconds": 20.0}, "target", 5.0, 19.7),
        ],
    )
    def test_at_the_ceiling_or_once_the_target_is_out_of_reach(
        self, noise: float, settings: dict[str, Any], stopped: str, least_s: float, before_s: float
    ) -> None:
        record = alone({"noise_sigma": noise, "device_kind": "cpu"}, **settings)
        walls = [block.wall_s for block in record.blocks]
        assert record.stopped == stopped
        assert sum(walls[:-1]) < before_s
        assert sum(walls) >= least_s

    def test_a_cpu_is_held_to_its_own_wider_target(self) -> None:
        measure = MeasureSpec(target_half_width=1e-6, cpu_target_half_width=0.05, max_seconds=5.0)
        found = [alone({"step_s": 0.01, "device_kind": kind}, measure=measure).stopped for kind in ("cpu", "cuda")]
        assert found == ["target", "unreachable"]


@pytest.mark.parametrize(
    ("device", "task", "kind", "least", "most"),
    [
        ("cuda", "infer", "latency", 130, 132),
        ("cpu", "infer", "throughput", 130, 132),  # in the only blocks there are
        ("cuda", "train", "throughput", 1, 29),  # nobody asks for the tail of training
    ],
)
def test_the_tail_is_waited_for_where_latency_is_told(device: str, task: str, kind: str, least: int, most: int) -> None:
    record = alone({"step_s": 0.1, "device_kind": device}, tail_samples=130, task=task)
    assert record.stopped == "target"
    assert least <= samples(record, kind) <= most
    latency: Any = measurements([record])[0].latency_s
    if kind == "latency":
        assert (latency.p95 is None, latency.p99) == (False, None)
        assert alone({"step_s": 0.1}, tail_samples=10_000, max_seconds=5.0).stopped == "ceiling"


class TestASiblingThatFails:
    @pytest.mark.parametrize("stage", ["build", "compile", "numerics", "warm-up"])
    def test_before_it_is_timed_is_recorded_while_the_others_go_on(self, stage: str) -> None:
        truth = breaks(stage=stage)
        records, door, journal = together(*THREE, **truth)
        assert stops(records) == ["target", "failed", "target"]
        assert (records[1].failure, records[1].blocks, records[1].key) == (truth["failure"]["fp16"], (), None)
        assert len({record.group for record in records}) == 1
        assert journal.of(records[1].id) == ["finish"]
        assert measurements(records)[2].vs_first is not None
        assert door.all_closed()

    def test_while_it_is_timed_keeps_the_blocks_it_had(self) -> None:
        truth = breaks(after=3)
        records, door, journal = together(*THREE, device_kind="cpu", **truth)
        assert stops(records) == ["target", "failed", "target"]
        assert records[1].failure == truth["failure"]["fp16"]
        assert [block.round for block in records[1].blocks] == [0, 1, 2]
        assert [len(record.blocks) for record in records] == [6, 3, 6]
        assert journal.of(records[1].id) == ["begin", "append", "append", "append", "finish"]
        assert Counter(name for name, _, _ in door.timed)["fp16"] == 4  # a broken one is not asked again
        row = measurements(records)[1]
        assert (row.vs_first, row.throughput_per_s) == (None, None)
        # Its process may be alive, with threads that spin: it is kept still like the others.
        late = [asleep for name, request, asleep in door.timed if request.round > 3]
        assert late
        assert all("fp16" in asleep for asleep in late)

    def test_and_is_the_first_leaves_the_others_without_a_ratio(self) -> None:
        records, _, _ = together(*THREE, **breaks("baseline", "build"))
        assert stops(records) == ["failed", "target", "target"]
        rows = measurements(records)
        assert [row.vs_first for row in rows] == [None, None, None]
        assert rows[1].throughput_per_s == pytest.approx(32 / 0.02, rel=0.02)

    def test_by_answering_out_of_turn_has_broken_too(self) -> None:
        def judge(door: WatchedDoor, spec: RunSpec, request: Request) -> Reply | None:
            confused = isinstance(request, Measure) and request.round == 2 and spec.recipe.switches
            return Progress(stage="build") if confused else None

        records, _, _ = together("baseline", "fp16", judge=judge)
        assert stops(records) == ["target", "failed"]
        assert records[1].failure.kind == "crash"
        assert "Progress" in records[1].failure.message


class TestOutOfMemory:
    def test_beside_siblings_is_tried_again_alone(self) -> None:
        records, door, journal = together(*THREE, judge=crowded("fp16"))
        assert stops(records) == ["target"] * 3
        first, retried, other = records
        assert (retried.failure, retried.group, retried.position) == (None, None, 1)
        assert first.group == other.group is not None
        assert [(note.code, note.about) for note in retried.notes] == [("measured-separately", "memory")]
        assert [row.vs_first is None for row in measurements(records)] == [True, True, False]
        # It begins when the others are over, and what did not fit left no trace.
        assert journal.of(retried.id)[0] == "begin"
        assert set(journal.finished) == {record.id for record in records}
        begun = journal.entries.index(("begin", retried.id))
        assert max(journal.entries.index(("finish", record.id)) for record in (first, other)) < begun
        assert door.all_closed()

    @pytest.mark.parametrize(
        ("recipe", "opened"),
        [("fp16", ["baseline", "fp16", "fp16"]), ("baseline", ["baseline", "fp16"])],
        ids=["alone as well", "with nobody beside it is not tried twice"],
    )
    def test_that_stays_is_a_failure(self, recipe: str, opened: list[str]) -> None:
        memory = {recipe: 2**30, "*": 2**20}
        records, door, _ = together("baseline", "fp16", memory_bytes=memory, memory_limit_bytes=2**25)
        assert door.names == opened
        for record in records:
            failed = str(record.spec.recipe) == recipe
            assert record.stopped == ("failed" if failed else "target")
            assert (record.failure.kind if record.failure else None) == ("oom" if failed else None)
        assert records[1].group is None or recipe == "baseline"


class TestCtrlC:
    @staticmethod
    def interrupted(judge: Judge, *specs: RunSpec, **truth: Any) -> Notebook:
        door, journal = WatchedDoor(Landscape(**{"step_s": 0.02, **truth}), judge), Notebook()
        with pytest.raises(KeyboardInterrupt):
            measure_together(specs or (spec_of(), spec_of("fp16")), door, journal)
        assert door.all_closed()
        return journal

    @staticmethod
    def in_round(number: int, recipe: str = "fp16", kind: str = "throughput") -> Judge:
        return interrupting(
            lambda spec, request: (
                isinstance(request, Measure)
                and (request.round, request.kind, str(spec.recipe)) == (number, kind, recipe)
            )
        )

    def test_while_timing_leaves_every_record_finished_with_its_blocks(self) -> None:
        journal = self.interrupted(self.in_round(3), device_kind="cpu", noise_sigma=0.1)
        first, second = journal.finished.values()
        assert stops([first, second]) == ["interrupted", "interrupted"]
        assert [block.round for block in second.blocks] == [0, 1, 2]
        assert len(first.blocks) in (3, 4)
        for record in (first, second):
            assert journal.blocks[record.id] == list(record.blocks)
            assert journal.of(record.id) == ["begin", *["append"] * len(record.blocks), "finish"]
            assert record.failure is None
            assert record.closed is not None

    def test_while_preparing_the_second_keeps_the_first(self) -> None:
        prepares = interrupting(lambda spec, request: isinstance(request, Prepare) and bool(spec.recipe.switches))
        (record,) = self.interrupted(prepares).finished.values()
        assert (str(record.spec.recipe), record.stopped) == ("baseline", "interrupted")
        assert record.blocks
        assert all(block.solo for block in record.blocks), "what it ran before the second came is kept"

    @pytest.mark.parametrize("door", ["fork", "inline"])
    def test_finishes_one_that_is_measured_alone(self, door: str) -> None:
        """Inline specs, and one that did not fit beside the others, are alone; they are no less worth keeping."""

        def judge(watched: WatchedDoor, spec: RunSpec, request: Request) -> Reply | None:
            refused = crowded("fp16")(watched, spec, request) if door == "fork" else None
            return refused or self.in_round(2)(watched, spec, request)

        journal = self.interrupted(judge, spec_of(door=door), spec_of("fp16", door=door), device_kind="cpu")
        done, stopped = journal.finished.values()
        assert stops([done, stopped]) == ["target", "interrupted"]
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
        assert versus_first(records).low is None  # three rounds are too few for an interval

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
        assert stops(list(journal.finished.values())) == ["interrupted", "interrupted"]
        assert door.all_closed()


class TestCompany:
    """Processes that take turns on a GPU may change each other; whoever deploys a recipe runs it alone."""

    def row(self, **truth: Any) -> tuple[Any, RunRecord]:
        step_s = {"baseline": 0.010, "fp16": 0.002}
        records, _, _ = together("baseline", "fp16", **{"step_s": step_s, "noise_sigma": 0.002, **truth})
        return measurements(records)[1], records[1]

    @pytest.mark.parametrize(("factor", "told"), [(0.92, r"8\.[67]\d? ?% faster"), (1.05, r"4\.[78]\d? ?% slower")])
    def test_the_figures_are_those_alone_and_it_is_said(self, factor: float, told: str) -> None:
        row, _ = self.row(contended_factor={"baseline": 1.0, "fp16": factor})
        assert row.throughput_per_s == pytest.approx(32 / 0.002, rel=0.005)
        assert row.latency_s.p50 == pytest.approx(0.002, rel=0.005)
        (noted,) = row.verdict.noted("contended")
        assert noted in row_of(row).notes
        assert re.search(told, str(noted).replace("\u2009", " ")), noted
        assert row.vs_first.ratio == pytest.approx(5.0, rel=0.01)
        low, high = sorted((5.0, 5.0 / factor))
        assert row.vs_first.low <= low < high <= row.vs_first.high, "the ratio in turns is not ruled out"

    def test_without_any_the_turns_count(self) -> None:
        row, record = self.row()
        assert not row.verdict.noted("contended")
        in_turns = [block for block in record.blocks if block.kind == "latency" and not block.solo]
        assert row.latency_s.n == sum(len(block.samples) for block in in_turns)


class TestInline:
    def run(self, **truth: Any) -> tuple[list[RunRecord], WatchedDoor, Notebook]:
        return together("baseline", "fp16", spec={"door": "inline"}, **truth)

    def test_specs_are_measured_one_after_the_other_without_a_ratio(self) -> None:
        records, door, journal = self.run()
        assert [name for name, _ in groupby(name for name, _, _ in door.seen)] == ["baseline", "fp16"]
        ends = journal.entries.index(("finish", records[0].id))
        assert ends < journal.entries.index(("begin", records[1].id))
        assert [(record.position, record.group) for record in records] == [(0, None), (1, None)]
        assert [row.vs_first for row in measurements(records)] == [None, None]
        for record in records:
            assert [(note.code, note.about) for note in record.notes] == [("measured-separately", "inline")]


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

    @pytest.mark.parametrize("cancels", [False, True])
    def test_what_is_given_up_leaves_nothing(self, cancels: bool) -> None:
        door, journal = WatchedDoor(Landscape(step_s=0.02)), Notebook()
        with self.group(door, journal) as group:
            pending = group.start(spec_of("fp16"), 0)
            assert group.pending == [pending]
            if cancels:
                group.cancel(pending)
                assert group.pending == []
        assert (journal.entries, group.done) == ([], {})
        assert door.all_closed()


class TestTheJournal:
    def test_hears_of_a_block_as_soon_as_it_is_measured(self) -> None:
        """Not at the end of the round: what is killed in between would take it along."""
        heard: list[int] = []
        journal = Notebook()

        def judge(door: WatchedDoor, spec: RunSpec, request: Request) -> None:
            if isinstance(request, Measure):
                heard.append(sum(len(blocks) for blocks in journal.blocks.values()))

        measure_together([spec_of(), spec_of("fp16")], WatchedDoor(Landscape(step_s=0.02), judge), journal)
        assert heard == list(range(len(heard)))


class TestKeepingStill:
    def test_on_a_cpu_everybody_else_is_paused_while_one_is_measured_or_prepared(self) -> None:
        door = together(*THREE, device_kind="cpu")[1]
        assert door.timed
        for name, _, asleep in door.timed:
            assert asleep == set(THREE) - {name}
        prepared = [asleep for _, request, asleep in door.seen if isinstance(request, Prepare)]
        assert prepared == [set(), {"baseline"}, {"baseline", "fp16"}]
        assert not together("baseline", device_kind="cpu")[1].sessions[0].paused

    @pytest.mark.parametrize("device", ["cuda", "rocm"])
    def test_a_gpu_worker_just_sleeps_and_is_never_paused(self, device: str) -> None:
        assert not any(asleep for _, _, asleep in together(*THREE, device_kind=device)[1].seen)


@pytest.mark.parametrize("follows", [False, True])
def test_after_others_a_block_passes_that_is_not_kept(follows: bool) -> None:
    door = WatchedDoor(Landscape(step_s=0.01))
    with Group(door, Notebook(), Observer(), random.Random(0)) as opened:
        entry = opened.open(spec_of(), 0)
        opened.measure_solo(entry, "throughput", follows_others=follows)
        assert len(door.timed) == len(entry.record.blocks) + follows
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
    assert (record.closed.memory.needed_bytes, record.closed.memory.allocator_retries) == (needed, 3)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_the_sessions_of_a_round_feed_a_gpu_from_one_processor_and_those_of_the_next_from_another(kind: str) -> None:
    """Processors of a shared machine differ; a CPU's own steps have all of them, and blocks alone any."""
    _, door, _ = together("baseline", "fp16", device_kind=kind)
    turns: dict[int, set[int | None]] = {}
    timed = [request for _, request, _ in door.timed]
    solo = 2 * SOLO_BLOCKS * 2 if kind == "cuda" else 0  # two sessions, throughput and latency
    assert {request.turn for request in timed[:solo]} <= {None}
    for request in timed[solo:]:
        turns.setdefault(request.round, set()).add(request.turn)
    assert len(turns) >= 6
    assert all(len(used) == 1 for used in turns.values())
    if kind == "cpu":
        assert set().union(*turns.values()) == {None}
    else:
        assert len(set().union(*turns.values())) == len(turns)
