"""Cells measured on a Ray cluster of two machines come back once each, also when one machine is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import redline
from redline.errors import SpecError
from redline.record import RunRecord
from redline.search.spread import spread
from redline.spec import LaunchSpec, MeasureSpec, RunSpec, WorkloadSpec

MODELS = Path(__file__).parent.parent / "models" / "ranks.py"
QUICK = MeasureSpec(
    warmup_min_seconds=0.0,
    warmup_window_seconds=0.0,
    warmup_max_seconds=0.2,
    check_numerics=False,
    max_seconds=0.5,
    min_rounds=1,
)


def test_an_address_without_ray_is_a_mistake() -> None:
    with pytest.raises(SpecError, match="--launch ray"):
        redline.sweep("simple_cnn", address="auto")


def test_a_sweep_settles_what_comes_back_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    from redline.search.group import measure_together
    from redline.search.observer import NoJournal

    def backwards(specs: Sequence[RunSpec], address: str | None) -> Iterator[tuple[int, RunRecord]]:
        with redline.Workspace(keep=False) as workspace:
            for number, spec in reversed(list(enumerate(specs))):
                yield number, measure_together([spec], workspace.door(spec.launch), NoJournal())[0]

    monkeypatch.setattr("redline.api.sweep.spread", backwards)
    result = redline.sweep(
        f"{MODELS}:sound", batches=[1, 2], device="cpu", ray=True, address="auto", effort="quick", no_check=True
    )
    assert [cell.status for cell in result.summary.cells] == ["done"] * 2
    assert sorted(row.batch or 0 for row in result.rows) == [1, 2]


@pytest.mark.slow
def test_a_lost_machine_costs_no_row() -> None:
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    specs = [
        RunSpec(
            workload=WorkloadSpec(model=f"{MODELS}:sound", batch=batch),
            measure=QUICK,
            launch=LaunchSpec(),
            device="cpu",
            threads=1,
        )
        for batch in (1, 2, 3)
    ]

    def lose_one() -> None:
        time.sleep(3.0)
        cluster.remove_node(second, allow_graceful=False)

    losing = threading.Thread(target=lose_one)
    try:
        losing.start()
        found = list(spread(specs, cluster.address))
        losing.join()
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert sorted(number for number, _ in found) == [0, 1, 2]
    assert [record.failure for _, record in found] == [None] * 3
    assert all(record.spec == specs[number] and record.blocks for number, record in found)
