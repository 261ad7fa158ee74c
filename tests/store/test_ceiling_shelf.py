"""Ceilings are kept per device, driver, torch and threads; those of another way of measuring count as none."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from redline.record import DeviceInfo, Environment
from redline.store import History, device_key_of, device_key_of_ceilings
from redline.work import Ceilings

CEILINGS = Ceilings(
    kind="cuda",
    name="Some GPU",
    driver="570.1",
    torch="2.9.0",
    threads=None,
    flops_per_s={"bf16": 7.9e14},
    copy_bytes_per_s=4.3e12,
    launch_s=4e-6,
    measured_at=1.7e9,
)


def place(kind: str = "cuda", threads: int = 8, **device: str) -> str:
    info = DeviceInfo(kind=kind, **{"name": "Some GPU", "driver": "570.1", **device})
    return device_key_of(Environment(device=info, threads=threads, versions={"torch": "2.9.0"}))


def test_they_come_back_and_the_newest_counts(tmp_path: Path) -> None:
    with History.open(tmp_path / "h.sqlite") as history:
        shelf = history.ceilings()
        assert shelf.get(place()) is None
        shelf.put(CEILINGS)
        assert shelf.get(place()) == CEILINGS
        newer = msgspec.structs.replace(CEILINGS, copy_bytes_per_s=4.4e12)
        shelf.put(newer)
    with History.open(tmp_path / "h.sqlite") as history:
        assert history.ceilings().get(place()) == newer


@pytest.mark.parametrize("other", [{"name": "Another GPU"}, {"driver": "580.0"}, {"kind": "rocm"}])
def test_another_device_or_driver_is_another_place(other: dict[str, str]) -> None:
    assert place(**other) != place() == device_key_of_ceilings(CEILINGS)


def test_threads_matter_on_a_cpu_only() -> None:
    assert place(threads=2) == place(threads=4)
    assert place("cpu", threads=2) != place("cpu", threads=4)


def test_those_measured_in_another_way_are_measured_anew(tmp_path: Path) -> None:
    with History.open(tmp_path / "h.sqlite") as history:
        history.ceilings().put(msgspec.structs.replace(CEILINGS, schema=0))
        assert history.ceilings().get(place()) is None
