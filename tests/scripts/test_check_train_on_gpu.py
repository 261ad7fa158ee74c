"""Loaders that the checks of training write into files."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_loaders_of_the_hard_task_can_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is a text of its own, in which no type checker looks for what has moved."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import check_train_on_gpu as check

    from redline.bench.data.sources import synthetic

    monkeypatch.setattr(synthetic, "SIGNAL", synthetic.SIGNAL)  # the file changes it
    file = tmp_path / "faint.py"
    file.write_text(check.FAINT_LOADERS.format(signal=0.04, batch=4, train=16, held_out=8))
    train, held_out = runpy.run_path(str(file))["loaders"]()
    assert (len(train), len(held_out)) == (4, 2)
    images, classes = next(iter(train))
    assert len(images) == len(classes) == 4
    assert synthetic.SIGNAL == 0.04
