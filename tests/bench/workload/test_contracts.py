"""The contracts of what people bring: each kind of model works, with the batch and items that are right, or is refused in one line."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from redline.bench.count.count import answer_count
from redline.bench.memory import answer_memory
from redline.bench.session import BenchSession, check
from redline.bench.workload.called import OwnStep
from redline.bench.workload.handed import workload_of_step
from redline.model.protocol import BlockReply, Close, FailureReply, Measure, Prepare, PreparedReply, Profile, TraceReply
from redline.model.record import Failure, Prepared
from redline.model.spec import MeasureSpec, Recipe, RunSpec, WorkloadSpec

MODELS = Path(__file__).parents[2] / "models"
MEASURE = MeasureSpec(
    effort="quick", block_seconds=0.002, settle_seconds=0.0, warmup_min_seconds=0.0, warmup_min_steps=1,
    warmup_max_seconds=0.01, warmup_window=1, warmup_window_seconds=0.0, loss_path_steps=3,
)  # fmt: skip
AS_A_FUNCTION = "measure its loop as a function (--task step)"


@dataclass(frozen=True)
class Works:
    """What is right for a factory: without a batch, and with 6 asked for."""

    batch: int | None = 1
    origin: str = "asked"
    items: int = 1
    item: str = "item"
    resized: int | str = 6
    """Items at batch 6, or a part of the refusal."""
    trains: bool = True
    second: str | None = "factory"
    """Where the second inputs of the numerics come from."""


FROM_BATCH = Works()
"""The factory takes the batch: one item by default, six when asked for."""
FORWARD_ALONE = Works(trains=False)
ASKS = Works(None, "unknown", 1, "step", "add --batch-axis N (batch_axis=N), or let the factory take batch")
"""The model does not answer for each entry of the first input alone: Redline asks for the setting by name."""


def by_axis_0(size: int, **more: Any) -> Works:
    return Works(size, "scaled", size, **more)


CONTRACTS: dict[str, Works] = {
    # a list of images; sequence-first; packed, ragged and sparse; bags and graphs
    "detector": FORWARD_ALONE,
    "time_first": FROM_BATCH,
    "packed": FROM_BATCH,
    "packed_tokens": Works(items=9, item="token", resized=9 + 8 + 7 + 6 + 5 + 9),
    "nested": FROM_BATCH,
    "ragged_out": FORWARD_ALONE,
    "sparse_first": FROM_BATCH,
    "bags": FROM_BATCH,
    "graphs": FROM_BATCH,
    # keywords, dataclasses, named tuples, objects of one's own, texts, a scalar in front
    "keywords": FROM_BATCH,
    "dataclasses": FROM_BATCH,
    "named_tuples": FROM_BATCH,
    "own_objects": FROM_BATCH,
    "with_text": FROM_BATCH,
    "scalar_first": FROM_BATCH,
    "complex_numbers": FORWARD_ALONE,
    # labels in keywords, one number, both axes, integers, a distribution, targets of one's own
    "own_loss": FROM_BATCH,
    "scalar_out": FROM_BATCH,
    "two_towers": FROM_BATCH,
    "integers_out": FORWARD_ALONE,
    "distribution_out": FROM_BATCH,
    "two_targets": FROM_BATCH,
    # state between calls, buffers, inputs that are written into or emptied, gradients in the forward pass
    "stateful": FROM_BATCH,
    "in_place": FROM_BATCH,
    "overwriting": FROM_BATCH,
    "cached": FROM_BATCH,
    "popping": FROM_BATCH,
    "sampled": FROM_BATCH,
    "in_half": FROM_BATCH,
    "forces": FROM_BATCH,
    "forces_of_the_caller": FROM_BATCH,
    "one_mode": FORWARD_ALONE,
    # the factory takes no batch: axis 0 of the first input, proven by one run, or declared
    "fixed_own_loss": by_axis_0(5),
    "fixed_energy": by_axis_0(5),
    "fixed_texts": by_axis_0(5, second=None),
    "fixed_list": by_axis_0(3, trains=False),
    "fixed_towers": by_axis_0(6),
    "declared_axis": Works(4, "declared", 4),
    "declared_items": Works(None, "unknown", 15, "node", ASKS.resized),
    "fixed_time_first": ASKS,
    "fixed_encoder": ASKS,
    "fixed_graph": ASKS,
    "fixed_packed": ASKS,
}


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each session begins with one, which looks at all that the tests have loaded: half of the time these would take."""
    monkeypatch.setattr("redline.bench.prepare.gc.collect", lambda: 0)


