"""Advice comes from what the bench found applicable and from the device's own ceilings, never from names."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from by_hand import make_prepared, make_record

from redline.analyze.advice import FASTER_FORMAT, worth_trying
from redline.model.record import Failure
from redline.model.spec import Recipe
from redline.model.work import Ceilings, OperatorWork, WorkCount


def ceilings(kind: str = "cuda", **flops_per_s: float) -> Ceilings:
    return Ceilings(
        kind=kind, name="some device", driver=None, torch=None, threads=None,
        flops_per_s=flops_per_s, copy_bytes_per_s=1e12, launch_s=1e-5,
    )  # fmt: skip


def work(flops: int) -> WorkCount:
    operator = OperatorWork(
        name="mm", kind="matmul", number_format="fp32", phase="forward", calls=1, flops=flops, bytes=1
    )
    return WorkCount(params=1, compulsory_bytes=1, operators=(operator,))


@pytest.fixture
def applicable() -> Any:
    def make(*recipes: str, kind: str = "cuda", **changes: Any) -> Any:
        device = "cuda:0" if kind == "cuda" else kind
        return make_record(device=device, prepared=make_prepared(kind, applicable=recipes, **changes))

    return make


def test_only_what_the_bench_found_applicable_the_best_last(applicable: Any) -> None:
    record = applicable("fp16+compile", "graphs", "tf32")
    assert worth_trying(record, None) == ("graphs", "fp16+compile")
    assert worth_trying(applicable(), None) == ()


def test_what_was_measured_already_is_left_out_however_it_was_written(applicable: Any) -> None:
    record = applicable("fp16+compile", "graphs", "tf32")
    assert worth_trying(record, None, known=["compile+fp16"]) == ("tf32", "graphs")


def test_what_the_recipe_does_already_is_no_advice(applicable: Any) -> None:
    record = applicable("compile", "fp16+compile", "compile:reduce-overhead", "fp16+graphs", "compile:max-autotune")
    spec = msgspec.structs.replace(record.spec, recipe=Recipe.parse("fp16+compile:pdl+graphs"))
    assert worth_trying(msgspec.structs.replace(record, spec=spec), None) == ("compile:max-autotune",)
    spec = msgspec.structs.replace(record.spec, recipe=Recipe.parse("compile"))
    assert worth_trying(msgspec.structs.replace(record, spec=spec), None) == ("compile:reduce-overhead", "fp16+compile")


@pytest.mark.parametrize("recipe", ["tf32", "fp16", "bf16", "amp", "amp-bf16"])
@pytest.mark.parametrize(("ratio", "helps"), [(FASTER_FORMAT, True), (0.99 * FASTER_FORMAT, False)])
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_a_number_format_helps_where_the_device_multiplies_faster_in_it(
    recipe: str, ratio: float, helps: bool, kind: str, applicable: Any
) -> None:
    form = {"amp": "fp16", "amp-bf16": "bf16"}.get(recipe, recipe)
    known = ceilings(kind, **{"fp32": 1e13, form: ratio * 1e13})
    assert bool(worth_trying(applicable(recipe, kind=kind), known)) is helps
    assert not worth_trying(applicable(recipe, kind=kind), ceilings(kind, fp32=1e13)), "the device does not have it"


@pytest.mark.parametrize("known", [None, ceilings("cpu", bf16=1e14)])
def test_without_a_ceiling_a_format_is_believed_of_a_gpu_and_not_of_a_cpu(
    known: Ceilings | None, applicable: Any
) -> None:
    assert worth_trying(applicable("bf16", "compile"), known) == ("compile", "bf16")
    assert worth_trying(applicable("bf16", "compile", kind="cpu"), known) == ("compile",)


def test_no_format_where_nothing_is_multiplied(applicable: Any) -> None:
    assert worth_trying(applicable("fp16", "compile", work=work(0)), None) == ("compile",)
    assert worth_trying(applicable("fp16", "compile", work=work(10)), None) == ("compile", "fp16")


def test_what_takes_python_out_comes_first_where_the_host_holds_it_up(applicable: Any) -> None:
    record = applicable("fp16+compile", "fp16", "compile:reduce-overhead", "fp16+graphs")
    assert worth_trying(record, None, host_bound=True) == ("fp16+graphs", "compile:reduce-overhead")


def test_nothing_for_what_failed_or_was_never_prepared(applicable: Any) -> None:
    record = applicable("compile")
    failure = Failure(stage="measure", kind="oom", message="")
    assert worth_trying(msgspec.structs.replace(record, failure=failure), None) == ()
    assert worth_trying(msgspec.structs.replace(record, prepared=None), None) == ()
