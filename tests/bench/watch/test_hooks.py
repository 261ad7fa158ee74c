"""The hooks in a process, on libraries that are stood in for where this machine has none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from redline.analyze.watch import rates_of
from redline.bench.watch import stepping
from redline.bench.watch.clock import Clock
from redline.bench.watch.hooks import Watch
from redline.bench.watch.marks import STEP
from redline.bench.watch.samples import batch_samples, planned_batches, samples_fed
from redline.bench.watch.stopwatch import DATA, FORWARD, OTHER
from redline.launch.watch import SpoolReader


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
    assert watch.clock is not None
    logs = SpoolReader(tmp_path).refresh()
    rates = rates_of(logs)
    assert rates.steps == 43
    assert rates.samples == 4 * 43
    assert watch.facts is not None
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


def test_a_copy_into_a_buffer_is_asked_about_without_comparing_tensors(watch: Watch) -> None:
    """As batches reach the buffers of a recorded graph: `buffer.copy_(batch, True)`."""
    assert watch.clock is not None
    assert watch.facts is not None
    watch.clock.steps, watch.clock.device = 5, object()  # type: ignore[assignment]
    buffer = torch.zeros(4, 3).as_subclass(OnGpu)
    copy = watch._copy_into(lambda *_: buffer)
    copy(buffer, torch.randn(4, 3), True)
    copy(buffer, torch.randn(4, 3))
    watch.clock.device = None
    assert watch.clock is not None  # nothing of ours has failed
    assert (watch.facts._copies["asked"], watch.facts._copies["blocking"]) == (2, 1)


def test_os_exit_loses_no_step(watch: Watch, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(33):
        step(model, optimizer)
    watch._exit(lambda code: None)(3)
    (log,) = SpoolReader(tmp_path).refresh()
    assert log._chunks[0].shape[0] == 33  # rows of their own, none made up


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
    (log,) = SpoolReader(tmp_path).refresh()
    fed = log.rows[:, log.columns.index("fed")]
    assert fed.tolist() == [0.0] + 29 * [4.0]  # until the first step ended nobody knew of it


def test_a_holder_that_is_not_called_is_looked_into(watch: Watch, tmp_path: Path) -> None:
    model = Around(torch.nn.Sequential(torch.nn.Linear(3, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Keeper = type("Keeper", (torch.nn.Module,), {})
    keeper = Keeper()
    keeper.kept = model
    for _ in range(30):
        step(model.model[0], optimizer)  # type: ignore[index]
    watch.remove()
    (log,) = SpoolReader(tmp_path).refresh()
    assert log.rows[:, log.columns.index("fed")].tolist()[-20:] == 20 * [4.0]


CONVOLUTIONS = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 8, 3))
GREY = torch.nn.Sequential(torch.nn.Unflatten(0, (-1, 1)), torch.nn.Conv2d(1, 8, 3), torch.nn.Conv2d(8, 8, 3))
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
    ],
)
def test_a_sample_without_a_batch_is_one(
    watch: Watch, model: torch.nn.Module, shape: tuple[int, ...], samples: int
) -> None:
    assert samples_fed(model, (torch.randn(shape),), {}, watch._singles.of(model)) == samples
    assert samples_fed(model, (), {"x": torch.randn(shape)}, watch._singles.of(model)) == samples


def test_indices_are_a_batch_however_many_they_are(watch: Watch) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 2))
    assert samples_fed(model, (torch.zeros(4, dtype=torch.long),), {}, watch._singles.of(model)) == 4


def test_a_lazy_layer_is_asked_again_once_it_knows_its_width(watch: Watch) -> None:
    model = torch.nn.LazyLinear(2)
    assert watch._singles.of(model) == frozenset()
    model(torch.randn(7, 4))
    assert samples_fed(model, (torch.randn(4),), {}, watch._singles.of(model)) == 1


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
    (log,) = SpoolReader(tmp_path).refresh()
    assert log.rows[:, log.columns.index("fed")].tolist() == 4 * [5.0] + 4 * [7.0]
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


def rows_of(folder: Path, name: str, kind: float | None = None) -> list[float]:
    (log,) = SpoolReader(folder).refresh()
    rows = log.rows if kind is None else log.rows[log.rows[:, log.columns.index("kind")] == kind]
    return rows[:, log.columns.index(name)].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("through_data", [False, True])
def test_weights_that_did_not_change_end_no_step(watch: Watch, tmp_path: Path, through_data: bool) -> None:
    """An update by hand after every third backward pass, which versions show unless it goes through `.data`."""
    model = torch.nn.Linear(3, 2)
    for number in range(1, 13):
        model(torch.randn(4, 3)).square().sum().backward()
        if number % 3:
            continue
        for weight in model.parameters():
            assert weight.grad is not None
            if through_data:
                weight.data -= 0.1 * weight.grad
                weight.grad.data.zero_()
            else:
                with torch.no_grad():
                    weight -= 0.1 * weight.grad
                    weight.grad = None
    watch.remove()
    assert rows_of(tmp_path, "backwards") == 4 * [3.0]


@pytest.mark.parametrize("by_grad", [False, True])
@pytest.mark.parametrize("replaces", [False, True])
def test_steps_of_bare_weights_without_a_loader_are_found(
    watch: Watch, tmp_path: Path, by_grad: bool, replaces: bool
) -> None:
    weight = torch.randn(3, 2, requires_grad=True)
    for number in range(1, 13):
        loss = (torch.randn(4, 3) @ weight).square().sum()
        if by_grad:
            (gradient,) = torch.autograd.grad(loss, [weight])
        else:
            loss.backward()
            gradient = weight.grad  # type: ignore[assignment]
        if number % 3:
            continue
        if replaces:
            weight = (weight - 0.1 * gradient).detach().requires_grad_()
        else:
            with torch.no_grad():
                weight -= 0.1 * gradient
            weight.grad = None
    watch.remove()
    assert len(rows_of(tmp_path, "backwards")) == (3 if replaces else 4)  # the weights made last are never used


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
    assert rows_of(tmp_path, "fed") == 6 * [float(samples)]
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
    assert rows_of(tmp_path, "fed") == 4 * [5.0]
    assert torch.compile is usual


def test_a_model_that_is_not_trained_takes_forward_time_and_no_samples(watch: Watch, tmp_path: Path) -> None:
    """A teacher or a backbone: without a loader its pass would else count as waiting for data."""
    backbone, model = Around(torch.nn.Linear(5, 3)), torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    phases: list[int] = []
    backbone.register_forward_hook(lambda *_: phases.append(watch.clock.phase if watch.clock else -1))
    for _ in range(4):
        model(backbone(torch.randn(7, 5)).detach()).sum().backward()
        optimizer.step()
    watch.remove()
    assert phases == [OTHER] + 3 * [FORWARD]  # it is looked for after the first step
    assert rows_of(tmp_path, "fed") == 4 * [7.0]
    assert len(set(rows_of(tmp_path, "models"))) == 1


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
    phases: list[int] = []
    transform.register_forward_hook(lambda *_: phases.append(watch.clock.phase if watch.clock else -1))
    for batch in torch.utils.data.DataLoader(Turned(transform), batch_size=2):
        model(batch).sum().backward()
        optimizer.step()
    watch.remove()
    assert phases == 8 * [DATA]
    assert rows_of(tmp_path, "fed")[:4] == 4 * [2.0]  # then comes what followed the last step


def test_an_optimizer_takes_time_from_its_call_on(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch makes a record of the step before it calls its hooks."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    record = torch.autograd.profiler.record_function
    began, recorded = list[float](), list[float]()

    def recording(name: str) -> record:
        recorded.append(perf_counter())
        return record(name)

    def beginning(clock: Clock, number: int, at: float) -> None:
        began.append(at)
        clock.begin_optimizer(number, at)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", recording)
    monkeypatch.setattr(stepping, "BEGIN_OPTIMIZER", beginning)
    for _ in range(3):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
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
    assert len(rows_of(tmp_path, "backwards")) == 4


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(3)


def _unheard(batch: torch.Tensor, weights: torch.Tensor) -> None:
    batch @ weights


@pytest.mark.parametrize("every", [2, 1])
def test_a_pass_in_which_nothing_is_trained_is_validation(watch: Watch, tmp_path: Path, every: int) -> None:
    """Whoever is fed: an average of the weights is no model that anybody trains. Before each step it belongs to the step."""
    model = torch.nn.Linear(3, 2)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(4):
        for batch in torch.utils.data.DataLoader(Rows(2 * every), batch_size=2):
            model(batch).sum().backward()
            optimizer.step()
        with torch.no_grad():
            for batch in torch.utils.data.DataLoader(Rows(9), batch_size=3):
                average(batch) if epoch % 2 else _unheard(batch, model.weight.T)
    watch.remove()
    loaded, paused = rows_of(tmp_path, "loaded", kind=STEP), rows_of(tmp_path, "paused", kind=STEP)
    if every == 2:
        assert loaded == 8 * [2.0]
        assert [each > 0 for each in paused[1:]] == [False, True, False, True, False, True, False]
    else:
        assert loaded[2:] == 2 * [11.0]


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
    clock = watch.clock
    assert clock is not None
    assert not clock.is_inside
    for _ in range(5):
        step(model, optimizer)
    clock.work_through()
    rates = rates_of(SpoolReader(tmp_path).refresh())
    assert (rates.steps, rates.samples) == (6, 4 * 6)
