"""The hooks in a process, on libraries that are stood in for where this machine has none."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from redline.analyze.watch import Heard, Reader, Steps, rates_of
from redline.bench.watch.hooks import Watch
from redline.bench.watch.recorder import EARLY_STEPS, Recorder
from redline.bench.watch.samples import batch_samples, planned_batches
from redline.bench.watch.spool import BACKWARD, OPTIMIZER_ENDED, Spool
from redline.launch.watch import SpoolReader
from redline.model.record import Rates


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`, which cannot be made without a GPU: replaying calls no hook."""

    def capture_begin(self) -> None:
        """Nothing is recorded."""

    def capture_end(self) -> None:
        """Nothing is recorded."""

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
    assert not hasattr(torch.Tensor.copy_, "__wrapped__")


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()


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


def test_replays_of_a_recorded_step_are_steps(watch: Watch, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, optimizer)
    graph: Any = Graph()
    graph.capture_begin()
    step(model, optimizer)
    graph.capture_end()
    for _ in range(40):
        graph.replay()
    other: Any = Graph()
    other.replay()  # recorded before the watch began: nothing is known of it
    rates = rates_in(tmp_path)
    assert (rates.steps, rates.samples) == (43, 4 * 43)
    assert watch.facts.replays == 40


def test_what_is_wrapped_while_waits_are_listened_to_stays(watch: Watch) -> None:
    watch._listen_for_waits()
    model = torch.nn.Bilinear(3, 3, 3)
    torch.optim.SGD(model.parameters(), lr=0.1)
    watch._stop_listening_for_waits()
    assert not hasattr(torch.Tensor.item, "__wrapped__")
    assert "__call__" in vars(torch.nn.Bilinear)  # the model's class is still watched


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def test_a_copy_into_a_buffer_is_asked_about_without_comparing_tensors(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As batches reach the buffers of a recorded graph: `buffer.copy_(batch, True)`."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    watch.log.steps = 5
    buffer = torch.zeros(4, 3).as_subclass(OnGpu)
    copy = watch._copy_into(lambda *_: buffer)
    copy(buffer, torch.randn(4, 3), True)
    copy(buffer, torch.randn(4, 3))
    assert watch.log is not None  # nothing of ours has failed
    assert (watch.facts._copies["asked"], watch.facts._copies["blocking"]) == (2, 1)
    monkeypatch.undo()


class Around(torch.nn.Module):
    """Stands in for what `torch.compile` returns: its call is heard, that of the model in it is not."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: torch.Tensor) -> Any:
        return self.model.forward(batch)


def test_a_model_that_is_compiled_after_its_optimizer_was_made_is_heard(watch: Watch, tmp_path: Path) -> None:
    model: torch.nn.Module = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = Around(Around(model))
    for _ in range(30):
        step(model, optimizer)
    watch.remove()
    assert fed_in(tmp_path) == 30 * [4.0]


def test_a_holder_that_is_not_called_is_looked_into(watch: Watch, tmp_path: Path) -> None:
    model = Around(torch.nn.Sequential(torch.nn.Linear(3, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Keeper = type("Keeper", (torch.nn.Module,), {})
    keeper = Keeper()
    keeper.kept = model
    for _ in range(30):
        step(model.model[0], optimizer)  # type: ignore[index]
    watch.remove()
    assert fed_in(tmp_path)[-20:] == 20 * [4.0]


CONVOLUTIONS = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 8, 3))
GREY = torch.nn.Sequential(torch.nn.Unflatten(0, (-1, 1)), torch.nn.Conv2d(1, 8, 3), torch.nn.Conv2d(8, 8, 3))
WORDS = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 2))
NUMBERS = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Linear(64, 1))
FOLDED = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Conv1d(16, 1, 1))


@pytest.mark.parametrize(
    ("model", "shape", "samples"),
    [
        (torch.nn.Linear(4, 2), (4,), 1),
        (torch.nn.Linear(4, 2), (4, 4), 4),
        (torch.nn.Linear(4, 2), (7, 4), 7),
        (CONVOLUTIONS, (3, 9, 9), 1),
        (CONVOLUTIONS, (3, 3, 9, 9), 3),
        (GREY, (8, 9, 9), 8),
        (NUMBERS, (64,), 64),
        (FOLDED, (16, 6), 16),
        (torch.nn.LazyLinear(2), (4,), 4),
        (WORDS, (4,), 4),
    ],
)
def test_a_sample_without_a_batch_is_one(
    watch: Watch, model: torch.nn.Module, shape: tuple[int, ...], samples: int
) -> None:
    batch = torch.zeros(shape, dtype=torch.long) if model is WORDS else torch.randn(shape)  # indices are always a batch
    assert watch._samples.fed(model, (batch,), {}) == watch._samples.fed(model, (), {"x": batch}) == samples


def test_a_lazy_layer_is_asked_again_once_it_knows_its_width(watch: Watch) -> None:
    model = torch.nn.LazyLinear(2)
    assert watch._samples.fed(model, (torch.randn(4),), {}) == 4
    model(torch.randn(7, 4))
    assert watch._samples.fed(model, (torch.randn(4),), {}) == 1


def test_steps_of_torch_func_are_heard_through_the_model_they_call(watch: Watch, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    weights = {name: one.detach() for name, one in model.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (batch,)).square().mean()

    for _ in range(4):
        torch.func.grad(loss)(weights, torch.randn(5, 3))
    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    for _ in range(4):
        per_sample(weights, torch.randn(7, 3))
    watch.remove()
    assert fed_in(tmp_path) == 4 * [5.0] + 4 * [7.0]
    assert not hasattr(torch.nn.utils.stateless._functional_call, "__wrapped__")


def test_a_step_of_torch_func_that_is_only_traced_is_not_heard(watch: Watch) -> None:
    model = torch.nn.Linear(3, 2)
    weights = {name: one.detach() for name, one in model.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (batch,)).square().mean()

    make_fx(torch.func.grad(loss))(weights, torch.randn(5, 3))
    assert torch.nn.Linear not in watch._watched
    torch.func.grad(loss)(weights, torch.randn(5, 3))
    assert torch.nn.Linear in watch._watched


def test_the_last_batch_of_padded_sequences_is_as_large_as_the_sampler_says() -> None:
    """Time comes first: the length of the longest sequence may be any number below that of a whole batch."""

    def padded(batch: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(6, len(batch)), torch.tensor(batch)

    iterator = iter(torch.utils.data.DataLoader(list(range(19)), batch_size=8, collate_fn=padded))  # type: ignore[arg-type]
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
    loader = torch.utils.data.DataLoader
    assert planned_batches(loader(numbers, batch_size=2)) == 5
    assert planned_batches(loader(numbers, batch_size=None)) == 9
    assert planned_batches(loader(Stream(), batch_size=2)) is None
    assert planned_batches(loader(numbers, batch_size=2, sampler=Unsure())) is None


@pytest.mark.parametrize("by_grad", [False, True])
def test_steps_of_bare_weights_without_a_loader_are_found(watch: Watch, tmp_path: Path, by_grad: bool) -> None:
    weight = torch.randn(3, 2, requires_grad=True)
    for _ in range(12):
        loss = (torch.randn(4, 3) @ weight).square().sum()
        if by_grad:
            torch.autograd.grad(loss, [weight])
        else:
            loss.backward()
    watch.remove()
    assert rates_in(tmp_path).steps == 12


class Layered(torch.nn.Module):
    """A recurrent layer that takes its batch second, given what was turned before or not; the last state or all of them."""

    def __init__(self, *, turns: bool = False, last: bool = False) -> None:
        super().__init__()
        self.embedding, self.layer = torch.nn.Embedding(9, 4), torch.nn.GRU(4, 5)
        self._turns, self._last = turns, last

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        given = self.embedding(tokens.T if self._turns else tokens)
        states: torch.Tensor = self.layer(given)[0]
        return states[:, -1] if self._last else states


class Weights(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 2))

    def forward(self, one: torch.Tensor) -> torch.Tensor:
        return one @ self.weight


@pytest.mark.parametrize(
    ("kind", "batch", "samples"),
    [
        (Layered, torch.zeros(7, 3, dtype=torch.long), 3),
        (partial(Layered, turns=True), torch.zeros(7, 3, dtype=torch.long), 7),
        (partial(Layered, last=True), torch.zeros(7, 3, dtype=torch.long), 7),  # used as if its batch came first
        (Weights, torch.randn(4), 1),
        (Weights, torch.randn(4, 4), 4),
    ],
)
def test_a_call_shows_which_dimension_is_the_batch(
    watch: Watch, tmp_path: Path, kind: Callable[[], torch.nn.Module], batch: torch.Tensor, samples: int
) -> None:
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        model(batch).sum().backward()
        optimizer.step()
    watch.remove()
    assert fed_in(tmp_path) == 6 * [float(samples)]
    assert all("forward" not in vars(one) for one in model.modules())


def test_a_compiled_function_is_called_with_the_samples(watch: Watch, tmp_path: Path) -> None:
    weight = torch.randn(3, 2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    usual = torch.compile.__wrapped__  # torch's own, or where Lightning was imported its wrapper
    loss = torch.compile(lambda weight, batch: (batch @ weight).square().mean(), backend="eager")
    for _ in range(4):
        loss(weight, torch.randn(5, 3)).backward()
        optimizer.step()
    watch.remove()
    assert fed_in(tmp_path) == 4 * [5.0]
    assert torch.compile is usual


def test_a_model_that_is_not_trained_takes_forward_time_and_no_samples(watch: Watch, tmp_path: Path) -> None:
    """A teacher or a backbone: without a loader its pass would else count as waiting for data. It is looked for after a step."""
    backbone, model = Around(torch.nn.Linear(5, 3)), torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        model(backbone(torch.randn(7, 5)).detach()).sum().backward()
        optimizer.step()
    watch.remove()
    reader = heard_in(tmp_path)
    assert [row.key > 0 for row in reader.heard if row.kind == "forward"] == [True] + 3 * [False, True]
    assert Steps(reader).samples.tolist() == 4 * [7.0]


class Turned(torch.utils.data.Dataset[torch.Tensor]):
    """Its transform is a module of the model's class."""

    def __init__(self, transform: torch.nn.Module) -> None:
        self._transform = transform

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._transform(torch.ones(3))  # type: ignore[no-any-return]


def test_a_transform_in_the_loader_is_no_forward_pass(watch: Watch, tmp_path: Path) -> None:
    model, transform = torch.nn.Sequential(torch.nn.Linear(3, 2)), torch.nn.Sequential(torch.nn.Identity())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.utils.data.DataLoader(Turned(transform), batch_size=2):
        model(batch).sum().backward()
        optimizer.step()
    watch.remove()
    assert sum(row.kind == "forward" for row in heard_in(tmp_path).heard) == 4
    assert fed_in(tmp_path) == 4 * [2.0]


def test_an_optimizer_takes_time_from_its_call_on(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Torch makes a record of the step before it calls its hooks."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    record, recorded = torch.autograd.profiler.record_function, list[float]()

    def recording(name: str) -> record:
        recorded.append(perf_counter())
        return record(name)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", recording)
    for _ in range(3):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    watch.remove()
    began = [row.at for row in heard_in(tmp_path).heard if row.kind == "optimizer"]
    assert [begin < record for begin, record in zip(began, recorded, strict=True)] == 3 * [True]


def test_a_step_that_is_compiled_in_parts_is_counted(watch: Watch, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-3))
    update = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        update()
    watch.remove()
    assert rates_in(tmp_path).steps == 4


def test_the_function_that_makes_the_next_batch_is_data_wherever_it_is_called(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nanoGPT makes it between the forward and the backward pass; a function that computes the loss there is none."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock = [0.0]
    monkeypatch.setattr("redline.bench.watch.hooks.perf_counter", lambda: clock[0])

    def get_batch() -> tuple[torch.Tensor, int]:
        clock[0] += 2.0
        return torch.randn(4, 3), 4

    def loss_of(output: torch.Tensor) -> torch.Tensor:
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
    fetched = [row.value for row in heard_in(tmp_path).heard if row.kind == "fetched"]
    assert fetched == 8 * [2.0]  # from the second step on


@pytest.mark.parametrize(("sizes", "is_full"), [([4], False), ([4, 5, 6], True)])
def test_only_steps_that_repeat_are_not_heard_in_full(
    watch: Watch, tmp_path: Path, sizes: list[int], is_full: bool
) -> None:
    """Without a loader nothing else tells how many samples a step takes."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(200):
        model(torch.randn(sizes[number % len(sizes)], 3)).sum().backward()
        optimizer.step()
    watch.remove()
    reader = heard_in(tmp_path)
    assert rates_in(tmp_path).samples == sum(sizes[number % len(sizes)] for number in range(200))
    heard = sum(row.kind == "forward" for row in reader.heard)
    assert heard == 200 if is_full else EARLY_STEPS <= heard < 100


def test_what_a_library_saves_in_its_own_way_is_saving(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its functions are looked for after the first step, and call each other and `torch.save` in between."""
    library = SimpleNamespace(serialize_file=lambda: None)
    trainer = SimpleNamespace(_save_checkpoint=lambda: library.serialize_file())
    monkeypatch.setitem(sys.modules, "safetensors.torch", library)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "transformers.trainer", SimpleNamespace(Trainer=trainer))  # type: ignore[arg-type]
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, optimizer)
        trainer._save_checkpoint()
    library.serialize_file()
    watch.remove()
    assert sum(row.kind == "saving" for row in heard_in(tmp_path).heard) == 3 + 1
    assert not hasattr(library.serialize_file, "__wrapped__")


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(3)


