"""The one door: the messages of a measuring session between desk and bench, and how messages are framed on a socket.

The desk sends a request; the bench answers with one reply, and with `Progress` on the way.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Collection, Sequence
from typing import Literal, TypeVar

import msgspec

from redline.model.arrivals import Served
from redline.model.errors import DoorError, SpecError
from redline.model.fields import Frozen
from redline.model.note import Note
from redline.model.record import (
    Block,
    BlockKind,
    Capabilities,
    Closed,
    DeviceInfo,
    Environment,
    Epoch,
    Failure,
    Fed,
    FedPart,
    Prepared,
    TraceRef,
    WorkloadInfo,
)
from redline.model.spec import RunSpec
from redline.model.work import Ceilings, Facts, MemoryUse, OperatorTime, WorkCount

Relief = Literal["host", "device", "both", "memory"]
"""A switch relieves a host that cannot launch fast enough, a device that is busy, both, or memory. One that relieves memory makes a step
slower rather than faster, and pays where a larger batch does."""


class AskEnvironment(Frozen, tag=True):
    """Asks what this machine is, seen from torch."""

    device: str = "auto"
    threads: int | None = None


class AskModels(Frozen, tag=True):
    """Asks which models go by name."""

    pattern: str | None = None


class AskCheck(Frozen, tag=True):
    """Asks whether these specs could run here. Resolves `auto` devices; builds nothing."""

    specs: tuple[RunSpec, ...]


class AskHealth(Frozen, tag=True):
    """Asks what torch says about itself: its build, visible devices, a compiler that works."""


class AskSwitches(Frozen, tag=True):
    """Asks what one step of this workload does, and which switches it could be given here. Runs a few steps of it on its
    device, in strict fp32; the spec's recipe is ignored."""

    spec: RunSpec


class AskCount(Frozen, tag=True):
    """How much work is one step? Builds the model without its memory where that can be; needs no device."""

    spec: RunSpec


class AskMemory(Frozen, tag=True):
    """Asks what one step of this workload under the spec's recipe holds in memory, and who holds it. Runs two steps."""

    spec: RunSpec


class AskSnippet(Frozen, tag=True):
    """The spec's recipe as plain PyTorch, for people who do not have Redline installed."""

    spec: RunSpec


class AskMetric(Frozen, tag=True):
    """Asks what the user's own check says about the workload under the spec's recipe, and about it without any."""

    spec: RunSpec
    check: str
    """`file.py:function`, `package.module:function` or `pickle:PATH`: from a model to a number, higher is better."""
    baseline: float | None = None
    """The check says this about the workload without any recipe, where that is known already."""


class AskCeilings(Frozen, tag=True):
    """How fast is this device at its best? Takes seconds, and the device to itself."""

    device: str = "auto"
    threads: int | None = None


OperatorName = Literal["matmul", "conv", "attention", "norm", "elementwise"]


class OperatorCase(Frozen):
    """This is one operator at one size in one number format."""

    operator: OperatorName
    shape: tuple[int, ...]
    number_format: str = "fp32"


class AskOperators(Frozen, tag=True):
    """How fast are these operators by themselves, or those that the model of a spec calls?"""

    device: str = "auto"
    threads: int | None = None
    cases: tuple[OperatorCase, ...] = ()
    spec: RunSpec | None = None
    """With None, the cases are timed. Otherwise the operators of one forward of this model are, and the cases are ignored."""


Question = (
    AskEnvironment
    | AskModels
    | AskCheck
    | AskHealth
    | AskSwitches
    | AskSnippet
    | AskCount
    | AskCeilings
    | AskMetric
    | AskOperators
    | AskMemory
)


class ModelName(Frozen):
    name: str
    source: str
    kind: str = ""


class ModelNames(Frozen, tag=True):
    models: tuple[ModelName, ...]
    missing: tuple[str, ...] = ()
    """Sources whose package is not installed, with how to get it."""


class Checked(Frozen):
    """The answer for one spec: the spec with its device resolved, or why it cannot be."""

    spec: RunSpec
    usage: str | None = None
    """This is a mistake of the person: nothing can run."""
    fingerprint: str = ""
    """This holds what is known of the model before it is built, such as the version of its library or a hash of the user's files."""
    capabilities: Capabilities = Capabilities()
    """These are those of the spec's recipe."""


