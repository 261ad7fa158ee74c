from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch

from redline.bench.workload.structure import describe, float_tensors, map_tensors, named_tensors, shape_of, stored

Pair = namedtuple("Pair", ["logits", "aux"])


@dataclass(frozen=True)
class Answer:
    scores: torch.Tensor
    label: str
    hidden: tuple[torch.Tensor, ...] = ()


def test_tensors_are_found_wherever_they_stand() -> None:
    x = torch.ones(1)
    assert [name for name, _ in named_tensors(x)] == [""]
    assert [name for name, _ in named_tensors((x, [x, {"a": x}]))] == ["0", "1.0", "1.1.a"]
    assert [name for name, _ in named_tensors(Pair(x, {"deep": x}))] == ["logits", "aux.deep"]
    assert [name for name, _ in named_tensors(Answer(x, "cat", (x, x)))] == ["scores", "hidden.0", "hidden.1"]


@pytest.mark.filterwarnings("ignore:.*(beta|prototype)")
def test_what_a_tensor_stores_whatever_its_layout() -> None:
    dense = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 3.0]])
    for sparse in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()):
        assert stored(sparse)[0].tolist() == [2.0, 3.0]
        assert sum(part.numel() for part in stored(sparse)[1:]) > 0
    rows = [torch.ones(3, 4), torch.ones(5, 4)]
    for layout in (torch.jagged, torch.strided):
        ragged = torch.nested.nested_tensor(rows, layout=layout)
        assert sum(part.numel() for part in stored(ragged) if part.is_floating_point()) == 8 * 4
        assert shape_of(ragged) == [2, None, 4]
    assert stored(dense)[0] is dense
    assert shape_of(dense) == [2, 3]


def test_mapping_keeps_every_kind_of_container() -> None:
    x = torch.ones(2)
    value = {
        "pair": Pair(x, None),
        "list": [x, 3],
        "answer": Answer(x, "cat", (x,)),
        "ordered": OrderedDict(a=x),
        "fixed": MappingProxyType({"a": x}),
        "text": "kept",
    }
    doubled = map_tensors(value, lambda _, tensor: tensor * 2)
    assert [tensor.sum().item() for _, tensor in named_tensors(doubled)] == [4.0] * 6
    assert isinstance(doubled["pair"], Pair)
    assert isinstance(doubled["answer"], Answer)
    assert isinstance(doubled["ordered"], OrderedDict)
    assert doubled["list"][1] == 3
    assert doubled["text"] == "kept"
    assert value["list"][0] is x, "the original stays"


def test_a_structure_without_tensors_is_returned_as_it_is() -> None:
    value = (torch.Size([2, 3]), {"a": 1})
    assert map_tensors(value, lambda _, tensor: tensor + 1) is value


def test_the_description_shows_shapes_and_not_values() -> None:
    assert describe((torch.zeros(2, 3), 5)) == describe((torch.ones(2, 3), 5))
    assert describe((torch.zeros(2, 3),)) != describe((torch.zeros(3, 2),))
    assert describe((torch.zeros(2),)) != describe((torch.zeros(2, dtype=torch.float16),))
    assert describe((torch.zeros(2), 5)) != describe((torch.zeros(2), 6))
    assert describe([torch.zeros(2)]) != describe((torch.zeros(2),))
    assert describe(object()) == describe(object()), "no address may show"


def test_outputs_keep_floating_tensors_only() -> None:
    x, ids = torch.ones(1), torch.ones(1, dtype=torch.int64)
    assert float_tensors(x) == [("output", x)]
    assert [name for name, _ in float_tensors({"out": x, "aux": None, "ids": ids, "n": 3})] == ["out"]
    assert float_tensors((None, "text", object())) == []
    assert float_tensors(torch.ones(1, dtype=torch.bfloat16))[0][1].dtype is torch.bfloat16


def test_outputs_of_transformers_are_read_as_mappings() -> None:
    from transformers.modeling_outputs import BaseModelOutput

    x = torch.ones(1, 2)
    output = BaseModelOutput(last_hidden_state=x, hidden_states=(x, x))
    assert [name for name, _ in float_tensors(output)] == ["last_hidden_state", "hidden_states.0", "hidden_states.1"]