@pytest.mark.parametrize("is_last", [False, True])
def test_a_batch_that_another_thread_was_fetching_is_not_the_trainings(
    watch: Watch, tmp_path: Path, is_last: bool
) -> None:
    """A script's own thread that loads ahead is in the loader when the first step shows which thread trains."""
    has_begun, may_go_on = threading.Event(), threading.Event()

    class Late(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            has_begun.set()
            may_go_on.wait()
            yield from () if is_last else torch.ones(4, 3)

    loader = torch.utils.data.DataLoader(Late(), batch_size=4)
    thread = threading.Thread(target=lambda: list(loader))
    thread.start()
    has_begun.wait()
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    may_go_on.set()
    thread.join()
    assert watch.log.inside is None
    for _ in range(5):
        step(model, optimizer)
    rates = rates_in(tmp_path)
    assert (rates.steps, rates.samples) == (6, 4 * 6)


def test_the_thread_that_trains_may_be_followed_by_another(watch: Watch, tmp_path: Path) -> None:
    """As folds that are trained in threads, one after the other; beside one that trains no other thread is heard."""

    def train(count: int) -> None:
        model = torch.nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(count):
            step(model, optimizer)

    for _ in range(2):
        thread = threading.Thread(target=train, args=(5,))
        thread.start()
        thread.join()
    train(3)
    beside = threading.Thread(target=train, args=(50,))
    beside.start()
    beside.join()
    assert rates_in(tmp_path).steps == 13


class Device:
    """Works off what it is given one thing after the other; its clock stands still while it waits."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.synchronized = 0
        self.is_busy = False

    def mark(self) -> Any:
        device, at = self, self.seconds
        device.seconds += 0.25

        class Mark:
            def query(self) -> bool:
                return not device.is_busy

            def synchronize(self) -> None:
                device.synchronized += 1

            def elapsed_time(self, later: Any) -> float:
                return 1e3 * (later.at - at)

        found: Any = Mark()
        found.at = at
        return found

    def release(self, marks: list[Any]) -> None:
        """None of them is used again."""

    def is_capturing(self) -> bool:
        return False


def test_the_devices_clock_is_read_when_it_has_passed_its_marks(tmp_path: Path) -> None:
    """It is waited for once, to set it by the host's clock, and at the end of the program."""
    log, device = Recorder(Spool(str(tmp_path))), Device()
    log.device, device.is_busy = device, True
    for number in range(4):
        log.put(BACKWARD)
        log.put(BACKWARD + 1)
        log.put(OPTIMIZER_ENDED, 0.0, 1.0)
        log.step_ended()
        device.is_busy = number < 2
    assert device.synchronized == 1
    reader = heard_in(tmp_path)
    assert sum(row.kind == "device" for row in reader.heard) == 1 + 3 * 4
    assert reader.device.spent.sum() == pytest.approx(4 * 0.5)
