"""Kineto traces made up for tests and benchmarks, with the truth about them in whole nanoseconds.

`TraceMaker` writes single events where a test wants them. `training_trace` simulates a few steps of training on one
GPU with a communication stream, as large as asked for.
"""

from __future__ import annotations

import gzip
import io
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

from redline.analyze.profile import Profile, profile_of
from redline.model.record import RunRecord
from redline.trace.columns import Trace
from redline.trace.decode import read_trace

MAIN, AUTOGRAD = 100, 101
GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_execute_kernel__5x_cublas"
CONV = "sm80_xmma_fprop_implicit_gemm_f16f16_f16f16_f16_nhwckrsc_nhwc_tilesize128x128x32_kernel_trt"
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >"
    "(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
)
NORM = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float, float const*)"
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ADAM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::FusedOptimizerTensorListMetadata<4>, "
    "at::native::FusedAdamMathFunctor<float, 4> >(float)"
)
DEFAULT_BASE_NS = 1_419_116_104_994_000_000 // 1000


def microseconds(nanoseconds: int) -> str:
    """As Kineto prints a time."""
    sign, value = ("-", -nanoseconds) if nanoseconds < 0 else ("", nanoseconds)
    return f"{sign}{value // 1000}.{value % 1000:03d}"


def merged(intervals: list[tuple[int, int]]) -> list[list[int]]:
    """The plain way, to check the vectorised one against."""
    result: list[list[int]] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1][1] = max(result[-1][1], end)
        else:
            result.append([start, end])
    return result


def length(intervals: list[tuple[int, int]]) -> int:
    return sum(end - start for start, end in merged(intervals))


@dataclass
class Truth:
    """What was simulated, in nanoseconds."""

    compute: list[tuple[int, int]] = field(default_factory=list)
    communication: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    def timeline(self) -> dict[str, int]:
        everything = self.compute + self.communication + self.copies
        busy = merged(everything)
        span = busy[-1][1] - busy[0][0]
        compute = length(self.compute)
        return {
            "span": span,
            "busy": length(everything),
            "idle": span - length(everything),
            "compute": compute,
            "communication": length(self.communication),
            "exposed_communication": length(self.compute + self.communication) - compute,
            "copy": length(self.copies),
        }


