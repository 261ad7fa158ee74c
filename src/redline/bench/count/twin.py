"""A copy of a model whose tensors have shapes and no memory: what is counted on it leaves no trace on the original."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from redline.bench.workload.structure import map_tensors, named_tensors
from redline.errors import BenchError


def fake_mode(model: nn.Module, inputs: Any) -> FakeTensorMode:
    """The mode a model was built under, else a new one. Tensors that hide in places unknown may enter as they are."""
    tensors = [*model.parameters(), *model.buffers(), *(tensor for _, tensor in named_tensors(inputs))]
    for tensor in tensors:
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_inputs(inputs: Any, mode: FakeTensorMode) -> Any:
    return map_tensors(inputs, lambda _, tensor: _fake(tensor, mode))


def fake_twin(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Whatever the module does to itself while it runs, it does to the copy."""
    tensors = [*model.parameters(), *model.buffers(), *_attributes(model)]
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return model  # built without memory, for counting alone
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise BenchError("unsupported", "a TorchScript module cannot be copied without its memory")
    memo: dict[int, Any] = {id(tensor): _fake(tensor, mode) for tensor in tensors}
    # What the copy would share with the original, were it not copied, must live as long as the memo does.
    memo[id(memo)] = tensors
    return copy.deepcopy(model, memo)


def has_no_values(model: nn.Module) -> bool:
    """Built on torch's meta device or under a fake mode: it can be counted, not run."""
    return any(isinstance(one, FakeTensor) or one.is_meta for one in (*model.parameters(), *model.buffers()))


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor
    if not tensor.is_meta:
        return mode.from_tensor(tensor, static_shapes=True)
    # As if on the CPU: some operators take another way on the meta device than on any that exists.
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def _attributes(model: nn.Module) -> list[Tensor]:
    """Tensors that are neither parameters nor buffers: weights that a norm computes anew, masks, tables."""
    return [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
