"""Whatever passes the door arrives as it was sent; a door that breaks is told from a worker that is gone."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest

from redline.model import protocol
from redline.model.arrivals import Served
from redline.model.environment import DeviceInfo, Environment, Memory, TelemetrySample
from redline.model.errors import DoorError
from redline.model.note import note
from redline.model.protocol import (
    AllReduce,
    AllReduced,
    Ask,
    BlockReply,
    Close,
    ClosedReply,
    EpochReply,
    FailureReply,
    FedReply,
    Feed,
    Hello,
    Load,
    LoadReply,
    Measure,
    Position,
    Prepare,
    PreparedReply,
    Profile,
    Progress,
    Squeeze,
    SqueezeReply,
    TraceReply,
    TrainEpoch,
    Where,
    receive_frame,
    receive_reply,
    receive_request,
    send,
)
from redline.model.questions import (
    AskCeilings,
    AskCheck,
    AskCount,
    AskEnvironment,
    AskHealth,
    AskMemory,
    AskMetric,
    AskModels,
    AskOperators,
    AskSnippet,
    AskSwitches,
    CeilingsAnswer,
    Checked,
    CheckedSpecs,
    CountAnswer,
    EnvironmentAnswer,
    Health,
    HealthItem,
    MemoryAnswer,
    MetricAnswer,
    ModelName,
    ModelNames,
    OperatorCase,
    OperatorTimes,
    Question,
    Snippet,
    SwitchChoice,
    SwitchChoices,
    SwitchNeed,
)
from redline.model.record import (
    Block,
    Capabilities,
    Closed,
    ColdStart,
    Failure,
    Numerics,
    Prepared,
    TraceRef,
    Warmup,
    WorkloadInfo,
)
from redline.model.spec import LaunchSpec, MeasureSpec, Recipe, RunSpec, WorkloadSpec
from redline.model.training import Epoch, Fed, TrainingProgress
from redline.model.work import Ceilings, MemoryHolder, MemoryPoint, MemoryUse, OperatorTime, OperatorWork, WorkCount

Pair = tuple[socket.socket, socket.socket]

SPEC = RunSpec(
    workload=WorkloadSpec(model="timm:some/ünusual_näme", batch=3, task="train"),
    recipe=Recipe.parse("fp16+compile:max-autotune,fullgraph=true,depth=2"),
    measure=MeasureSpec.for_effort("quick"),
    launch=LaunchSpec(door="spawn", command_prefix=("numactl", "-N0")),
    device="cuda:1",
    threads=2,
    seed=5,
)
ENVIRONMENT = Environment(device=DeviceInfo(kind="cpu", name="Some CPU"), versions={"torch": "2.9.0"}, affinity=(0, 3))
BLOCK = Block(
    kind="latency",
    clock="host",
    samples=(0.1, 1 / 3),
    settling=(0.5,),
    phases={"forward": (0.1,)},
    telemetry=(TelemetrySample(at_s=0.1, foreign=("somebody",)),),
)
PREPARED = Prepared(
    environment=ENVIRONMENT,
    workload=WorkloadInfo(source="builtin", class_name="Net", parameters=1, items_per_step=3, batch=3),
    cold_start=ColdStart(build_s=0.5),
    numerics=Numerics(losses=(1.5, None), passed=True),
    warmup=Warmup(samples=(0.1, 0.2), steady=True),
    memory=Memory(peak_rss_bytes=2**33),
)

WORK = WorkCount(
    params=2**33,
    compulsory_bytes=2**34,
    operators=(
        OperatorWork(
            name="mm", kind="matmul", number_format="bf16", phase="backward", calls=3, flops=2**50, bytes=2**35
        ),
    ),
)
CEILINGS = Ceilings(
    kind="cuda",
    name="Some GPU",
    driver="570.1",
    torch="2.9.0",
    threads=None,
    flops_per_s={"bf16": 7.9e14},
    copy_bytes_per_s=4.3e12,
    launch_s=4e-6,
)

EPOCH = Epoch(
    number=1, seconds=2.5, train_s=2.0, steps=80, samples=10_240, train_loss=1.5, phases_s={"data": 0.5, "step": 1.5}
)
REQUESTS = [
    Prepare(spec=SPEC, modules=True, checkpoint="kept.pt"),
    Measure(kind="latency", seconds=0.25, max_steps=7, settle_seconds=0.0, round=3, turn=5),
    Profile(path="trace.json.gz", wait=0, warmup=1, active=2, shapes=False, memory=True, stacks=True, modules=True),
    TrainEpoch(number=2),
    Feed(part="together", seconds=1.5, workers=4, prefetch=False),
    Load(arrivals_s=(0.0, 0.5), rate=2.0, deadline_s=3.0, seed=7),
    Squeeze(),
    AllReduce(message_bytes=4096, repeats=3),
    Where(),
    Close(),
    Ask(question=AskEnvironment(device="cuda:1", threads=3)),
    Ask(question=AskModels(pattern="res*")),
    Ask(question=AskCheck(specs=(SPEC, SPEC))),
    Ask(question=AskHealth()),
    Ask(question=AskCount(spec=SPEC)),
    Ask(question=AskCeilings(device="cuda:1", threads=2)),
    Ask(question=AskSwitches(spec=SPEC)),
    Ask(question=AskSnippet(spec=SPEC)),
    Ask(question=AskMetric(spec=SPEC, check="metrics.py:top1")),
    Ask(question=AskMemory(spec=SPEC)),
    Ask(
        question=AskOperators(device="cpu", threads=2, cases=(OperatorCase(operator="norm", shape=(4, 8)),), spec=SPEC)
    ),
]
REPLIES = [
    Progress(stage="compile", detail="fp16"),
    Progress(stage="epoch", training=TrainingProgress(epoch=1, epochs=3, step=7, steps=80, loss=1.5)),
    PreparedReply(prepared=PREPARED, epochs=(EPOCH,)),
    BlockReply(block=BLOCK),
    EpochReply(epoch=EPOCH, block=BLOCK),
    FedReply(fed=Fed(part="loader", samples=512, seconds=1.5, wait_s=0.25, workers=4, prefetch=False)),
    LoadReply(
        served=Served(rate=2.0, arrivals_s=(0.0, 0.5), sizes=(2,), started_s=(0.5,), finished_s=(0.75,), ended_s=0.75)
    ),
    TraceReply(trace=TraceRef(path="trace.json.gz", steps=3, capture_s=1.5, bytes=4096)),
    SqueezeReply(needed_bytes=2**33),
    AllReduced(message_bytes=4096, seconds=(0.5, 0.25)),
    Hello(rank=3, world=4, local_rank=1, host="node2", pid=4711, token="word"),
    Position(stage="measure", entered=5, steps=12, waits=True, where="model.py:3 in forward"),
    ClosedReply(closed=Closed(memory=Memory(allocator_retries=2))),
    FailureReply(failure=Failure(stage="build", kind="user", message="no such dataset", traceback="line\nline")),
    EnvironmentAnswer(environment=ENVIRONMENT),
    ModelNames(models=(ModelName(name="resnet18", source="torchvision", kind="classify"),), missing=("timm",)),
    CheckedSpecs(answers=(Checked(spec=SPEC), Checked(spec=SPEC, usage="no such model"))),
    Health(
        items=(HealthItem(name="driver", ok=None, seen="none", mend="install one"),), devices=(DeviceInfo(kind="cpu"),)
    ),
    CountAnswer(work=WORK, workload=PREPARED.workload),
    MemoryAnswer(
        use=MemoryUse(
            peak_bytes=30,
            peak_phase="backward",
            categories={"weights": 10, "activations": 20},
            holders=(MemoryHolder(module="layer1", bytes=20, category="activations", line="net.py:3"),),
            timeline=(MemoryPoint(at=0.5, bytes=30, phase="backward"),),
            reserved_bytes=40,
            fragments_bytes=10,
        ),
        workload=PREPARED.workload,
        environment=PREPARED.environment,
    ),
    CeilingsAnswer(ceilings=CEILINGS),
    OperatorTimes(
        rows=(
            OperatorTime(
                operator="norm",
                shape="4×8",
                number_format="fp16",
                calls=2,
                kind="norm",
                samples=(1e-6, 2e-6),
                flops=9,
                bytes=8,
                refusal="no",
            ),
        )
    ),
    SwitchChoices(
        choices=(
            SwitchChoice(
                switch="compile:freeze",
                family="compiler",
                relieves="both",
                excludes=("torchscript",),
                needs=(SwitchNeed(beside="amp", wants=("fused-optimizer",), reason="scaling asks the host"),),
                refusal=note("unavailable", "no compiler"),
                capabilities=Capabilities(quantizes=True),
                leaves_program=True,
                is_slow_to_prepare=True,
            ),
        )
    ),
    Snippet(code="import torch\n"),
    MetricAnswer(value=0.75, baseline=0.76),
]


@pytest.fixture
def pair() -> Iterator[Pair]:
    desk, bench = socket.socketpair()
    desk.settimeout(20.0)
    bench.settimeout(20.0)
    with desk, bench:
        yield desk, bench


def framed(body: bytes) -> bytes:
    return struct.pack("!Q", len(body)) + body


class TestTheWire:
    def test_is_tried_with_every_message_there_is(self) -> None:
        questions = {type(message.question) for message in REQUESTS if isinstance(message, Ask)}
        assert {type(message) for message in REQUESTS} == set(get_args(protocol.Request))
        assert questions == set(get_args(Question))
        assert {type(message) for message in REPLIES} == set(get_args(protocol.Reply))

    @pytest.mark.parametrize("request_", REQUESTS, ids=lambda message: type(message).__name__)
    def test_carries_every_request(self, pair: Pair, request_: Any) -> None:
        desk, bench = pair
        send(desk, request_)
        received = receive_request(bench)
        assert received == request_
        assert type(received) is type(request_)

    @pytest.mark.parametrize("reply", REPLIES, ids=lambda message: type(message).__name__)
    def test_carries_every_reply(self, pair: Pair, reply: Any) -> None:
        desk, bench = pair
        send(bench, reply)
        received = receive_reply(desk)
        assert received == reply
        assert type(received) is type(reply)

    def test_keeps_messages_apart_and_in_order(self, pair: Pair) -> None:
        desk, bench = pair
        for reply in REPLIES:
            send(bench, reply)
        bench.close()
        assert [receive_reply(desk) for _ in REPLIES] == REPLIES
        assert receive_reply(desk) is None

    def test_does_not_mind_how_the_bytes_trickle_in(self, pair: Pair) -> None:
        desk, bench = pair
        data = framed(msgspec.msgpack.encode(REPLIES[1]))

        def trickle() -> None:
            for position in range(len(data)):
                bench.sendall(data[position : position + 1])

        sender = threading.Thread(target=trickle)
        sender.start()
        assert receive_reply(desk) == REPLIES[1]
        sender.join()

    def test_carries_blocks_larger_than_any_buffer(self, pair: Pair) -> None:
        desk, bench = pair
        samples = tuple(number * 1e-9 for number in range(1_000_000))
        reply = BlockReply(block=msgspec.structs.replace(BLOCK, samples=samples))
        sender = threading.Thread(target=send, args=(bench, reply))
        sender.start()
        received = receive_reply(desk)
        sender.join()
        assert received == reply

    def test_carries_an_empty_frame(self, pair: Pair) -> None:
        desk, bench = pair
        bench.sendall(framed(b""))
        assert receive_frame(desk) == b""


class TestAnEnd:
    def test_between_messages_is_none(self, pair: Pair) -> None:
        desk, bench = pair
        desk.close()
        assert receive_request(bench) is None

    @pytest.mark.parametrize("kept", [1, 7, 8, 9, -1])
    def test_in_the_middle_of_a_frame_is_none(self, pair: Pair, kept: int) -> None:
        desk, bench = pair
        bench.sendall(framed(msgspec.msgpack.encode(REPLIES[1]))[:kept])
        bench.close()
        assert receive_reply(desk) is None

    def test_by_reset_is_none(self) -> None:
        """A worker that is killed with our request unread resets the connection."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            desk = socket.create_connection(server.getsockname(), timeout=20.0)
            bench, _ = server.accept()
            with desk:
                desk.sendall(b"never read")
                bench.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                bench.close()
                assert receive_reply(desk) is None

    def test_is_not_silence(self, pair: Pair) -> None:
        """Who waits too long is told so: a hung worker is not a dead one."""
        desk, _ = pair
        desk.settimeout(0.01)
        with pytest.raises(TimeoutError):
            receive_reply(desk)


