"""What torch's own words say of memory that ran out."""

from __future__ import annotations

import pytest

from redline.analyze.blocks import fragments

SAID = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 139.80 GiB of which "
    "125.85 GiB is free. Including non-PyTorch memory, this process has 13.94 GiB memory in use. 16.00 GiB allowed; Of the "
    "allocated memory 8.23 GiB is allocated by PyTorch, and {idle} is reserved by PyTorch but unallocated. If reserved "
    "but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def test_more_idle_than_asked_for_is_told_with_the_cure() -> None:
    told = fragments(SAID.format(asked="3.34 GiB", idle="5.04 GiB"))
    assert told is not None
    assert told.startswith("3.34 GiB were asked for while 5.04 GiB lay idle in pieces; ")
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in told


@pytest.mark.parametrize(
    "said",
    [
        SAID.format(asked="3.34 GiB", idle="512.00 MiB"),
        SAID.format(asked="3.34 GiB", idle="900 bytes"),
        "CUDA error: out of memory",
        "std::bad_alloc",
        "",
    ],
)
def test_what_is_really_short_is_not_called_fragments(said: str) -> None:
    assert fragments(said) is None
