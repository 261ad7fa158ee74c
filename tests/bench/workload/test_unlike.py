"""Batch and items of unlike models, each known by hand; what cannot be known is said and refused, never guessed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from redline.bench.count.ask import answer_count
from redline.bench.memory import answer_memory
from redline.bench.session import BenchSession
from redline.model.errors import BenchError
from redline.model.protocol import BlockReply, Close, FailureReply, Measure, Prepare, PreparedReply
from redline.model.record import Failure, Prepared
from redline.model.spec import MeasureSpec, Recipe, RunSpec, WorkloadSpec

PLACE = Path(__file__).parents[2] / "models" / "unlike.py"

MEASURE = MeasureSpec(
    effort="quick", block_seconds=0.002, settle_seconds=0.0, warmup_min_seconds=0.0, warmup_min_steps=1,
    warmup_max_seconds=0.01, warmup_window=1, warmup_window_seconds=0.0, loss_path_steps=3,
)  # fmt: skip


@dataclass(frozen=True)
class Known:
    """What is right for a factory: without a batch, and with `resized` asked for."""

    batch: int | None
    origin: str
    items: int
    item: str = "item"
    resized: int | str = "let the factory take batch, or declare batch_axis"
    """Items at batch 6, or part of the refusal."""
    trains: bool = True
    second: str | None = "factory"
    """Where the second inputs of the numerics come from."""


TOLD = Known(1, "asked", 1, resized=6)
"""A factory that takes the batch: one item by default, six when asked for."""
UNKNOWN = Known(None, "unknown", 1, "step")
"""The model does not answer for each entry of the first input alone: Redline asks for the setting by name."""

MODELS: dict[str, Known] = {
    "detector": Known(1, "asked", 1, resized=6, trains=False),
    "time_first": TOLD,
    "positions_first": TOLD,
    "scalar_first": TOLD,
    "packed": TOLD,
    "packed_tokens": Known(1, "asked", 9, "token", resized=9 + 8 + 7 + 6 + 5 + 9),
    "sorted_lengths": TOLD,
    "bags": TOLD,
    "graphs": TOLD,
    "nested": TOLD,
    "ragged_out": Known(1, "asked", 1, resized=6, trains=False),
    "one_mode": Known(1, "asked", 1, resized=6, trains=False),
    "keywords": TOLD,
    "dataclasses": TOLD,
    "named_tuples": TOLD,
    "nesting": TOLD,
    "integers_out": Known(1, "asked", 1, resized=6, trains=False),
    "complex_numbers": Known(1, "asked", 1, resized=6, trains=False),
    "two_towers": TOLD,
    "stateful": TOLD,
    "in_place": TOLD,
    "constrained": TOLD,
    "video": TOLD,
    "audio": TOLD,
    "diffusion": TOLD,
    "point_clouds": TOLD,
    "sparse_first": TOLD,
    "with_text": TOLD,
    "own_loss": TOLD,
    "scalar_out": TOLD,
    "overwriting": TOLD,
    "sampled": TOLD,
    "in_half": TOLD,
    "popping": TOLD,
    "forces": TOLD,
    "forces_of_the_caller": TOLD,
    "compressed_rows": TOLD,
    "own_objects": TOLD,
    "distribution_out": TOLD,
    "two_targets": TOLD,
    "cached": TOLD,
    "routed": TOLD,
    "related": TOLD,
    "fixed_sampled": UNKNOWN,
    "fixed_own_loss": Known(5, "scaled", 5, resized=6),
    "fixed_energy": Known(5, "scaled", 5, resized=6),
    "fixed_contrast": UNKNOWN,
    "fixed_fours": Known(4, "scaled", 4, resized="shape '[4, -1, 6]' is invalid"),
    "fixed_texts": Known(5, "scaled", 5, resized=6, second=None),
    "fixed_relations": UNKNOWN,
    "ignoring": Known(8, "scaled", 8, resized="takes batch but gives the same inputs for 6 and 12"),
    "of_layers": Known(5, "scaled", 5, resized=6),
    "fixed_pair_of_states": UNKNOWN,
    "fixed_images": Known(8, "scaled", 8, resized=6),
    "fixed_one_image": Known(1, "scaled", 1, resized=6),
    "fixed_time_first": UNKNOWN,
    "fixed_positions": UNKNOWN,
    "fixed_encoder": UNKNOWN,
    "fixed_list": Known(3, "scaled", 3, resized=6, trains=False),
    "fixed_towers": Known(6, "scaled", 6, resized=6),
    "fixed_zero_head": Known(5, "scaled", 5, resized=6),
    "fixed_state": Known(4, "scaled", 4, resized=6),
    "fixed_graph": UNKNOWN,
    "fixed_edges": UNKNOWN,
    "fixed_bags": UNKNOWN,
    "fixed_packed": UNKNOWN,
    "fixed_pointwise": Known(4, "scaled", 4, resized=6),
    "fixed_for_four": UNKNOWN,
    "fixed_mixture": Known(4, "scaled", 4, resized=6, second=None),
    "declared_axis": Known(4, "declared", 4, resized=6),
    "declared_items": Known(None, "unknown", 15, "node"),
}


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each session begins with one, which looks at all that the tests have loaded: half of the time these would take."""
    monkeypatch.setattr("redline.bench.prepare.gc.collect", lambda: 0)


