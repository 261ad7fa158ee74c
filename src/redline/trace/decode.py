"""This module makes columns of typed events, batch by batch, and returns a `Trace` for each process in a file."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import compress
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from redline.model.errors import TraceError
from redline.model.note import note
from redline.trace.columns import (
    UNKNOWN,
    Allocations,
    Calls,
    Collective,
    DeviceInfo,
    DeviceWork,
    HostRanges,
    Ids,
    Ints,
    Lost,
    Marks,
    Operators,
    Shape,
    Trace,
    Work,
)
from redline.trace.events import (
    NO_ARGS,
    NO_TIME,
    UNREADABLE,
    AnyEvent,
    Args,
    Event,
    EventReader,
    TraceFile,
    rank_in_name,
    start_and_duration,
    trace_files,
)
from redline.trace.intervals import distinct

T = TypeVar("T")


class _Kind(NamedTuple):
    """This describes one table of a trace."""

    field: str
    table: type[Any]
    arguments: dict[str, str]
    """These columns are arguments of the events. The values are the names that `Args` gives them."""


OPERATOR = _Kind("operators", Operators, {name: name for name in ("external", "sequence", "forward_thread")})
CALL = _Kind("calls", Calls, {name: name for name in ("correlation", "external")})
ANNOTATION = _Kind("annotations", Marks, {})
FRAME = _Kind("frames", HostRanges, {})
DEVICE = _Kind("work", DeviceWork, {name: name for name in ("correlation", "bytes", "stream")})
ALLOCATION = _Kind("allocations", Allocations, {"bytes": "allocated", "on_device": "device_type"})
_KINDS = (OPERATOR, CALL, ANNOTATION, FRAME, DEVICE, ALLOCATION)

_CATEGORIES: dict[str, tuple[_Kind, Work | None] | None] = {
    "cpu_op": (OPERATOR, None),
    "user_annotation": (ANNOTATION, None),
    "python_function": (FRAME, None),
    "kernel": (DEVICE, Work.KERNEL),
    "gpu_memcpy": (DEVICE, Work.COPY),
    "gpu_memset": (DEVICE, Work.FILL),
    "cpu_instant_event": (ALLOCATION, None),
    # torch 1.8 to 1.10 wrote operators like this.
    "operator": (OPERATOR, None),
    "memcpy": (DEVICE, Work.COPY),
    "memset": (DEVICE, Work.FILL),
    "runtime": (CALL, None),
    # This is work on accelerators of other makers.
    **dict.fromkeys(("mtia_ccp_events", "hpu_op"), (DEVICE, Work.KERNEL)),
    # We leave these out because they repeat what other events say: annotations drawn on the device, arrows, the profiler's own work.
    **dict.fromkeys(("gpu_user_annotation", "ac2g", "fwdbwd", "overhead", "trace", "cuda_sync", "")),
}
_OLD_MARKS = ("ProfilerStep#", "enumerate(DataLoader)", "Optimizer.")
"""Annotations begin with these. torch 1.8 to 1.10 wrote them as operators."""

LONG_FRAME_US = 100.0
"""Shorter Python functions are not kept, unless they are calls of modules, because they explain no wait and there are millions of them."""
MODULE_FRAME = "nn.Module: "

WITH_VALUES = ("conv", "attention", "record_param_comms", "c10d::")
"""The work of these operators depends on inputs that are not tensors, such as strides or whether a mask is causal."""


class Numbering(defaultdict[T, int]):
    """It numbers things in the order in which they are first met."""

    def __init__(self) -> None:
        super().__init__()
        self.default_factory = self.__len__

    def of(self, things: Iterable[T], count: int) -> Ids:
        return np.fromiter(map(self.__getitem__, things), np.int32, count)


class Builder:
    """It takes batches of events. `finish` returns the tables."""

    def __init__(self) -> None:
        self.names: Numbering[str] = Numbering()
        self.threads: Numbering[tuple[int | str, int | str]] = Numbering()
        self.shapes: Numbering[Shape] = Numbering()
        self.collectives: Numbering[Collective] = Numbering()
        self.devices: Numbering[tuple[int, int | str]] = Numbering()
        """The keys are the device's number and the process that the event is drawn under. The second one tells devices of
        fused files apart."""
        self.events = 0
        self.rejected: Counter[str] = Counter()
        self.unused: Counter[str] = Counter()
        """It counts events with a duration in categories that no table reads."""
        self._parts: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        self._shape_number = cache(
            lambda *texts: self.shapes[Shape(*(b"".join(text.split()).decode("utf-8", "replace") for text in texts))]
        )
        self._has_values = cache(lambda name: any(word in name for word in WITH_VALUES))

    def add(self, events: Sequence[AnyEvent]) -> None:
        """Adds a batch of events. Raises `NeedsExactTimes` before anything is taken from the batch."""
        by_category: defaultdict[str, list[AnyEvent]] = defaultdict(list)
        for event in events:
            by_category[event.cat].append(event)
        groups: list[tuple[_Kind, Work | None, list[AnyEvent]]] = []
        unused: Counter[str] = Counter()
        for category, group in by_category.items():
            known = _kind_of(category)
            if known == "unknown":
                # An event that says on which device and stream it ran is work of an accelerator, even if we do not know its category.
                placed = [event for event in group if event.args and min(event.args.device, event.args.stream) >= 0]
                unused[category] += 0 if placed else sum(event.ph == "X" for event in group)
                known, group = (DEVICE, Work.KERNEL), placed
            if category == "Operator":
                groups.append((ANNOTATION, None, [event for event in group if event.name.startswith(_OLD_MARKS)]))
                group = [event for event in group if not event.name.startswith(_OLD_MARKS)]
            if known is not None:
                groups.append((*known, _wanted(known[0], group)))
        self._keep([group for group in groups if group[2]])
        self.unused += unused
        self.events += len(events)

    def _keep(self, groups: list[tuple[_Kind, Work | None, list[AnyEvent]]]) -> None:
        """Takes the groups. Times are worked out for all of them at once, because calling numpy for each by itself would
        take most of the time."""
        if not groups:
            return
        start, duration = start_and_duration([event for _, _, group in groups for event in group])
        end = 0
        for kind, work, group in groups:
            part = slice(end, end := end + len(group))
            lasts = np.zeros(len(group), np.int64) if kind is ALLOCATION else duration[part]
            keep = (start[part] != NO_TIME) & (lasts >= 0)
            self.rejected["no time, or one out of range"] += int((start[part] == NO_TIME).sum())
            late = int((~keep & (start[part] != NO_TIME)).sum())
            self.rejected["a duration below zero, out of range, or none"] += late
            kept = group if keep.all() else list(compress(group, keep.tolist()))
            columns = {"start": start[part][keep], "duration": lasts[keep]}
            self._parts[kind.field].append(columns | self._columns(kind, work, kept))

    def _columns(self, kind: _Kind, work: Work | None, events: list[AnyEvent]) -> dict[str, Any]:
        count, args = len(events), [event.args or NO_ARGS for event in events]
        columns: dict[str, Any] = {
            name: _keys(list(map(attrgetter(argument), args))) for name, argument in kind.arguments.items()
        }
        if kind is not ALLOCATION:
            columns["name"] = self.names.of((event.name for event in events), count)
        if kind is not DEVICE:
            columns["thread"] = self.threads.of(((event.pid, event.tid) for event in events), count)
        if kind in (OPERATOR, ANNOTATION):
            columns["shape"] = self._shapes(events, args)
        if kind in (OPERATOR, DEVICE):
            columns["collective"] = self._collectives(args)
        if kind is DEVICE:
            drawn = [(arg.device, event.pid) for arg, event in zip(args, events, strict=True)]
            number = {pair: self.devices[_device(*pair)] for pair in dict.fromkeys(drawn)}
            columns["device"] = np.array([number[pair] for pair in drawn], np.int32)
            columns["kind"] = np.full(count, work, np.int32)
            if UNKNOWN in columns["stream"]:
                columns["stream"] = _keys(
                    [_either(arg.stream, event.tid) for arg, event in zip(args, events, strict=True)]
                )
        return columns

    def _shapes(self, events: list[AnyEvent], args: list[Args]) -> Ids:
        number, has_values = self._shape_number, self._has_values
        return np.array(
            [
                number(bytes(arg.dims), bytes(arg.types), bytes(arg.values) if has_values(event.name) else b"")
                if arg.dims
                else UNKNOWN
                for event, arg in zip(events, args, strict=True)
            ],
            np.int32,
        )

    def _collectives(self, args: list[Args]) -> Ids:
        if not any([arg.collective for arg in args]):  # noqa: C419 - a list is made in half the time
            return np.full(len(args), UNKNOWN, np.int32)
        return np.array([self.collectives[_collective(arg)] if arg.collective else UNKNOWN for arg in args], np.int32)

    def finish(self) -> dict[str, Any]:
        """Returns the tables of a `Trace`, by field. The parts they were made from are released on the way."""
        self._shape_number.cache_clear()
        tables: dict[str, Any] = {}
        for kind in _KINDS:
            parts = self._parts.pop(kind.field, [])
            columns = {}
            for column in fields(kind.table):
                pieces = [part.pop("start" if column.name == "at" else column.name) for part in parts]
                columns[column.name] = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
            tables[kind.field] = kind.table(**columns)
        return tables

    def device_numbers(self) -> Ids:
        """Returns the number of each device. If two devices share one, the number is that of the process they are drawn under."""
        shared = Counter(number for number, _ in self.devices)
        numbers = [number if shared[number] == 1 else _either(UNKNOWN, pid, number) for number, pid in self.devices]
        return np.array(numbers, np.int32)


def _wanted(kind: _Kind, events: list[AnyEvent]) -> list[AnyEvent]:
    if kind is ALLOCATION:
        return [event for event in events if event.ph == "i" and event.name == "[memory]"]
    if kind is FRAME and events and isinstance(events[0], Event):
        # Only Python functions that last long and calls of modules are kept. Exact times are not compared.
        events = [event for event in events if event.dur >= LONG_FRAME_US or event.name.startswith(MODULE_FRAME)]
    return [event for event in events if event.ph == "X"]


@cache
def _kind_of(category: str) -> Any:
    """Returns the table and the kind of work. It is None for a category that is not read, and `unknown` for one that nobody knows."""
    lower = category.lower()
    return (CALL, None) if lower.endswith(("_runtime", "_driver")) else _CATEGORIES.get(lower, "unknown")


def _collective(args: Args) -> Collective:
    name, dtype, group = (
        bytes(raw).decode("utf-8", "replace").strip('" ') for raw in (args.collective, args.dtype, args.group)
    )
    return Collective(name, dtype, args.in_elements, args.out_elements, args.group_size, group)


def _keys(values: list[int]) -> Ints | Ids:
    """Returns whole numbers as a column, in half the space if they fit."""
    column = np.array(values, np.int64)
    small = column.astype(np.int32)
    return small if (small == column).all() else column


def _device(number: int, pid: int | str) -> tuple[int, int | str]:
    # No machine has so many devices, so such a number is damaged and counts as unknown.
    return _either(number if abs(number) < 2**31 else UNKNOWN, pid), pid


def _either(value: int, label: int | str, otherwise: int = UNKNOWN) -> int:
    """Returns the argument if it is given, else the process or thread number that the event is drawn under."""
    if value != UNKNOWN:
        return value
    return label if isinstance(label, int) and abs(label) < 2**31 else otherwise


# The functions below read whole files.

MOST_DEVICES = 256
"""One process drives far fewer devices than this. A file that names more is damaged or holds something else."""
LARGEST_SUM_NS = 2.0**62
"""Durations that add up to more would overflow the sums that are made of them."""


def read_file(path: Path) -> list[Trace]:
    """Returns a trace for each process in the file."""
    file, builder = TraceFile(path), Builder()
    reader = EventReader(file, path, builder.add)
    reader.read()
    lost = _lost(file, reader, builder)
    why = f" ({'; '.join(lost.reasons)})" if lost.reasons else ""
    tables = builder.finish()
    devices = len(distinct(tables["work"].device))
    if not builder.events:
        raise TraceError(f"{path} holds no whole event{why}")
    if devices > MOST_DEVICES:
        raise TraceError(f"{path} names {devices:,} devices: this is not the trace of one process")
    if not len(tables["operators"]) and not len(tables["work"]):
        raise TraceError(f"{path} holds {builder.events:,} events, but neither operators nor device work{why}")
    for name in ("operators", "calls", "annotations", "work"):
        if tables[name].duration.sum(dtype=np.float64) > LARGEST_SUM_NS:
            raise TraceError(f"{path}: the durations of its {name} add up to more than a century; they are damaged")
    header = reader.header()
    job = _part(header, "distributedInfo", dict[str, Any], {})
    listed = ", ".join(f"{count:,} of {category[:40]!r}" for category, count in builder.unused.most_common(5))
    unknown = note("unknown-events", f"events of categories that Redline does not know are not counted: {listed}")
    whole = Trace(
        source=str(path),
        events=builder.events,
        rank=_count(job.get("rank"), rank_in_name(path)),
        world_size=_count(job.get("world_size")),
        devices=tuple(map(_device_info, _part(header, "deviceProperties", list[dict[str, Any]], [])[:MOST_DEVICES])),
        names=list(builder.names),
        shapes=list(builder.shapes),
        collectives=list(builder.collectives),
        threads=list(builder.threads),
        lost=lost,
        trace_id=_part(header, "trace_id", str, "") or None,
        notes=(unknown,) if listed else (),
        **tables,
    )
    return _by_process(whole, builder.device_numbers())


def read_trace(path: Path) -> Trace:
    """Returns the trace of a regular file that holds one process, as profilers write it."""
    if path.exists() and not path.is_file() and not path.is_dir():
        # Nobody may ever write into a pipe, and then we would wait for ever.
        raise TraceError(f"{path} is not a regular file")
    traces = read_file(path)
    if len(traces) > 1:
        raise TraceError(f"{path} holds {len(traces)} processes")
    return traces[0]


def read_traces(paths: Sequence[Path]) -> list[Trace]:
    """Returns all traces in files and folders. A trace that is there twice is returned once."""
    files, notes = trace_files(paths)
    traces: dict[Any, Trace] = {}
    for trace in (trace for path in files for trace in read_file(path)):
        key = (trace.trace_id, trace.rank, trace.process, trace.events) if trace.trace_id else len(traces)
        if (first := traces.setdefault(key, trace)) is not trace:
            notes.append(note("given-twice", f"{trace.source} is the same trace as {first.source} and is counted once"))
    first, *others = traces.values()
    return [replace(first, notes=(*notes, *first.notes)), *others]


def _lost(file: TraceFile, reader: EventReader, builder: Builder) -> Lost:
    reasons = []
    if not reader.ended:
        where = f"{file.problem or 'the file ends early'}, after {file.size_bytes:,} bytes"
        inside = f", inside an event ({reader.left_over:,} bytes of it)" if reader.left_over else ""
        reasons.append(f"{where}{inside}: whatever came later is missing")
    rejected = {"not readable as events": reader.unreadable, **builder.rejected}
    reasons += [f"{count:,} events left out: {why}" for why, count in rejected.items() if count]
    return Lost(
        truncated=not reader.ended, bytes=reader.left_over, events=sum(rejected.values()), reasons=tuple(reasons)
    )


def _part(header: dict[str, msgspec.Raw], name: str, kind: type[T], otherwise: T) -> T:
    try:
        return msgspec.json.decode(header[name], type=kind) if name in header else otherwise
    except UNREADABLE:
        return otherwise


def _device_info(told: dict[str, Any]) -> DeviceInfo:
    major, minor = _count(told.get("computeMajor")), _count(told.get("computeMinor"))
    return DeviceInfo(
        index=_count(told.get("id")),
        name=told["name"] if isinstance(told.get("name"), str) else "",
        capability=None if major is None or minor is None else (major, minor),
    )


def _count(value: Any, otherwise: int | None = None) -> int | None:
    """Returns a number that counts something. If something else stands there, it returns `otherwise`."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else otherwise


