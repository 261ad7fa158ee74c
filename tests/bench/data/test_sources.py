"""Data from files and from the user: read as they are, and refused in one line where they are broken."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10
from trained import TINY, refused, spec_of, training

from redline.bench.data.feed import part_batch
from redline.bench.data.source import ImageData, LoaderData, check_data, open_data
from redline.model.errors import BenchError, SpecError, UsageError
from redline.model.spec import DataSpec, WorkloadSpec

PER_FILE = 20
ANY_MODEL = WorkloadSpec(model="simple_cnn", task="train")


class Harmful:
    """What a pickle from elsewhere may hold: opening it writes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def classes_in(folder: Path, **pictures: int) -> Path:
    """The folder with so many pictures per class."""
    for name, count in pictures.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (8, 8)).save(folder / name / f"{number}.png")
    return folder


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    """Files in the published format: five batches and a test batch of pickled dicts with bytes for keys."""
    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    random = np.random.default_rng(0)
    for number, (name, _) in enumerate((*CIFAR10.train_list, *CIFAR10.test_list)):
        content = {
            "batch_label": f"batch {number + 1}",
            "labels": [int(each) for each in random.integers(0, 10, PER_FILE)],
            "data": random.integers(0, 256, (PER_FILE, 3072), dtype=np.uint8),
            "filenames": [f"{number}_{each}.png" for each in range(PER_FILE)],
        }
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return tmp_path


def opened(name: str, folder: Path | None = None, **more: Any) -> Any:
    return open_data(DataSpec(name=name, folder=None if folder is None else str(folder), **more), ANY_MODEL)


class TestCifar10:
    def test_it_is_read_from_its_standard_folder(self, cifar: Path) -> None:
        data = opened("cifar10", cifar)
        assert isinstance(data, ImageData)
        assert (len(data.train), len(data.validation), data.classes, data.size) == (100, 20, 10, 32)
        stored = pickle.loads((cifar / CIFAR10.base_folder / "data_batch_2").read_bytes(), encoding="latin1")
        images, classes = data.train.fetch([PER_FILE + 3])
        assert torch.equal(images[0], torch.from_numpy(stored["data"][3].reshape(3, 32, 32)))
        assert classes.tolist() == [stored["labels"][3]]
        assert [note.code for note in data.notes] == ["other-data"]
        assert len(opened("cifar10", cifar / CIFAR10.base_folder).train) == 100  # the folder itself will do

    def test_a_part_of_it_mixes_the_files(self, cifar: Path) -> None:
        data = opened("cifar10", cifar, train_samples=40, val_samples=5)
        assert (len(data.train), len(data.validation)) == (40, 5)
        with pytest.raises(SpecError, match="train_samples must be 100 or less"):
            opened("cifar10", cifar, train_samples=101)

    def test_a_model_trains_on_it(self, cifar: Path) -> None:
        spec = spec_of(
            data={"name": "cifar10", "folder": str(cifar), "train_samples": 32, "val_samples": 16},
            workload={"image_size": None},
        )
        with training(spec) as run:
            assert run.prepared.data.shape == (3, 32, 32)
            assert run.epoch(1).epoch.samples == 32

    @pytest.mark.parametrize(
        ("spoil", "complaint"),
        [
            (lambda path: path.write_bytes(b"no pickle at all"), "data_batch_3 is damaged or cut short"),
            (lambda path: path.write_bytes(path.read_bytes()[:5000]), "data_batch_3 is damaged or cut short"),
            (lambda path: path.write_bytes(b""), "data_batch_3 is damaged or cut short"),
            (lambda path: path.write_bytes(pickle.dumps({"labels": []})), "data_batch_3 is not a batch of CIFAR-10"),
            (
                lambda path: path.write_bytes(pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 11]})),
                "data_batch_3 is not a batch of CIFAR-10",
            ),
            (lambda path: path.unlink(), "has no data_batch_3: CIFAR-10 is not whole there"),
        ],
        ids=["corrupt", "truncated", "empty", "no data", "label 11", "missing"],
    )
    def test_files_that_are_broken_are_named(self, cifar: Path, spoil: Any, complaint: str) -> None:
        spoil(cifar / CIFAR10.base_folder / "data_batch_3")
        with pytest.raises((BenchError, UsageError), match=complaint):
            opened("cifar10", cifar)

    def test_a_pickle_that_would_run_something_is_refused(self, cifar: Path, tmp_path: Path) -> None:
        (cifar / CIFAR10.base_folder / "test_batch").write_bytes(pickle.dumps(Harmful(tmp_path / "harmed")))
        with pytest.raises(BenchError, match="which no batch of CIFAR-10 does"):
            opened("cifar10", cifar)
        assert not (tmp_path / "harmed").exists()

    def test_a_folder_one_level_too_high_is_told_where_it_lies(self, cifar: Path) -> None:
        with pytest.raises(SpecError, match=f"it lies in {cifar}"):
            opened("cifar10", cifar.parent)

    def test_without_its_folder_it_says_how_to_get_it(self, tmp_path: Path) -> None:
        for folder in (None, tmp_path):
            with pytest.raises(SpecError, match=r"--download fetches it there .* or train on synthetic-learnable"):
                check_data(DataSpec(name="cifar10", folder=None if folder is None else str(folder)), ANY_MODEL)

    def test_a_download_without_a_network_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_network(*_: Any, **__: Any) -> None:
            raise OSError("no route to host")

        monkeypatch.setattr(CIFAR10, "download", no_network)
        with pytest.raises(BenchError, match=r"cannot download CIFAR-10 to .*no route to host"):
            opened("cifar10", tmp_path / "new", download=True)


