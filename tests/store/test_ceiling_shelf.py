"""Ceilings are kept per device, driver, torch and threads; those of another way of measuring count as none."""

from __future__ import annotations

import msgspec
import pytest

from redline.model.identity import device_key, device_key_of_ceilings
from redline.model.record import DeviceInfo, Environment
from redline.model.work import Ceilings
from redline.store import History

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


def key(kind: str = "cuda", threads: int = 8, **device: str) -> str:
    info = DeviceInfo(kind=kind, **{"name": "Some GPU", "driver": "570.1", **device})
    return device_key(Environment(device=info, threads=threads, versions={"torch": "2.9.0"}))


def test_they_come_back_and_the_newest_counts(history: History, location: str) -> None:
    shelf = history.ceilings()
    assert shelf.get(key()) is None
    shelf.put(CEILINGS)
    assert shelf.get(key()) == CEILINGS
    newer = msgspec.structs.replace(CEILINGS, copy_bytes_per_s=4.4e12)
    shelf.put(newer)
    with History.open(location) as again:
        assert again.ceilings().get(key()) == newer


@pytest.mark.parametrize("other", [{"name": "Another GPU"}, {"driver": "580.0"}, {"kind": "rocm"}])
def test_another_device_or_driver_has_another_key(other: dict[str, str]) -> None:
    assert key(**other) != key() == device_key_of_ceilings(CEILINGS)


def test_threads_matter_on_a_cpu_only() -> None:
    assert key(threads=2) == key(threads=4)
    assert key("cpu", threads=2) != key("cpu", threads=4)


def test_those_measured_in_another_way_are_measured_anew(history: History) -> None:
    history.ceilings().put(msgspec.structs.replace(CEILINGS, schema=0))
    assert history.ceilings().get(key()) is None
