"""Several ranks answer as one bench; a rank that dies, hangs or raises is named, and nothing stays behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import msgspec
import pytest
from alive import is_alive

from redline.analyze.ranks import late_rank
from redline.launch import open_door
from redline.launch.ranks import hanging, merged_block
from redline.launch.workers import TOKEN, listen_at, reserved_port
from redline.model.errors import UsageError
from redline.model.protocol import (
    AllReduce,
    AllReduced,
    Ask,
    AskCheck,
    BlockReply,
    CheckedSpecs,
    FailureReply,
    Measure,
    Position,
    Prepare,
    PreparedReply,
    Profile,
    Reply,
    TraceReply,
)
from redline.model.record import Block, Failure, RunRecord
from redline.model.spec import LaunchSpec, MeasureSpec, Recipe, RunSpec, WorkloadSpec

MODELS = Path(__file__).parent.parent / "models" / "ranks.py"
LATE_S = 0.2
"""As the models of that file have it."""
QUICK = MeasureSpec(warmup_min_seconds=0.0, warmup_window_seconds=0.0, warmup_max_seconds=0.2, check_numerics=False)


def spec_of(factory: str, *, ranks: int = 2, batch: int = 8, task: str = "train", **launch) -> RunSpec:
    return RunSpec(
        workload=WorkloadSpec(model=f"{MODELS}:{factory}", task=task, batch=batch),
        measure=QUICK,
        launch=LaunchSpec(**{"door": "fork", **launch}),
        device="cpu",
        threads=1,
        ranks=ranks,
    )


@pytest.fixture(autouse=True)
def sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that tells models to misbehave."""
    monkeypatch.setenv("REDLINE_TEST_FOLDER", str(tmp_path))
    return tmp_path / "misbehave"


@contextmanager
def opened(spec: RunSpec) -> Iterator:
    door = open_door(spec.launch)
    try:
        yield door.open(spec)
    finally:
        door.close()


def first_failure(spec: RunSpec, sign: Path | None = None) -> Failure:
    """What goes wrong first, preparing or, with the `sign`, measuring; and that no rank survives it."""
    with opened(spec) as session:
        pids = session.pids
        reply: Reply = session.ask(Prepare(spec=spec))
        if sign is not None:
            assert isinstance(reply, PreparedReply), reply
            sign.touch()
            reply = session.ask(Measure(kind="throughput", seconds=0.05))
        session.close()
    assert isinstance(reply, FailureReply), reply
    assert not any(map(is_alive, pids))
    return reply.failure


def test_ranks_answer_as_one(tmp_path: Path) -> None:
    spec = spec_of("sound", batch=9)
    with opened(spec) as session:
        reply = session.ask(Prepare(spec=spec))
        assert isinstance(reply, PreparedReply), reply
        prepared = reply.prepared
        assert [(rank.rank, rank.items_per_step) for rank in prepared.ranks] == [(0, 5), (1, 4)]
        assert (prepared.workload.items_per_step, prepared.workload.batch) == (9, 9)
        assert "uneven-batch" in [each.code for each in prepared.workload.notes]
        assert prepared.gradient_bytes == 4 * (16 * 32 + 32 + 32 * 4 + 4)
        block = session.ask(Measure(kind="throughput", seconds=0.05))
        assert isinstance(block, BlockReply)
        counts = {len(rank.samples) for rank in block.block.ranks}
        assert len(counts) == 1, "every rank runs the same steps"
        assert [rank.rank for rank in block.block.ranks] == [0, 1]
        assert all(rank.memory.peak_rss_bytes for rank in block.block.ranks)
        probe = session.ask(AllReduce(message_bytes=4096, repeats=3))
        assert isinstance(probe, AllReduced)
        assert len(probe.seconds) == 3
        trace = session.ask(Profile(path=str(tmp_path / "trace.json.gz"), active=1))
        assert isinstance(trace, TraceReply)
        assert [Path(path).name for path in (trace.trace.path, *trace.trace.others)] == [
            "trace.rank0.json.gz",
            "trace.rank1.json.gz",
        ]
        session.close()


@pytest.mark.parametrize(
    ("factory", "late"),
    [("late_in_backward", (1, "backward")), ("late_in_forward", (1, "forward")), ("all_late", None)],
)
def test_a_late_rank_is_named_with_its_phase_although_the_others_wait(
    factory: str, late: tuple[int, str] | None
) -> None:
    spec = spec_of(factory)
    with opened(spec) as session:
        prepared = session.ask(Prepare(spec=spec)).prepared
        replies = [session.ask(Measure(kind="throughput", seconds=0.5, round=number)) for number in range(4)]
        session.close()
    blocks = tuple(reply.block for reply in replies)
    for block in blocks:
        middles = [median(rank.samples) for rank in block.ranks]
        assert max(middles) < 1.5 * min(middles), "all ranks take as long as the slowest"
    found = late_rank(RunRecord(id="a", spec=spec, prepared=prepared, blocks=blocks))
    assert (None if found is None else (found.rank, found.phase)) == late
    if found is not None:
        assert found.seconds == pytest.approx(LATE_S, rel=0.5)


