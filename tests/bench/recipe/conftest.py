"""What the tests of single steps share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from redline.bench.environment import remember_flags


@pytest.fixture
def torch_as_it_was() -> Iterator[None]:
    """One thread, a seed, and every switch put back."""
    restore = remember_flags()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    restore()