def spec_of(name: str, **workload: Any) -> RunSpec:
    return RunSpec(workload=WorkloadSpec(model=f"{PLACE}:{name}", **workload), measure=MEASURE, device="cpu", threads=1)


def measured(spec: RunSpec) -> Prepared | Failure:
    """Prepare and time one block, as `run` does."""
    session = BenchSession(lambda progress: None, isolated=False)
    try:
        reply = session.handle(Prepare(spec=spec))
        if isinstance(reply, FailureReply):
            return reply.failure
        assert isinstance(reply, PreparedReply)
        block = session.handle(Measure(kind="throughput", seconds=0.002, max_steps=2))
        assert isinstance(block, BlockReply), block
        return reply.prepared
    finally:
        session.handle(Close())


def sound(spec: RunSpec) -> Prepared:
    found = measured(spec)
    assert isinstance(found, Prepared), found
    return found


def test_there_are_enough_of_them() -> None:
    assert len(MODELS) >= 30


@pytest.mark.parametrize("name", MODELS)
def test_inference_knows_its_batch_and_items(name: str) -> None:
    known = MODELS[name]
    prepared = sound(spec_of(name))
    info = prepared.workload
    assert (info.batch, info.batch_from) == (known.batch, known.origin)
    assert (info.items_per_step, info.item) == (known.items, known.item)
    assert prepared.numerics.method == "reference"
    assert prepared.numerics.second_inputs == known.second
    unknown = [note for note in info.notes if note.code == "batch-unknown"]
    assert bool(unknown) == (known.item == "step")
    assert all("add --batch-axis N (batch_axis=N) or --items N (items=N)" in str(note) for note in unknown)


@pytest.mark.parametrize("name", MODELS)
def test_another_batch_is_what_was_asked_for_or_refused(name: str) -> None:
    known = MODELS[name]
    found = measured(spec_of(name, batch=6))
    if isinstance(known.resized, str):
        assert isinstance(found, Failure)
        assert found.kind == "user"
        assert known.resized in found.message
        return
    assert isinstance(found, Prepared), found
    assert (found.workload.batch, found.workload.items_per_step) == (6, known.resized)


@pytest.mark.parametrize("name", [name for name, known in MODELS.items() if known.trains])
def test_training_knows_them_too(name: str) -> None:
    known = MODELS[name]
    batch = 2 if known.origin == "asked" else None
    info = sound(spec_of(name, task="train", batch=batch)).workload
    assert info.batch == (batch or known.batch)


def test_a_detector_trains_on_its_own_boxes() -> None:
    info = sound(spec_of("detector_training", task="train", batch=2)).workload
    assert (info.batch, info.items_per_step) == (2, 2)


