"""What a model returned, as named floating tensors: the part of an output that numerics can compare."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from redline.bench.workload.structure import named_tensors


def float_tensors(output: Any) -> list[tuple[str, Tensor]]:
    """Named floating tensors of any output; a lone tensor is called `output`. None and other objects are left out."""
    return [(path or "output", tensor) for path, tensor in named_tensors(output) if tensor.is_floating_point()]