class TestImageFolder:
    @pytest.fixture
    def pictures(self, tmp_path: Path) -> Path:
        for part, count in (("train", 4), ("val", 2)):
            for number, name in enumerate(("cats", "dogs")):
                folder = tmp_path / "sets" / part / name
                folder.mkdir(parents=True)
                for each in range(count):
                    Image.new("RGB", (20 + each, 30), (100 * number, 50, 10 * each)).save(folder / f"{each}.png")
        return tmp_path / "sets"

    def test_pictures_are_scaled_and_cut(self, pictures: Path) -> None:
        spec = DataSpec(name="imagefolder", folder=str(pictures))
        data = open_data(spec, WorkloadSpec(model="simple_cnn", task="train", image_size=16))
        assert isinstance(data, ImageData)
        assert (len(data.train), len(data.validation), data.classes, data.size) == (8, 4, 2, 16)
        images, classes = data.train.fetch([0, 7])
        assert images.shape == (2, 3, 16, 16)
        assert images.dtype == torch.uint8
        assert classes.tolist() == [0, 1]
        assert images[1, 0, 0, 0] == 100

    @pytest.mark.parametrize(("brightness", "seen"), [(0, 0), (255, 0), (256, 1), (65535, 255)])
    def test_sixteen_bits_become_eight(self, tmp_path: Path, brightness: int, seen: int) -> None:
        for name in ("cats", "dogs"):
            (tmp_path / name).mkdir()
            Image.fromarray(np.full((20, 20), brightness, dtype=np.uint16)).save(tmp_path / name / "0.png")
        images, _ = opened("imagefolder", tmp_path).train.fetch([0])
        assert images.unique().tolist() == [seen]

    def test_without_parts_a_tenth_is_held_out(self, pictures: Path) -> None:
        data = opened("imagefolder", pictures / "train")
        assert (len(data.train), len(data.validation)) == (7, 1)

    @pytest.mark.parametrize("workers", [0, 1])
    def test_a_damaged_picture_is_a_failed_row_that_names_it(self, pictures: Path, workers: int) -> None:
        (pictures / "train" / "dogs" / "2.png").write_bytes(b"no picture")
        data = {"name": "imagefolder", "folder": str(pictures), "train_samples": None, "val_samples": None}
        with training(spec_of(data={**data, "workers": workers}, workload={"batch": 2})) as run:
            failure = run.failure()
        assert failure.kind == "user"
        assert "cannot read the image" in failure.message
        assert "2.png" in failure.message

    @pytest.mark.parametrize(
        ("prepare", "complaint"),
        [
            (lambda folder: folder / "nosuch", "no such folder"),
            (lambda folder: (folder / "empty").mkdir() or folder / "empty", "must hold one folder per class"),
            (lambda folder: (folder / "half" / "train").mkdir(parents=True) or folder / "half", "train but no val"),
            (lambda folder: classes_in(folder, cats=2, dogs=0), "dogs is a class without images"),
            (lambda folder: classes_in(folder, cats=3), "has but one class, cats"),
            (
                lambda folder: classes_in(folder / "sets", cats=2, dogs=2) and folder,
                "name .*sets if its folders are the classes",
            ),
            (
                lambda folder: (
                    [classes_in(folder / part, cats=2, dogs=2) for part in ("training", "testing")] and folder
                ),
                "holds the same folders .cats, dogs., which look like the classes",
            ),
        ],
    )
    def test_folders_that_are_none_are_told(self, tmp_path: Path, prepare: Any, complaint: str) -> None:
        with pytest.raises(SpecError, match=complaint):
            opened("imagefolder", prepare(tmp_path))


