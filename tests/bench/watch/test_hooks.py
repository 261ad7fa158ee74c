"""The hooks in a process, on libraries that are stood in for where this machine has none."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from redline.analyze.watch import Heard, Reader, Steps, rates_of
from redline.bench.watch.hooks import Watch
from redline.bench.watch.recorder import EARLY_STEPS, DeviceMarks, Recorder
from redline.bench.watch.samples import batch_samples, planned_batches
from redline.bench.watch.spool import BACKWARD, OPTIMIZER, Spool
from redline.launch.watch import SpoolReader
from redline.model.record import Rates


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`, which cannot be made without a GPU: replaying calls no hook."""

    def replay(self) -> None:
        """Nothing is computed."""


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    watching = Watch(str(tmp_path))
    watching.install()
    yield watching
    watching.remove()
    assert not hasattr(Graph.replay, "__wrapped__")


def train(model: Callable[[Tensor], Any], batches: Iterable[Tensor], *, owner: Any = None) -> torch.optim.Optimizer:
    """Takes a step on each batch; `owner` has the weights if the model is not the module that does."""
    optimizer = torch.optim.SGD((owner or model).parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    return optimizer


def batches(count: int, *shape: int) -> Iterator[Tensor]:
    return (torch.randn(shape or (4, 3)) for _ in range(count))


class Kept(Reader):
    """Also keeps what it is given to read."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Heard] = []

    def read(self, rows: Any) -> None:
        rows = list(rows)
        self.heard += [Heard(*row) for row in rows]
        super().read(rows)


def heard_in(folder: Path) -> Kept:
    (log,) = SpoolReader(folder, Kept).refresh()
    assert "broken" not in log.facts
    reader: Kept = log.reader
    return reader


def rates_in(folder: Path) -> Rates:
    return rates_of(SpoolReader(folder, Reader).refresh())


def fed_in(folder: Path) -> list[float]:
    return Steps(heard_in(folder)).samples.tolist()  # type: ignore[no-any-return]


def count_of(folder: Path, kind: str) -> int:
    return sum(row.kind == kind for row in heard_in(folder).heard)


def test_replays_of_a_recorded_step_are_steps(watch: Watch, tmp_path: Path) -> None:
    train(nn.Linear(3, 3), batches(3))
    for _ in range(40):
        Graph().replay()
    assert (rates_in(tmp_path).steps, watch.facts.replays) == (43, 40)


class Around(nn.Module):
    """Stands in for what `torch.compile` returns: its call is heard, that of the model in it is not."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Tensor) -> Any:
        return self.model.forward(batch)


def test_a_model_that_is_compiled_after_its_optimizer_was_made_is_heard(watch: Watch, tmp_path: Path) -> None:
    inner = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    model = Around(Around(inner))
    for batch in batches(30):
        model(batch).sum().backward()
        optimizer.step()
    assert fed_in(tmp_path) == 30 * [4.0]


def test_a_holder_that_is_not_called_is_looked_into(watch: Watch, tmp_path: Path) -> None:
    """As Lightning's, whose parts are called by its training step."""
    holder = Around(nn.Sequential(nn.Linear(3, 3)))
    keeper: Any = nn.Module()
    keeper.kept = holder
    train(holder.model[0], batches(30), owner=holder)  # type: ignore[index]
    assert fed_in(tmp_path)[-20:] == 20 * [4.0]


def test_the_last_batch_of_padded_sequences_is_as_large_as_the_sampler_says() -> None:
    """Time comes first: the length of the longest sequence may be any number below that of a whole batch."""

    def padded(batch: list[int]) -> tuple[Tensor, Tensor]:
        return torch.zeros(6, len(batch)), torch.tensor(batch)

    iterator = iter(DataLoader(list(range(19)), batch_size=8, collate_fn=padded))  # type: ignore[arg-type]
    assert [batch_samples(batch, iterator) for batch in iterator] == [8.0, 8.0, 3.0]


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))

    def __len__(self) -> int:
        raise AssertionError("nobody asks a stream for its length")


class Unsure(torch.utils.data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))

    def __len__(self) -> int:
        raise RuntimeError("not before the epoch is set")


