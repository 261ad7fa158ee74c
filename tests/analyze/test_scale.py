"""Efficiency against a known truth, and what is found to be in the way of it."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import msgspec
import pytest
from by_hand import make_prepared, make_record
from rich.console import Console

from redline.analyze.bound import Bound
from redline.analyze.ranks import late_rank
from redline.analyze.scale import Communication, Mode, ScaleRun, points_of, rank_rows
from redline.model.metrics import Row
from redline.model.note import note
from redline.model.record import Block, DeviceInfo, Environment, Memory, RankBlock, RankInfo, WorkloadInfo
from redline.model.spec import LaunchSpec, RunSpec, WorkloadSpec
from redline.show.result import terminal
from redline.verbs.scale import result_of


def trial(
    ranks: int,
    step_s: float,
    *,
    batch: int,
    threads: int = 1,
    cores: int = 8,
    hosts: int = 1,
    told: Communication | None = None,
    kind: str = "cpu",
    **of_rank: dict[int, Any],
) -> ScaleRun:
    """`of_rank`: for some ranks another time of the forward pass, share of the batch, name, processor time or share of waiting."""

    def own(name: str, rank: int, otherwise: Any) -> Any:
        return of_rank.get(name, {}).get(rank, otherwise)

    device = DeviceInfo(kind=kind, name="some device")
    everyone = range(ranks if ranks > 1 else 0)
    infos = tuple(
        RankInfo(
            rank=rank,
            host=f"node{rank % hosts}",
            local_rank=rank,
            device=DeviceInfo(kind=kind, name=own("names", rank, device.name)),
            items_per_step=own("items", rank, batch // ranks),
        )
        for rank in everyone
    )
    rank_blocks = tuple(
        RankBlock(
            rank=rank,
            samples=(step_s,) * 20,
            phases={"forward": (own("forward", rank, step_s / 3),) * 20},
            wall_s=step_s * 20,
            cpu_s=own("cpu", rank, step_s * 10),
            waited_s=own("waited", rank, 0.0) * step_s * 20,
            memory=Memory(peak_rss_bytes=1000 + rank),
        )
        for rank in everyone
    )
    block = Block(
        kind="throughput", clock="host", samples=(step_s,) * 20, ranks=rank_blocks, memory=Memory(peak_rss_bytes=500)
    )
    prepared = msgspec.structs.replace(
        make_prepared(
            environment=Environment(device=device, threads=threads, affinity=tuple(range(cores))),
            workload=WorkloadInfo(source="user", class_name="Net", parameters=1, items_per_step=batch, batch=batch),
            ranks=infos,
        ),
        gradient_bytes=100_000_000,
    )
    workload = WorkloadSpec(model="net", task="train", batch=batch)
    record = make_record(
        id=f"r{ranks}-{batch}",
        spec=RunSpec(workload=workload, launch=LaunchSpec(door="torchrun"), device="cpu", ranks=ranks),
        prepared=prepared,
        blocks=tuple(msgspec.structs.replace(block, round=number) for number in range(8)),
    )
    return ScaleRun(record=record, communication=told or Communication())


def rows_of(runs: list[ScaleRun], mode: Mode = "weak") -> list[Row]:
    return [point.row for point in points_of(runs, mode)]


def test_weak_scaling_is_set_against_the_same_batch_per_rank() -> None:
    trials = [trial(1, 0.1, batch=8), trial(2, 0.125, batch=16), trial(1, 0.2, batch=16), trial(4, 0.1, batch=32)]
    one, two, other, four = rows_of(trials)
    assert (one.value("efficiency"), one.value("ideal"), one.value("memory")) == pytest.approx((1.0, 80.0, 500))
    efficiency = two.metric("efficiency")
    assert (efficiency.value, efficiency.low, efficiency.high) == pytest.approx((0.8, 0.8, 0.8))
    assert two.value("ideal") == pytest.approx(160.0)
    assert (two["batch_per_rank"], two["global_batch"], two.value("memory")) == (8, 16, 1001)
    assert other.value("efficiency") == pytest.approx(1.0), "a batch of 16 on one rank begins a series of its own"
    assert four.value("efficiency") == pytest.approx(1.0)


def test_strong_scaling_is_set_against_the_same_global_batch() -> None:
    one, two = rows_of([trial(1, 0.1, batch=16), trial(2, 0.1, batch=16)], "strong")
    assert (one.value("efficiency"), two.value("efficiency")) == pytest.approx((1.0, 0.5))
    assert two["batch_per_rank"] == 8


def test_each_rank_tells_its_own_speed_and_what_it_does_by_itself() -> None:
    first, second = rank_rows(trial(2, 0.1, batch=16, forward={0: 0.02, 1: 0.03}).record)
    assert [(row["rank"], row["items"], row.value("throughput")) for row in (first, second)] == [
        (0, 8, pytest.approx(80.0)),
        (1, 8, pytest.approx(80.0)),
    ]
    assert [row.value("own_forward") for row in (first, second)] == [0.02, 0.03]
    assert [row.value("memory") for row in (first, second)] == [1000, 1001]


def test_threads_beyond_the_processors_are_never_called_scaling() -> None:
    one, four = points_of([trial(1, 0.1, batch=8, cores=2), trial(4, 0.1, batch=32, cores=2)], "weak")
    assert four.row["is_oversubscribed"]
    assert "efficiency" in one.row
    assert "efficiency" not in four.row
    assert ([each.code for each in four.row.notes], four.findings) == (["oversubscribed"], [])
    told = str(result_of([one, four], "weak"))
    assert told.count("this is not scaling") == 1, "it is said once"
    (apart,) = rows_of([trial(4, 0.1, batch=32, cores=2, hosts=2)])
    assert not apart["is_oversubscribed"], "two of the ranks run on another machine"


SLOW = Communication(total_s=0.05, exposed_s=0.04, span_s=0.1, probe_s=1.0, probe_bytes=100_000_000)
WAITS = Communication(total_s=0.002, exposed_s=0.001, waited_s=0.05, span_s=0.1, probe_s=1.0, probe_bytes=10**8)


@pytest.mark.parametrize(
    ("step_s", "given", "codes", "told"),
    [
        (0.1, {"told": SLOW}, ["communication-bound"], "moves 95.4 MiB/s between ranks"),
        # 0.06 s of computing must become 0.36 s beside 0.04 s of communication.
        (0.1, {"told": msgspec.structs.replace(SLOW, probe_s=0.01)}, ["communication-bound"], "--batch-per-rank 48"),
        (0.1, {"told": WAITS, "forward": {1: 0.09}}, ["straggler"], "rank 1 takes"),
        (0.1, {"told": WAITS}, ["straggler"], "not always for the same one"),
        (0.1, {}, ["unexplained"], "efficiency 60"),
        (0.062, {}, [], ""),
    ],
    ids=["slow link", "small batch", "late rank", "ranks wait in turns", "unknown", "scales"],
)
def test_what_is_in_the_way_is_named(step_s: float, given: dict[str, Any], codes: list[str], told: str) -> None:
    two = points_of([trial(1, 0.06, batch=8), trial(2, step_s, batch=16, **given)], "weak")[1]
    assert [finding.code for finding in two.findings] == codes
    assert told in " ".join(f"{finding.evidence} {finding.next}" for finding in two.findings)
    assert all(finding.saves_s <= two.step_s for finding in two.findings)


def test_exposed_communication_and_waiting_are_told_apart() -> None:
    runs = [trial(1, 0.06, batch=8), trial(2, 0.1, batch=16, told=SLOW), trial(2, 0.1, batch=16, told=WAITS)]
    _, slow, waits = rows_of(runs)
    assert (slow.value("exposed"), slow.value("hidden"), slow.value("bus")) == pytest.approx((0.4, 0.2, 1e8))
    assert (waits.value("exposed"), waits.value("waiting")) == pytest.approx((0.01, 0.5))


@pytest.mark.parametrize(("step_s", "codes"), [(0.12, ["host-bound"]), (0.062, [])])
def test_a_host_that_is_late_is_told_where_a_point_does_not_scale(step_s: float, codes: list[str]) -> None:
    two = points_of([trial(1, 0.06, batch=8), trial(2, step_s, batch=16)], "weak")[1]
    host = Bound(label="host", evidence=note("host", "issuing takes 98 % of the step"))
    assert [finding.code for finding in dataclasses.replace(two, bound=host).findings] == codes


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
    assert (found.rank, found.why.code) == (1, code)


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
    assert (found.rank, found.phase, found.seconds) == (2, phase, pytest.approx(0.2))
    alike = tuple(block(number, 0.001) for number in range(4))
    assert late_rank(msgspec.structs.replace(record, blocks=alike)) is None


def test_a_rank_with_a_larger_part_of_the_batch_is_not_late() -> None:
    assert late_rank(trial(2, 0.1, batch=7, forward={0: 0.04, 1: 0.03}, items={0: 4, 1: 3}).record) is None
    found = late_rank(trial(2, 0.1, batch=7, forward={0: 0.09, 1: 0.03}, items={0: 4, 1: 3}).record)
    assert found.rank == 0, "and slower per item too"


@pytest.mark.parametrize("width", [160, 80])
def test_the_table_keeps_its_figures_whole_in_any_width(width: int) -> None:
    points = points_of([trial(1, 0.1, batch=8, cores=2), trial(4, 0.1, batch=32, cores=2, forward=LATE)], "weak")
    text = io.StringIO()
    Console(file=text, width=width, highlight=False).print(terminal(result_of(points, "weak")))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    (four,) = [line for line in lines if line.strip().startswith("4 ")]
    assert "320" in four
