"""The desk's end of several ranks: every request goes to each of them, and their answers become one.

Each rank has a line of its own, so that a rank that dies, raises or hangs is known by its number, whoever started it and
wherever it runs.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import IO, TypeVar

import msgspec

from redline.launch.connection import (
    END_TIMEOUT_S,
    KILL_TIMEOUT_S,
    LONGEST_LOOK_S,
    WorkerProcess,
    cause_of_death,
    kernel_oom_kills,
    last_lines,
    log_tail,
    stage_of,
    timeout_of,
    trim_log,
)
from redline.launch.door import Session
from redline.model.errors import DoorError
from redline.model.protocol import (
    AllReduced,
    BlockReply,
    Close,
    ClosedReply,
    FailureReply,
    Hello,
    OnProgress,
    Position,
    PreparedReply,
    Profile,
    Progress,
    Reply,
    Request,
    SqueezeReply,
    TraceReply,
    Where,
    receive_reply,
    send,
)
from redline.model.record import Block, Closed, Failure, Numerics, Prepared, RankBlock
from redline.model.spec import LaunchSpec

GRACE_S = 3.0
"""After the first rank has failed: for the others to say whether they failed too, or where they are."""

R = TypeVar("R")


@dataclass
class RankLine:
    """The desk's end of one rank."""

    rank: int
    connection: socket.socket
    pid: int | None
    """It is None for a rank on another machine, which no signal reaches."""
    process: WorkerProcess | None = None
    """It is known if the desk itself started the rank, and then says how it ended."""
    stage: str = "start"
    reply: Reply | None = None
    position: Position | None = None
    is_gone: bool = False
    ended_at: float = field(default=math.inf)

    @property
    def failure(self) -> Failure | None:
        return self.reply.failure if isinstance(self.reply, FailureReply) else None

    @property
    def is_victim(self) -> bool:
        """True if it failed because another rank went away or never came."""
        found = self.failure
        return found is not None and any(each.code == "broken-collective" for each in found.notes)