class TraceMaker:
    """Times are nanoseconds since the beginning of the trace."""

    def __init__(
        self, *, rocm: bool = False, base_ns: int = DEFAULT_BASE_NS, device: int = 0, process: int = MAIN
    ) -> None:
        self.rocm = rocm
        self.base_ns = base_ns
        self.device = device
        self.process = process
        self.events: list[dict[str, Any]] = []
        self.truth = Truth()
        self.header: dict[str, Any] = {"schemaVersion": 1}
        self._number = 0

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def event(self, ph: str, cat: str, name: str, start: int, duration: int | None, **fields: Any) -> None:
        event = {"ph": ph, "cat": cat, "name": name, "pid": self.process, "tid": MAIN, "ts": Time(self.base_ns + start)}
        if duration is not None:
            event["dur"] = Time(duration)
        self.events.append({**event, **fields})

    def operator(
        self,
        name: str,
        start: int,
        duration: int,
        *,
        thread: int = MAIN,
        dims: Any = None,
        types: Any = None,
        **more: Any,
    ) -> int:
        number = self.next_number()
        args = {"External id": number, **more}
        if dims is not None:
            args |= {"Input Dims": dims, "Input type": types}
        self.event("X", "cpu_op", name, start, duration, tid=thread, args=args)
        return number

    def annotation(self, name: str, start: int, duration: int, *, thread: int = MAIN, **args: Any) -> None:
        self.event("X", "user_annotation", name, start, duration, tid=thread, args=args)

    def frame(self, name: str, start: int, duration: int, *, thread: int = MAIN) -> None:
        self.event("X", "python_function", name, start, duration, tid=thread, args={})

    def gpu(self, name: str, capability: tuple[int, int] | None = None) -> None:
        """Name the device in the header."""
        properties: dict[str, Any] = {"id": self.device, "name": name}
        if capability is not None:
            properties |= {"computeMajor": capability[0], "computeMinor": capability[1]}
        self.header["deviceProperties"] = [properties]

    def call(self, name: str, start: int, duration: int, *, thread: int = MAIN, **args: Any) -> None:
        self.event("X", "cuda_runtime", name, start, duration, tid=thread, args=args)

    def memory(self, at: int, size: int, *, thread: int = MAIN, on_device: bool = True) -> None:
        args = {"Bytes": size, "Device Type": int(on_device)}
        self.event("i", "cpu_instant_event", "[memory]", at, None, tid=thread, args=args)

    def kernel(
        self,
        name: str,
        start: int,
        duration: int,
        *,
        launched: int | None = None,
        call_ns: int = 4000,
        operator: int | None = None,
        stream: int | None = None,
        thread: int = MAIN,
        kind: str = "kernel",
        size: int | str | None = None,
        correlation: int | None = None,
        caller: str | None = None,
        **more: Any,
    ) -> None:
        """A kernel, copy or fill; with `launched` also the call that launched it, of the name `caller`."""
        stream = (0 if self.rocm else 7) if stream is None else stream
        number = correlation or self.next_number()
        args: dict[str, Any] = {"device": self.device, "stream": stream, "correlation": number, **more}
        if size is not None:
            args["bytes"] = size
        if operator is not None and not self.rocm:
            args["External id"] = operator
        if launched is not None and correlation is None:
            external = {"External id": operator} if operator is not None else {}
            launcher = caller or ("hipLaunchKernel" if self.rocm else "cudaLaunchKernel")
            self.call(launcher, launched, call_ns, thread=thread, correlation=number, **external)
        self.event("X", kind, name, start, duration, pid=self.device, tid=stream, args=args)
        end = start + duration
        where = self.truth.copies if kind != "kernel" else self.truth.compute
        (self.truth.communication if "nccl" in name.lower() else where).append((start, end))

    def copy(self, name: str, start: int, duration: int, **more: Any) -> None:
        self.kernel(name, start, duration, kind="gpu_memcpy", **more)

    def text(self, layout: str = "kineto") -> str:
        """`kineto`: as torch writes it; `compact`: without blanks; `indented`: as `json.dump(indent=2)`."""
        document = {**self.header, "traceEvents": self.events, "traceName": "made up"}
        if layout == "kineto":
            head = "".join(f'  "{key}": {json.dumps(value)},\n' for key, value in self.header.items())
            body = ",\n".join(_as_kineto(event) for event in self.events)
            return f'\n{{\n{head}  "traceEvents": [\n{body}\n  ],\n  "traceName": "made up"\n}}\n'
        options: dict[str, Any] = {"separators": (",", ":")} if layout == "compact" else {"indent": 2}
        return json.dumps(document, default=float, **options)

    def write(self, path: Path, layout: str = "kineto") -> Path:
        body = self.text(layout).encode()
        path.write_bytes(gzip.compress(body, 1) if path.suffix == ".gz" else body)
        return path

    def read(self) -> Trace:
        with TemporaryDirectory() as folder:
            return read_trace(self.write(Path(folder) / "a.json"))

    def profile(self, record: RunRecord | None = None) -> Profile:
        return profile_of([self.read()], record)


class Time:
    """Nanoseconds that print as Kineto's microseconds; `float` of it is what re-written traces hold."""

    def __init__(self, nanoseconds: int) -> None:
        self.nanoseconds = nanoseconds

    def __float__(self) -> float:
        return self.nanoseconds / 1000


def _as_kineto(event: dict[str, Any]) -> str:
    fields = (
        f'"{key}": {microseconds(value.nanoseconds) if isinstance(value, Time) else json.dumps(value)}'
        for key, value in event.items()
    )
    return "  {\n    " + ", ".join(fields) + "\n  }"


def training_trace(
    path: Path, *, megabytes: float, seed: int = 0, rocm: bool = False, stacks: bool = True, rank: int = 0
) -> Truth:
    """Steps of a made-up network until the file is so large: forward, backward with collectives, optimizer, a copy
    before each step and now and then a loader that comes late."""
    with path.open("wb") as file:
        packed: Any = gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1) if path.suffix == ".gz" else file
        with io.TextIOWrapper(packed, write_through=False) as text:
            simulation = _Simulation(text, random.Random(seed), rocm, stacks)
            simulation.run(int(megabytes * 1e6), rank)
    return simulation.truth