def spec_of(name: str, recipe: str = "baseline", *, checks: bool = True, **workload: Any) -> RunSpec:
    """As a verb passes it on: checked, and as its source understands it."""
    name = name if ":" in name else f"{MODELS / 'unlike.py'}:{name}"
    spec = RunSpec(
        workload=WorkloadSpec(model=name, **workload),
        recipe=Recipe.parse(recipe),
        measure=msgspec.structs.replace(MEASURE, check_numerics=checks),
        device="cpu",
        threads=1,
    )
    answer = check(spec)
    assert answer.usage is None, answer.usage
    return answer.spec


def step_spec(name: str, **workload: Any) -> RunSpec:
    return spec_of(f"{MODELS / 'steps.py'}:{name}", **workload)


def measured(spec: RunSpec, trace: Path | None = None) -> Prepared | Failure:
    """Prepare and time one block, as `run` does."""
    session = BenchSession(lambda progress: None, isolated=False)
    try:
        reply = session.handle(Prepare(spec=spec))
        if isinstance(reply, FailureReply):
            return reply.failure
        assert isinstance(reply, PreparedReply)
        block = session.handle(Measure(kind="throughput", seconds=0.002, max_steps=2))
        assert isinstance(block, BlockReply), block
        if trace is not None:
            assert isinstance(session.handle(Profile(path=str(trace), active=1, warmup=1)), TraceReply)
        return reply.prepared
    finally:
        session.handle(Close())


def sound(spec: RunSpec) -> Prepared:
    found = measured(spec)
    assert isinstance(found, Prepared), found
    return found


def refused(spec: RunSpec) -> Failure:
    found = measured(spec)
    assert isinstance(found, Failure), found
    assert "\n" not in found.message
    return found


@pytest.mark.parametrize("name", CONTRACTS)
def test_inference_knows_its_batch_and_items(name: str) -> None:
    known, prepared = CONTRACTS[name], sound(spec_of(name))
    info = prepared.workload
    assert (info.batch, info.batch_from) == (known.batch, known.origin)
    assert (info.items_per_step, info.item) == (known.items, known.item)
    assert prepared.numerics.method == "reference"
    assert prepared.numerics.second_inputs == known.second
    unknown = [str(note) for note in info.notes if note.code == "batch-unknown"]
    assert bool(unknown) == (known.item == "step")
    assert all("add --batch-axis N (batch_axis=N) or --items N (items=N)" in note for note in unknown)


@pytest.mark.parametrize("name", CONTRACTS)
def test_another_batch_is_what_was_asked_for_or_refused(name: str) -> None:
    known = CONTRACTS[name]
    if isinstance(known.resized, str):
        found = refused(spec_of(name, batch=6))
        assert found.kind == "user"
        assert known.resized in found.message
    else:
        info = sound(spec_of(name, batch=6)).workload
        assert (info.batch, info.items_per_step) == (6, known.resized)


@pytest.mark.parametrize("name", [name for name, known in CONTRACTS.items() if known.trains])
def test_training_knows_them_too(name: str) -> None:
    known = CONTRACTS[name]
    batch = 2 if known.origin == "asked" else None
    assert sound(spec_of(name, task="train", batch=batch)).workload.batch == (batch or known.batch)


@pytest.mark.parametrize("name", CONTRACTS)
def test_work_is_counted_for_the_batch(name: str) -> None:
    known, counted = CONTRACTS[name], answer_count(spec_of(name))
    assert counted.work.params == counted.workload.parameters
    # Counting does not run the model to ask it.
    assert counted.workload.batch == (None if known.origin == "scaled" else known.batch)
    if isinstance(known.resized, int):
        six = answer_count(spec_of(name, batch=6))
        assert six.workload.batch == 6
        if counted.work.flops and known.origin == "asked":
            assert six.work.flops > counted.work.flops


def test_a_detector_trains_on_its_own_boxes() -> None:
    info = sound(spec_of("detector_training", task="train", batch=2)).workload
    assert (info.batch, info.items_per_step) == (2, 2)