class TestNonsense:
    bodies = {
        "nothing": b"",
        "no msgpack": b"\xc1",
        "text": b"Traceback (most recent call last)",
        "no table": msgspec.msgpack.encode([1, 2]),
        "no type": msgspec.msgpack.encode({"stage": "build"}),
        "an unknown type": msgspec.msgpack.encode({"type": "Gossip"}),
        "not UTF-8": b"\x81\xa4type\xa2\xff\xfe",
        "bottomless": b"\x81\xa4type\xa9Progress\xa5stage" + b"\x91" * 100_000,
        "cut": msgspec.msgpack.encode(REPLIES[1])[:-1],
    }

    @pytest.mark.parametrize("body", bodies.values(), ids=bodies)
    def test_from_the_worker_breaks_the_door(self, pair: Pair, body: bytes) -> None:
        desk, bench = pair
        sender = threading.Thread(target=bench.sendall, args=(framed(body),))
        sender.start()
        with pytest.raises(DoorError, match="the worker sent something that is not a message"):
            receive_reply(desk)
        sender.join()

    @pytest.mark.parametrize("body", bodies.values(), ids=bodies)
    def test_from_the_desk_breaks_the_door(self, pair: Pair, body: bytes) -> None:
        desk, bench = pair
        sender = threading.Thread(target=desk.sendall, args=(framed(body),))
        sender.start()
        with pytest.raises(DoorError, match="the desk sent something that is not a message"):
            receive_request(bench)
        sender.join()

    def test_is_a_message_in_the_wrong_direction(self, pair: Pair) -> None:
        desk, bench = pair
        send(desk, Progress(stage="build"))
        with pytest.raises(DoorError, match="Progress"):
            receive_request(bench)
        send(bench, Close())
        with pytest.raises(DoorError, match="Close"):
            receive_reply(desk)

    def test_is_a_field_nobody_knows(self, pair: Pair) -> None:
        desk, bench = pair
        bench.sendall(framed(msgspec.msgpack.encode({"type": "Progress", "stage": "build", "mood": "good"})))
        with pytest.raises(DoorError, match="mood"):
            receive_reply(desk)

    def test_is_a_spec_out_of_range(self, pair: Pair) -> None:
        desk, bench = pair
        plain = msgspec.to_builtins(Prepare(spec=SPEC))
        plain["spec"]["workload"]["batch"] = 0
        desk.sendall(framed(msgspec.msgpack.encode(plain)))
        with pytest.raises(DoorError, match="batch must be 1 or more"):
            receive_request(bench)

    def test_does_not_eat_the_message_behind_it(self, pair: Pair) -> None:
        desk, bench = pair
        bench.sendall(framed(b"\xc1"))
        send(bench, REPLIES[0])
        with pytest.raises(DoorError):
            receive_reply(desk)
        assert receive_reply(desk) == REPLIES[0]