class RanksSession(Session):
    """Several ranks that answer as one bench."""

    def __init__(
        self, lines: Sequence[RankLine], processes: Sequence[WorkerProcess], log: IO[bytes], launch: LaunchSpec
    ) -> None:
        self._lines = sorted(lines, key=lambda line: line.rank)
        self._processes = list(processes)
        self._log = log
        self._launch = launch
        self._dead: Failure | None = None
        self._paused_at: float | None = None
        self._released = False
        self._deadline = self._limit_s = 0.0
        self._oom_kills = kernel_oom_kills()

    @classmethod
    def failed(
        cls, failure: Failure, processes: Sequence[WorkerProcess], log: IO[bytes], launch: LaunchSpec
    ) -> RanksSession:
        """One that never came up: every question is answered with the failure."""
        session = cls([], processes, log, launch)
        session._end()
        session._dead = msgspec.structs.replace(failure, traceback=log_tail(log))
        return session

    def begin(self, request: Request) -> None:
        if self._dead is not None:
            return
        self.resume()
        trim_log(self._log)
        self._limit_s = timeout_of(request, self._launch)
        self._deadline = time.monotonic() + self._limit_s
        for line in self._lines:
            line.reply, line.position, line.stage = None, None, stage_of(request)
            try:
                line.connection.settimeout(self._limit_s)
                send(line.connection, _for_rank(request, line.rank))
            except (TimeoutError, ConnectionError):
                self._hang_up(line)

    def wait(self, on_progress: OnProgress | None = None, timeout_s: float | None = None) -> Reply | None:
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while self._dead is None:
            if not self._silent:
                break
            self._hear(min(self._next_moment(), until) - time.monotonic(), on_progress)
            now = time.monotonic()
            if self._silent and now >= self._next_moment():
                return self._give_up()
            if self._silent and now >= until:
                return None
            trim_log(self._log)
        return FailureReply(failure=self._dead) if self._dead is not None else self._together()

    def pause(self) -> None:
        if self._dead is None and self._paused_at is None:
            self._signal(signal.SIGSTOP)
            self._paused_at = time.monotonic()

    def resume(self) -> None:
        if self._paused_at is not None:
            self._signal(signal.SIGCONT)
            self._deadline += time.monotonic() - self._paused_at  # they could not work meanwhile
            self._paused_at = None

    def close(self) -> Closed:
        if self._released:
            return Closed()
        reply = self.ask(Close()) if self._dead is None else None
        ended = [process.wait(self._launch.close_timeout_s if reply else 0.0) for process in self._processes]
        if None in ended:
            self._end()
        printed = last_lines(log_tail(self._log))
        self._release()
        closed = reply.closed if isinstance(reply, ClosedReply) else Closed()
        return msgspec.structs.replace(closed, printed=printed)

    def kill(self) -> None:
        if not self._released:
            self._end()
            self._release()

    # Hearing

    @property
    def _silent(self) -> list[RankLine]:
        return [line for line in self._lines if line.reply is None]

    def _next_moment(self) -> float:
        """The deadline; once a rank has failed, the others have only a moment to say so too."""
        return min([self._deadline, *(line.ended_at + GRACE_S for line in self._lines)])

    def _hear(self, within_s: float, on_progress: OnProgress | None = None) -> None:
        poll = select.poll()
        by_number = {line.connection.fileno(): line for line in self._lines if not line.is_gone}
        for number in by_number:
            poll.register(number, select.POLLIN)
        for number, _ in poll.poll(1000 * min(max(within_s, 0.0), LONGEST_LOOK_S)):
            self._take(by_number[number], on_progress)

    def _take(self, line: RankLine, on_progress: OnProgress | None) -> None:
        try:
            line.connection.settimeout(max(self._deadline - time.monotonic(), 1.0))
            reply = receive_reply(line.connection)
        except (TimeoutError, ConnectionError, DoorError):
            reply = None
        if reply is None:
            self._hang_up(line)
        elif isinstance(reply, Progress):
            line.stage = reply.stage
            if on_progress and line.rank == 0:
                on_progress(reply)
        elif isinstance(reply, Position):
            line.position = reply
        elif not isinstance(reply, Hello):
            line.reply = reply
            line.ended_at = time.monotonic() if isinstance(reply, FailureReply) else math.inf

    def _hang_up(self, line: RankLine) -> None:
        """Note how a rank ended whose connection broke."""
        line.is_gone = True
        who = f"rank {line.rank} of {len(self._lines)}" + (f" (process {line.pid})" if line.pid else "")
        if line.process is not None:
            status = line.process.wait(END_TIMEOUT_S)
            kind, message = cause_of_death(status, line.stage, kernel_oom_kills() > self._oom_kills, who)
        else:
            is_oom = kernel_oom_kills() > self._oom_kills
            kind, message = "oom" if is_oom else "crash", f"{who} died at '{line.stage}'"
        if line.failure is None or line.is_victim:
            line.reply = FailureReply(failure=Failure(stage=line.stage, kind=kind, message=message))
        line.ended_at = min(line.ended_at, time.monotonic())

    # Answering

    def _together(self) -> Reply:
        failed = [line for line in self._lines if line.failure is not None]
        if failed:
            return self._broken(failed)
        replies = [line.reply for line in self._lines if line.reply is not None]
        return merged(replies)

    def _give_up(self) -> Reply:
        """A rank failed and others wait for it, or no rank answers at all."""
        failed = [line for line in self._lines if line.failure is not None]
        if failed and not all(line.is_victim for line in failed):
            return self._broken(failed)
        for line in self._silent:
            with contextlib.suppress(OSError):
                line.connection.settimeout(1.0)
                send(line.connection, Where())
        asked, until = self._silent, time.monotonic() + GRACE_S
        while any(line.position is None and line.reply is None for line in asked) and time.monotonic() < until:
            self._hear(until - time.monotonic())
        return self._fail(_hanging(asked, len(self._lines), self._limit_s))

    def _broken(self, failed: Sequence[RankLine]) -> Reply:
        causes = [line for line in failed if not line.is_victim] or list(failed)
        first = min(causes, key=lambda line: (line.ended_at, line.rank))
        found = first.failure
        assert found is not None
        alike = {(line.failure.kind, line.failure.message) for line in failed if line.failure}
        if len(failed) == len(self._lines) and len(alike) == 1 and len(self._lines) > 1:
            return self._fail(msgspec.structs.replace(found, message=f"on every rank: {found.message}"))
        told = found.message if first.is_gone else f"rank {first.rank} of {len(self._lines)}: {found.message}"
        return self._fail(msgspec.structs.replace(found, message=told, rank=first.rank))

    def _fail(self, failure: Failure) -> Reply:
        self._end()
        self._dead = failure if failure.traceback else msgspec.structs.replace(failure, traceback=log_tail(self._log))
        return FailureReply(failure=self._dead)

    # Ending

    def _signal(self, number: signal.Signals) -> None:
        """To every rank on this machine, as long as whoever started them still runs and their numbers are theirs."""
        for line in self._lines:
            process = line.process or (self._processes[0] if self._processes else None)
            if line.pid is not None and process is not None and process.wait(0.0) is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(line.pid, number)

    def _end(self) -> None:
        """Ranks elsewhere end when their line does."""
        self._signal(signal.SIGKILL)
        for process in self._processes:
            if process.wait(0.0) is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(KILL_TIMEOUT_S)

    def _release(self) -> None:
        self._released = True
        self._dead = self._dead or Failure(stage="closed", kind="crash", message="the session is closed")
        for line in self._lines:
            line.connection.close()
        self._log.close()