class _Simulation(TraceMaker):
    """Each event is written at once, so that a file may be larger than the memory."""

    def __init__(self, file: TextIO, chance: random.Random, rocm: bool, stacks: bool) -> None:
        super().__init__(rocm=rocm)
        self.file, self.chance, self.stacks = file, chance, stacks
        self.now = 0
        self.free = {"compute": 0, "comm": 0, "copy": 0}
        self.streams = dict(zip(self.free, (0, 1, 2) if rocm else (7, 20, 13), strict=True))
        self.written = 0

    def run(self, size: int, rank: int) -> None:
        kind = "AMD Instinct MI300X" if self.rocm else "NVIDIA H200"
        self.header["deviceProperties"] = [{"id": number, "name": kind} for number in range(2)]
        self.header["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 8}
        process = {"name": "process_name", "ph": "M", "ts": 0, "pid": 1, "tid": 0, "args": {"name": "python"}}
        self._put(json.dumps(self.header)[:-1] + ',\n  "traceEvents": [\n' + _as_kineto(process))
        number = 0
        while self.written < size:
            self._step(number)
            number += 1
        self._put('\n  ],\n  "traceName": "made up"\n}\n')

    def event(self, *args: Any, **fields: Any) -> None:
        super().event(*args, **fields)
        self._put(",\n" + _as_kineto(self.events.pop()))

    def _put(self, text: str) -> None:
        self.file.write(text)
        self.written += len(text)

    def _about(self, nanoseconds: int) -> int:
        return round(nanoseconds * (0.8 + 0.4 * self.chance.random()))

    def _launch(self, name: str, duration: int, operator: int, where: str, thread: int, kind: str = "kernel") -> None:
        launched, cost, stream = self.now, self._about(4000), self.streams[where]
        start = max(self.now + cost + self._about(2500), self.free[where] + self._about(1000))
        self.free[where] = start + duration
        size = None if self.rocm or kind == "kernel" else duration * 24
        self.kernel(
            name, start, duration, launched=launched, call_ns=cost, operator=operator, stream=stream, thread=thread,
            kind=kind, size=size, grid=[128, 1, 1], block=[256, 1, 1],
        )  # fmt: skip
        for end, at, line in (("s", launched, thread), ("f", start, stream)):
            self.event(end, "ac2g", "ac2g", at, None, id=self._number, tid=line)
        self.now += cost + self._about(1000)

    def _operator(self, name: str, kernel: str, duration: int, thread: int = MAIN, where: str = "compute") -> None:
        begin, inner = self.now, self.next_number()
        self.now += self._about(5000)
        inner_begin = self.now
        self._launch(kernel, self._about(duration), inner, where, thread)
        inner_end, self.now = self.now, self.now + self._about(1500)
        shapes = {
            "thread": thread, "types": ["float", "float", "Scalar"],
            "dims": [[self.chance.choice((8, 16)), 1024, 1024], [1024, 1024], []],
        }  # fmt: skip
        self.operator(name, begin, self.now - begin, **shapes)
        self.operator(f"{name}_inner", inner_begin, inner_end - inner_begin, **shapes, **{"External id": inner})
        self.memory(inner_begin + 100, 4096, thread=thread)
        for depth in range(4 if self.stacks else 0):
            frame = f"torch/nn/modules/module.py({1500 + depth}): _call_impl"
            self.frame(frame, begin + depth, self.now - begin - 2 * depth, thread=thread)
        self.now += self._about(2000)

    def _step(self, number: int) -> None:
        begin = self.now
        late = self._about(9_000_000) if number % 4 == 3 else 200_000
        self.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", begin, late)
        self.now += late + 1000
        copy = self._about(30_000)
        self._launch("Memcpy HtoD (Pinned -> Device)", copy, self.next_number(), "copy", MAIN, "gpu_memcpy")
        self.free["compute"] = max(self.free["compute"], self.free["copy"])
        for _ in range(24):
            self._operator("aten::linear", GEMM, 60_000)
            self._operator("aten::layer_norm", NORM, 12_000)
            self._operator("aten::add", ADD, 9_000)
        for layer in range(24):
            self._operator("autograd::engine::evaluate_function: AddmmBackward0", GEMM, 110_000, AUTOGRAD)
            self._operator("autograd::engine::evaluate_function: AddBackward0", ADD, 9_000, AUTOGRAD)
            if layer % 4 == 3:
                self._operator("c10d::allreduce_", REDUCE, 300_000, AUTOGRAD, "comm")
        self.free["compute"] = max(self.free["compute"], self.free["comm"])
        self._operator("Optimizer.step#AdamW.step", ADAM, 250_000)
        wait = max(self.free["compute"] - self.now, 2000)
        self.call("cudaDeviceSynchronize", self.now, wait, correlation=self.next_number())
        self.now += wait + 2000
        self.annotation(f"ProfilerStep#{number}", begin, self.now - begin)