class CheckedSpecs(Frozen, tag=True):
    answers: tuple[Checked, ...]


class HealthItem(Frozen):
    """This is one thing that was looked at: whether it is fine, what was seen, and how to fix it."""

    name: str
    ok: bool | None
    """It is None if the thing is absent and only needed for some features."""
    seen: str
    mend: str = ""


class Health(Frozen, tag=True):
    items: tuple[HealthItem, ...]
    devices: tuple[DeviceInfo, ...] = ()


class SwitchNeed(Frozen):
    """A switch needs this, always or once another is in the recipe too."""

    wants: tuple[str, ...]
    """One of these must be in the recipe as well, each as `name` or `name:argument`."""
    reason: str
    """It says why, and what to do about it."""
    beside: str | None = None
    """The need holds only where this one is in the recipe. With None it always holds."""

    def is_met(self, names: Collection[str]) -> bool:
        """Returns whether it is met in a recipe of switches with these names."""
        return (self.beside is not None and self.beside not in names) or any(name in names for name in self.wants)


class SwitchChoice(Frozen):
    """One switch as the tuner may put it into a recipe."""

    switch: str
    """It is written as in a recipe: `fp16`, `compile:freeze`."""
    family: str
    """A recipe has at most one switch of a family."""
    relieves: Relief = "device"
    excludes: tuple[str, ...] = ()
    """It cannot stand beside these switches (`compile`, or only `compile:reduce-overhead`). Both sides of an exclusion tell it."""
    needs: tuple[SwitchNeed, ...] = ()
    """These hold for the task that was asked about."""
    refusal: Note | None = None
    """This says why it cannot be had here, or would change nothing about this model. It is None if it can be tried."""
    capabilities: Capabilities = Capabilities()
    """A switch that quantizes is never tried unless asked for, and this tells which do."""
    leaves_program: bool = False
    """If True, programs that were compiled without the switch serve with it too: a recipe that only adds it finds the caches warm."""
    is_slow_to_prepare: bool = False
    """Minutes rather than seconds: only for those who have them."""
    prepare_s: float | None = None
    """About how long that takes, where it is worth its time for this task; None: as usual."""
    is_doubtful: bool = False
    """It often does not run on models like this one."""
    expected_time: float | None = None
    """Time of a step with it over one without, by what the device was seen to need for products in its number format; None: not asked."""


class SwitchChoices(Frozen, tag=True):
    choices: tuple[SwitchChoice, ...]
    facts: Facts | None = None
    """It is None where a plain step of the workload does not fit into memory."""


class Snippet(Frozen, tag=True):
    code: str


class MetricAnswer(Frozen, tag=True):
    value: float
    baseline: float


class EnvironmentAnswer(Frozen, tag=True):
    environment: Environment


class CountAnswer(Frozen, tag=True):
    work: WorkCount
    workload: WorkloadInfo


class MemoryAnswer(Frozen, tag=True):
    use: MemoryUse
    workload: WorkloadInfo
    environment: Environment


class CeilingsAnswer(Frozen, tag=True):
    ceilings: Ceilings


class OperatorTimes(Frozen, tag=True):
    rows: tuple[OperatorTime, ...]
    notes: tuple[Note, ...] = ()
    """They name what a model calls and was not timed."""


Sharing = Literal["alone", "shares", "helps"]
"""This says how blocks that are compiled one by one are compiled. `shares`: other workers prepare the same recipe at the same time, and
each compiles some. `helps`: the same, and nothing else is prepared."""


class Prepare(Frozen, tag=True):
    """Asks to build the workload, apply the recipe, check its numerics, and reach the steady state."""

    spec: RunSpec
    bare: bool = False
    """It is true under a profiler from outside, which makes every kernel slow. Numerics are then left out, and two steps warm up."""
    modules: bool = False
    """If True, the work is counted module by module."""
    sharing: Sharing = "alone"


class Measure(Frozen, tag=True):
    """Asks to run one timed block."""

    kind: BlockKind
    seconds: float
    max_steps: int | None = None
    settle_seconds: float = 0.02
    round: int = 0
    turn: int | None = None
    """It says which of the processors that may be used issues the steps, counted round and round. With None the system chooses."""


