"""Epochs on a CPU: what is learned, what is recorded, that a seed and a checkpoint mean what they say."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trained import TINY, losses, refused, spec_of, training

from redline.bench.data import batches
from redline.bench.data.source import InMemory
from redline.bench.measure import blocks
from redline.bench.recipe.base import COMPILER, SWITCHES, RecipeCode, RecipeSwitch
from redline.bench.train import epochs as epochs_module
from redline.bench.train.epochs import rate_at
from redline.bench.workload.step import Setup
from redline.model.protocol import FedReply, Feed, Progress

FEW = {"train_samples": 32}
DROPPING = f"{TINY}:dropping"


def accuracy(augment: str = "none", data: str = "synthetic-learnable") -> float:
    """Of the tiny network, after as many epochs as it needs; mirror images look like other textures to it."""
    with training(spec_of(epochs=5 if augment == "none" else 10, data={"augment": augment, "name": data})) as run:
        return run.all()[-1].val_accuracy or 0.0


@pytest.mark.parametrize("augment", ["none", "device"])
def test_classes_that_can_be_learned_are_learned(augment: str) -> None:
    assert accuracy(augment) > 0.6


def test_wrong_labels_and_an_idle_optimizer_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert accuracy(data="synthetic") < 0.2
    sound = InMemory.fetch

    def shuffled(self: InMemory, indices: Any) -> Any:
        images, classes = sound(self, indices)
        return images, classes[torch.randperm(len(classes), generator=torch.Generator().manual_seed(1))]

    with monkeypatch.context() as patched:
        patched.setattr(InMemory, "fetch", shuffled)
        assert accuracy() < 0.3
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, closure=None: None)
    assert accuracy() < 0.3
    with training(spec_of(data=FEW)) as run:
        epoch = run.epoch(1).epoch
    assert epoch.unchanged == epoch.trainable == 6
    assert epoch.val_most_frequent == pytest.approx(0.1, abs=0.01)


def test_an_epoch_tells_its_parts_and_the_phases_of_one_step_in_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs_module, "TELL_EVERY_S", 0.0)
    told: list[Progress] = []
    with training(spec_of(data={"train_samples": 388}), told=told) as run:
        reply, info = run.epoch(1), run.prepared.data
    epoch, block = reply.epoch, reply.block
    assert (epoch.number, epoch.steps, epoch.samples, block.round) == (1, 25, 388, 1)
    assert (info.steps_per_epoch, info.last_batch, info.last_batch_fate) == (25, 4, "run")
    assert epoch.seconds == pytest.approx(epoch.train_s + epoch.validation_s)
    # The smaller batch is no sample of a step.
    held = {name: len(each) for name, each in block.phases.items()}
    assert held == {"data": 24, "forward": 3, "backward": 3, "optimizer": 3}
    assert len(block.samples) == 24
    assert epoch.phases_s.keys() == held.keys()
    assert sum(block.samples) < sum(epoch.phases_s.values()) <= epoch.train_s
    assert 0 <= (epoch.data_wait_share or 0.0) < 1
    # Whether others had the processors meanwhile can be told afterwards.
    assert None not in (epoch.peak_bytes, block.cpu_s, block.others_cpu_s)
    seen = [progress.training for progress in told if progress.training is not None]
    assert {(each.step, each.steps) for each in seen} >= {(1, 25), (25, 25)}
    assert any(each.loss and each.samples_per_s for each in seen)


@pytest.mark.parametrize(("samples", "last"), [(97, "run"), (100, "drop")])
def test_a_last_batch_is_dropped_where_asked_or_where_it_is_one_sample(samples: int, last: str) -> None:
    with training(spec_of(data={"train_samples": samples}, last_batch=last)) as run:
        assert run.prepared.data.last_batch_fate == "dropped"
        assert run.epoch(1).epoch.steps == 6


def test_looking_at_the_device_is_no_part_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = [0.0]

    class Slow(blocks.Sampling):
        def __enter__(self) -> blocks.Sampling:
            looked[0] += 1000.0
            return super().__enter__()

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            looked[0] += 1000.0

    monkeypatch.setattr(blocks, "Sampling", Slow)
    clock = SimpleNamespace(time=time.time, perf_counter=lambda: time.perf_counter() + looked[0])
    monkeypatch.setattr(epochs_module, "time", clock)
    with training(spec_of(data=FEW)) as run:
        epoch = run.epoch(1).epoch
    assert looked == [2000.0]
    assert epoch.train_s <= epoch.seconds < 1000.0


def test_losses_that_are_no_numbers_are_told() -> None:
    with training(spec_of(f"{TINY}:exploding")) as run:
        failure = run.failure()
    assert failure.kind == "numerics"
    assert "the loss was no longer a number in epoch 1" in failure.message
    assert "lower the learning rate" in failure.message
    with training(spec_of(data={"name": f"{TINY}:spoilt_validation"})) as run:
        epoch = run.epoch(1).epoch
    assert (epoch.val_loss, epoch.val_batches_not_finite, epoch.val_batches) == (None, 1, 2)


def test_parameters_that_no_gradient_reaches_are_counted() -> None:
    with training(spec_of(f"{TINY}:stays", data=FEW)) as run:
        epoch = run.epoch(1).epoch
    assert (epoch.unchanged, epoch.trainable) == (2, 6)


def test_the_same_seed_gives_the_same_losses_however_batches_come() -> None:
    def of(seed: int = 0, **way: Any) -> Any:
        data = {"train_samples": 96, "augment": "device", **way}
        with training(spec_of(DROPPING, data=data, epochs=2, seed=seed)) as run:
            return losses(run.all())

    first = of()
    for way in ({"prefetch": False}, {"workers": 2}, {"augment": "host"}, {"on_device": True}):
        assert of(**way) == first
    assert of(seed=1) != first


def test_the_time_may_be_cut() -> None:
    with training(spec_of(max_seconds=1e-6)) as run:
        epoch = run.epoch(1).epoch
    assert epoch.is_cut
    assert epoch.samples < 512


@pytest.mark.parametrize("recipe", ["amp-bf16", "channels-last", "bf16"])
def test_any_number_format_trains_and_validates(recipe: str) -> None:
    with training(spec_of(recipe=recipe, data={"train_samples": 64, "val_samples": 16})) as run:
        epoch = run.epoch(1).epoch
    assert epoch.train_loss == pytest.approx(2.3, abs=0.2)
    assert epoch.val_accuracy is not None


def test_a_recipe_made_for_one_size_runs_the_smaller_batch_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Specialised(RecipeSwitch):
        name, summary, stage = "specialised", "takes whole batches only", COMPILER

        def apply(self, setup: Setup) -> None:
            plain = setup.model

            def compiled(images: torch.Tensor) -> Any:
                sizes.append(len(images))
                return plain(images)

            setup.model = compiled

        def write(self, code: RecipeCode) -> None: ...

    "specialised" in SWITCHES  # noqa: B015  (fills the table first)
    monkeypatch.setitem(SWITCHES._entries, "specialised", Specialised)
    with training(spec_of(recipe="specialised", data={"train_samples": 72})) as run:
        assert run.prepared.data.last_batch_fate == "run eagerly"
        compiled = run.epoch(1).epoch
    assert set(sizes) == {16}
    with training(spec_of(data={"train_samples": 72})) as run:
        assert losses([compiled]) == losses([run.epoch(1).epoch])


def test_loader_and_model_are_measured_apart_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = batches.Reader.__getitem__

    def slow(self: batches.Reader, key: Any) -> Any:
        time.sleep(0.1)  # far longer than a step, on a busy machine too
        return sound(self, key)

    def fed(run: Any, part: Any) -> Any:
        reply = run.session.handle(Feed(part=part, seconds=0.05))
        assert isinstance(reply, FedReply), reply
        assert reply.fed.part == part
        assert reply.fed.per_s > 0
        return reply.fed

    monkeypatch.setattr(batches.Reader, "__getitem__", slow)
    with training(spec_of(data={"train_samples": 64})) as run:
        for part in ("loader", "model"):
            fed(run, part)
        assert fed(run, "together").wait_share > 0.5
        assert (run.epoch(1).epoch.data_wait_share or 0.0) > 0.5
    with training(spec_of(f"{TINY}:bare", data={"name": f"{TINY}:as_dicts"})) as run:
        fed(run, "loader")
    with training(spec_of(data={"train_samples": 64, "on_device": True})) as run:
        fed(run, "loader")
    with training(spec_of(f"{TINY}:bare", data={"name": f"{TINY}:streamed"})) as run:
        assert run.prepared.data.workers == 2


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"workload": {"batch": 1000}}, "batch must be 512 or less"),
        ({"data": {"name": "nosuch"}}, "unknown data set 'nosuch'"),
        ({"data": {"name": "synthetic", "folder": "/tmp"}}, "folder /tmp cannot be honoured"),
        ({"model": "transformer", "workload": {"image_size": 20}}, "image_size must be a multiple of 8"),
        (
            {"data": {"name": f"{TINY}:loaders"}, "model": "simple_cnn", "workload": {"classes": 5}},
            "the model answers with 5 classes",
        ),
    ],
)
def test_mistakes_are_told_in_one_line_before_they_can_hurt(changes: dict[str, Any], complaint: str) -> None:
    failure = refused(spec_of(**changes))
    assert failure.kind == "user"
    assert complaint in failure.message


@pytest.mark.parametrize("schedule", ["constant", "cosine", "one-cycle"])
def test_a_schedule_rises_to_the_highest_rate_and_falls(schedule: Any) -> None:
    rates = [rate_at(schedule, 0.4, step, 100) for step in range(100)]
    top = rates.index(max(rates))
    assert rates[top] == pytest.approx(0.4)
    if schedule != "constant":
        assert rates[0] < 0.1
        assert 0 < rates[-1] < 0.01
        assert rates == sorted(rates[:top]) + sorted(rates[top:], reverse=True)


def test_batches_of_an_epoch_hold_every_sample_once() -> None:
    order = batches.Order(100, 16, seed=3, shuffle=True, drop_last=False)
    rows = [row for each, _ in order for row in each]
    assert sorted(rows) == list(range(100))
    order.epoch = 2
    assert [row for each, _ in order for row in each] != rows


def test_augmentation_shifts_and_mirrors_each_image_by_its_own_draw() -> None:
    images = torch.arange(2 * 3 * 16 * 16, dtype=torch.float32).view(2, 3, 16, 16)
    made = batches.augmented(images, torch.tensor([[2, 2, 0], [2, 2, 1]]))
    assert torch.equal(made[0], images[0])
    assert torch.equal(made[1], images[1].flip(-1))
    shifted = batches.augmented(images[:1], torch.tensor([[0, 2, 0]]))[0]
    assert torch.equal(shifted[:, 2:], images[0, :, :-2])
    assert not shifted[:, :2].any()
