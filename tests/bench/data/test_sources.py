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
CIFAR = CIFAR10.base_folder


class Harmful:
    """What a pickle from elsewhere may hold: opening it writes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def opened(name: str, folder: Path | None = None, workload: Any = None, **more: Any) -> Any:
    spec = DataSpec(name=name, folder=None if folder is None else str(folder), **more)
    return open_data(spec, WorkloadSpec(model="simple_cnn", task="train", **(workload or {})))


def pictures(folder: Path, size: tuple[int, int] = (8, 8), **counts: int) -> Path:
    """The folder with so many pictures per class, each class in a red of its own."""
    for number, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for each in range(count):
            Image.new("RGB", size, (100 * number, 50, each)).save(folder / name / f"{each}.png")
    return folder


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    """Files in the published format: five batches and a test batch of pickled dicts with bytes for keys."""
    folder = tmp_path / "sets" / CIFAR
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for number, (name, _) in enumerate((*CIFAR10.train_list, *CIFAR10.test_list)):
        content = {
            "batch_label": f"batch {number + 1}",
            "labels": [int(each) for each in random.integers(0, 10, PER_FILE)],
            "data": random.integers(0, 256, (PER_FILE, 3072), dtype=np.uint8),
            "filenames": [f"{number}_{each}.png" for each in range(PER_FILE)],
        }
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return folder.parent


def test_cifar_10_is_read_from_its_standard_folder(cifar: Path) -> None:
    data = opened("cifar10", cifar)
    assert isinstance(data, ImageData)
    assert (len(data.train), len(data.validation), data.classes, data.size) == (100, 20, 10, 32)
    stored = pickle.loads((cifar / CIFAR / "data_batch_2").read_bytes(), encoding="latin1")
    images, classes = data.train.fetch([PER_FILE + 3])
    assert torch.equal(images[0], torch.from_numpy(stored["data"][3].reshape(3, 32, 32)))
    assert classes.tolist() == [stored["labels"][3]]
    assert [note.code for note in data.notes] == ["other-data"]
    part = opened("cifar10", cifar / CIFAR, train_samples=40, val_samples=5)  # the folder itself will do
    assert (len(part.train), len(part.validation)) == (40, 5)


def test_a_model_trains_on_cifar_10(cifar: Path) -> None:
    data = {"name": "cifar10", "folder": str(cifar), "train_samples": 32, "val_samples": 16}
    with training(spec_of(data=data, workload={"image_size": None})) as run:
        assert run.prepared.data.shape == (3, 32, 32)
        assert run.epoch(1).epoch.samples == 32


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda path: path.write_bytes(b"no pickle at all"), ""),
        (lambda path: path.write_bytes(path.read_bytes()[:5000]), ""),
        (lambda path: path.write_bytes(b""), ""),
        (lambda path: path.write_bytes(pickle.dumps({"labels": []})), "KeyError"),
        (
            lambda path: path.write_bytes(pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 11]})),
            "labels below 10",
        ),
        (lambda path: path.unlink(), "No such file"),
        (
            lambda path: path.write_bytes(pickle.dumps(Harmful(path.with_name("harmed")))),
            "which no batch of CIFAR-10 does",
        ),
    ],
    ids=["corrupt", "truncated", "empty", "no data", "label 11", "missing", "harmful"],
)
def test_files_that_are_broken_are_named_and_run_nothing(cifar: Path, spoil: Any, complaint: str) -> None:
    spoil(cifar / CIFAR / "data_batch_3")
    with pytest.raises(BenchError, match=f"data_batch_3 is no whole file of CIFAR-10: .*{complaint}"):
        opened("cifar10", cifar)
    assert not (cifar / CIFAR / "harmed").exists()


def test_where_cifar_10_lies_and_how_to_get_it_is_told(cifar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="train_samples must be 100 or less"):
        opened("cifar10", cifar, train_samples=101)
    for folder in (None, str(cifar / CIFAR / "nowhere")):
        with pytest.raises(SpecError, match=r"--download fetches it there .* or train on synthetic-learnable"):
            check_data(DataSpec(name="cifar10", folder=folder), WorkloadSpec(model="simple_cnn", task="train"))

    def no_network(*_: Any, **__: Any) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(CIFAR10, "download", no_network)
    with pytest.raises(BenchError, match=r"cannot download CIFAR-10 to .*no route to host"):
        opened("cifar10", cifar / "new", download=True)


def test_pictures_are_scaled_and_cut(tmp_path: Path) -> None:
    for part, count in (("train", 4), ("val", 2)):
        pictures(tmp_path / part, (20, 30), cats=count, dogs=count)
    data = opened("imagefolder", tmp_path, {"image_size": 16}, train_samples=7)
    assert (len(data.train), len(data.validation), data.classes, data.size) == (7, 4, 2, 16)
    images, classes = data.validation.fetch([0, 3])
    assert (images.shape, images.dtype, classes.tolist()) == ((2, 3, 16, 16), torch.uint8, [0, 1])
    assert images[1, 0, 0, 0] == 100
    Image.fromarray(np.full((20, 20), 300, dtype=np.uint16)).save(tmp_path / "val" / "cats" / "0.png")
    with pytest.raises(ValueError, match="more than 8 bits"):
        data.validation.fetch([0])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_picture_is_a_failed_row_that_names_it(tmp_path: Path, workers: int) -> None:
    for part in ("train", "val"):
        pictures(tmp_path / part, cats=4, dogs=4)
    (tmp_path / "train" / "dogs" / "2.png").write_bytes(b"no picture")
    data = {"name": "imagefolder", "folder": str(tmp_path), "train_samples": None, "val_samples": None}
    with training(spec_of(data={**data, "workers": workers}, workload={"batch": 2})) as run:
        failure = run.failure()
    assert failure.kind == "user"
    assert "cannot read the image" in failure.message
    assert "2.png" in failure.message


@pytest.mark.parametrize(
    ("counts", "complaint"),
    [
        ({}, "imagefolder needs --folder DIR with train and val"),
        ({"train": {"cats": 2}}, "imagefolder needs --folder DIR with val"),
        ({"train": {"cats": 2}, "val": {}}, "Couldn't find any class folder in .*val"),
        ({"train": {"cats": 2, "dogs": 0}, "val": {"cats": 2}}, "Found no valid file for the classes dogs"),
        ({"train": {"cats": 2, "dogs": 1}, "val": {"cats": 2}}, "train and val have different classes"),
    ],
)
def test_folders_that_are_none_are_told(tmp_path: Path, counts: dict[str, Any], complaint: str) -> None:
    for part, classes in counts.items():
        (tmp_path / part).mkdir()
        pictures(tmp_path / part, **classes)
    with pytest.raises(SpecError, match=complaint):
        opened("imagefolder", tmp_path)


def test_learnable_data_are_the_same_whatever_the_seed_and_held_out_apart() -> None:
    one, other = (opened("synthetic-learnable", train_samples=64, val_samples=64) for _ in range(2))
    assert one.fingerprint == other.fingerprint
    assert not torch.equal(one.train.images, one.validation.images)
    assert sorted(one.train.classes.bincount().tolist()) == [6] * 6 + [7] * 4


# The user's own loaders


def test_their_loaders_feed_the_training_alike_in_every_run() -> None:
    """Shuffled by the global state: every epoch begins anew."""
    spec, found = spec_of(data={"name": f"{TINY}:loaders"}, epochs=2), []
    for _ in range(2):
        with training(spec) as run:
            assert run.prepared.workload.items_per_step == 16
            found.append([(epoch.samples, epoch.train_loss) for epoch in run.all()])
    assert found[0] == found[1]
    assert found[0][0][0] == 96


@pytest.mark.parametrize(
    ("how", "patience_s", "kind", "says"),
    [
        ("dying", 120.0, "crash", "a worker of the loader died"),  # its workers take their time to start
        ("hanging", 2.0, "timeout", "a worker of the loader hangs"),
        ("raising", 120.0, "user", "ValueError: sample 32 is spoilt"),
        ("one_left_over", 120.0, "user", "Expected more than 1 value per channel when training"),
    ],
)
def test_a_loader_that_breaks_is_a_failed_row_with_its_message(
    how: str, patience_s: float, kind: str, says: str
) -> None:
    model = "stays" if how == "one_left_over" else "make"
    with training(spec_of(f"{TINY}:{model}", data={"name": f"{TINY}:{how}", "loader_timeout_s": patience_s})) as run:
        failure = run.failure()
    assert failure.kind == kind
    assert says in failure.message


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
def test_mistakes_are_told(name: str, more: dict[str, Any], complaint: str) -> None:
    with pytest.raises((UsageError, BenchError), match=complaint):
        opened(f"{TINY}:{name}", **more)


def test_classes_that_nobody_names_must_be_given() -> None:
    asked = {"data": {"name": f"{TINY}:loaders"}, "model": "simple_cnn"}
    assert "give --classes" in refused(spec_of(**asked)).message
    with training(spec_of(**asked, workload={"classes": 10, "image_size": None})) as run:
        assert run.prepared.data.shape == (3, 16, 16)


@pytest.mark.parametrize("data", ["synthetic-learnable", f"{TINY}:loaders", f"{TINY}:as_dicts"])
def test_a_module_without_inputs_takes_those_of_the_data(data: str) -> None:
    with training(spec_of(f"{TINY}:bare", data={"name": data})) as run:
        assert run.epoch(1).epoch.val_accuracy is not None


def test_tokens_train_a_model_that_reads_them(tmp_path: Path) -> None:
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
def test_a_model_that_wants_its_targets_gets_them_and_is_trained_on_its_own_loss(model: str) -> None:
    with training(spec_of(f"{TINY}:{model}", data={"name": f"{TINY}:tokens"}, workload={"image_size": None})) as run:
        assert run.prepared.workload.loss == "output 1"
        epoch = run.epoch(1).epoch
    assert (epoch.train_loss or 0.0) > 1.5 * math.log(12)  # its loss is twice the cross-entropy
    assert epoch.val_accuracy is None


def test_a_detector_gets_its_images_in_a_list_and_is_trained_on_the_sum_of_its_losses(tmp_path: Path) -> None:
    file = tmp_path / "found.py"
    file.write_text(
        "import torch\n\ndef loaders():\n    box = {'boxes': torch.tensor([[1.0, 1.0, 5.0, 6.0]]), 'labels': torch.tensor([1])}\n"
        "    return [(tuple(torch.rand(2, 3, 10, 12)), (box, box))] * 3, None\n"
    )
    with training(spec_of(f"{TINY.with_name('unlike.py')}:detector_training", data={"name": f"{file}:loaders"})) as run:
        assert run.prepared.workload.loss == "sum of the output's losses"
        assert run.epoch(1).epoch.samples == 6


def test_without_a_validation_loader_there_is_no_accuracy() -> None:
    data = {"name": f"{TINY}:without_validation"}
    with training(spec_of(data=data)) as run:
        epoch = run.epoch(1).epoch
    assert (epoch.val_loss, epoch.val_accuracy, epoch.val_batches) == (None, None, 0)
    assert "without a validation loader" in refused(spec_of(data=data, target_accuracy=0.5)).message


def test_held_out_rows_that_are_trained_on_are_told() -> None:
    (told,) = opened(f"{TINY}:twice").notes
    assert str(told) == "the held-out samples are trained on, too: validation says nothing about new ones"
    assert opened(f"{TINY}:loaders").notes == ()


def test_the_batch_goes_to_those_who_take_one() -> None:
    data = opened(f"{TINY}:loaders", workload={"batch": 24})
    assert isinstance(data, LoaderData)
    assert len(next(iter(data.train))[1]) == 24


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
def test_a_batch_is_a_pair_or_a_dict(batch: Any) -> None:
    parted = part_batch(batch, ["x"])
    inputs = parted.inputs["x"] if isinstance(parted.inputs, dict) else parted.inputs
    assert torch.equal(inputs, IMAGES)
    assert torch.equal(parted.targets, CLASSES)
    assert parted.count == 4
    wanted = part_batch({"input_ids": IMAGES, "labels": CLASSES}, ["input_ids", "labels"])
    assert wanted.inputs.keys() == {"input_ids", "labels"}, "a model that takes its labels gets them"


@pytest.mark.parametrize(
    ("batch", "complaint"),
    [
        ((IMAGES, CLASSES, CLASSES), "gave tuple of 3; several inputs go together, .* each batch must be"),
        (IMAGES, "gave Tensor; each batch must be"),
        ({"image": IMAGES, "mask": CLASSES}, "a dict of image, mask, none of which is labels"),
        ({"image": IMAGES, "more": IMAGES, "y": CLASSES}, "a dict of image, more, y; the model takes x"),
        ((IMAGES, ["cat", "dog"]), "targets without a tensor"),
    ],
)
def test_a_batch_that_is_neither_is_told(batch: Any, complaint: str) -> None:
    with pytest.raises(BenchError, match=complaint):
        part_batch(batch, ["x"])
