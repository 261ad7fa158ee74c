"""Inputs of any structure: tensors are found, mapped and described wherever they stand, and drawn anew or changed a little."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from redline.bench.workload.inputs import changed_slightly, input_shapes, redraw, same_values
from redline.bench.workload.structure import describe, float_tensors, map_tensors, named_tensors, shape_of, stored

Pair = namedtuple("Pair", ["logits", "aux"])


@dataclass(frozen=True)
class Answer:
    scores: Tensor
    label: str
    hidden: tuple[Tensor, ...] = ()


def structures() -> Any:
    leaves = st.integers(1, 4).map(torch.ones) | st.integers() | st.text(max_size=3) | st.none()
    names = st.text("abc", min_size=1, max_size=3)

    def containers(inside: Any) -> Any:
        lists = st.lists(inside, max_size=3)
        mappings = st.dictionaries(names, inside, max_size=3)
        answers = st.builds(Answer, st.just(torch.ones(2)), names, lists.map(tuple))
        ordered, fixed = mappings.map(OrderedDict), mappings.map(MappingProxyType)
        return lists | lists.map(tuple) | mappings | ordered | fixed | st.builds(Pair, inside, inside) | answers

    return st.recursive(leaves, containers, max_leaves=8)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(structures())
def test_mapping_changes_every_tensor_and_nothing_else(value: Any) -> None:
    before = [(path, tensor.clone()) for path, tensor in named_tensors(value)]
    doubled = map_tensors(value, lambda _, tensor: tensor * 2)
    assert [path for path, _ in named_tensors(doubled)] == [path for path, _ in before]
    assert all(torch.equal(new, 2 * old) for (_, new), (_, old) in zip(named_tensors(doubled), before, strict=True))
    assert all(torch.equal(now, old) for (_, now), (_, old) in zip(named_tensors(value), before, strict=True))
    assert describe(doubled).replace("mappingproxy", "dict") == describe(value).replace("mappingproxy", "dict")
    assert map_tensors(value, lambda _, tensor: tensor) is value
    assert float_tensors(value) == [(path or "output", tensor) for path, tensor in named_tensors(value)]


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (torch.ones(1), [""]),
        ((torch.ones(1), [torch.ones(1), {"a": torch.ones(1)}]), ["0", "1.0", "1.1.a"]),
        (Pair(torch.ones(1), {"deep": torch.ones(1)}), ["logits", "aux.deep"]),
        (Answer(torch.ones(1), "cat", (torch.ones(1),)), ["scores", "hidden.0"]),
        ({"ids": torch.ones(1, dtype=torch.int64), "n": 3, "aux": None}, ["ids"]),
        (
            BaseModelOutput(torch.ones(1), hidden_states=(torch.ones(1),) * 2),
            ["last_hidden_state", "hidden_states.0", "hidden_states.1"],
        ),
    ],
)
def test_tensors_are_named_by_where_they_stand(value: Any, names: list[str]) -> None:
    assert [name for name, _ in named_tensors(value)] == names
    assert [name or "output" for name in names if name != "ids"] == [name for name, _ in float_tensors(value)]


@pytest.mark.filterwarnings("ignore:.*(beta|prototype)")
def test_what_a_tensor_stores_whatever_its_layout() -> None:
    dense = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 3.0]])
    for sparse in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()):
        assert stored(sparse)[0].tolist() == [2.0, 3.0]
        assert sum(part.numel() for part in stored(sparse)[1:]) > 0
    for layout in (torch.jagged, torch.strided):
        ragged = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(5, 4)], layout=layout)
        assert sum(part.numel() for part in stored(ragged) if part.is_floating_point()) == 8 * 4
        assert shape_of(ragged) == [2, None, 4]
    assert stored(dense)[0] is dense
    assert shape_of(dense) == [2, 3]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ((torch.zeros(2, 3), 5), (torch.ones(2, 3), 5), True),
        (object(), object(), True),
        ((torch.zeros(2, 3),), (torch.zeros(3, 2),), False),
        ((torch.zeros(2),), (torch.zeros(2, dtype=torch.float16),), False),
        ((torch.zeros(2), 5), (torch.zeros(2), 6), False),
        ([torch.zeros(2)], (torch.zeros(2),), False),
    ],
)
def test_a_description_shows_shapes_and_settings_and_not_values(one: Any, other: Any, same: bool) -> None:
    assert (describe(one) == describe(other)) == same


def test_shapes_print_with_names_if_there_are_several() -> None:
    assert input_shapes(((torch.zeros(1, 3, 8, 8),), {})) == ("1×3×8×8 float32",)
    shapes = input_shapes(((), {"input_ids": torch.zeros(2, 5, dtype=torch.int64), "scale": torch.tensor(1.0)}))
    assert shapes == ("input_ids 2×5 int64", "scale scalar float32")


def one(tensor: Tensor, seed: int = 0, vocabulary: dict[str, int] | None = None) -> Tensor:
    (drawn,), _ = redraw(((tensor,), {}), seed, vocabulary or {})
    return drawn


def slightly(tensor: Tensor) -> Tensor:
    (changed,), _ = changed_slightly(((tensor,), {}), 0)
    return changed


def test_drawing_again_keeps_what_is_known_of_the_values() -> None:
    original = (5 + 2 * torch.randn(64, 3, 8, 8)).half().to(memory_format=torch.channels_last).requires_grad_()
    drawn = one(original)
    assert (drawn.shape, drawn.dtype, drawn.requires_grad) == (original.shape, torch.float16, True)
    assert drawn.is_contiguous(memory_format=torch.channels_last)
    assert drawn.float().mean().item() == pytest.approx(5, abs=0.5)
    assert drawn.float().std().item() == pytest.approx(2, rel=0.2)
    assert torch.equal(one(original, 3), one(original, 3)), "a seed means the same numbers"
    assert not torch.equal(one(original, 3), one(original, 4))
    assert one(torch.zeros(1000)).std().item() == pytest.approx(1, rel=0.1), "inputs are never zeros"
    shares, tokens = torch.rand(1000), torch.tensor([[7, 9, 12]])
    assert shares.min() <= one(shares).min() <= one(shares).max() <= shares.max()
    quarters = [half.mean() for row in one(torch.randn(1, 1, 64, 64)).chunk(2, 2) for half in row.chunk(2, 3)]
    assert torch.stack(quarters).std() > 0.1, "pure noise averages to the same everywhere"
    seen = torch.cat([one(tokens, seed) for seed in range(30)])
    assert (seen.min(), seen.max()) == (7, 12)
    assert 12 < torch.cat([one(tokens, seed, {"0": 100}) for seed in range(30)]).max() < 100
    assert one(torch.randn(3, dtype=torch.complex64)).is_complex()


MEANT = [
    torch.tensor([True, False]),
    torch.tensor([1, 1, 0, 1]),  # an attention mask
    torch.tensor(0.5),  # a scalar setting
    torch.tensor([0.0, float("-inf")]),  # an additive mask
    torch.empty(0, 3),
    torch.eye(3).to_sparse(),
    torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
]


@pytest.mark.parametrize("tensor", MEANT)
def test_what_has_a_meaning_stays(tensor: Tensor) -> None:
    assert one(tensor) is tensor or torch.equal(one(tensor), tensor)
    assert slightly(tensor) is tensor


def test_a_little_noise_leaves_what_an_input_means() -> None:
    boxes = torch.tensor([[0.0, 0.0, 8.0, 9.0], [2.0, 3.0, 4.0, 9.0]])
    changed = slightly(boxes)
    assert not torch.equal(changed, boxes)
    assert torch.equal(changed == 0, boxes == 0), "zeros stay zeros"
    assert changed.max() <= 9, "within the range that was given"
    assert (changed - boxes).norm() < 0.5 * boxes.norm()
    assert bool((slightly(-torch.rand(100)) <= 0).all()), "signs stay"
    assert slightly(tokens := torch.arange(6)) is tokens
    assert not torch.equal(slightly(torch.ones(4)), torch.ones(4)), "constants move too"
    assert slightly(torch.randn(4, dtype=torch.complex64)).is_complex()


def test_values_are_compared_part_by_part() -> None:
    def inputs(last: int) -> Any:
        return (torch.ones(2), [torch.tensor([0, 1, last])]), {"x": torch.zeros(1)}

    assert same_values(inputs(2), inputs(2))
    assert not same_values(inputs(2), inputs(3))