def _for_rank(request: Request, rank: int) -> Request:
    """Each rank writes its own trace."""
    if not isinstance(request, Profile) or not request.path:
        return request
    stem, dot, ending = request.path.partition(".json")
    return msgspec.structs.replace(request, path=f"{stem}.rank{rank}{dot}{ending}")


def _hanging(asked: Sequence[RankLine], ranks: int, limit_s: float) -> Failure:
    """Names who holds up the others: a rank that does not say where it is, or the one that is furthest behind."""
    mute = [line for line in asked if line.position is None]
    told = [(line, line.position) for line in asked if line.position is not None]
    if mute:
        behind = mute
    else:
        least = min((where.entered, where.steps) for _, where in told)
        late = [(line, where) for line, where in told if (where.entered, where.steps) == least]
        busy = [line for line, where in late if not where.waits]
        own = [line for line, where in late if where.where]
        behind = busy or (own if len(own) < len(late) else []) or [line for line, _ in late]
    names = ", ".join(str(line.rank) for line in behind)
    first = behind[0]
    at = f"'{first.position.stage if first.position else first.stage}'"
    inside = f" in {first.position.where}" if first.position is not None and first.position.where else ""
    does = "do not respond" if mute else "wait for each other" if len(behind) == ranks > 1 else "did not go on"
    message = f"rank {names} of {ranks} {does} at {at}{inside}: no answer within {limit_s:g} s; all were stopped"
    stage = first.position.stage if first.position else first.stage
    return Failure(
        stage=stage,
        kind="timeout",
        message=message,
        where=first.position.where if first.position else "",
        rank=first.rank if len(behind) == 1 else None,
    )


def merged(replies: Sequence[Reply]) -> Reply:
    """Returns one reply made from those of all ranks, in their order."""
    first = replies[0]
    if isinstance(first, PreparedReply):
        return msgspec.structs.replace(
            first, prepared=_prepared([_as(PreparedReply, each).prepared for each in replies])
        )
    if isinstance(first, BlockReply):
        return BlockReply(block=merged_block([_as(BlockReply, each).block for each in replies]))
    if isinstance(first, TraceReply):
        others = tuple(_as(TraceReply, each).trace.path for each in replies[1:])
        return TraceReply(trace=msgspec.structs.replace(first.trace, others=others))
    if isinstance(first, AllReduced):
        probes = [_as(AllReduced, each) for each in replies]
        return max(probes, key=lambda probe: median(probe.seconds))
    if isinstance(first, SqueezeReply):
        known = [each.needed_bytes for each in replies if isinstance(each, SqueezeReply) and each.needed_bytes]
        return SqueezeReply(needed_bytes=max(known, default=None))
    return first


def _as(kind: type[R], reply: object) -> R:
    if not isinstance(reply, kind):
        raise DoorError(f"ranks answered unlike things: {kind.__name__} and {type(reply).__name__}")
    return reply


def _prepared(parts: Sequence[Prepared]) -> Prepared:
    first, infos = parts[0], [part.workload for part in parts]
    items = sum(info.items_per_step for info in infos)
    batches = [info.batch for info in infos]
    batch = None if None in batches else sum(each or 0 for each in batches)
    wrong = next((part.numerics for part in parts if part.numerics.is_wrong), None)
    numerics: Numerics = wrong or first.numerics
    return msgspec.structs.replace(
        first,
        workload=msgspec.structs.replace(first.workload, items_per_step=items, batch=batch),
        numerics=numerics,
        ranks=tuple(rank for part in parts for rank in part.ranks),
    )


def merged_block(blocks: Sequence[Block]) -> Block:
    """Returns the slowest rank's block with the samples and the memory of all: the others have to wait for it."""
    slowest = max(blocks, key=lambda block: sum(block.samples) / max(len(block.samples), 1))
    siblings_s = sum(block.cpu_s or 0.0 for block in blocks if block is not slowest)
    others_s = slowest.others_cpu_s
    energies = [block.energy_j for block in blocks]
    return msgspec.structs.replace(
        slowest,
        # Siblings are no strangers on this machine. Their shares cannot be told from others' by name.
        others_cpu_s=None if others_s is None else max(others_s - siblings_s, 0.0),
        busiest=(),
        energy_j=None if None in energies else sum(each or 0.0 for each in energies),
        ranks=tuple(
            RankBlock(
                rank=rank,
                samples=block.samples,
                # Without `alone` nobody knows which part of a phase is waiting for others, as in every phase of FSDP.
                phases=block.phases if block.alone else {},
                alone=block.alone,
                wall_s=block.wall_s,
                cpu_s=block.cpu_s,
                waited_s=block.waited_s,
                memory=block.memory,
            )
            for rank, block in enumerate(blocks)
        ),
    )
