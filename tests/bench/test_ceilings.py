"""Ceilings of the CPU at hand: every figure is there, and a format that cannot be is left out, not guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from redline.bench.device.cpu import CpuDevice, last_cache_bytes
from redline.bench.measure import ceilings
from redline.bench.measure.ceilings import measure_ceilings


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("CPU_SIZES", (64, 128)),
        ("CPU_LONGEST_S", float("inf")),  # how many sizes are tried must not depend on the machine's load
        ("BURSTS", 3),
        ("BURST_S", 1e-4),
        ("WARM_S", 0.0),
        ("COPY_BYTES", 1 << 20),
        ("SMALLEST_COPY_BYTES", 1 << 18),
        ("COPY_TO_CACHE", 0),
        ("LAUNCHES", 10),
    ):
        monkeypatch.setattr(ceilings, name, value)


def test_every_figure_is_there() -> None:
    found = measure_ceilings(CpuDevice())
    assert (found.kind, found.threads) == ("cpu", torch.get_num_threads())
    assert set(found.flops_per_s) == set(found.shapes) == {"fp32", "bf16", "fp16"}
    assert all(value > 0 for value in found.flops_per_s.values())
    assert found.copy_bytes_per_s > 0
    assert found.launch_s > 0


def test_a_refused_format_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: Any, dtype: torch.dtype) -> str | None:
        return "no" if dtype == torch.float16 else None

    monkeypatch.setattr(CpuDevice, "refusal_of", refuses)
    assert set(measure_ceilings(CpuDevice()).flops_per_s) == {"fp32", "bf16"}


def test_a_format_only_some_cards_have_becomes_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(device: Any, form: str, shape: Any) -> Any:
        if form == "fp8":
            raise RuntimeError("torch._scaled_mm is only supported on some")
        return lambda: torch.ones(4, 4).mm(torch.ones(4, 4))

    monkeypatch.setattr(ceilings, "_formats", lambda device: ["fp32", "fp8"])
    monkeypatch.setattr(ceilings, "_product", product)
    found = measure_ceilings(CpuDevice())
    assert set(found.flops_per_s) == {"fp32"}
    assert list(map(str, found.notes)) == ["no fp8 products: torch._scaled_mm is only supported on some"]


def test_the_best_of_several_shapes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_formats", lambda device: ["fp32"])
    monkeypatch.setattr(ceilings, "_timed", lambda device, call: ceilings.Timing(1.0, 1.0, 5))
    found = measure_ceilings(CpuDevice())
    assert (found.shapes, found.flops_per_s) == ({"fp32": "128×128×128"}, {"fp32": 2.0 * 128**3})


def test_a_copy_counts_what_it_reads_and_what_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_timed", lambda device, call: ceilings.Timing(1.0, 1.0, 5))
    assert measure_ceilings(CpuDevice()).copy_bytes_per_s == 2 * 4 * (1 << 18)


def test_caches_that_cores_share_count_once(tmp_path: Path) -> None:
    for core, shared in ((0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3")):
        for index, level, size, who in ((0, 1, "32K", str(core)), (3, 3, "16384K", shared)):
            folder = tmp_path / f"cpu{core}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, text in (("level", str(level)), ("size", size), ("shared_cpu_list", who)):
                (folder / name).write_text(f"{text}\n")
    assert last_cache_bytes(tmp_path) == 2 * 16384 * 1024
    assert last_cache_bytes(tmp_path / "nothing") is None
