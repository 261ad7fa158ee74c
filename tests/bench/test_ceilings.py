"""Ceilings of the CPU at hand: every figure is there, and a format that cannot be is left out, not guessed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from brief import shorten_ceilings

from redline.bench.device.cpu import CpuDevice, last_cache_bytes
from redline.bench.device.process import ProcessorUse
from redline.bench.measure import ceilings
from redline.bench.measure.ceilings import measure_ceilings
from redline.model.note import note
from redline.model.work import Ceilings


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_ceilings(monkeypatch.setattr)


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
    monkeypatch.setattr(ceilings, "time_bursts", lambda *_, **__: [1.0] * 12)
    found = measure_ceilings(CpuDevice())
    assert (found.shapes, found.flops_per_s) == ({"fp32": "128×128×128"}, {"fp32": 2.0 * 128**3})


def test_a_copy_counts_what_it_reads_and_what_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "time_bursts", lambda *_, **__: [1.0] * 12)
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


def measured(**changes: Any) -> Ceilings:
    found = Ceilings(
        kind="cpu", name="some CPU", driver=None, torch=None, threads=2,
        flops_per_s={"fp32": 2.0, "bf16": 5.0}, shapes={"fp32": "64", "bf16": "64"},
        copy_bytes_per_s=10.0, launch_s=1e-5,
    )  # fmt: skip
    return msgspec.structs.replace(found, **changes)


BUSY = (note("shared-cpu", "others were at work"),)


def test_of_two_measurements_each_figure_is_the_better_one() -> None:
    other = measured(
        flops_per_s={"fp32": 3.0, "bf16": 4.0, "fp16": 1.0},
        shapes={"fp32": "128", "bf16": "128", "fp16": "128"},
        copy_bytes_per_s=9.0,
        launch_s=5e-6,
        doubts=BUSY,
    )
    found = measured().with_best_of(other)
    assert found.flops_per_s == {"fp32": 3.0, "bf16": 5.0, "fp16": 1.0}
    assert found.shapes == {"fp32": "128", "bf16": "64", "fp16": "128"}
    assert (found.copy_bytes_per_s, found.launch_s) == (10.0, 5e-6)
    assert found.is_trusted, "the later measurement was undisturbed"


@pytest.mark.parametrize(("cores", "codes"), [(1.0, []), (1.01, ["shared-cpu"])])
def test_a_busy_machine_is_why_figures_may_be_too_low(cores: float, codes: list[str]) -> None:
    found = ceilings._doubts(CpuDevice(), cores * ceilings.BUSY_CORES, ("make (pid 3): 1.00 cores",))
    assert [doubt.code for doubt in found] == codes


def test_who_was_busy_is_named_with_its_share() -> None:
    def use(**others: tuple[str, float]) -> ProcessorUse:
        return ProcessorUse(own_s=1.0, waited_s={}, machine_s=4.0, others={int(k[1:]): v for k, v in others.items()})

    before = use(p1=("a", 10.0), p2=("b", 5.0), p3=("c", 1.0), p4=("d", 0.0))
    after = use(p1=("a", 10.19), p2=("b", 7.0), p3=("c", 2.0), p4=("d", 0.2), p5=("new (x)", 1.5))
    found = after.since(before, 2.0)
    assert found["busiest"] == (
        "b (pid 2): 1.00 cores", "new (x) (pid 5): 0.75 cores", "c (pid 3): 0.50 cores",
    )  # fmt: skip
    assert found["waited_s"] is None, "this system does not tell"
    assert use(p1=("a", 10.19)).since(before, 2.0)["busiest"] == (), "less than a tenth of a core"
    assert use(p1=("a", 10.21)).since(before, 2.0)["busiest"] == ("a (pid 1): 0.11 cores",)
    assert use().since(before, 2.0)["busiest"] == (), "who has ended is not there"


def test_no_more_cores_are_told_than_were_busy_while_it_looked() -> None:
    """Looking takes longer than a short block where the machine is busy."""
    before = ProcessorUse(own_s=0.0, waited_s={}, machine_s=0.0, others={1: ("a", 0.0)}, at_s=10.0)
    after = ProcessorUse(own_s=0.0, waited_s={}, machine_s=0.8, others={1: ("a", 0.4)}, at_s=10.4)
    found = after.since(before, 0.01)
    assert found["busiest"] == ("a (pid 1): 1.00 cores",)
    assert found["others_cpu_s"] == pytest.approx(0.02)


def test_what_a_child_computed_that_has_ended_is_our_own() -> None:
    """A loader worker that ends within an epoch is no busy neighbour."""
    before = ProcessorUse.now()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    assert ProcessorUse.now().since(before, 1.0)["cpu_s"] >= 0.3