class TestTheUsersOwn:
    def test_their_loaders_feed_the_training(self) -> None:
        spec = spec_of(data={"name": f"{TINY}:loaders"}, epochs=2)
        seen = []
        for _ in range(2):
            with training(spec) as run:
                assert run.prepared.workload.items_per_step == 16
                seen.append([(epoch.samples, epoch.train_loss) for epoch in run.all()])
        assert seen[0] == seen[1]  # shuffled by the global state, which every epoch begins anew
        assert seen[0][0][0] == 96

    def test_a_worker_that_dies_hangs_or_raises_is_a_failed_row_with_its_message(self) -> None:
        told = {}
        for how in ("dying", "hanging", "raising"):
            patience_s = 2.0 if how == "hanging" else 120.0  # a loader's workers take their time to start
            spec = spec_of(data={"name": f"{TINY}:{how}", "loader_timeout_s": patience_s})
            with training(spec) as run:
                told[how] = run.failure()
        assert {how: failure.kind for how, failure in told.items()} == {
            "dying": "crash",
            "hanging": "timeout",
            "raising": "user",
        }
        assert "a worker of the loader died" in told["dying"].message
        assert "a worker of the loader hangs" in told["hanging"].message
        assert "ValueError: sample 32 is spoilt" in told["raising"].message

    @pytest.mark.parametrize(
        ("name", "more", "complaint"),
        [
            ("nosuch", {}, "has no nosuch"),
            ("loaders", {"workers": 2}, "workers 2 cannot be honoured for data .*: your loaders decide it"),
            ("one_loader", {}, "returned DataLoader; expected"),
            ("used_up", {}, "cannot be gone through twice"),
            ("SIZE", {}, "is int, not a function"),
        ],
    )
    def test_mistakes_are_told(self, name: str, more: dict[str, Any], complaint: str) -> None:
        with pytest.raises((UsageError, BenchError), match=complaint):
            opened(f"{TINY}:{name}", **more)

    def test_classes_that_nobody_names_must_be_given(self) -> None:
        asked = {"data": {"name": f"{TINY}:loaders"}, "model": "simple_cnn"}
        assert "give --classes" in refused(spec_of(**asked)).message
        with training(spec_of(**asked, workload={"classes": 10, "image_size": None})) as run:
            assert run.prepared.data.shape == (3, 16, 16)

    @pytest.mark.parametrize("data", ["synthetic-learnable", f"{TINY}:loaders", f"{TINY}:as_dicts"])
    def test_a_module_without_inputs_takes_those_of_the_data(self, data: str) -> None:
        with training(spec_of(f"{TINY}:bare", data={"name": data})) as run:
            assert run.epoch(1).epoch.val_accuracy is not None

    def test_a_generator_of_their_own_begins_each_epoch_alike_after_a_resume(self, tmp_path: Path) -> None:
        spec = spec_of(f"{TINY}:bare", data={"name": f"{TINY}:own_generator"}, epochs=2)
        with training(spec) as run:
            whole = [epoch.train_loss for epoch in run.all()]
        with training(spec, tmp_path / "one.pt") as run:
            first = run.epoch(1).epoch.train_loss
        with training(spec, tmp_path / "one.pt") as run:
            assert [first, *(epoch.train_loss for epoch in run.all())] == whole

    def test_tokens_train_a_model_that_reads_them(self, tmp_path: Path) -> None:
        file = tmp_path / "tokens.py"
        file.write_text(
            "import torch\n\ndef loaders():\n    tokens = torch.arange(36).view(4, 9)\n"
            "    return [(tokens[:, :-1], tokens[:, 1:])], [(tokens[:, :-1], tokens[:, 1:])]\n"
        )
        workload = {"image_size": None, "batch": None}
        with training(spec_of("transformer", data={"name": f"{file}:loaders"}, workload=workload)) as run:
            assert run.epoch(1).epoch.val_accuracy is not None
            assert run.prepared.workload.items_per_step == 4

    @pytest.mark.parametrize("model", ["reads", "reads_probabilities"])
    def test_a_model_that_wants_its_targets_gets_them_and_is_trained_on_its_own_loss(self, model: str) -> None:
        with training(
            spec_of(f"{TINY}:{model}", data={"name": f"{TINY}:tokens"}, workload={"image_size": None})
        ) as run:
            assert run.prepared.workload.loss == "output 1"
            epoch = run.epoch(1).epoch
        assert (epoch.train_loss or 0.0) > 1.5 * math.log(12)  # its loss is twice the cross-entropy
        assert epoch.val_accuracy is None

    def test_without_a_validation_loader_there_is_no_accuracy(self) -> None:
        data = {"name": f"{TINY}:without_validation"}
        with training(spec_of(data=data)) as run:
            epoch = run.epoch(1).epoch
        assert (epoch.val_loss, epoch.val_accuracy, epoch.val_batches) == (None, None, 0)
        assert "without a validation loader" in refused(spec_of(data=data, target_accuracy=0.5)).message

    def test_samples_that_are_held_out_and_trained_on_are_told(self) -> None:
        data = open_data(DataSpec(name=f"{TINY}:twice"), WorkloadSpec(model="simple_cnn", task="train"))
        assert [str(each) for each in data.notes] == [
            "16 of the 48 held-out samples are trained on, too: validation says nothing about new ones"
        ]
        assert opened(f"{TINY}:loaders").notes == ()
        assert "8 of the 40 held-out samples are trained on" in str(opened(f"{TINY}:copied").notes[0])

    @pytest.mark.parametrize(("name", "repeats"), [("streamed", False), ("streamed_twice", True), ("loaders", False)])
    def test_workers_that_give_the_same_samples_are_noticed(self, name: str, repeats: bool) -> None:
        assert opened(f"{TINY}:{name}").repeats == repeats

    def test_a_batch_that_is_too_small_for_the_model_is_told(self) -> None:
        spec = spec_of(f"{TINY}:stays", data={"name": f"{TINY}:one_left_over"})
        with training(spec) as run:
            said = run.failure().message
        assert "step 3 of the epoch failed on a batch of one sample" in said
        assert "drop_last=True" in said

    def test_a_loader_without_workers_that_hangs_is_a_failed_row(self) -> None:
        with training(spec_of(data={"name": f"{TINY}:asleep", "loader_timeout_s": 0.1})) as run:
            failure = run.failure()
        assert failure.kind == "timeout"
        assert "the loader gave no batch for 0.1 s" in failure.message

    def test_the_batch_goes_to_those_who_take_one(self) -> None:
        data = open_data(DataSpec(name=f"{TINY}:loaders"), WorkloadSpec(model="simple_cnn", task="train", batch=24))
        assert isinstance(data, LoaderData)
        assert len(next(iter(data.train))[1]) == 24