def test_a_loader_says_how_many_batches_a_pass_has_where_it_knows() -> None:
    numbers: Any = list(range(9))
    loaders: tuple[DataLoader[Any], ...] = (
        DataLoader(numbers, batch_size=2), DataLoader(numbers, batch_size=None), DataLoader(Stream(), batch_size=2),
        DataLoader(numbers, batch_size=2, sampler=Unsure()),
    )  # fmt: skip
    assert [planned_batches(loader) for loader in loaders] == [5, 9, None, None]


@pytest.mark.parametrize("by_grad", [False, True])
def test_steps_of_bare_weights_without_a_loader_are_found(watch: Watch, tmp_path: Path, by_grad: bool) -> None:
    weight = torch.randn(3, 2, requires_grad=True)
    for batch in batches(12):
        loss = (batch @ weight).square().sum()
        if by_grad:
            torch.autograd.grad(loss, [weight])
        else:
            loss.backward()
    watch.remove()
    assert rates_in(tmp_path).steps == 12


class Layered(nn.Module):
    """A recurrent layer that takes its batch second, given what was turned before or not."""

    def __init__(self, *, turns: bool = False) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(9, 4), nn.GRU(4, 5)
        self._turns = turns

    def forward(self, tokens: Tensor) -> Tensor:
        states: Tensor = self.layer(self.embedding(tokens.T if self._turns else tokens))[0]
        return states


TOKENS = torch.zeros(7, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("kind", "batch", "samples"),
    [
        (Layered, TOKENS, 3),
        (partial(Layered, turns=True), TOKENS, 7),
        (partial(nn.Linear, 4, 2), torch.randn(4), 1),  # an agent's state
        (partial(nn.Linear, 4, 2), torch.randn(4, 4), 4),
        (partial(nn.LazyLinear, 2), torch.randn(7, 4), 7),
        (partial(nn.Conv2d, 3, 8, 3), torch.randn(3, 3, 9, 9), 3),
    ],
)
def test_a_call_shows_which_dimension_is_the_batch(
    watch: Watch, tmp_path: Path, kind: Callable[[], nn.Module], batch: Tensor, samples: int
) -> None:
    train(kind(), 6 * [batch])
    assert fed_in(tmp_path) == 6 * [float(samples)]
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_a_model_that_is_not_trained_takes_forward_time_and_no_samples(watch: Watch, tmp_path: Path) -> None:
    """A teacher or a backbone: without a loader its pass would else count as waiting for data."""
    backbone, model = Around(nn.Linear(5, 3)), nn.Linear(3, 2)
    train(lambda batch: model(backbone(batch).detach()), batches(4, 7, 5), owner=model)
    reader = heard_in(tmp_path)
    assert [row.key > 0 for row in reader.heard if row.kind == "forward"] == 4 * [False, True]
    assert Steps(reader).samples.tolist() == 4 * [7.0]


class Turned(torch.utils.data.Dataset[Tensor]):
    """Its transform is a module of the model's class."""

    transform = nn.Sequential(nn.Identity())

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return self.transform(torch.ones(3))  # type: ignore[no-any-return]


def test_a_transform_in_the_loader_is_no_forward_pass(watch: Watch, tmp_path: Path) -> None:
    train(nn.Sequential(nn.Linear(3, 2)), DataLoader(Turned(), batch_size=2))
    assert count_of(tmp_path, "forward") == 4
    assert fed_in(tmp_path) == 4 * [2.0]


