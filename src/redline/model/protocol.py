"""The one door: the messages of a measuring session between desk and bench, and how messages are framed on a socket.

The desk sends a request; the bench answers with one reply, and with `Progress` on the way.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import msgspec

from redline.model.arrivals import Served
from redline.model.errors import DoorError, SpecError
from redline.model.fields import Frozen
from redline.model.questions import (
    CeilingsAnswer,
    CheckedSpecs,
    CountAnswer,
    EnvironmentAnswer,
    Health,
    MemoryAnswer,
    MetricAnswer,
    ModelNames,
    OperatorTimes,
    Question,
    Snippet,
    SwitchChoices,
)
from redline.model.record import (
    Block,
    BlockKind,
    Closed,
    Failure,
    Prepared,
    TraceRef,
)
from redline.model.spec import RunSpec
from redline.model.training import Epoch, Fed, FedPart, TrainingProgress

Sharing = Literal["alone", "shares", "helps"]
"""How blocks that are compiled one by one are compiled. `shares`: other workers prepare the same recipe at the same time, and
each compiles some. `helps`: the same, and nothing else is prepared."""


class Prepare(Frozen, tag=True):
    """Build the workload, apply the recipe, check its numerics, reach the steady state."""

    spec: RunSpec
    bare: bool = False
    """Under a profiler from outside, which makes every kernel slow: no numerics, and two steps of warm-up."""
    modules: bool = False
    """Count the work module by module."""
    sharing: Sharing = "alone"
    checkpoint: str | None = None
    """Training on data: the file that keeps the state after each epoch. Where it is there, training goes on from it."""


class Measure(Frozen, tag=True):
    """Run one timed block."""

    kind: BlockKind
    seconds: float
    max_steps: int | None = None
    settle_seconds: float = 0.02
    round: int = 0
    turn: int | None = None
    """Which of the processors that may be used issues the steps, counted round and round; None: whichever the system chooses."""


class Profile(Frozen, tag=True):
    """Capture a trace of a few steps, outside every timed block."""

    path: str
    """Where the gzipped Chrome trace is to be written; with `outside`, where the other profiler writes."""
    wait: int = 1
    warmup: int = 2
    active: int = 3
    shapes: bool = True
    memory: bool = False
    stacks: bool = False
    outside: bool = False
    """A profiler in front of the worker looks on: only run the steps and mark them for it."""
    modules: bool = False
    """Mark every module of the forward pass. A recipe that dissolves modules (compiled, recorded) has no such marks."""


class TrainEpoch(Frozen, tag=True):
    """Train one epoch on the data and validate; progress comes on the way."""

    number: int
    """From 1."""
    loader_timeout_s: float = 0.0
    """The loader may keep the training waiting for so long."""


class Feed(Frozen, tag=True):
    """Run the loader alone, the model alone on a batch that is there, or both, for a while."""

    part: FedPart
    seconds: float
    workers: int = 0
    prefetch: bool = True


class Load(Frozen, tag=True):
    """Requests that arrive at these moments, in batches as the spec's `load` says."""

    arrivals_s: tuple[float, ...]
    rate: float
    deadline_s: float
    """Stop then, whoever still waits: above its capacity a server falls behind without end."""
    seed: int | None = None


class AllReduce(Frozen, tag=True):
    """How long does it take all ranks to sum a message of this size? Outside every timed block."""

    message_bytes: int
    repeats: int = 10


class Where(Frozen, tag=True):
    """What is this rank doing right now? Answered also while it is busy with another request, or hangs."""


class Squeeze(Frozen, tag=True):
    """How little memory would do? Run steps under ever tighter caps. The last question before `Close`."""


class Close(Frozen, tag=True):
    """End the session."""


class Ask(Frozen, tag=True):
    """Something that needs torch but no run."""

    question: Question


Request = Prepare | Measure | TrainEpoch | Feed | Load | Profile | AllReduce | Where | Squeeze | Close | Ask


class Progress(Frozen, tag=True):
    """Where the bench is; also tells where a crash happened."""

    stage: str
    detail: str = ""
    training: TrainingProgress | None = None