REFUSED: list[tuple[RunSpec, str, str]] = [
    (
        spec_of("ignoring"),
        "user",
        "takes batch but gives the same inputs for 1 and 2: make the inputs with it, or leave it out",
    ),
    (spec_of("undifferentiated", task="train", batch=2), "user", "no gradient reaches the loss"),
    (spec_of("ragged_out", task="train", batch=2), "user", "the model returned a ragged tensor"),
    (
        spec_of("one_mode", task="train"),
        "unsupported",
        "OneMode cannot be trained: NotImplementedError: Calling train()",
    ),
    (
        spec_of("lazily"),
        "user",
        "Lazily returned a generator: nothing of it has run yet; let a module of yours call it and use it up",
    ),
    (step_spec("greedy_step"), "user", "must be given 2 more arguments: a step takes nothing"),
    (step_spec("model_step"), "user", "is timed as it is, but it returned a module"),
    (step_spec("teardown"), "user", "must be given state, which Redline does not know"),
    (step_spec("by_hand", task="train"), "user", f"optimizes by hand: {AS_A_FUNCTION}"),
    (step_spec("two_optimizers", task="train"), "user", f"has 2 optimizers: {AS_A_FUNCTION}"),
    (
        step_spec("lit", task="train", batch=6, optimizer="adam"),
        "user",
        "cannot be honoured: Lit brings its own",
    ),
    # Its mask is made in fp32, and meets weights in bf16: what only a switch breaks is not the user's fault.
    (spec_of("graphs", "amp-bf16", batch=2), "unsupported", ""),
]


@pytest.mark.parametrize(("spec", "kind", "says"), REFUSED, ids=lambda part: getattr(part, "fingerprint", None))
def test_what_cannot_be_is_refused_in_one_line(spec: RunSpec, kind: str, says: str) -> None:
    found = refused(spec)
    assert (found.kind, found.switches) == (kind, tuple(map(str, spec.recipe.switches)))
    assert says in found.message


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("forces", "measured with torch.no_grad(): the model fails in inference mode"),
        (
            "forces_of_the_caller",
            "measured with gradients on: the model fails in inference mode and under torch.no_grad()",
        ),
    ],
)
@pytest.mark.parametrize("checks", [True, False])
def test_a_model_that_inference_mode_refuses_says_how_it_was_measured(name: str, told: str, checks: bool) -> None:
    notes = sound(spec_of(name, checks=checks)).workload.notes
    assert [str(note) for note in notes if note.code == "model"] == [told]


def test_what_returns_nothing_is_timed_and_not_compared() -> None:
    numerics = sound(spec_of("silent")).numerics
    assert (numerics.method, numerics.is_left_out) == ("unchecked", True)
    assert "neither tensors nor numbers" in str(numerics.reason)


@pytest.mark.parametrize(
    ("name", "why"), [("silent", "nothing"), ("integers_out", "int64"), ("ragged_out", "a ragged tensor")]
)
def test_why_no_backward_pass_is_counted_is_one_sentence(name: str, why: str) -> None:
    (told,) = answer_count(spec_of(name)).work.notes
    assert str(told).startswith("backward not counted: no loss to train on: the model returned ")
    assert why in str(told)


def test_the_backward_pass_is_counted_with_targets_of_ones_own() -> None:
    work = answer_count(spec_of("two_targets", batch=2)).work
    assert not work.notes
    # One linear layer of 6 to 30 on 14 tokens: gradients of its inputs and of its weights.
    assert work.backward_flops == 2 * (2 * 14 * 6 * 30)


@pytest.mark.parametrize(
    ("name", "task", "recipe"),
    [
        ("overwriting", "infer", "torchscript"),
        ("overwriting", "train", "amp-bf16"),
        ("overwriting", "infer", None),
        ("cached", "train", None),
        ("popping", "infer", None),
    ],
)
def test_inputs_that_a_model_writes_into_are_restored(name: str, task: Any, recipe: str | None) -> None:
    """For every recipe that is compared, and where nothing is compared too."""
    spec = spec_of(name, recipe or "baseline", checks=recipe is not None, batch=4, task=task)
    found = sound(spec)
    assert recipe is None or found.numerics.passed, found.numerics
    assert [note.code for note in found.workload.notes] == ["input"]
    assert recipe or answer_memory(spec).use.peak_bytes > 0
    plain = spec_of("scalar_first", checks=recipe is not None, batch=4, task=task)
    assert not sound(plain).workload.notes