class TestABatch:
    IMAGES, CLASSES = torch.zeros(4, 3, 8, 8), torch.tensor([1, 2, 3, 4])

    @pytest.mark.parametrize(
        "batch",
        [
            (IMAGES, CLASSES),
            [IMAGES.numpy(), CLASSES.tolist()],
            {"image": IMAGES, "label": CLASSES.numpy()},
            {"x": IMAGES, "labels": CLASSES, "file": ["a", "b", "c", "d"]},
        ],
    )
    def test_is_a_pair_or_a_dict(self, batch: Any) -> None:
        parted = part_batch(batch, ["x"])
        inputs = parted.inputs["x"] if isinstance(parted.inputs, dict) else parted.inputs
        assert torch.equal(inputs, self.IMAGES)
        assert torch.equal(parted.targets, self.CLASSES)
        assert parted.count == 4

    def test_a_model_that_takes_its_labels_gets_them(self) -> None:
        parted = part_batch({"input_ids": self.IMAGES, "labels": self.CLASSES}, ["input_ids", "labels"])
        assert parted.inputs.keys() == {"input_ids", "labels"}

    @pytest.mark.parametrize(
        ("batch", "complaint"),
        [
            ((IMAGES, CLASSES, CLASSES), "gave tuple of 3; each batch must be"),
            (IMAGES, "gave Tensor; each batch must be"),
            ({"image": IMAGES, "mask": CLASSES}, "a dict of image, mask, none of which is labels"),
            ({"image": IMAGES, "more": IMAGES, "y": CLASSES}, "a dict of image, more, y; the model takes x"),
            ((IMAGES, ["cat", "dog"]), "targets without a tensor"),
        ],
    )
    def test_that_is_neither_is_told(self, batch: Any, complaint: str) -> None:
        with pytest.raises(BenchError, match=complaint):
            part_batch(batch, ["x"])


def test_learnable_data_are_the_same_whatever_the_seed_and_held_out_apart() -> None:
    one, other = (opened("synthetic-learnable", train_samples=64, val_samples=64) for _ in range(2))
    assert one.fingerprint == other.fingerprint
    assert not torch.equal(one.train.images, one.validation.images)
    assert sorted(one.train.classes.bincount().tolist()) == [6] * 6 + [7] * 4