# The functions below divide files that hold several processes, as tools write that fuse the traces of a job. Each process
# counts its launches and operators from 1, so their numbers collide. Work on a device names the launch it came from but not
# the process. A device is driven by one process: the one whose launches explain most of its work.

MOST_PROCESSES = 1024
"""A file of one job names far fewer processes than this. One that names more is damaged or holds something else."""


def _by_process(trace: Trace, numbers: Ids) -> list[Trace]:
    """Returns one trace for each process, which is the trace itself if one process made it. `numbers` holds the number of
    each device that its work names by index."""
    processes: Numbering[int | str] = Numbering()
    of_thread = processes.of((pid for pid, _ in trace.threads), len(trace.threads))
    working = distinct(np.concatenate((of_thread[trace.operators.thread], of_thread[trace.calls.thread]))).tolist()
    if len(working) > MOST_PROCESSES:
        raise TraceError(f"{trace.source} names {len(working):,} processes: this is not the trace of one job")
    work = replace(trace.work, device=numbers[trace.work.device])
    if len(working) < 2:
        return [replace(trace, work=work)]
    traces = []
    driver = {
        device: _driver(trace, np.flatnonzero(trace.work.device == device), of_thread, working, device)
        for device in distinct(trace.work.device).tolist()
    }
    for process in working:
        own = np.isin(trace.work.device, [device for device, name in driver.items() if name == process])
        tables: dict[str, Any] = {"work": work.only(own)}
        for kind in _KINDS:
            if kind is not DEVICE:
                table = getattr(trace, kind.field)
                tables[kind.field] = table.only(of_thread[table.thread] == process)
        traces.append(replace(trace, process=str(list(processes)[process]), **tables))
    return traces


def _driver(trace: Trace, rows: Ints, of_thread: Ids, processes: list[int], device: int) -> int:
    """Returns the process that launched most of a device's work. If several explain as much of it, it is the one that
    stands nearest in the file."""
    work, calls = trace.work.only(rows), trace.calls

    def unexplained(process: int) -> tuple[float, float, int]:
        mine = np.flatnonzero((of_thread[calls.thread] == process) & (calls.correlation > 0))
        if not len(mine):
            return 1.0, 0.0, process
        order = mine[np.argsort(calls.correlation[mine], kind="stable")]
        call = order[np.minimum(np.searchsorted(calls.correlation[order], work.correlation), len(order) - 1)]
        delay = (work.start - calls.start[call])[calls.correlation[call] == work.correlation]
        # Ranks of one job launch the same things, so a hundredth more or less tells nothing. Devices and processes are
        # numbered as they appear in the file, where those of one rank stand together.
        return round(1 - float((delay >= 0).sum()) / len(rows), 2), abs(device - process), process

    return min(processes, key=unexplained)