def test_a_step_that_is_compiled_in_parts_is_counted(watch: Watch, tmp_path: Path) -> None:
    """The compiled optimizer calls no hook, so that the backward passes are counted."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-3))
    update = torch.compile(lambda: optimizer.step(), backend="eager")
    for batch in batches(4):
        model(batch).sum().backward()
        update()
    watch.remove()
    assert rates_in(tmp_path).steps == 4


def test_the_function_that_makes_the_next_batch_is_data_wherever_it_is_called(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nanoGPT makes it between the forward and the backward pass; a function that computes the loss there is none."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock = [0.0]
    monkeypatch.setattr("redline.bench.watch.hooks.perf_counter", lambda: clock[0])

    def get_batch() -> tuple[Tensor, int]:
        clock[0] += 2.0
        return torch.randn(4, 3), 4

    def loss_of(output: Tensor) -> Tensor:
        clock[0] += 1.0
        return output.square().sum()

    batch, _ = get_batch()
    for _ in range(10):
        loss = loss_of(model(batch))
        batch, _ = get_batch()
        loss.backward()
        optimizer.step()
    watch.remove()
    assert sys.gettrace() is None
    assert [row.value for row in heard_in(tmp_path).heard if row.kind == "fetched"] == 8 * [
        2.0
    ]  # from the second step on


@pytest.mark.parametrize(("sizes", "is_full"), [([4], False), ([4, 5, 6], True)])
def test_only_steps_that_repeat_are_not_heard_in_full(
    watch: Watch, tmp_path: Path, sizes: list[int], is_full: bool
) -> None:
    """Without a loader nothing else tells how many samples a step takes."""
    taken = [sizes[number % len(sizes)] for number in range(200)]
    train(nn.Linear(3, 2), (torch.randn(size, 3) for size in taken))
    assert rates_in(tmp_path).samples == sum(taken)
    heard = count_of(tmp_path, "forward")
    assert heard == 200 if is_full else EARLY_STEPS <= heard < 100


def test_what_a_library_saves_in_its_own_way_is_saving(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its functions are looked for after the first step, and call each other and `torch.save` in between."""
    library = SimpleNamespace(serialize_file=lambda: None)
    trainer = SimpleNamespace(_save_checkpoint=lambda: library.serialize_file())
    monkeypatch.setitem(sys.modules, "safetensors.torch", library)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "transformers.trainer", SimpleNamespace(Trainer=trainer))  # type: ignore[arg-type]
    train(nn.Linear(3, 2), batches(3))
    trainer._save_checkpoint()
    library.serialize_file()
    watch.remove()
    assert count_of(tmp_path, "saving") == 2
    assert not hasattr(library.serialize_file, "__wrapped__")


@pytest.mark.parametrize("is_last", [False, True])
def test_a_batch_that_another_thread_was_fetching_is_not_the_trainings(
    watch: Watch, tmp_path: Path, is_last: bool
) -> None:
    """A script's own thread that loads ahead is in the loader when the first step shows which thread trains."""
    has_begun, may_go_on = threading.Event(), threading.Event()

    class Late(torch.utils.data.IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            has_begun.set()
            may_go_on.wait()
            yield from () if is_last else torch.ones(4, 3)

    thread = threading.Thread(target=lambda: list(DataLoader(Late(), batch_size=4)))
    thread.start()
    has_begun.wait()
    model = nn.Linear(3, 3)
    train(model, batches(2))
    may_go_on.set()
    thread.join()
    assert watch.log is not None
    assert watch.log.inside is None
    train(model, batches(5))
    assert (rates_in(tmp_path).steps, rates_in(tmp_path).samples) == (7, 4 * 7)


def test_the_thread_that_trains_may_be_followed_by_another(watch: Watch, tmp_path: Path) -> None:
    """As folds that are trained in threads, one after the other; beside one that trains no other thread is heard."""

    def in_thread(count: int) -> None:
        thread = threading.Thread(target=lambda: train(nn.Linear(3, 3), batches(count)))
        thread.start()
        thread.join()

    for _ in range(2):
        in_thread(5)
    train(nn.Linear(3, 3), batches(3))
    in_thread(50)
    assert rates_in(tmp_path).steps == 13


class Device:
    """Works off what it is given one thing after the other; its clock stands still while it waits."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.synchronized = 0
        self.is_busy = True

    def mark(self) -> Any:
        at, self.seconds = self.seconds, self.seconds + 0.25

        def synchronize() -> None:
            self.synchronized += 1

        return SimpleNamespace(
            at=at,
            query=lambda: not self.is_busy,
            synchronize=synchronize,
            elapsed_time=lambda later: 1e3 * (later.at - at),
        )

    def release(self, marks: list[Any]) -> None:
        """None of them is used again."""


def test_the_devices_clock_is_read_when_it_has_passed_its_marks(tmp_path: Path) -> None:
    """It is waited for once, to set it by the host's clock, and at the end of the program."""
    log, device = Recorder(Spool(str(tmp_path))), Device()
    log.device = DeviceMarks(log.spool, device)
    for number in range(4):
        log.put(BACKWARD)
        log.put(BACKWARD + 1)
        log.put(OPTIMIZER + 1, 0.0, 1.0)
        log.step_ended()
        device.is_busy = number < 2
    assert device.synchronized == 1
    reader = heard_in(tmp_path)
    assert count_of(tmp_path, "device") == 1 + 3 * 4
    assert reader.device.spent.sum() == pytest.approx(4 * 0.5)