@pytest.mark.parametrize("name", MODELS)
def test_work_is_counted_for_the_batch(name: str) -> None:
    known = MODELS[name]
    counted = answer_count(spec_of(name))
    assert counted.work.params == counted.workload.parameters
    expected = None if known.origin == "scaled" else known.batch  # counting does not run the model to ask it
    assert counted.workload.batch == expected
    if isinstance(known.resized, int):
        six = answer_count(spec_of(name, batch=6))
        assert six.workload.batch == 6
        if counted.work.flops and known.origin == "asked":
            assert six.work.flops > counted.work.flops


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
def test_a_model_that_inference_mode_refuses_says_how_it_was_measured(name: str, told: str) -> None:
    for check in (True, False):
        spec = spec_of(name)
        measure = msgspec.structs.replace(spec.measure, check_numerics=check)
        notes = sound(msgspec.structs.replace(spec, measure=measure)).workload.notes
        assert [str(note) for note in notes if note.code == "model"] == [told]


def test_a_model_that_fails_whatever_the_mode_fails_as_it_did_first() -> None:
    found = measured(spec_of("detector_training", batch=1))
    assert isinstance(found, Prepared)
    found = measured(spec_of("lazily"))
    assert isinstance(found, Failure)
    with pytest.raises(BenchError, match="Lazily returned a generator"):
        answer_count(spec_of("lazily"))
    assert (found.kind, found.message) == (
        "user",
        "Lazily returned a generator: nothing of it has run yet; let a module of yours call it and use it up",
    )


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("undifferentiated", "user", "no gradient reaches the loss"),
        ("ragged_out", "user", "the model returned a ragged tensor"),
        ("one_mode", "unsupported", "OneMode cannot be trained: NotImplementedError: Calling train()"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(name: str, kind: str, says: str) -> None:
    found = measured(spec_of(name, task="train", batch=2))
    assert isinstance(found, Failure)
    assert found.kind == kind
    assert says in found.message


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


@pytest.mark.parametrize(("task", "recipe"), [("infer", "torchscript"), ("train", "amp-bf16")])
def test_inputs_that_a_model_writes_into_are_the_same_for_every_recipe(task: Any, recipe: str) -> None:
    spec = spec_of("overwriting", batch=4, task=task)
    found = sound(msgspec.structs.replace(spec, recipe=Recipe.parse(recipe)))
    assert found.numerics.passed, found.numerics
    assert [note.code for note in found.workload.notes] == ["input"]
    plain = sound(spec_of("scalar_first", batch=4)).workload.notes
    assert not plain


@pytest.mark.parametrize(("name", "task"), [("overwriting", "infer"), ("cached", "train"), ("cached", "infer")])
def test_they_are_restored_where_nothing_is_compared_too(name: str, task: Any) -> None:
    spec = spec_of(name, batch=4, task=task)
    unchecked = msgspec.structs.replace(spec, measure=msgspec.structs.replace(MEASURE, check_numerics=False))
    assert [note.code for note in sound(unchecked).workload.notes] == ["input"]
    assert answer_memory(spec).use.peak_bytes > 0
    plain = spec_of("scalar_first", batch=4, task=task)
    plain = msgspec.structs.replace(plain, measure=unchecked.measure)
    assert not sound(plain).workload.notes


def test_what_only_a_switch_breaks_is_not_the_users_fault() -> None:
    """Its mask is made in fp32, and meets weights in bf16."""
    found = measured(msgspec.structs.replace(spec_of("graphs", batch=2), recipe=Recipe.parse("amp-bf16")))
    assert isinstance(found, Failure)
    assert (found.kind, found.switches) == ("unsupported", ("amp-bf16",)), found.message


@pytest.mark.parametrize("name", ["sampled", "in_half"])
def test_a_recipe_that_changes_nothing_passes_whatever_the_model_draws_or_holds(name: str) -> None:
    """The same random numbers for both, and for a model in bf16 the tolerance of bf16."""
    found = sound(msgspec.structs.replace(spec_of(name, batch=4), recipe=Recipe.parse("torchscript")))
    assert found.numerics.passed, found.numerics
    other = sound(msgspec.structs.replace(spec_of(name, batch=4), recipe=Recipe.parse("bf16"))).numerics
    assert other.passed or other.reason.code == "unresolved", other
