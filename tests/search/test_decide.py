"""Races: fresh processes in turns, decided early where that is clear, never by what one process was born with."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from typing import Any

import msgspec
import pytest
from reported import race_records

from redline.analyze.pairs import pairs_of
from redline.analyze.statistics import PairedLog, student_t
from redline.model.errors import UsageError
from redline.model.protocol import FailureReply, OnProgress, Reply
from redline.model.record import Failure, RunRecord
from redline.model.spec import LaunchSpec, MeasureSpec, Recipe, RunSpec, WorkloadSpec
from redline.search import decide as deciding
from redline.search.decide import EXTENSIONS, REPLICATES_PER_EXTENSION, Race, UntilTold, decide
from redline.search.group import Entry
from redline.search.observer import NoJournal, Observer
from redline.show.result import terminal
from redline.show.terminal import as_text
from redline.testing.fake import FakeDoor, FakeSession
from redline.testing.landscape import Landscape
from redline.verbs.run import Measured, result_of


def specs_of(*recipes: str, door: str = "fork") -> list[RunSpec]:
    return [
        RunSpec(
            workload=WorkloadSpec(model="resnet50", batch=32),
            recipe=Recipe.parse(recipe),
            measure=MeasureSpec.for_effort("quick"),
            launch=LaunchSpec(door=door),  # type: ignore[arg-type]
        )
        for recipe in recipes
    ]


def raced(landscape: Landscape, *recipes: str, **settings: Any) -> tuple[list[list[Any]], FakeDoor]:
    door = FakeDoor(landscape)
    return decide(specs_of(*recipes), door, Observer(), **settings), door


def told_of(replicates: list[list[RunRecord]]) -> str:
    records = [record for replicate in replicates for record in replicate]
    return as_text(terminal(result_of(Measured(records=records, decided=[replicates]))))


def test_functions_race_each_other_under_their_own_names() -> None:
    functions = [
        msgspec.structs.replace(specs_of(recipe)[0], workload=WorkloadSpec(model=model, task="step"))
        for model, recipe in (("a.py:step", "baseline"), ("b.py:step", "baseline"), ("a.py:step", "tf32"))
    ]
    truth = Landscape(step_s={"baseline": 0.02, "tf32": 0.01}, offset_sigma=0.0005)
    pairs = {(pair.a, pair.b): pair.verdict for pair in pairs_of(decide(functions, FakeDoor(truth), Observer()))}
    assert pairs == {
        ("a.py:step", "b.py:step"): "same",
        ("a.py:step", "a.py:step tf32"): "faster",
        ("b.py:step", "a.py:step tf32"): "faster",
    }


class TestBesideOthersOnACpu:
    """True is 1.5. Beside a busy core the baseline takes seven times as long, and compiled only 1.4 times."""

    def pair(self, others_cores: Any, seed: int = 0) -> Any:
        truth = Landscape(
            step_s={"baseline": 0.01, "compile": 0.01 / 1.5},
            slowed_by_others={"baseline": 6.0, "compile": 0.4},
            others_cores=others_cores,
            device_kind="cpu",
            noise_sigma=0.03,
            offset_sigma=0.005,
            seed=seed,
        )
        specs = [msgspec.structs.replace(spec, device="cpu") for spec in specs_of("baseline", "compile")]
        (pair,) = pairs_of(decide(specs, FakeDoor(truth), Observer()))
        return pair

    def test_the_rounds_without_them_decide(self) -> None:
        pair = self.pair(lambda clock_s: float(clock_s % 3.0 < 0.6))
        assert (pair.verdict, pair.low <= 1.5 <= pair.high) == ("faster", True)
        assert pair.high < 1.7

    @pytest.mark.parametrize("seed", range(3))
    def test_where_there_are_none_the_interval_still_holds_the_truth(self, seed: int) -> None:
        pair = self.pair(lambda clock_s: 1.0, seed)
        assert pair.low <= 1.5 <= 7.5 <= pair.high


class TestVerdicts:
    def test_a_clear_difference_is_decided_before_all_replicates_are_run(self) -> None:
        replicates, _ = raced(
            Landscape(step_s={"baseline": 0.02, "fp16": 0.01}, offset_sigma=0.0005), "baseline", "fp16"
        )
        (pair,) = pairs_of(replicates)
        assert (len(replicates), pair.verdict) == (2, "faster")
        assert pair.low <= 2.0 <= pair.high

    def test_every_pair_gets_one(self) -> None:
        truth = {"baseline": 0.02, "fp16": 0.01, "bf16": 0.01}
        replicates, _ = raced(Landscape(step_s=truth, offset_sigma=0.001), "baseline", "fp16", "bf16")
        found = {(pair.a, pair.b): pair.verdict for pair in pairs_of(replicates)}
        assert found == {("baseline", "fp16"): "faster", ("baseline", "bf16"): "faster", ("fp16", "bf16"): "same"}

    def test_two_extensions_come_before_inconclusive(self) -> None:
        replicates, _ = raced(Landscape(step_s=0.01, offset_sigma=0.1), "baseline", "fp16")
        assert len(replicates) == 3 + EXTENSIONS * REPLICATES_PER_EXTENSION
        assert pairs_of(replicates)[0].verdict == "inconclusive"
        told = " ".join(told_of(replicates).split())
        assert f"--replicates {2 * len(replicates)} or --effort strict" in told, "more than it had"

    def test_who_is_decided_leaves_before_an_extension(self) -> None:
        landscape = Landscape(step_s={"baseline": 0.1, "fp16": 0.01, "bf16": 0.01}, offset_sigma=0.06)
        replicates, _ = raced(landscape, "baseline", "fp16", "bf16")
        assert len(replicates[0]) == 3
        assert [str(record.spec.recipe) for record in replicates[-1]] == ["fp16", "bf16"]

    def test_one_process_each_decides_nothing(self) -> None:
        replicates, _ = raced(Landscape(step_s={"baseline": 0.02, "fp16": 0.01}), "baseline", "fp16", replicates=1)
        assert len(replicates) == 1
        assert pairs_of(replicates)[0].verdict == "inconclusive"


class TestFalseAlarms:
    @pytest.mark.parametrize(
        "machine",
        [
            {"noise_sigma": 0.01, "offset_sigma": 0.01, "drift_sigma": 0.003, "noise_rho": 0.3},
            {"noise_sigma": 0.03, "offset_sigma": 0.02, "drift_sigma": 0.01, "noise_rho": 0.6},
            {"noise_sigma": 0.08, "offset_sigma": 0.005, "drift_sigma": 0.02, "noise_rho": 0.7, "device_kind": "cpu"},
        ],
        ids=["card", "worse card", "shared CPU"],
    )
    def test_of_equal_recipes_are_rare_and_the_interval_holds_the_truth(self, machine: dict[str, Any]) -> None:
        count, missed, verdicts = 80, 0, Counter[str]()
        for seed in range(count):
            replicates, _ = raced(Landscape(step_s=0.01, seed=seed, **machine), "baseline", "fp16", seed=seed)
            (pair,) = pairs_of(replicates)
            missed += not pair.low <= 1 <= pair.high
            verdicts[pair.verdict] += 1
        # At a true rate of 5 % more than 9 of 80 come about once in a hundred times.
        assert missed <= 9
        assert verdicts["faster"] + verdicts["slower"] <= 2

    def test_within_one_process_the_same_noise_would_be_a_difference(self) -> None:
        """The check can fail: rounds alone, pooled over replicates, call processes' offsets differences."""
        from redline.analyze.pairs import log_ratio

        alarms = 0
        for seed in range(60):
            replicates, _ = raced(Landscape(step_s=0.01, seed=seed, offset_sigma=0.02), "baseline", "fp16", seed=seed)
            log = log_ratio(*replicates[0])
            alarms += abs(log.mean) > 3 * log.error
        assert alarms > 30


