"""Epochs on a CPU: what is learned, what is recorded, that a seed and a checkpoint mean what they say."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trained import TINY, losses, refused, spec_of, training

from redline.bench.data import batches, feed
from redline.bench.data.source import InMemory
from redline.bench.measure import blocks
from redline.bench.recipe.base import COMPILER, SWITCHES, RecipeCode, RecipeSwitch
from redline.bench.train import epochs as epochs_module
from redline.bench.train.epochs import rate_at
from redline.bench.workload.step import Setup
from redline.model.protocol import FedReply, Feed, Progress

LEARNING, LEARNING_AUGMENTED = 5, 10
"""Epochs after which the tiny network knows the made-up classes; mirror images look like other textures to it."""


def accuracy(augment: str = "none") -> float:
    epochs = LEARNING if augment == "none" else LEARNING_AUGMENTED
    with training(spec_of(epochs=epochs, data={"augment": augment})) as run:
        return run.all()[-1].val_accuracy or 0.0


class TestLearning:
    @pytest.mark.parametrize("augment", ["none", "device"])
    def test_classes_that_can_be_learned_are_learned(self, augment: str) -> None:
        assert accuracy(augment) > 0.6

    def test_shuffled_labels_are_caught(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sound = InMemory.fetch

        def shuffled(self: InMemory, indices: Any) -> Any:
            images, classes = sound(self, indices)
            return images, classes[torch.randperm(len(classes), generator=torch.Generator().manual_seed(1))]

        monkeypatch.setattr(InMemory, "fetch", shuffled)
        assert accuracy() < 0.3

    def test_an_optimizer_that_is_not_stepped_is_caught(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, closure=None: None)
        assert accuracy() < 0.3
        with training(spec_of(data={"train_samples": 32})) as run:
            epoch = run.epoch(1).epoch
        assert epoch.unchanged == epoch.trainable == 6
        assert epoch.val_most_frequent == pytest.approx(0.1, abs=0.01)

    def test_augmentation_of_labels_is_caught(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sound = feed.ImageArrival.__call__

        def spoilt(self: feed.ImageArrival, batch: Any) -> Any:
            images, classes, draws = batch
            if draws.numel():
                classes = torch.where(draws[:, 2] == 1, classes.flip(0), classes)
            return sound(self, (images, classes, draws))

        monkeypatch.setattr(feed.ImageArrival, "__call__", spoilt)
        assert accuracy("device") < 0.3

    def test_random_classes_are_said_to_be_so(self) -> None:
        with training(spec_of(data={"name": "synthetic"})) as run:
            assert run.prepared.data.random_labels
            assert (run.epoch(1).epoch.val_accuracy or 0.0) < 0.2


class TestRecorded:
    def test_an_epoch_tells_its_parts(self) -> None:
        with training(spec_of(data={"train_samples": 100})) as run:
            reply = run.epoch(1)
            info = run.prepared.data
        epoch, block = reply.epoch, reply.block
        assert (epoch.number, epoch.steps, epoch.samples) == (1, 7, 100)
        assert (info.steps_per_epoch, info.last_batch, info.last_batch_fate) == (7, 4, "run")
        assert set(epoch.phases_s) == {"data", "forward", "backward", "optimizer"}
        assert epoch.seconds == pytest.approx(epoch.train_s + epoch.validation_s)
        assert sum(epoch.phases_s.values()) <= epoch.train_s
        assert 0 <= (epoch.data_wait_share or 0.0) < 1
        assert epoch.peak_bytes
        assert len(block.samples) == 6  # the smaller batch is no sample of a step
        assert {name: len(each) for name, each in block.phases.items()} == {
            **dict.fromkeys(epoch.phases_s, 1),
            "data": 6,
        }
        assert block.round == 1
        # Whether others had the processors meanwhile can be told afterwards.
        assert block.cpu_s is not None
        assert block.others_cpu_s is not None

    def test_phases_are_timed_in_one_step_of_ten_and_divide_the_time_of_all(self) -> None:
        with training(spec_of(data={"train_samples": 400})) as run:
            reply = run.epoch(1)
        epoch, block = reply.epoch, reply.block
        assert {name: len(each) for name, each in block.phases.items()} == {
            "data": 25, "forward": 3, "backward": 3, "optimizer": 3,
        }  # fmt: skip
        assert sum(epoch.phases_s.values()) == pytest.approx(sum(block.samples))
        assert epoch.phases_s["data"] == pytest.approx(sum(block.phases["data"]))

    @pytest.mark.parametrize(
        ("samples", "last", "fate", "steps"), [(97, "run", "dropped", 6), (100, "drop", "dropped", 6)]
    )
    def test_a_last_batch_is_dropped_where_asked_or_where_it_is_one_sample(
        self, samples: int, last: str, fate: str, steps: int
    ) -> None:
        with training(spec_of(data={"train_samples": samples}, last_batch=last)) as run:
            assert run.prepared.data.last_batch_fate == fate
            assert run.epoch(1).epoch.steps == steps

    def test_looking_at_the_device_is_no_part_of_the_training(self, monkeypatch: pytest.MonkeyPatch) -> None:
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
        with training(spec_of(data={"train_samples": 32})) as run:
            epoch = run.epoch(1).epoch
        assert looked == [2000.0]
        assert epoch.train_s <= epoch.seconds < 1000.0

    def test_the_time_may_be_cut(self) -> None:
        with training(spec_of(max_seconds=1e-6)) as run:
            epoch = run.epoch(1).epoch
        assert epoch.is_cut
        assert epoch.samples < 512

    def test_progress_tells_loss_and_speed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(epochs_module, "TELL_EVERY_S", 0.0)
        told: list[Progress] = []
        with training(spec_of(data={"train_samples": 64}), told=told) as run:
            run.epoch(1)
        seen = [progress.training for progress in told if progress.training is not None]
        assert {(each.step, each.steps) for each in seen} >= {(1, 4), (4, 4)}
        assert any(each.loss and each.samples_per_s for each in seen)

    def test_a_loss_that_is_no_number_ends_the_training_in_words(self) -> None:
        with training(spec_of(f"{TINY}:exploding")) as run:
            failure = run.failure()
        assert failure.kind == "numerics"
        assert "the loss was no longer a number in epoch 1" in failure.message
        assert "lower the learning rate" in failure.message

    def test_a_validation_loss_that_is_no_number_is_counted(self) -> None:
        with training(spec_of(data={"name": f"{TINY}:spoilt_validation"})) as run:
            epoch = run.epoch(1).epoch
        assert (epoch.val_loss, epoch.val_batches_not_finite, epoch.val_batches) == (None, 1, 2)

    def test_what_training_does_not_change_is_told(self) -> None:
        with training(spec_of(f"{TINY}:stays", data={"name": f"{TINY}:loaders"})) as run:
            told = {each.code: str(each) for each in run.prepared.workload.notes}
            epoch = run.epoch(1).epoch
        assert told["frozen"].startswith("1 of 7.717 k parameters are frozen")
        assert told["stays-in-eval"].startswith("drop stays in eval mode")
        assert (epoch.unchanged, epoch.trainable) == (2, 6)  # the layer that is not used

    @pytest.mark.parametrize(
        ("model", "code", "told"),
        [
            ("always_dropping", "random-in-eval", "answers the same batch differently each time"),
            ("mixing", "mixes-samples", "depends on the others in its batch (0 stays in training mode)"),
            ("without_statistics", "mixes-samples", "as BatchNorm without running statistics does"),
            ("dropping", None, ""),
            ("whitening", None, ""),
        ],
    )
    def test_answers_in_eval_mode_that_cannot_be_judged_are_told(self, model: str, code: str | None, told: str) -> None:
        with training(spec_of(f"{TINY}:{model}", data={"train_samples": 32})) as run:
            notes = {each.code: str(each) for each in run.prepared.workload.notes}
        assert set(notes) & {"random-in-eval", "mixes-samples"} == ({code} if code else set())
        assert told in notes.get(code or "", "")


class TestRepeatable:
    def test_the_same_seed_gives_the_same_losses_however_batches_come(self) -> None:
        ways: list[dict[str, Any]] = [
            {},
            {"prefetch": False},
            {"workers": 2},
            {"augment": "host"},
        ]
        seen = []
        for way in ways:
            spec = spec_of(f"{TINY}:dropping", data={"train_samples": 96, "augment": "device", **way}, epochs=2)
            with training(spec) as run:
                seen.append(losses(run.all()))
        on_device = spec_of(
            f"{TINY}:dropping", data={"train_samples": 96, "augment": "device", "on_device": True}, epochs=2
        )
        with training(on_device) as run:
            seen.append(losses(run.all()))
        assert seen == [seen[0]] * 5
        with training(spec_of(f"{TINY}:dropping", data={"train_samples": 96, "augment": "device"}, seed=1)) as run:
            assert losses(run.all()) != seen[0][:1]

    def test_a_checkpoint_goes_on_as_if_nothing_had_happened(self, tmp_path: Path) -> None:
        spec = spec_of(f"{TINY}:dropping", data={"train_samples": 96}, epochs=4)
        with training(spec) as run:
            whole = run.all()
        with training(spec, tmp_path / "kept.pt") as run:
            begun = [run.epoch(1).epoch, run.epoch(2).epoch]
        with training(spec, tmp_path / "kept.pt") as run:
            assert list(run.restored) == begun
            assert losses([*begun, *run.all()]) == losses(whole)

    def test_a_checkpoint_that_cannot_be_written_ends_no_training(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with training(spec_of(data={"train_samples": 32}), tmp_path / "file" / "one.pt") as run:
            assert "FileExistsError" in run.epoch(1).lost_checkpoint

    def test_a_full_disk_is_named_as_such(self, tmp_path: Path) -> None:
        (tmp_path / "one.partial").symlink_to("/dev/full")
        with training(spec_of(data={"train_samples": 32}), tmp_path / "one.pt") as run:
            assert "No space left on device" in run.epoch(1).lost_checkpoint
        assert not any(tmp_path.iterdir()), "half a state is removed"

    def test_the_time_before_a_resume_counts(self, tmp_path: Path) -> None:
        spec = spec_of(data={"train_samples": 64}, epochs=3, max_seconds=1000.0)
        with training(spec, tmp_path / "kept.pt") as run:
            assert not run.epoch(1).epoch.is_cut
        state = torch.load(tmp_path / "kept.pt", weights_only=True)
        state["epochs"][0]["train_s"] = 2000.0
        torch.save(state, tmp_path / "kept.pt")
        with training(spec, tmp_path / "kept.pt") as run:
            assert run.epoch(2).epoch.is_cut

    def test_a_checkpoint_of_another_training_or_a_damaged_one_is_refused(self, tmp_path: Path) -> None:
        with training(spec_of(data={"train_samples": 32}), tmp_path / "kept.pt") as run:
            run.epoch(1)
        other = refused(spec_of(data={"train_samples": 48}), tmp_path / "kept.pt")
        assert "is of another training" in other.message
        (tmp_path / "kept.pt").write_bytes(b"nothing of the kind")
        assert "cannot be read" in refused(spec_of(data={"train_samples": 32}), tmp_path / "kept.pt").message


class TestRecipes:
    @pytest.mark.parametrize("recipe", ["amp-bf16", "channels-last", "bf16"])
    def test_any_number_format_trains_and_validates(self, recipe: str) -> None:
        with training(spec_of(recipe=recipe, data={"train_samples": 64, "val_samples": 16})) as run:
            epoch = run.epoch(1).epoch
        assert epoch.train_loss == pytest.approx(2.3, abs=0.2)
        assert epoch.val_accuracy is not None

    def test_a_recipe_made_for_one_size_runs_the_smaller_batch_eagerly(self, monkeypatch: pytest.MonkeyPatch) -> None:
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


class TestFeeds:
    def test_loader_and_model_are_measured_apart_and_together(self) -> None:
        with training(spec_of(data={"train_samples": 64})) as run:
            for part in ("loader", "model", "together"):
                reply = run.session.handle(Feed(part=part, seconds=0.05))
                assert isinstance(reply, FedReply), reply
                assert reply.fed.part == part
                assert reply.fed.per_s > 0

    def test_a_loader_of_dicts_is_timed_alone(self) -> None:
        with training(spec_of(f"{TINY}:bare", data={"name": f"{TINY}:as_dicts"})) as run:
            reply = run.session.handle(Feed(part="loader", seconds=0.05))
            assert isinstance(reply, FedReply), reply
            assert reply.fed.samples > 0

    def test_processes_of_an_own_loader_are_counted(self) -> None:
        with training(spec_of(f"{TINY}:bare", data={"name": f"{TINY}:streamed"})) as run:
            assert run.prepared.data.workers == 2

    def test_a_slow_loader_shows_as_waiting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sound = batches.Reader.__getitem__

        def slow(self: batches.Reader, key: Any) -> Any:
            time.sleep(0.1)  # far longer than a step, on a busy machine too
            return sound(self, key)

        monkeypatch.setattr(batches.Reader, "__getitem__", slow)
        with training(spec_of(data={"train_samples": 64})) as run:
            reply = run.session.handle(Feed(part="together", seconds=0.3))
            assert isinstance(reply, FedReply)
            assert reply.fed.wait_share > 0.5
            assert (run.epoch(1).epoch.data_wait_share or 0.0) > 0.5


class TestMistakes:
    @pytest.mark.parametrize(
        ("changes", "complaint"),
        [
            ({"workload": {"batch": 1000}}, "batch must be 512 or less"),
            ({"data": {"name": "nosuch"}}, "unknown data set 'nosuch'"),
            ({"data": {"name": "synthetic", "folder": "/tmp"}}, "folder /tmp cannot be honoured"),
            ({"model": "transformer", "workload": {"image_size": 20}}, "image_size must be a multiple of 8"),
        ],
    )
    def test_they_are_told_in_one_line(self, changes: dict[str, Any], complaint: str) -> None:
        failure = refused(spec_of(**changes))
        assert failure.kind == "user"
        assert complaint in failure.message

    def test_a_model_with_too_few_answers_is_refused_before_it_can_hurt(self) -> None:
        failure = refused(spec_of(data={"name": f"{TINY}:loaders"}, model="simple_cnn", workload={"classes": 5}))
        assert "answers with 5 classes" in failure.message or "out of bounds" in failure.message


@pytest.mark.parametrize("schedule", ["constant", "cosine", "one-cycle"])
def test_a_schedule_rises_to_the_highest_rate_and_falls(schedule: Any) -> None:
    rates = [rate_at(schedule, 0.4, step, 100) for step in range(100)]
    assert max(rates) == pytest.approx(0.4)
    if schedule != "constant":
        assert rates[0] < 0.1
        assert 0 < rates[-1] < 0.01
        assert rates == sorted(rates[: rates.index(max(rates))]) + sorted(
            rates[rates.index(max(rates)) :], reverse=True
        )


def test_batches_of_an_epoch_hold_every_sample_once() -> None:
    order = batches.Order(100, 16, seed=3, shuffle=True, drop_last=False)
    rows = [row for each, _ in order for row in each]
    assert sorted(rows) == list(range(100))
    order.epoch = 2
    assert [row for each, _ in order for row in each] != rows


def test_augmentation_shifts_and_mirrors_each_image_by_its_own_draw() -> None:
    images = torch.arange(2 * 3 * 16 * 16, dtype=torch.float32).view(2, 3, 16, 16)
    unchanged, mirrored = torch.tensor([2, 2, 0]), torch.tensor([2, 2, 1])
    made = batches.augmented(images, torch.stack((unchanged, mirrored)))
    assert torch.equal(made[0], images[0])
    assert torch.equal(made[1], images[1].flip(-1))
    shifted = batches.augmented(images[:1], torch.tensor([[0, 2, 0]]))[0]
    assert torch.equal(shifted[:, 2:], images[0, :, :-2])
    assert not shifted[:, :2].any()
