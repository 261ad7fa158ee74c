"""What a notebook calls: models by name and alive, results that print and export, and nothing left changed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import redline
from redline.bench.environment import remember_flags
from redline.model.errors import SpecError, UsageError
from redline.store import History

TINY: dict[str, Any] = {
    "device": "cpu",
    "threads": 1,
    "measure": {
        "max_seconds": 0.15, "block_seconds": 0.03, "min_rounds": 2, "min_samples": 2, "tail_samples": 2,
        "warmup_min_seconds": 0.02, "warmup_max_seconds": 0.1, "warmup_min_steps": 2, "warmup_window": 2,
        "loss_path_steps": 4,
    },
}  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.norm(self.layer(x))
        return y if scale is None else y * scale


class Tied(Net):
    """Holds what no pickle can carry."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.seen: list[tuple[torch.dtype, bool]] = []

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        with self.lock:
            self.seen.append((x.dtype, self.training))
        return super().forward(x, scale)


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    restore = remember_flags()
    torch.set_num_threads(1)
    yield
    restore()


def test_a_model_goes_by_its_name(own_history: Path) -> None:
    result = redline.run("simple_cnn", batch=2, recipes=["baseline", "channels-last"], **TINY)
    assert [row["recipe"] for row in result] == ["baseline", "channels-last"]
    assert not any(row.failure for row in result)
    assert all(row.value("throughput") > 0 for row in result)
    assert result[1]["compared_with"] == "baseline"
    with History.open(own_history) as history:
        assert {record.id for record in history.find()} == {row.record_id for row in result}


@pytest.mark.parametrize(
    "inputs",
    [
        torch.randn(6, 4),
        (torch.randn(6, 4), torch.ones(6, 1)),
        {"x": torch.randn(6, 4), "scale": torch.ones(6, 1)},
    ],
    ids=["tensor", "tuple", "dict"],
)
def test_a_live_module_travels_with_its_inputs(inputs: Any) -> None:
    result = redline.run(Net(), inputs, **TINY)
    (row,) = result
    assert row.failure == ""
    assert (row["model"], row["batch"]) == ("live:Net", 6)
    prepared = result.records[0].prepared
    assert prepared.isolated
    assert prepared.workload.source == "live"
    assert "not-isolated" not in row["trust"]


def test_a_live_module_defined_here_and_now_keeps_its_weights_and_mode() -> None:
    class Local(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).relu()

    model = Local(4, 3)
    before = model.weight.detach().clone()
    result = redline.run(model, torch.randn(2, 4), batch=5, recipes=["baseline", "bf16"], **TINY)
    assert [row["batch"] for row in result] == [5, 5]
    assert result[1]["numerics"] == "passed"
    assert torch.equal(model.weight, before)
    assert model.weight.dtype == torch.float32
    assert model.training


def test_a_live_module_trains_on_the_loss_it_is_given() -> None:
    result = redline.run(
        Net(), torch.randn(8, 4), loss=lambda output: output.square().mean() + 100, task="train", **TINY
    )
    (row,) = result
    assert row.failure == ""
    assert all(phase in row for phase in ("forward", "backward", "optimizer_step"))
    losses = result.records[0].prepared.numerics.losses
    assert 100 < losses[-1] < losses[0] < 110, "the loss given is the one that was minimised"


def flags() -> tuple[object, ...]:
    """What of torch and Python a bench sets for itself."""
    return (
        torch.get_num_threads(), torch.is_grad_enabled(), torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark, torch.get_default_dtype(), gc.isenabled(),
    )  # fmt: skip