class TestMemory:
    def test_recipes_that_do_not_fit_together_are_opened_in_turn(self) -> None:
        door = Crowded(Landscape(step_s={"baseline": 0.02, "fp16": 0.01}, offset_sigma=0.001), room=1)
        running = Race(door, NoJournal(), Observer(), random.Random(0))
        for _ in range(3):
            records = running.run_replicate(specs_of("baseline", "fp16"))
            assert all(record.blocks and record.group is None for record in records)
        assert running.in_turns
        assert door.most_open == 1 + 1  # the one that found no room
        (pair,) = running.pairs
        assert pair.ratio == pytest.approx(2.0, rel=0.02)


class Crowded(FakeDoor):
    """Has room for so many sessions at a time."""

    def __init__(self, landscape: Landscape, room: int) -> None:
        super().__init__(landscape)
        self.room = room
        self.live: list[object] = []
        self.most_open = 0

    def open(self, spec: RunSpec | None = None) -> FakeSession:
        session = super().open(spec)
        self.live.append(session)
        self.most_open = max(self.most_open, len(self.live))
        crowded, wait, close = len(self.live) > self.room, session.wait, session.close

        def waited(on_progress: OnProgress | None = None, timeout_s: float | None = None) -> Reply | None:
            if crowded:
                return FailureReply(failure=Failure(stage="build", kind="oom", message="no room"))
            return wait(on_progress, timeout_s)

        def closed() -> Any:
            if session in self.live:
                self.live.remove(session)
            return close()

        session.wait, session.close = waited, closed  # type: ignore[method-assign]
        return session


class TestFailures:
    def test_a_broken_recipe_is_out_after_its_first_replicate(self) -> None:
        broken = Failure(stage="compile", kind="compile", message="cannot")
        landscape = Landscape(
            step_s={"*": 0.01, "tf32": 0.02}, failure={"*": None, "fp16": broken}, offset_sigma=0.0005
        )
        replicates, _ = raced(landscape, "baseline", "fp16", "tf32")
        assert replicates[0][1].failure == broken
        assert all(len(replicate) == 2 for replicate in replicates[1:])
        assert {(pair.a, pair.b) for pair in pairs_of(replicates)} == {("baseline", "tf32")}

    def test_a_race_of_one_survivor_ends(self) -> None:
        broken = Failure(stage="compile", kind="compile", message="cannot")
        replicates, _ = raced(Landscape(step_s=0.01, failure={"*": None, "fp16": broken}), "baseline", "fp16")
        assert len(replicates) == 1
        assert pairs_of(replicates) == []