AFTER_COMPILING = frozenset({"numerics", "count", "warm-up", "ready"})
"""Stages of a recipe that has been compiled, in which it takes no longer than any other."""


class PreparedReply(Frozen, tag=True):
    prepared: Prepared
    epochs: tuple[Epoch, ...] = ()
    """Done before, by the checkpoint."""


class BlockReply(Frozen, tag=True):
    block: Block


class EpochReply(Frozen, tag=True):
    epoch: Epoch
    block: Block
    """Its steps."""
    lost_checkpoint: str = ""
    """Why the state after it could not be kept; empty if it was kept, or was not asked for."""


class FedReply(Frozen, tag=True):
    fed: Fed


class LoadReply(Frozen, tag=True):
    served: Served


class TraceReply(Frozen, tag=True):
    trace: TraceRef


class AllReduced(Frozen, tag=True):
    message_bytes: int
    seconds: tuple[float, ...]
    """For each repeat; of several ranks, those of the slowest."""


class Hello(Frozen, tag=True):
    """The first word of a rank, to the process that waits for all of them."""

    rank: int
    world: int
    local_rank: int
    host: str
    pid: int
    token: str = ""


class Position(Frozen, tag=True):
    """How far a rank has come: of ranks that wait for each other, the one that is behind holds up the others."""

    stage: str
    entered: int
    """Stages so far."""
    steps: int
    """Steps begun so far."""
    waits: bool
    """For other ranks, as far as its innermost call tells."""
    where: str = ""
    """The line of the user's own code it is in; empty where it is in none."""


class SqueezeReply(Frozen, tag=True):
    needed_bytes: int | None
    """None where this device has no allocator to cap."""


class ClosedReply(Frozen, tag=True):
    closed: Closed


class FailureReply(Frozen, tag=True):
    failure: Failure


Reply = (
    Progress
    | PreparedReply
    | BlockReply
    | EpochReply
    | FedReply
    | LoadReply
    | TraceReply
    | AllReduced
    | Hello
    | Position
    | SqueezeReply
    | ClosedReply
    | FailureReply
    | EnvironmentAnswer
    | ModelNames
    | CheckedSpecs
    | Health
    | SwitchChoices
    | Snippet
    | CountAnswer
    | MemoryAnswer
    | CeilingsAnswer
    | MetricAnswer
    | OperatorTimes
)

OnProgress = Callable[[Progress], None]

T = TypeVar("T")

_LENGTH = struct.Struct("!Q")
_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_scripts: msgspec.msgpack.Decoder[list[Request]] = msgspec.msgpack.Decoder(list[Request])
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def send(connection: socket.socket, message: Request | Reply) -> None:
    body = _encoder.encode(message)
    connection.sendall(_LENGTH.pack(len(body)) + body)


def receive_request(connection: socket.socket) -> Request | None:
    """The next request, or None when the desk has hung up."""
    body = receive_frame(connection)
    return None if body is None else _decode(_requests, body, "desk")


def receive_reply(connection: socket.socket) -> Reply | None:
    """The next reply, or None when the worker is gone."""
    body = receive_frame(connection)
    return None if body is None else _decode(_replies, body, "worker")


def write_script(requests: Sequence[Request]) -> bytes:
    """Requests for a worker without a connection to the desk."""
    return _encoder.encode(list(requests))


def read_script(body: bytes) -> list[Request]:
    return _decode(_scripts, body, "script")


def receive_frame(connection: socket.socket) -> bytes | None:
    """One length-prefixed frame; None at the end of the stream, also in the middle of a frame."""
    header = _receive_exactly(connection, _LENGTH.size)
    return None if header is None else _receive_exactly(connection, _LENGTH.unpack(header)[0])


def _decode(decoder: msgspec.msgpack.Decoder[T], body: bytes, sender: str) -> T:
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError, SpecError) as error:  # also text that is not UTF-8, and a spec out of range
        raise DoorError(f"the {sender} sent something that is not a message: {error}") from None


def _receive_exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = connection.recv(min(count - len(parts), 1 << 20))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