@pytest.mark.parametrize("name", ["sampled", "in_half"])
def test_a_recipe_that_changes_nothing_passes_whatever_the_model_draws_or_holds(name: str) -> None:
    """The same random numbers for both, and for a model in bf16 the tolerance of bf16."""
    found = sound(spec_of(name, "torchscript", batch=4))
    assert found.numerics.passed, found.numerics
    other = sound(spec_of(name, "bf16", batch=4)).numerics
    assert other.passed or other.reason.code == "unresolved", other


# Functions that are timed as they are, and modules that train themselves


def test_a_function_called_step_is_timed_and_profiled_as_it_is(tmp_path: Path) -> None:
    spec = step_spec("step", batch=5)
    assert spec.workload.task == "step"
    prepared = measured(spec, tmp_path / "trace.json.gz")
    assert isinstance(prepared, Prepared), prepared
    info = prepared.workload
    assert (info.class_name, info.batch, info.batch_from, info.items_per_step) == ("step", 5, "asked", 5)
    assert prepared.numerics.method == "unchecked"
    assert (tmp_path / "trace.json.gz").stat().st_size > 0
    model, optimizer, batches = sys.modules["steps"].closed[-1]
    assert isinstance(model, nn.Linear), "teardown was called with what setup made"
    assert [batch.shape[0] for batch in batches] == [5, 5]
    assert optimizer.state, "its own optimizer ran"
    default = sound(step_spec("alone_step")).workload
    assert (default.batch, default.batch_from, default.item) == (3, "declared", "item"), "as the file's setup says"
    assert sound(step_spec("alone_step", items=64)).workload.items_per_step == 64


def test_its_work_is_counted_in_one_real_call() -> None:
    counted = answer_count(step_spec("step", batch=5))
    # Two batches of 5×4 by 4×2; the gradient of the weight costs as much again, the inputs have none.
    product = 2 * 5 * 4 * 2
    assert (counted.work.flops, counted.work.backward_flops) == (2 * product, 2 * product)
    assert counted.work.for_these_inputs
    assert counted.work.params == counted.workload.parameters == 4 * 2 + 2, "the model that its setup made"
    assert [row.type for row in counted.work.modules] == ["StepModule", "Linear"]
    assert any(one.phase == "optimizer" for one in counted.work.operators)
    assert answer_count(step_spec("alone_step")).work.flops == 2 * 8**3


@pytest.mark.parametrize(
    ("model", "task", "recipe", "says"),
    [
        (f"{MODELS / 'steps.py'}:step", "infer", "fp16", "switch fp16 is for infer, train, generate, not for step"),
        ("resnet18", "step", "baseline", "task step is for a function of yours"),
    ],
)
def test_a_function_and_a_model_have_their_own_settings(model: str, task: Any, recipe: str, says: str) -> None:
    spec = RunSpec(workload=WorkloadSpec(model=model, task=task), recipe=Recipe.parse(recipe), device="cpu")
    assert says in str(check(spec).usage)


def test_the_modules_a_function_reaches_are_found() -> None:
    inner, other = nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1))

    class Holder:
        def __init__(self) -> None:
            self.net = other
            self.again = other[0]

        def step(self) -> Any:
            return inner(torch.ones(1)) + self.net(torch.ones(1))

    assert OwnStep(Holder().step, "step").modules() == {"inner": inner, "net": other}


def test_a_function_keeps_the_mode_and_the_place_of_its_model() -> None:
    model, spec = nn.Dropout(), WorkloadSpec(model="live:step", task="step")
    step = OwnStep(lambda x: model(x), "step", ((torch.ones(2, dtype=torch.float64),), {}))
    workload = workload_of_step(step, spec, source="live", identity="", seed=0).to("cpu")
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


def test_a_module_that_trains_itself_uses_its_own_step_and_optimizer() -> None:
    prepared = sound(step_spec("lit", task="train", batch=6))
    info = prepared.workload
    assert (info.batch, info.loss, info.optimizer) == (6, "output.loss", "AdamW of its own")
    assert prepared.numerics.passed
    refused(step_spec("lit", batch=6))  # its forward takes the pictures alone, and was given the labels too


def test_a_model_without_values_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "on_meta.py"
    file.write_text(
        "import torch\ndef make(batch):\n    with torch.device('meta'):\n        model = torch.nn.Linear(3, 2)\n"
        "    return model, torch.ones(batch, 3)\n"
    )
    assert "Linear has weights on the meta device" in refused(spec_of(f"{file}:make")).message
    assert answer_count(spec_of(f"{file}:make")).work.macs == 6
