"""What the tests of single steps share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from redline.bench.environment import remember_flags


@pytest.fixture(autouse=True)
def fast_path_as_it_was() -> Iterator[None]:
    """A recipe is applied for the rest of its process, which here is that of other tests too."""
    held = torch.backends.mha.get_fastpath_enabled()
    yield
    torch.backends.mha.set_fastpath_enabled(held)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread, a seed, and every switch put back. Two threads that wait for each other on a busy machine take ten times as long."""
    restore = remember_flags()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    restore()


@pytest.fixture
def torch_as_it_was(one_thread: None) -> Iterator[None]:
    """The same, and nothing compiled is left."""
    yield
    torch._dynamo.reset()
