"""Any function is measured as it is, with its setup and teardown; a module that trains itself does so."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import steps
from torch import nn

from redline.bench.count.ask import answer_count
from redline.bench.questions import check
from redline.bench.session import BenchSession
from redline.bench.workload.called import OwnStep, TrainsItself, one_optimizer
from redline.bench.workload.handed import workload_of_step
from redline.model.errors import BenchError
from redline.model.protocol import BlockReply, Close, FailureReply, Measure, Prepare, PreparedReply, Profile, TraceReply
from redline.model.record import Failure, Prepared
from redline.model.spec import MeasureSpec, Recipe, RunSpec, WorkloadSpec

FILE = Path(__file__).parents[2] / "models" / "steps.py"
MEASURE = MeasureSpec(
    effort="quick", block_seconds=0.002, settle_seconds=0.0, warmup_min_seconds=0.0, warmup_min_steps=1,
    warmup_max_seconds=0.01, warmup_window=1, warmup_window_seconds=0.0, loss_path_steps=3,
)  # fmt: skip


def spec_of(name: str, recipe: str = "baseline", **workload: Any) -> RunSpec:
    """As a verb passes it on: checked, and as its source understands it."""
    spec = RunSpec(
        workload=WorkloadSpec(model=f"{FILE}:{name}", **workload),
        recipe=Recipe.parse(recipe),
        measure=MEASURE,
        device="cpu",
        threads=1,
    )
    answer = check(spec)
    assert answer.usage is None, answer.usage
    return answer.spec


def measured(spec: RunSpec, trace: Path | None = None) -> Prepared | Failure:
    session = BenchSession(lambda progress: None, isolated=False)
    try:
        reply = session.handle(Prepare(spec=spec))
        if isinstance(reply, FailureReply):
            return reply.failure
        assert isinstance(reply, PreparedReply)
        block = session.handle(Measure(kind="throughput", seconds=0.002, max_steps=2))
        assert isinstance(block, BlockReply), block
        if trace is not None:
            captured = session.handle(Profile(path=str(trace), active=1, warmup=1))
            assert isinstance(captured, TraceReply), captured
        return reply.prepared
    finally:
        session.handle(Close())


def failed(spec: RunSpec) -> str:
    found = measured(spec)
    assert isinstance(found, Failure), found
    assert found.kind == "user"
    return found.message


def test_a_function_called_step_is_timed_as_it_is(tmp_path: Path) -> None:
    spec = spec_of("step")
    assert spec.workload.task == "step"
    prepared = measured(spec, tmp_path / "trace.json.gz")
    assert isinstance(prepared, Prepared), prepared
    info = prepared.workload
    assert info.class_name == "step"
    assert (info.batch, info.batch_from, info.items_per_step) == (3, "declared", 3), "as its setup says"
    assert prepared.numerics.method == "unchecked"
    assert (tmp_path / "trace.json.gz").stat().st_size > 0


def test_setup_is_told_the_batch_and_teardown_ends_it() -> None:
    prepared = measured(spec_of("step", batch=5))
    assert isinstance(prepared, Prepared), prepared
    assert (prepared.workload.batch, prepared.workload.batch_from) == (5, "asked")
    closed = importlib.import_module("steps").closed if "steps" in sys.modules else []
    assert closed, "teardown was called"
    model, optimizer, batches = closed[-1]
    assert isinstance(model, nn.Linear)
    assert [each.shape[0] for each in batches] == [5, 5]
    assert optimizer.state, "its own optimizer ran"


def test_its_work_is_counted_in_one_real_call() -> None:
    counted = answer_count(spec_of("step", batch=5))
    # Two batches of 5×4 by 4×2; the gradient of the weight costs as much again, the inputs have none.
    product = 2 * 5 * 4 * 2
    assert (counted.work.flops, counted.work.backward_flops) == (2 * product, 2 * product)
    assert counted.work.for_these_inputs
    assert counted.work.params == counted.workload.parameters == 4 * 2 + 2, "the model that its setup made"
    assert [row.type for row in counted.work.modules] == ["StepModule", "Linear"]
    assert any(one.phase == "optimizer" for one in counted.work.operators)
    assert answer_count(spec_of("alone_step")).work.flops == 2 * 8**3


def test_a_function_without_items_is_counted_in_steps() -> None:
    prepared = measured(spec_of("alone_step"))
    assert isinstance(prepared, Prepared), prepared
    assert (prepared.workload.batch, prepared.workload.item) == (3, "item"), "the file's setup belongs to all its steps"
    items = measured(spec_of("alone_step", items=64))
    assert isinstance(items, Prepared)
    assert items.workload.items_per_step == 64


@pytest.mark.parametrize(
    ("name", "task", "says"),
    [
        ("greedy_step", "infer", "must be given 2 more arguments: a step takes nothing"),
        ("model_step", "infer", "is timed as it is, but it returned a module"),
        ("teardown", "infer", "must be given state, which Redline does not know"),
        ("by_hand", "train", "optimizes by hand: measure its loop as a function"),
        ("two_optimizers", "train", "has 2 optimizers: measure its loop as a function"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(name: str, task: Any, says: str) -> None:
    told = failed(spec_of(name, task=task))
    assert says in told
    assert "\n" not in told


def test_a_module_that_trains_itself_uses_its_own_step_and_optimizer() -> None:
    prepared = measured(spec_of("lit", task="train", batch=6))
    assert isinstance(prepared, Prepared), prepared
    info = prepared.workload
    assert (info.batch, info.loss, info.optimizer) == (6, "output.loss", "AdamW of its own")
    assert prepared.numerics.passed
    inferred = measured(spec_of("lit", batch=6))
    assert isinstance(inferred, Failure), "its forward takes the pictures alone, and was given the labels too"
    assert "cannot be honoured: Lit brings its own" in failed(spec_of("lit", task="train", batch=6, optimizer="adam"))


def test_switches_that_change_a_model_are_refused_for_a_function() -> None:
    spec = RunSpec(workload=WorkloadSpec(model=f"{FILE}:step"), recipe=Recipe.parse("fp16"), device="cpu")
    assert check(spec).usage == "switch fp16 is for infer, train and generate, not for step"
    named = RunSpec(workload=WorkloadSpec(model="resnet18", task="step"), device="cpu")
    assert "task step is for a function of yours" in str(check(named).usage)


def test_one_optimizer_is_found_in_all_that_lightning_allows() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    for configured in (
        optimizer,
        [optimizer],
        ([optimizer], []),
        {"optimizer": optimizer},
        [{"optimizer": optimizer, "lr_scheduler": None}],
    ):
        assert one_optimizer(configured, "Net") is optimizer
    for configured, says in ((None, "gave NoneType"), ([], "has 0 optimizers"), ([optimizer] * 2, "has 2 optimizers")):
        with pytest.raises(BenchError, match=says):
            one_optimizer(configured, "Net")
    with pytest.raises(BenchError, match="LBFGS"):
        one_optimizer(torch.optim.LBFGS(nn.Linear(1, 1).parameters()), "Net")


def test_hooks_that_a_bare_step_does_not_call_are_refused_or_named() -> None:
    class Clips(steps.Lit):
        def configure_gradient_clipping(self) -> None: ...

    class Watches(steps.Lit):
        def on_train_batch_start(self) -> None: ...

    with pytest.raises(BenchError, match="has its own configure_gradient_clipping"):
        TrainsItself(Clips())
    assert TrainsItself(Watches()).unused_hooks == ["on_train_batch_start"]
    assert TrainsItself(steps.Lit()).unused_hooks == []


def test_the_modules_a_function_reaches_are_found() -> None:
    inner, other = nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1))

    class Holder:
        def __init__(self) -> None:
            self.net = other
            self.again = other[0]

        def step(self) -> Any:
            return inner(torch.ones(1)) + self.net(torch.ones(1))

    found = OwnStep(Holder().step, "step").modules()
    assert {id(module) for module in found.values()} == {id(inner), id(other)}
    assert {"inner", "net"} == found.keys()


def test_a_function_keeps_the_mode_and_the_place_of_its_model() -> None:
    model = nn.Dropout()
    workload = workload_of_step(
        OwnStep(lambda x: model(x), "step", ((torch.ones(2, dtype=torch.float64),), {})),
        WorkloadSpec(model="live:step", task="step"),
        source="live",
        identity="",
        seed=0,
    ).to("cpu")
    assert model.training
    assert workload.args[0].dtype == torch.float64
    assert workload.info().item == "step"


def test_what_teardown_raises_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(state: Any) -> None:
        raise ValueError("still open")

    step = OwnStep(lambda: None, "step", setup=lambda device: device, teardown=broken)
    step.close()
    assert capsys.readouterr().out == "", "never set up, never torn down"
    step.start("cpu", None, 0)
    step.close()
    assert "teardown of step raised ValueError: still open" in capsys.readouterr().out


def test_a_model_without_values_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "on_meta.py"
    file.write_text(
        "import torch\ndef make(batch):\n    with torch.device('meta'):\n        model = torch.nn.Linear(3, 2)\n"
        "    return model, torch.ones(batch, 3)\n"
    )
    spec = RunSpec(workload=WorkloadSpec(model=f"{file}:make"), measure=MEASURE, device="cpu", threads=1)
    assert "Linear has weights on the meta device" in failed(spec)
    assert answer_count(spec).work.macs == 6
