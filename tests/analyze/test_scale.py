"""Efficiency against a known truth, and what is found to be in the way of it."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from redline.analyze.bound import Bound
from redline.analyze.ranks import late_rank
from redline.analyze.scale import Communication, ScalePoint, ScaleRun, diagnose_scale, points_of
from redline.model.environment import DeviceInfo, Environment, Memory
from redline.model.note import note
from redline.model.record import (
    Block,
    ColdStart,
    Numerics,
    Prepared,
    RankBlock,
    RankInfo,
    RunRecord,
    Warmup,
    WorkloadInfo,
)
from redline.model.spec import LaunchSpec, RunSpec, WorkloadSpec
from redline.show.scale import scale_report

UNKNOWN = Bound(label="unknown", evidence=note("not-measured", ""))


def trial(
    ranks: int,
    step_s: float,
    *,
    batch: int,
    threads: int = 1,
    cores: int = 8,
    hosts: int = 1,
    told: Communication | None = None,
    forward: dict[int, float] | None = None,
    items: dict[int, int] | None = None,
    waited: dict[int, float] | None = None,
    cpu: dict[int, float] | None = None,
    names: dict[int, str] | None = None,
    kind: str = "cpu",
) -> ScaleRun:
    device = DeviceInfo(kind=kind, name="some device")
    infos = tuple(
        RankInfo(
            rank=rank,
            host=f"node{rank % hosts}",
            local_rank=rank,
            device=DeviceInfo(kind=kind, name=(names or {}).get(rank, "some device")),
            items_per_step=(items or {}).get(rank, batch // ranks),
        )
        for rank in range(ranks)
    )
    blocks = tuple(
        Block(
            kind="throughput",
            clock="host",
            samples=(step_s,) * 20,
            round=number,
            ranks=tuple(
                RankBlock(
                    rank=rank,
                    samples=(step_s,) * 20,
                    phases={"forward": ((forward or {}).get(rank, step_s / 3),) * 20},
                    wall_s=step_s * 20,
                    cpu_s=(cpu or {}).get(rank, step_s * 10),
                    waited_s=(waited or {}).get(rank, 0.0) * step_s * 20,
                    memory=Memory(peak_rss_bytes=1000 + rank),
                )
                for rank in range(ranks if ranks > 1 else 0)
            ),
            memory=Memory(peak_rss_bytes=500),
        )
        for number in range(8)
    )
    record = RunRecord(
        id=f"r{ranks}-{batch}",
        spec=RunSpec(
            workload=WorkloadSpec(model="net", task="train", batch=batch),
            launch=LaunchSpec(door="torchrun"),
            device="cpu",
            ranks=ranks,
        ),
        prepared=Prepared(
            environment=Environment(device=device, threads=threads, affinity=tuple(range(cores))),
            workload=WorkloadInfo(source="user", class_name="Net", parameters=1, items_per_step=batch, batch=batch),
            cold_start=ColdStart(),
            numerics=Numerics(),
            warmup=Warmup(steady=True),
            memory=Memory(),
            ranks=infos if ranks > 1 else (),
            gradient_bytes=100_000_000,
        ),
        blocks=blocks,
        stopped="target",
    )
    return ScaleRun(record=record, communication=told or Communication())


def test_weak_scaling_is_set_against_the_same_batch_per_rank() -> None:
    trials = [trial(1, 0.1, batch=8), trial(2, 0.125, batch=16), trial(1, 0.2, batch=16), trial(4, 0.1, batch=32)]
    one, two, other, four = points_of(trials, "weak")
    assert (one.efficiency, one.ideal_per_s, one.peak_bytes) == (pytest.approx(1.0), pytest.approx(80.0), (500,))
    assert two.efficiency == pytest.approx(0.8)
    assert two.ideal_per_s == pytest.approx(160.0)
    assert (two.low, two.high) == (pytest.approx(0.8), pytest.approx(0.8))
    assert (two.batch_per_rank, two.global_batch, two.peak_bytes) == (8, 16, (1000, 1001))
    assert other.efficiency == pytest.approx(1.0), "a batch of 16 on one rank begins a series of its own"
    assert four.efficiency == pytest.approx(1.0)


def test_strong_scaling_is_set_against_the_same_global_batch() -> None:
    one, two = points_of([trial(1, 0.1, batch=16), trial(2, 0.1, batch=16)], "strong")
    assert (one.efficiency, two.efficiency) == (pytest.approx(1.0), pytest.approx(0.5))
    assert two.batch_per_rank == 8


def test_threads_beyond_the_processors_are_never_called_scaling() -> None:
    points = points_of([trial(1, 0.1, batch=8, cores=2), trial(4, 0.1, batch=32, cores=2)], "weak")
    assert points[1].oversubscribed
    assert (points[1].efficiency, points[1].low, points[1].high) == (None, None, None)
    (finding,) = diagnose_scale(points, [UNKNOWN] * 2, ["cpu"] * 2)
    assert (finding.code, finding.ranks) == ("oversubscribed-cpu", 4)
    apart = points_of([trial(4, 0.1, batch=32, cores=2, hosts=2)], "weak")
    assert not apart[0].oversubscribed, "two of the ranks run on another machine"


def test_exposed_communication_over_a_slow_link_is_the_link() -> None:
    slow = Communication(total_s=0.05, exposed_s=0.04, span_s=0.1, probe_s=1.0, probe_bytes=100_000_000)
    points = points_of([trial(1, 0.06, batch=8), trial(2, 0.1, batch=16, told=slow)], "weak")
    assert points[1].communication_share == pytest.approx(0.4)
    assert points[1].overlap == pytest.approx(0.2)
    assert points[1].bus_bytes_per_s == pytest.approx(1e8)
    (finding,) = diagnose_scale(points, [UNKNOWN] * 2, ["cpu"] * 2)
    assert finding.code == "slow-interconnect"


def test_exposed_communication_over_a_fast_link_is_the_batch() -> None:
    fast = Communication(total_s=0.05, exposed_s=0.04, span_s=0.1, probe_s=0.01, probe_bytes=100_000_000)
    points = points_of([trial(1, 0.06, batch=8), trial(2, 0.1, batch=16, told=fast)], "weak")
    (finding,) = diagnose_scale(points, [UNKNOWN] * 2, ["cpu"] * 2)
    assert finding.code == "local-batch-too-small"
    assert "--batch-per-rank 48" in finding.next, "0.06 s of computing must become 0.36 s beside 0.04 s"


def test_waiting_for_a_rank_is_not_called_communication() -> None:
    told = Communication(total_s=0.002, exposed_s=0.001, waited_s=0.05, span_s=0.1, probe_s=1.0, probe_bytes=10**8)
    late = points_of([trial(1, 0.05, batch=8), trial(2, 0.1, batch=16, told=told, forward={1: 0.09})], "weak")
    assert late[1].communication_share == pytest.approx(0.01)
    assert late[1].waiting_share == pytest.approx(0.5)
    assert [each.code for each in diagnose_scale(late, [UNKNOWN] * 2, ["cpu"] * 2)] == ["straggler"]
    by_turns = points_of([trial(1, 0.05, batch=8), trial(2, 0.1, batch=16, told=told)], "weak")
    (finding,) = diagnose_scale(by_turns, [UNKNOWN] * 2, ["cpu"] * 2)
    assert (finding.code, by_turns[1].straggler) == ("straggler", None)
    assert "not always for the same one" in finding.evidence


def test_a_straggler_is_named_by_its_forward_pass() -> None:
    late = trial(3, 0.1, batch=24, forward={1: 0.05})
    found = late_rank(late.record)
    assert found is not None
    assert found.rank == 1
    assert late_rank(trial(3, 0.1, batch=24).record) is None
    points = points_of([late], "weak")
    assert "straggler" in [each.code for each in diagnose_scale(points, [UNKNOWN], ["cpu"])]


def test_a_host_that_is_late_is_told_and_good_points_say_nothing() -> None:
    host = Bound(label="host", evidence=note("host", "issuing takes 98 % of the step"))
    point = ScalePoint(model="net", task="train", recipe="baseline", ranks=2, efficiency=0.5, throughput_per_s=1.0)
    (finding,) = diagnose_scale([point], [host], ["cuda"])
    assert finding.code == "host-bound"
    good = ScalePoint(model="net", task="train", recipe="baseline", ranks=2, efficiency=0.97, throughput_per_s=1.0)
    assert diagnose_scale([good], [host], ["cuda"]) == []
    (unknown,) = diagnose_scale([point], [UNKNOWN], ["cuda"])
    assert unknown.code == "unexplained"


LATE = {1: 0.05}


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"names": {1: "an older device"}}, "unlike-device"),
        ({"kind": "cuda"}, "slow-device"),
        ({"waited": {1: 0.3}}, "no-processor"),
        ({"cpu": {1: 2.0}}, "computes-longer"),
        ({}, "waits-for-something"),
    ],
)
def test_why_a_rank_is_late(given: dict[str, Any], code: str) -> None:
    found = late_rank(trial(3, 0.1, batch=24, forward=LATE, **given).record)
    assert found is not None
    assert (found.rank, found.why.code) == (1, code)
    (point,) = points_of([trial(3, 0.1, batch=24, forward=LATE, **given)], "weak")
    assert point.straggler_why == found.why


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer"])
def test_a_rank_that_is_late_in_any_phase_is_named_by_what_it_does_alone(phase: str) -> None:
    """Backward passes that average gradients last until the late rank is done, on every rank."""

    def block(number: int, late_s: float) -> Block:
        ranks = []
        for rank in range(3):
            own = dict.fromkeys(("data", "forward", "backward", "optimizer"), 0.05)
            own[phase] += late_s if rank == 2 else 0.0
            alone = {name: (own[name],) for name in ("forward", "backward")}
            waited = {**own, "backward": 0.2 + late_s - sum(own.values()) + own["backward"]}
            phases = {name: (seconds,) for name, seconds in waited.items()}
            ranks.append(RankBlock(rank=rank, samples=(0.2 + late_s,), phases=phases, alone=alone))
        return Block(kind="throughput", clock="host", samples=(0.2,), round=number, ranks=tuple(ranks))

    record = trial(3, 0.2, batch=24).record
    found = late_rank(msgspec.structs.replace(record, blocks=tuple(block(number, 0.2) for number in range(4))))
    assert found is not None
    assert (found.rank, found.phase, found.seconds) == (2, phase, pytest.approx(0.2))
    alike = tuple(block(number, 0.001) for number in range(4))
    assert late_rank(msgspec.structs.replace(record, blocks=alike)) is None


def test_a_rank_with_a_larger_part_of_the_batch_is_not_late() -> None:
    assert late_rank(trial(2, 0.1, batch=7, forward={0: 0.04, 1: 0.03}, items={0: 4, 1: 3}).record) is None
    found = late_rank(trial(2, 0.1, batch=7, forward={0: 0.09, 1: 0.03}, items={0: 4, 1: 3}).record)
    assert found is not None
    assert found.rank == 0, "and slower per item too"


@pytest.mark.parametrize("width", [160, 80, 60])
def test_the_table_keeps_its_figures_whole_in_any_width(width: int) -> None:
    points = points_of([trial(1, 0.1, batch=8, cores=2), trial(4, 0.1, batch=32, cores=2, forward=LATE)], "weak")
    text = io.StringIO()
    report = scale_report(points, diagnose_scale(points, [UNKNOWN] * 2, ["cpu"] * 2), "weak")
    Console(file=text, width=width, highlight=False).print(report)
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in text.getvalue()
    (four,) = [line for line in lines if line.strip().startswith("4 ")]
    assert "320" in four
    assert "not scaling" in four
    assert text.getvalue().count("this is not scaling") == 1, "said once"