@pytest.mark.parametrize(
    ("factory", "kind", "words", "where"),
    [
        ("killed", "crash", "SIGKILL", ""),
        ("raising", "user", "ValueError: rank 1 does not like this step", "ranks.py"),
        pytest.param("sleeping", "timeout", "did not go on", "ranks.py", marks=pytest.mark.long),
        pytest.param("alone", "timeout", "did not go on", "ranks.py", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_ends_or_hangs_is_named_with_its_line(
    factory: str, kind: str, words: str, where: str, sign: Path
) -> None:
    failure = first_failure(spec_of(factory, measure_timeout_s=5.0 if kind == "timeout" else 300.0), sign)
    assert (failure.kind, failure.rank) == (kind, 1), failure
    assert "rank 1 of 2" in failure.message
    assert words in failure.message
    assert where in failure.where


def test_a_port_in_use_is_a_failed_row_that_names_the_rank() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        failure = first_failure(spec_of("sound", port=taken.getsockname()[1], prepare_timeout_s=120.0))
    assert failure.rank == 0
    assert "EADDRINUSE" in failure.message or "in use" in failure.message


def test_what_every_rank_refuses_names_no_rank() -> None:
    spec = spec_of("sound")
    spec = msgspec.structs.replace(spec, recipe=Recipe.parse("graphs"))
    failure = first_failure(spec)
    assert failure.rank is None
    assert failure.message.startswith("on every rank: graphs")


def test_the_slowest_rank_makes_the_block() -> None:
    fast = Block(kind="throughput", clock="host", samples=(1.0, 1.0), cpu_s=2.0, others_cpu_s=5.0, energy_j=3.0)
    slow = Block(kind="throughput", clock="host", samples=(2.0, 1.5), cpu_s=4.0, others_cpu_s=3.0, energy_j=4.0)
    block = merged_block([fast, slow])
    assert block.samples == (2.0, 1.5)
    assert [rank.samples for rank in block.ranks] == [(1.0, 1.0), (2.0, 1.5)]
    assert block.energy_j == 7.0
    assert block.others_cpu_s == 1.0, "a sibling is no stranger"


@pytest.mark.parametrize(
    ("places", "late"),
    [
        ([(9, True, ""), (8, True, ""), (9, False, "")], 1),
        ([(9, True, ""), (9, False, "model.py:3 in forward")], 1),
        ([None, (2, False, "")], 0),
        ([(9, True, ""), (9, True, "")], None),
    ],
)
def test_who_holds_up_the_others(places: list[tuple[int, bool, str] | None], late: int | None) -> None:
    known = {
        rank: "measure"
        if place is None
        else Position(stage="measure", entered=5, steps=place[0], waits=place[1], where=place[2])
        for rank, place in enumerate(places)
    }
    assert hanging(known, len(places), 1.0).rank == late


def test_a_taken_rendezvous_is_told() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(UsageError, match=r"rendezvous 127.0.0.1.*choose another port"),
    ):
        listen_at(f"127.0.0.1:{taken.getsockname()[1]}")


def test_ranks_beyond_the_gpus_are_refused() -> None:
    """Also where there is no GPU at all: the count is what decides."""
    from redline.bench.device import cuda
    from redline.bench.workload.ranks import refuse_shared_devices

    with pytest.raises(UsageError, match=r"ranks that share a GPU take turns"):
        refuse_shared_devices("cuda", cuda.device_count() + 1)


@pytest.mark.long
def test_two_agents_with_one_rendezvous_are_one_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two torchrun agents, as on two machines, give what two ranks of one machine give."""
    monkeypatch.setenv(TOKEN, "a word of ours")
    with reserved_port() as held_desk, reserved_port() as held_meeting:
        desk, meeting = (each.getsockname()[1] for each in (held_desk, held_meeting))
        apart = losses_of_agents(desk, meeting)
    together = losses_of(spec_of("sound", batch=9))
    assert apart == together
    assert len(apart[1]) == 5


def losses_of_agents(desk: int, meeting: int) -> tuple[list[tuple[int, int]], list[float | None]]:
    spec = spec_of("sound", batch=9, door="torchrun", rendezvous=f"127.0.0.1:{desk}")
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{meeting}", "--rdzv-id", "test"]
    command += ["-m", "redline.bench.worker", f"ranks:tcp:127.0.0.1:{desk}"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    agents = [subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **quiet) for _ in range(2)]
    try:
        return losses_of(spec)
    finally:
        for agent in agents:
            agent.terminate()
            agent.wait()


def losses_of(spec: RunSpec) -> tuple[list[tuple[int, int]], list[float | None]]:
    spec = msgspec.structs.replace(
        spec, measure=msgspec.structs.replace(spec.measure, check_numerics=True, loss_path_steps=5)
    )
    with opened(spec) as session:
        reply = session.ask(Prepare(spec=spec))
        assert isinstance(reply, PreparedReply), reply
        session.close()
    ranks = [(rank.rank, rank.items_per_step) for rank in reply.prepared.ranks]
    return ranks, list(reply.prepared.numerics.losses)


def test_a_rank_that_alone_draws_random_numbers_runs_as_many_steps() -> None:
    """The reference of such a model has a path more, which every rank must run: otherwise they wait for each other."""
    ranks, losses = losses_of(spec_of("drawing", prepare_timeout_s=60.0))
    assert len(ranks) == 2
    assert len(losses) == 5


def test_questions_need_no_ranks() -> None:
    spec = spec_of("sound", door="torchrun")
    door = open_door(spec.launch)
    try:
        session = door.open()
        reply = session.ask(Ask(question=AskCheck(specs=(spec,))))
        assert isinstance(reply, CheckedSpecs)
        session.close()
    finally:
        door.close()


@pytest.mark.long
def test_torchrun_on_this_machine_and_a_port_in_use() -> None:
    spec = spec_of("sound", ranks=1, door="torchrun")
    with opened(spec) as session:
        assert isinstance(session.ask(Prepare(spec=spec)), PreparedReply)
        session.close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        failure = first_failure(spec_of("sound", ranks=1, door="torchrun", port=taken.getsockname()[1]))
    assert failure.rank == 0
    assert "rank 0 of 1 never called" in failure.message
