"""This module spreads trials and searches over a Ray cluster, one per GPU (on CPUs, one per machine), and brings their records back.

Ray runs a trial again when its machine is lost. A trial is measured whole on one machine, so a record never mixes two; and
so is a search, whose trials are compared with each other.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from redline.launch import open_door
from redline.model.errors import DoorError, MissingExtra, RedlineError, SpecError, UsageError
from redline.model.fields import Frozen, split_address
from redline.model.migrations import decode, encode
from redline.model.record import Failure, RunRecord, new_id
from redline.model.spec import RunSpec
from redline.search.observer import NoJournal
from redline.search.run import measure_together
from redline.system.locks import device_lock

RETRIES = 3
"""A trial whose machine was lost is run again this many times."""
REACHABLE_S = 10.0
"""A cluster must answer within this time, or its address counts as wrong."""


def measure_trial(encoded: bytes) -> bytes:
    """Measures a whole trial on this process's own machine. If something breaks, the record has the failure."""
    spec = msgspec.msgpack.decode(encoded, type=RunSpec)
    door = open_door(spec.launch)
    try:
        with device_lock(spec.device):
            (record,) = measure_together([spec], door, NoJournal(), seed=spec.seed)
    finally:
        door.close()
    return encode(record)


@contextmanager
def cluster(address: str | None) -> Iterator[Any]:
    """Yields Ray, connected to a cluster: `auto` is the one that this machine belongs to, None is one of this machine alone."""
    try:
        import ray
    except ImportError:
        raise MissingExtra("--launch ray", "ray", "ray") from None
    _require_reachable(address)
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level="ERROR",
            include_dashboard=False if address is None else None,
        )
    except Exception as error:  # Ray raises plain exceptions too
        reason = " ".join(str(error).split())
        if address is None:
            raise DoorError(f"Ray did not start on this machine: {reason}; start it with 'ray start --head'") from None
        raise UsageError(f"no Ray cluster at {address}: {reason}; start one with 'ray start --head'") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _require_reachable(address: str | None) -> None:
    """Refuses a wrong address at once, which Ray itself would try for many minutes."""
    if address is None or ":" not in address:
        return
    host, port = split_address("address", address.removeprefix("ray://"))
    try:
        socket.create_connection((host, port), timeout=REACHABLE_S).close()
    except OSError as error:
        raise UsageError(f"no Ray cluster at {address}: {error}; start one with 'ray start --head'") from None


def require_cluster(ray: bool, address: str | None) -> None:
    if address is not None and not ray:
        raise SpecError("address is that of a Ray cluster: give ray (--launch ray) too")


class Answer(Frozen):
    """An answer comes from a machine of the cluster: a body, or a text that says what went wrong there."""

    body: bytes = b""
    mistake: str = ""
    """It says which mistake of the user's was only found there."""
    failure: str = ""


Work = Callable[[bytes], bytes]
"""Work is a function of a module, so that every machine finds it by name."""


def on_cluster(
    work: Work, payloads: Sequence[bytes], devices: Sequence[str], address: str | None
) -> Iterator[tuple[int, bytes | DoorError]]:
    """Yields what `work` makes of each payload, with its number, in the order in which they are done.

    Each has a GPU, or on CPUs a machine, to itself. One whose machine was lost is run again elsewhere; where that is of no
    use, an error stands in its place. A user's mistake is raised.
    """
    with cluster(address) as ray:
        call = ray.remote(max_retries=RETRIES, **_needs(ray, devices))(_called)
        waiting = {call.remote(work, payload): number for number, payload in enumerate(payloads)}
        while waiting:
            (done, *_), _ = ray.wait(list(waiting), num_returns=1)
            number = waiting.pop(done)
            try:
                answer = msgspec.msgpack.decode(ray.get(done), type=Answer)
            except ray.exceptions.RayError as error:
                reasons = str(error).strip().splitlines()
                lost = (
                    f"lost with its machine {RETRIES + 1} times"
                    if not reasons
                    else f"the cluster lost it: {reasons[0]}"
                )
                yield number, DoorError(lost)
                continue
            if answer.mistake:
                raise UsageError(answer.mistake)
            yield number, DoorError(answer.failure) if answer.failure else answer.body


def _called(work: Work, payload: bytes) -> bytes:
    """Does the work on a machine of the cluster. Errors travel as texts, because their classes need not be the same there and here."""
    try:
        answer = Answer(body=work(payload))
    except (UsageError, SpecError) as error:
        answer = Answer(mistake=str(error))
    except RedlineError as error:
        answer = Answer(failure=str(error))
    return msgspec.msgpack.encode(answer)


def spread(specs: Sequence[RunSpec], address: str | None) -> Iterator[tuple[int, RunRecord]]:
    """Measures the specs on a cluster, and yields each record with the number of its spec, in the order in which they are done."""
    payloads, devices = [msgspec.msgpack.encode(spec) for spec in specs], [spec.device for spec in specs]
    for number, answer in on_cluster(measure_trial, payloads, devices, address):
        yield number, _lost(specs[number], answer) if isinstance(answer, DoorError) else decode(answer)


def _needs(ray: Any, devices: Sequence[str]) -> dict[str, Any]:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    has_gpu = any(node.get("GPU") for node in nodes)
    for device in devices:
        kind, _, index = device.partition(":")
        if index not in ("", "0"):
            raise UsageError(f"device {device}: the cluster chooses the GPU; give --device {kind} without a number")
        if kind not in ("cpu", "auto") and not has_gpu:
            raise UsageError("the Ray cluster has no GPU; use --device cpu, or start its nodes where there are some")
    if has_gpu and any(device != "cpu" for device in devices):
        return {"num_gpus": 1}
    processors = [node["CPU"] for node in nodes if node.get("CPU")]
    if not processors:
        raise DoorError("the Ray cluster has no processors to run trials on")
    return {"num_cpus": min(processors)}  # a trial takes a machine to itself: two would slow each other


def _lost(spec: RunSpec, error: DoorError) -> RunRecord:
    failure = Failure(stage="door", kind="crash", message=str(error))
    return RunRecord(id=new_id(), spec=spec, failure=failure, stopped="failed")
