"""Trainings before a fake bench: every epoch once in the journal, whatever happens; workers found as they truly are."""

from __future__ import annotations

from typing import Any

import pytest

from redline.analyze.train import training_of
from redline.model.metrics import Row
from redline.model.record import Block, Failure, RunRecord
from redline.model.spec import DataSpec, RunSpec, TrainSpec, WorkloadSpec
from redline.search.observer import NoJournal
from redline.search.train import After, train_spec
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape
from redline.verbs.train import loader_result


def spec_of(*, workers: int = 0, **train: Any) -> RunSpec:
    data = DataSpec(name="synthetic-learnable", workers=workers)
    return RunSpec(
        workload=WorkloadSpec(model="resnet18", task="train", batch=128),
        device="cuda:0",
        train=TrainSpec(data=data, **{"epochs": 3, **train}),
    )


class Kept(NoJournal):
    """Remembers what a history would hold after each call."""

    def __init__(self) -> None:
        self.heads: list[RunRecord] = []
        self.blocks: list[int] = []

    def begin(self, record: RunRecord) -> None:
        self.heads.append(record)

    def append(self, record_id: str, block: Block) -> None:
        self.blocks.append(block.round)

    def finish(self, record: RunRecord) -> None:
        self.heads.append(record)


def door(**truth: Any) -> FakeDoor:
    return FakeDoor(Landscape(**{"step_s": 0.01, **truth}))


class TestEpochs:
    def test_each_is_in_the_journal_before_the_next_is_asked_for(self) -> None:
        journal = Kept()
        record = train_spec(spec_of(), door(), journal)
        assert [len(head.epochs) for head in journal.heads] == [0, 1, 2, 3, 3]
        assert journal.blocks == [1, 2, 3]
        assert (record.stopped, [epoch.number for epoch in record.epochs]) == ("target", [1, 2, 3])

    def test_a_target_ends_the_training_and_its_time_is_told(self) -> None:
        record = train_spec(spec_of(epochs=10, target_accuracy=0.7), door(), NoJournal())
        row = training_of(record)
        assert len(record.epochs) == 2
        assert row.time_to_target_s == pytest.approx(sum(epoch.seconds for epoch in record.epochs))
        assert (row.best_accuracy or 0.0) >= 0.7
        missed = training_of(train_spec(spec_of(epochs=1, target_accuracy=0.7), door(), NoJournal()))
        assert missed.time_to_target_s is None

    def test_time_that_is_over_cuts_it(self) -> None:
        record = train_spec(spec_of(max_seconds=0.2), door(), NoJournal())
        row = training_of(record)
        assert (record.stopped, row.state, len(record.epochs)) == ("ceiling", "cut", 1)
        whole = training_of(train_spec(spec_of(), door(), NoJournal()))
        assert row.epoch_s == pytest.approx(whole.epoch_s, rel=0.01)  # as long as the whole would have taken

    def test_a_failure_keeps_the_epochs_before_it(self) -> None:
        broken = Failure(stage="epoch", kind="crash", message="a worker of the loader died")
        journal = Kept()
        record = train_spec(spec_of(), door(failure=broken, fails_after_epochs=1), journal)
        assert (record.failure, record.stopped, len(record.epochs)) == (broken, "failed", 1)
        assert journal.heads[-1].epochs == record.epochs


def found_workers(**truth: Any) -> Row:
    record = train_spec(spec_of(), door(**truth), NoJournal(), after=After(feeds=True, epochs=False))
    assert not record.epochs
    (row,) = loader_result(record).table("loader").rows
    return row


class TestWorkers:
    @pytest.mark.parametrize(
        ("load_s", "cores", "needed", "ends_it"),
        [(0.035, 16, 4, True), (0.06, 16, 6, True), (0.005, 16, 0, True), (0.5, 8, 8, False)],
    )
    def test_the_fewest_workers_that_end_the_waiting_are_found_or_the_fastest(
        self, load_s: float, cores: int, needed: int, ends_it: bool
    ) -> None:
        """A step takes 10 ms; with w workers a batch comes every load/w, and waiting up to a tenth is not data-bound."""
        row = found_workers(load_s=load_s, cores=cores)
        assert (row["best_workers"], row["ends_it"]) == (needed, ends_it)
        assert row["verdict"] == ("data-bound" if needed else "not data-bound")
        assert row.value("model_alone") == pytest.approx(128 / 0.01, rel=0.01)
        assert row.value("loader") == pytest.approx(128 / load_s, rel=0.01)
        assert (row.value("data_wait") > 0.9) is (not ends_it)

    def test_prefetching_is_measured_both_ways(self) -> None:
        row = found_workers(load_s=0.01)
        assert row.value("without_prefetch") == pytest.approx(row.value("together") / 2, rel=0.02)


def test_waiting_for_data_is_the_bound_of_a_training() -> None:
    slow = training_of(train_spec(spec_of(), door(load_s=0.03), NoJournal()))
    assert slow.bound.label == "data"
    assert slow.data_wait_share == pytest.approx(2 / 3)
    assert training_of(train_spec(spec_of(), door(), NoJournal())).bound.label != "data"
