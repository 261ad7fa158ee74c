"""What broke is told of the recipe and the batch that it broke at, and of nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from reported import MIB, fake_door, sweep_records

from redline.model.record import Failure, RunRecord
from redline.show.contents import contents_of

OOM = Failure(stage="first-call", kind="oom", message="out of memory")


def told(records: Sequence[RunRecord]) -> list[tuple[str, tuple[str, ...]]]:
    return [(advice.headline, advice.details) for advice in contents_of(records).advice if advice.kind == "failed"]


def broken(record: RunRecord, failure: Failure) -> RunRecord:
    return msgspec.structs.replace(record, failure=failure, prepared=None, blocks=())


def test_each_recipe_ends_at_its_own_batch() -> None:
    small = fake_door(memory_bytes=lambda spec: (20 if spec.recipe.switches else 40) * (spec.workload.batch or 1) * MIB)
    records = sweep_records(small, recipe=["baseline", "fp16", "channels-last"], batches=[1, 90, 120, 240])
    assert told(records) == [
        ("resnet50 does not fit from batch 120 on with baseline: out of memory", ("baseline: 120, 240",)),
        (
            "resnet50 does not fit from batch 240 on with fp16, channels-last: out of memory",
            ("fp16: 240", "channels-last: 240"),
        ),
    ]


def test_no_batch_is_said_not_to_fit_below_one_that_ran() -> None:
    first, *others = sweep_records(recipe="baseline", batches=[60, 80, 500])
    assert told([broken(first, OOM), *others]) == [
        ("resnet50 does not fit from batch 500 on with baseline: out of memory", ("baseline: 60, 500",))
    ]
    assert told([broken(first, OOM), others[0]]) == [
        ("resnet50 ran out of memory with baseline, though a larger batch ran", ("baseline: 60",))
    ]


def test_a_reference_that_does_not_fit_is_not_the_recipes_fault() -> None:
    ran, large = sweep_records(recipe="fp16", batches=[8, 100], image_size=32)
    reference = msgspec.structs.replace(OOM, stage="reference")
    assert told([ran, broken(large, reference)]) == [
        (
            "The strict fp32 reference of resnet50 ran out of memory: it is not known whether fp16 would fit there",
            ("fp16: 100", "'redline batch resnet50 --image-size 32 -r fp16' tries without the reference"),
        )
    ]


def test_each_batch_failed_where_it_did() -> None:
    four, eight, nine = sweep_records(recipe="fp16", batches=[4, 8, 9])
    early = Failure(stage="reference", kind="user", message="no such shape")
    late = Failure(stage="first-call", kind="user", message="another shape")
    assert told([broken(four, early), broken(eight, late), broken(nine, late)]) == [
        ("fp16 failed at batch 4 (resnet50): user at reference", ("no such shape",)),
        ("fp16 failed at batch 8, 9 (resnet50): user at first-call", ("another shape",)),
    ]
