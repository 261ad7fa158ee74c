"""A recipe as a file of plain PyTorch that runs without Redline."""

from __future__ import annotations

from redline.spec import RunSpec


def snippet_of(spec: RunSpec) -> str:
    raise NotImplementedError
