"""What the tests of the workloads share: building by name, and the user's files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from redline.bench.workload.build import build_workload
from redline.bench.workload.workload import Workload
from redline.model.spec import WorkloadSpec

Build = Callable[..., Workload]


@pytest.fixture
def build() -> Build:
    def make(model: str, *, seed: int = 0, **options: Any) -> Workload:
        return build_workload(WorkloadSpec(model=model, **options), seed)

    return make


@pytest.fixture
def user_file(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Writes a file of the user's; afterwards the import path and the loaded modules are as they were."""
    path, modules = list(sys.path), set(sys.modules)
    counter = iter(range(100))

    def write(text: str, name: str | None = None) -> Path:
        # A name of its own per file, as users have.
        file = tmp_path / (name or f"my_model_{next(counter)}.py")
        file.write_text("import torch\nfrom torch import nn\n" + text)
        return file

    yield write
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