class Profile(Frozen, tag=True):
    """Asks to capture a trace of a few steps, outside every timed block."""

    path: str
    """The gzipped Chrome trace is to be written here. With `outside`, the other profiler writes here."""
    wait: int = 1
    warmup: int = 2
    active: int = 3
    shapes: bool = True
    memory: bool = False
    stacks: bool = False
    outside: bool = False
    """If True, a profiler in front of the worker looks on: the bench then only runs the steps and marks them for it."""
    modules: bool = False
    """If True, every module of the forward pass is marked. A recipe that dissolves modules (compiled, recorded) has no such marks."""


class TrainEpoch(Frozen, tag=True):
    """Asks to train one epoch on the data and to validate. Progress is sent on the way."""

    number: int
    """Epochs are counted from 1."""
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
    """The run stops then, whoever still waits: above its capacity a server falls behind without end."""
    seed: int | None = None


class AllReduce(Frozen, tag=True):
    """How long does it take all ranks to sum a message of this size? Outside every timed block."""

    message_bytes: int
    repeats: int = 10


class Where(Frozen, tag=True):
    """Asks what this rank is doing right now. Answered also while it is busy with another request, or hangs."""


class Squeeze(Frozen, tag=True):
    """How little memory would do? Run steps under ever tighter caps. The last question before `Close`."""


class Close(Frozen, tag=True):
    """Asks to end the session."""


class Ask(Frozen, tag=True):
    """Something that needs torch but no run."""

    question: Question


Request = Prepare | Measure | TrainEpoch | Feed | Load | Profile | AllReduce | Where | Squeeze | Close | Ask


class TrainingProgress(Frozen):
    """This says where a training is."""

    epoch: int
    epochs: int
    step: int
    steps: int
    """This epoch has so many steps. It is 0 if that is unknown, because the user's loader does not say how long it is."""
    loss: float | None = None
    """This was the mean over the epoch so far, a moment ago."""
    samples_per_s: float | None = None


class Progress(Frozen, tag=True):
    """This says where the bench is, and so also where a crash happened."""

    stage: str
    detail: str = ""
    training: TrainingProgress | None = None


AFTER_COMPILING = frozenset({"numerics", "count", "warm-up", "ready"})
"""Stages of a recipe that has been compiled, in which it takes no longer than any other."""


class PreparedReply(Frozen, tag=True):
    prepared: Prepared


class BlockReply(Frozen, tag=True):
    block: Block


class EpochReply(Frozen, tag=True):
    epoch: Epoch
    block: Block
    """Its steps."""


class FedReply(Frozen, tag=True):
    fed: Fed


class LoadReply(Frozen, tag=True):
    served: Served


class TraceReply(Frozen, tag=True):
    trace: TraceRef


class AllReduced(Frozen, tag=True):
    message_bytes: int
    seconds: tuple[float, ...]
    """They are given for each repeat. With several ranks they are those of the slowest."""


class Hello(Frozen, tag=True):
    """This is the first word of a rank, to the process that waits for all of them."""

    rank: int
    world: int
    local_rank: int
    host: str
    pid: int
    token: str = ""


class Position(Frozen, tag=True):
    """This says how far a rank has come: of ranks that wait for each other, the one that is behind holds up the others."""

    stage: str
    entered: int
    """Stages so far."""
    steps: int
    """Steps begun so far."""
    waits: bool
    """It waits for other ranks, as far as its innermost call tells."""
    where: str = ""
    """This is the line of the user's own code it is in. It is empty where it is in none."""


class SqueezeReply(Frozen, tag=True):
    needed_bytes: int | None
    """It is None where this device has no allocator to cap."""


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
    """Returns the next request, or None when the desk has hung up."""
    body = receive_frame(connection)
    return None if body is None else _decode(_requests, body, "desk")


def receive_reply(connection: socket.socket) -> Reply | None:
    """Returns the next reply, or None when the worker is gone."""
    body = receive_frame(connection)
    return None if body is None else _decode(_replies, body, "worker")


def write_script(requests: Sequence[Request]) -> bytes:
    """Returns requests for a worker without a connection to the desk."""
    return _encoder.encode(list(requests))


def read_script(body: bytes) -> list[Request]:
    return _decode(_scripts, body, "script")


def receive_frame(connection: socket.socket) -> bytes | None:
    """Returns one length-prefixed frame, or None at the end of the stream, also in the middle of a frame."""
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