@pytest.mark.parametrize("task", ["infer", "train"])
def test_a_module_that_cannot_travel_comes_back_unchanged(task: str) -> None:
    torch.manual_seed(7)
    model = Tied()
    model(torch.randn(8, 4))  # its statistics have seen something
    model.norm.eval()  # a mode of its own, as people freeze BatchNorm
    model.layer.weight.grad = torch.full_like(model.layer.weight, 3.0)
    inputs = torch.randn(8, 4)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    given, random = inputs.clone(), torch.get_rng_state()
    before = flags()

    settings = {**TINY, "threads": 2}
    result = redline.run(model, inputs, recipes=["baseline", "bf16"], task=task, **settings)

    assert [row.failure for row in result] == ["", ""]
    assert all("not-isolated" in row["trust"] for row in result), "and the verdict says so"
    assert not any("ratio" in row for row in result), "runs that merely followed each other have no ratio"
    assert {dtype for dtype, _ in model.seen} == {torch.float32, torch.bfloat16}, "it really ran here"
    after = model.state_dict()
    assert after.keys() == weights.keys()
    for name, value in weights.items():
        assert after[name].dtype == value.dtype
        assert torch.equal(after[name], value), name
    assert (model.training, model.layer.training, model.norm.training) == (True, True, False)
    assert torch.equal(model.layer.weight.grad, torch.full_like(model.layer.weight, 3.0))
    assert model.norm.weight.grad is None
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(inputs, given)
    assert torch.equal(torch.get_rng_state(), random)
    assert flags() == before
    model(inputs).sum().backward()


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"model": "resnet5"}, UsageError, "did you mean resnet50"),
        ({"model": "simple_cnn", "recipes": "compil"}, UsageError, "did you mean compile"),
        ({"model": "simple_cnn", "recipes": []}, UsageError, "at least one recipe"),
        ({"model": []}, SpecError, "name at least one model"),
        ({"model": "simple_cnn", "batch": 0}, SpecError, "batch must be 1 or more, got 0"),
        ({"model": "simple_cnn", "batsh": 2}, SpecError, "batsh"),
        ({"model": "simple_cnn", "inputs": torch.ones(1)}, UsageError, "a model by name brings its own"),
        ({"model": "simple_cnn", "loss": nn.MSELoss()}, UsageError, "a model by name brings its own"),
        ({"model": "simple_cnn", "device": "cpu:1"}, UsageError, "takes no index"),
    ],
)
def test_a_mistake_is_raised_before_anything_is_measured(
    own_history: Path, arguments: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        redline.run(**arguments)
    assert "\n" not in str(caught.value)
    assert not own_history.exists()


class TestFunctions:
    """What is callable and no module is timed as it is."""

    def test_it_is_measured_with_its_setup_and_teardown_in_a_worker(self, tmp_path: Path) -> None:
        ended = tmp_path / "ended"

        def setup(batch: int, device: str) -> Any:
            assert device == "cpu"
            return nn.Linear(4, 2), torch.ones(batch, 4)

        def train(state: Any) -> None:
            state[0](state[1]).sum().backward()

        result = redline.run(
            train, setup=setup, teardown=lambda state: ended.write_text(str(len(state))), batch=6, **TINY
        )
        (row,), (record,) = result.rows, result.records
        assert record.failure is None, record.failure
        assert (row["model"], row["task"], row["batch"], row["numerics"]) == ("live:train", "step", 6, "not checked")
        assert record.prepared.workload.batch_from == "asked"
        assert record.prepared.isolated
        assert record.prepared.workload.parameters == 10
        assert row.value("flops") == 2 * (2 * 6 * 4 * 2)
        assert ended.read_text() == "2"
        assert "live:train" in str(result)
        assert "the batch is unknown" not in str(result)

    def test_one_that_no_pickle_can_carry_runs_here(self) -> None:
        endless = (torch.ones(2) for _ in iter(int, 1))
        result = redline.run(lambda: next(endless) * 2, **TINY)
        assert result.records[0].failure is None
        assert "not-isolated" in result[0]["trust"]
        assert "redline.profile(lambda)" in str(result)

    @pytest.mark.parametrize(
        ("model", "given", "says"),
        [
            (nn.Linear, {}, "Linear is a class: pass an instance"),
            (print, {"task": "train"}, "a function is timed as it is"),
            (print, {"loss": print}, "a function is timed as it is"),
            (print, {"setup": 3}, "setup must be a function, got int"),
            (nn.Linear(2, 2), {"inputs": torch.ones(1, 2), "teardown": print}, "go with a function"),
            (nn.Linear(2, 2), {"inputs": torch.ones(1, 2), "task": "step"}, "this is a module: leave task out"),
            ("resnet18", {"task": "step"}, "task step is for a function of yours"),
        ],
    )
    def test_what_does_not_go_together_is_refused(self, model: Any, given: dict[str, Any], says: str) -> None:
        with pytest.raises(UsageError, match=says):
            redline.run(model, **given, **TINY, launch={"door": "inline"})

    def test_there_is_no_recipe_to_search_for(self) -> None:
        with pytest.raises(UsageError, match="no recipe to search"):
            redline.tune(print, device="cpu", launch={"door": "inline"})
