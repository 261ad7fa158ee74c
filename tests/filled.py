"""Messages and records of which no part is at its default, so that a test sees when a part gets lost."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import inspect as shapes

from redline.model.spec import DataSpec, LaunchSpec, Recipe, RunSpec, TrainSpec, WorkloadSpec

SAMPLES = (0.1, 1 / 3, 5e-324, 999_999_999.9999999, 0.010000000000000002)
"""Seconds that lose something wherever a double is not kept as it is."""

PLAIN = {shapes.IntType: 7, shapes.FloatType: 0.375, shapes.StrType: "two ünusual words"}


def whole_spec() -> RunSpec:
    """The settings of a spec depend on each other, so some are given."""
    data = filled(DataSpec, name="cifar10", on_device=False)
    workload = filled(
        WorkloadSpec, task="train", batch_axis={"x": 1, "rest": [None, "list"]}, prompt=None, new_tokens=None
    )
    return filled(
        RunSpec,
        workload=workload,
        train=filled(TrainSpec, data=data),
        recipe=Recipe.parse("fp16+compile:max-autotune,fullgraph=true,depth=3,share=0.5,backend=inductor"),
        launch=filled(LaunchSpec, door="spawn", rendezvous=None),
        load=None,
        ranks=1,
    )


def filled(kind: type, **given: Any) -> Any:
    """Returns a struct with the given parts, in which every other part differs from its default."""
    if kind is RunSpec and not given:
        return whole_spec()
    fields = [field for field in shapes.type_info(kind).fields if field.name not in given]  # type: ignore[attr-defined]
    return kind(**given, **{field.name: _value(field.type, field.default) for field in fields})


def _value(shape: Any, default: Any = msgspec.NODEFAULT) -> Any:
    match shape:
        case shapes.UnionType():
            return _value(next(part for part in shape.types if not isinstance(part, shapes.NoneType)), default)
        case shapes.StructType():
            return filled(shape.cls)
        case shapes.VarTupleType(item_type=shapes.FloatType()):
            return SAMPLES
        case shapes.VarTupleType():
            return (_value(shape.item_type),)
        case shapes.TupleType():
            return tuple(map(_value, shape.item_types))
        case shapes.DictType():
            return {_value(shape.key_type): _value(shape.value_type)}
        case shapes.LiteralType():
            return next((value for value in shape.values if value != default), default)
        case shapes.BoolType():
            return default is not True
    return PLAIN[type(shape)]
