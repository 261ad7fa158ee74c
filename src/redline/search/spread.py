"""Trials spread over a Ray cluster: one per GPU (on CPUs, one per machine), their records brought back to one history.

Ray runs a trial again when its machine is lost. A trial is measured whole on one machine, so a record never mixes two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from redline.errors import DoorError, MissingExtra, UsageError
from redline.launch import open_door
from redline.launch.lock import device_lock
from redline.record import Failure, RunRecord, decode, encode, new_id
from redline.search.group import measure_together
from redline.search.observer import NoJournal
from redline.spec import RunSpec

RETRIES = 3
"""Of a trial whose machine was lost."""


def measure_trial(encoded: bytes) -> bytes:
    """A whole trial in this process's own machine; what breaks is in the record."""
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
    """Ray, connected to the cluster there; `auto` is the one this machine belongs to, None one of this machine alone."""
    try:
        import ray
    except ImportError:
        raise MissingExtra("--launch ray", "ray", "ray") from None
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level="ERROR",
            include_dashboard=False if address is None else None,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(f"no Ray cluster at {address}: {error}; start one with 'ray start --head'") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def spread(specs: Sequence[RunSpec], address: str | None) -> Iterator[tuple[int, RunRecord]]:
    """Each spec's record with its number, in the order in which they are done."""
    with cluster(address) as ray:
        trial = ray.remote(max_retries=RETRIES, **_needs(ray, specs))(measure_trial)
        waiting = {trial.remote(msgspec.msgpack.encode(spec)): number for number, spec in enumerate(specs)}
        while waiting:
            (done, *_), _ = ray.wait(list(waiting), num_returns=1)
            number = waiting.pop(done)
            try:
                yield number, decode(ray.get(done))
            except ray.exceptions.RayError as error:
                yield number, _lost(specs[number], error)


def _needs(ray: Any, specs: Sequence[RunSpec]) -> dict[str, Any]:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(spec.device.partition(":")[0] != "cpu" for spec in specs):
        if not any(node.get("GPU") for node in nodes):
            raise UsageError("the Ray cluster has no GPU; use --device cpu, or start its nodes where there are some")
        return {"num_gpus": 1}
    processors = [node["CPU"] for node in nodes if node.get("CPU")]
    if not processors:
        raise DoorError("the Ray cluster has no processors to run trials on")
    return {"num_cpus": min(processors)}  # a trial takes a machine to itself: two would slow each other


def _lost(spec: RunSpec, error: Exception) -> RunRecord:
    told = str(error).strip().splitlines()
    message = f"lost with its machine {RETRIES + 1} times" if not told else f"the cluster lost it: {told[0]}"
    failure = Failure(stage="door", kind="crash", message=message, traceback=str(error)[-4000:])
    return RunRecord(id=new_id(), spec=spec, failure=failure, stopped="failed")