def test_what_turns_do_to_a_process_is_not_in_the_ratio() -> None:
    """Alone fp16 is no faster than bf16; in turns it runs 8 % faster than it ever will."""
    truth = Landscape(
        step_s={"fp16": 0.002, "bf16": 0.002}, contended_factor={"fp16": 0.92, "bf16": 1.0}, offset_sigma=0.001
    )
    (pair,) = pairs_of(decide(specs_of("bf16", "fp16"), FakeDoor(truth), Observer()))
    assert pair.ratio == pytest.approx(1.0, abs=0.01)
    assert pair.verdict != "faster"


def test_one_recipe_is_no_race() -> None:
    with pytest.raises(UsageError, match="at least two recipes"):
        raced(Landscape(step_s=0.01), "fp16")


class TestARecipeAgainstItself:
    """What two equal recipes differ by is the noise floor of the machine."""

    def test_it_is_the_same(self) -> None:
        replicates, _ = raced(Landscape(step_s=0.01, offset_sigma=0.002), "fp16", "fp16")
        (pair,) = pairs_of(replicates)
        assert (pair.a, pair.b, pair.verdict) == ("fp16", "fp16 (2)", "same")

    def test_its_copies_keep_their_names_when_others_leave(self) -> None:
        """baseline is decided at once; the copies differ too much from process to process to be decided."""
        truth = Landscape(step_s={"baseline": 0.1, "fp16": 0.01}, offset_sigma=0.08)
        replicates, _ = raced(truth, "baseline", "fp16", "fp16")
        assert len(replicates[-1]) == 2, "baseline left before the extension"
        by_pair = {(pair.a, pair.b): pair for pair in pairs_of(replicates)}
        assert by_pair["fp16", "fp16 (2)"].replicates == len(replicates)
        assert by_pair["baseline", "fp16"].replicates < len(replicates)


def test_a_race_in_which_nobody_met_says_so() -> None:
    """Stopped before a replicate was finished."""
    records = [msgspec.structs.replace(record, blocks=()) for record in race_records(("baseline", "fp16"))]
    assert "next: run the same command again" in told_of([records])


class TestUntilTold:
    """A band of 3 %: rounds go on until they leave a third of it open, or the pair is far outside."""

    def entries(self) -> list[Entry]:
        door = FakeDoor(Landscape(step_s=0.01))
        specs = specs_of("baseline", "fp16")
        return [Entry(record=RunRecord(id=str(spec.recipe), spec=spec), session=door.open(spec)) for spec in specs]

    @pytest.mark.parametrize(
        ("mean", "half", "is_over"),
        [
            (0.0, 0.0099, True),
            (0.0, 0.0101, False),
            (0.08, 0.02, True),  # wherever in twice its interval, it is beyond the band
            (-0.08, 0.02, True),
            (0.06, 0.02, False),
            (0.0, 0.08, False),
        ],
    )
    def test_by_what_the_rounds_leave_open(
        self, mean: float, half: float, is_over: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = PairedLog(mean=mean, error=half / student_t(9), rounds=10)
        monkeypatch.setattr(deciding, "log_ratio", lambda one, other, kind: log)
        entries = self.entries()
        rule = UntilTold("throughput", 3)
        fewest = min(entries[0].spec.measure.min_rounds, deciding.FEWEST_ROUNDS)
        rule.after_round(entries, fewest - 1)
        assert [entry.stopped for entry in entries] == [None, None], "too few rounds"
        rule.after_round(entries, fewest)
        assert [entry.stopped for entry in entries] == ["target" if is_over else None] * 2


class TestWithLittleTime:
    """Five replicates at once of a step so unsteady that no number of rounds tells two recipes apart."""

    def clocks(self, left_s: float) -> list[float]:
        """When each replicate was done, counted from when the first was timed."""
        door = FakeDoor(Landscape(step_s=0.01, noise_sigma=0.8, noise_rho=0.9))
        ends: list[float] = []

        class Noted(Observer):
            def closed(self, record: RunRecord) -> None:
                ends.append(door.clock_s)

        running = Race(
            door, NoJournal(), Noted(), random.Random(0), only="throughput", left_s=lambda: left_s - door.clock_s
        )
        measured = running.run_replicates([specs_of("baseline", "fp16")] * 5)
        assert all(len(record.blocks) >= deciding.FEWEST_ROUNDS for replicate in measured for record in replicate)
        return ends[1::2]

    def test_all_of_them_have_their_share_of_it(self) -> None:
        unhurried = self.clocks(math.inf)
        begun = 0.7 * unhurried[-1]
        hurried = self.clocks(begun)
        assert hurried[-1] <= 1.05 * begun
        took = [after - before for before, after in itertools.pairwise(hurried)]
        assert max(took) <= 1.5 * min(took)
