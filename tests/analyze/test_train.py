"""What a training's record says against its own figures."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from by_hand import make_block, make_prepared
from trained import spec_of

from redline.analyze.measurement import measurements
from redline.analyze.train import training_of
from redline.model.record import Epoch, Fed, RunRecord
from redline.show.course import ended_words
from redline.verbs.train import loader_result, result_of


def notes(**last: Any) -> dict[str, str]:
    sound = {
        "val_loss": 1.0,
        "val_judged": 1000,
        "val_most_frequent": 0.1,
        "val_accuracy": 0.5,
        "val_batches": 8,
        "trainable": 6,
    }
    epochs = [
        Epoch(number=number, seconds=1.0, train_s=1.0, steps=4, samples=64, train_loss=1.0, **each)
        for number, each in enumerate((sound, {**sound, **last}), start=1)
    ]
    record = RunRecord(id="a", spec=spec_of(), created_at=0.0, epochs=tuple(epochs))
    return {each.code: str(each) for each in training_of(record).notes}


def test_a_training_beside_busy_neighbours_is_doubted_in_every_output() -> None:
    epoch = Epoch(number=1, seconds=1.0, train_s=0.5, steps=4, samples=64, train_loss=1.0)
    quiet = make_block(0.01, cpu_s=1.0, waited_s=0.01, others_cpu_s=1.0)
    busy = msgspec.structs.replace(quiet, waited_s=1.0)
    prepared = make_prepared("cpu")
    found = {}
    for block in (quiet, busy):
        record = RunRecord(id="a", spec=spec_of(), created_at=0.0, prepared=prepared, epochs=(epoch,), blocks=(block,))
        found[block.waited_s] = [each.code for each in training_of(record).doubts]
        # The line that ends its progress has the speed of its tables: over the epoch, not of a step alone.
        assert "128 " in ended_words(*measurements([record]))
    assert found == {0.01: [], 1.0: ["shared-cpu"]}
    shown = result_of([record], measurements([record]))
    assert any("other processes" in str(each) for each in shown.table("trainings").rows[0].notes)


def test_a_sound_training_has_none() -> None:
    assert notes() == {}


@pytest.mark.parametrize(
    ("last", "code", "told"),
    [
        (
            {"val_accuracy": 0.11},
            "not-learned",
            "% is no better than always naming the most frequent class",
        ),
        (
            {"val_batches_not_finite": 3, "val_loss": None},
            "not-finite",
            "in epoch 2 the validation loss was not a number, in 3 of 8",
        ),
        ({"unchanged": 6}, "unchanged", "no parameter changed in epoch 2: the optimizer did nothing"),
        ({"unchanged": 6, "gradient_scale": 1e-9}, "unchanged", "or the gradient scaler skipped every step"),
    ],
)
def test_what_makes_it_suspect_is_told(last: dict[str, Any], code: str, told: str) -> None:
    found = notes(**last)
    assert list(found) == [code]
    assert told in found[code]


@pytest.mark.parametrize(
    ("accuracy", "judged", "is_told"), [(0.125, 1000, False), (0.125, 100, True), (0.9, 1000, False)]
)
def test_chance_is_a_matter_of_how_many_were_judged(accuracy: float, judged: int, is_told: bool) -> None:
    assert ("not-learned" in notes(val_accuracy=accuracy, val_judged=judged)) is is_told


def test_a_set_of_one_class_proves_nothing() -> None:
    assert notes(val_accuracy=1.0, val_most_frequent=1.0) == {}


@pytest.mark.parametrize(
    ("loader_per_s", "wait_s", "verdict"),
    [
        (90_000, 0.4, "not data-bound"),  # loading takes a hundredth of the time: the hand-over does
        (2_000, 0.4, "data-bound"),
        (2_000, 0.05, "not data-bound"),
    ],
)
def test_waiting_that_loading_cannot_explain_is_not_for_data(loader_per_s: int, wait_s: float, verdict: str) -> None:
    feeds = (
        Fed(part="model", samples=1600, seconds=1.0),
        Fed(part="loader", samples=loader_per_s, seconds=1.0),
        Fed(part="together", samples=1000, seconds=1.0, wait_s=wait_s),
    )
    record = RunRecord(id="a", spec=spec_of(), created_at=0.0, feeds=feeds)
    found = loader_result(record)
    assert found.table("loader").rows[0]["verdict"] == verdict
    assert ("share the processor" in str(found.headline)) is (verdict == "not data-bound" and wait_s > 0.1)


@pytest.mark.parametrize(
    ("faster", "best", "told", "to_do"),
    [
        (1500, 2, "2 workers end it", "train with --workers 2"),
        (800, 0, "no number of workers up to the number of cores makes the training faster", "make loading cheaper"),
    ],
)
def test_workers_that_end_the_waiting_must_not_slow_the_training(faster: int, best: int, told: str, to_do: str) -> None:
    """On a CPU they may take the processor from the model."""
    feeds = (
        Fed(part="model", samples=1600, seconds=1.0),
        Fed(part="loader", samples=2000, seconds=1.0),
        Fed(part="together", samples=1000, seconds=1.0, wait_s=0.4),
        Fed(part="together", samples=faster, seconds=1.0, wait_s=0.01, workers=2),
    )
    record = RunRecord(id="a", spec=spec_of(), created_at=0.0, feeds=feeds)
    found = loader_result(record)
    (row,) = found.table("loader").rows
    assert (row["best_workers"], row["ends_it"]) == (best, best == 2)
    assert told in str(found.headline)
    assert to_do in found.next
