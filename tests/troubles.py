"""Training steps with known troubles, as traces: what is wrong with them, and how much faster they would be without it.

A small machine is simulated: a host that launches, streams that work through what was launched, waits, collectives of
several ranks. The same program runs with a trouble and without it, so that its cost is known exactly. Durations depend
on nothing but the seed and what they belong to: taking a trouble out changes nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kineto import ADAM, ADD, AUTOGRAD, CONV, GEMM, MAIN, NORM, REDUCE, TraceMaker

from redline.analyze.profile import Profile, profile_of
from redline.trace.columns import Trace
from redline.trace.decode import read_traces

US = 1000
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
SOFTMAX = "void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, false, false>(float*, float const*)"
FLASH = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4> >(Flash_fwd_params)"
FLASH_BACKWARD = "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64> >(int)"
GELU = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)::{lambda()#2},"
    " std::array<char*, 2ul> >(int)"
)
LATENCY_NS, GAP_NS, CALL_NS = 4000, 1000, 4000
STEPS, LAYERS = 6, 5

CODES: dict[str, tuple[str, ...]] = {
    "loader": ("data-wait",),
    "sync copy": ("blocking-copy", "copy-bound"),
    "item": ("sync-in-loop",),
    "late launch": ("host-stall", "host-bound"),
    "launch overhead": ("host-bound",),
    "small kernels": ("launch-bound",),
    "unfused attention": ("attention",),
    "exposed communication": ("communication-bound",),
    "straggler": ("straggler",),
    "recompute": ("recompute",),
    "warm-up": ("warm-up",),
    "cold caches": ("cold-start",),
    "result copy": ("blocking-copy", "copy-bound"),
    "input copy": ("copy-bound",),
    "logging sync": ("sync-in-loop", "host-stall"),
    "optimizer loop": ("host-bound", "launch-bound"),
    "late graph": ("host-bound", "host-stall"),
    "partly hidden communication": ("communication-bound",),
    "compared algorithms": ("cold-start", "warm-up"),
}
"""Each trouble has the findings here that name it."""


@dataclass(frozen=True)
class Program:
    """This is what a training script does; each trouble has a size between 0 (none) and about 1 (as long as a step)."""

    seed: int = 0
    troubles: dict[str, float] = field(default_factory=dict)
    ranks: int = 1
    mended: frozenset[str] = frozenset()
    """Troubles whose work has to be done all the same: small kernels without gaps, one kernel for all parameters, a
    graph that is launched at once, convolutions without a search for the best algorithm."""

    def size(self, trouble: str) -> float:
        return self.troubles.get(trouble, 0.0)

    def without(self, trouble: str) -> Program:
        if trouble in ("small kernels", "optimizer loop", "late graph", "compared algorithms"):
            return replace(self, mended=self.mended | {trouble})
        return replace(self, troubles={name: size for name, size in self.troubles.items() if name != trouble})


class Rank:
    """One process and its device."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program = program
        self.rank = rank
        self.maker = TraceMaker(process=1000 + rank, device=rank)
        self.maker.header["distributedInfo"] = {"rank": rank, "world_size": program.ranks}
        self.now = 0
        self.free = {"compute": 0, "communication": 0, "copy": 0}
        self.ends: list[tuple[int, int]] = []
        self.seen: set[str] = set()
        self.sequence = 0
        self.step = 0

    def about(self, nanoseconds: float, *key: Any) -> int:
        """Returns a time that is the same for the same part of the program, within 5 % of what is asked for."""
        digest = hashlib.blake2b(repr((self.program.seed, *key)).encode(), digest_size=4).digest()
        return round(nanoseconds * (0.95 + 0.1 * int.from_bytes(digest, "big") / 2**32))

    def run(self) -> Iterator[int]:
        """Yields when a collective arrives, and is sent when it ends: that depends on the other ranks."""
        program = self.program
        for self.step in range(STEPS):
            begin = self.now
            if program.size("loader"):
                self._loader()
            if program.size("sync copy"):
                self._blocking_copy()
            if program.size("input copy"):
                self._input_copy()
            if program.size("late graph"):
                self._late_graph()
            if program.size("compared algorithms"):
                self._compared_algorithms()
            for layer in range(LAYERS):
                self._forward(layer)
            for layer in reversed(range(LAYERS)):
                self._backward(layer)
                if layer in (LAYERS // 2, 0):
                    yield from self._all_reduce(layer)
                if layer == 1 and program.size("partly hidden communication"):
                    yield from self._partly_hidden()
            if program.size("small kernels"):
                self._small_kernels()
            self.free["compute"] = max(self.free["compute"], self.free["communication"])
            self._work("Optimizer.step#AdamW.step", ADAM, 150 * US, "adam")
            if program.size("optimizer loop"):
                self._optimizer_loop()
            if program.size("result copy"):
                self._result_copy()
            if program.size("logging sync"):
                self._logging_sync()
            if program.size("late launch"):
                self.now += self.about(program.size("late launch") * 12_000 * US, self.step, "logging")
            self.maker.annotation(f"ProfilerStep#{self.step}", begin, self.now - begin)
            self.ends.append((begin, self.now))

    @property
    def wall_ns(self) -> int:
        """This is from the first step on the host to the end of the last, on the host or on the device."""
        return max(self.now, *self.free.values())

    def _work(
        self,
        name: str,
        kernel: str,
        duration: float,
        *key: Any,
        stream: str = "compute",
        thread: int = MAIN,
        inside: dict[str, Any] | None = None,
    ) -> tuple[int, int]:
        """An operator and its kernel; when the kernel starts and ends."""
        program = self.program
        begin = self.now
        overhead = 6 * US + program.size("launch overhead") * 300 * US
        self.now += self.about(overhead, self.step, *key, "host")
        call = CALL_NS
        if kernel not in self.seen and program.size("warm-up"):
            call += round(program.size("warm-up") * 2500 * US)
        self.seen.add(kernel)
        launched, self.now = self.now, self.now + call
        if self.step == 0 and program.size("cold caches"):
            duration *= 1 + 2.5 * program.size("cold caches")
        lasts = self.about(duration, self.step, *key)
        start = max(self.now + LATENCY_NS, self.free[stream] + GAP_NS)
        self.free[stream] = start + lasts
        self.now += 2 * US
        number = self.maker.operator(name, begin, self.now - begin, thread=thread, **(inside or {}))
        where = 7 if stream == "compute" else 20
        self.maker.kernel(
            kernel, start, lasts, launched=launched, call_ns=call, operator=number, stream=where, thread=thread
        )
        return start, start + lasts

    def _loader(self) -> None:
        lasts = self.about(self.program.size("loader") * 6000 * US, self.step, "loader")
        self.maker.annotation(LOADER, self.now, lasts)
        self.now += lasts

    def _blocking_copy(self) -> None:
        """`.to(device)` of pageable memory: the call ends when the copy has, behind all that was launched before."""
        begin, lasts = self.now, self.about(self.program.size("sync copy") * 1500 * US, self.step, "copy")
        start = max(begin + LATENCY_NS, self.free["compute"] + GAP_NS)
        end = start + lasts
        self.free["compute"] = end
        self.now = end + 10 * US
        number = self.maker.operator("aten::copy_", begin - 1, self.now - begin + 2)
        self.maker.copy(
            "Memcpy HtoD (Pageable -> Device)", start, lasts, launched=begin, call_ns=self.now - begin,
            operator=number, caller="cudaMemcpyAsync", size=lasts * 6,
        )  # fmt: skip
        self.now += self.about(30 * US, self.step, "after the copy")

    def _input_copy(self) -> None:
        """The copy is from pinned memory on a stream of its own; the forward waits for it, and nothing is left to run beside it."""
        begin, lasts = self.now, self.about(self.program.size("input copy") * 3000 * US, self.step, "input")
        self.now += 12 * US
        number = self.maker.operator("aten::copy_", begin, 12 * US)
        start = max(self.now + LATENCY_NS, self.free["copy"] + GAP_NS, self.free["compute"] + GAP_NS)
        self.free["copy"] = self.free["compute"] = start + lasts
        self.maker.copy(
            "Memcpy HtoD (Pinned -> Device)", start, lasts, launched=begin + 2 * US, call_ns=8 * US, stream=13,
            operator=number, caller="cudaMemcpyAsync", size=lasts * 20,
        )  # fmt: skip

    def _result_copy(self) -> None:
        """This is `.cpu()` of what the step returned, into pageable memory: the host waits for all that it launched."""
        begin, lasts = self.now, self.about(self.program.size("result copy") * 2000 * US, self.step, "result")
        start = max(begin + LATENCY_NS, self.free["compute"] + GAP_NS)
        self.free["compute"] = start + lasts
        self.now = start + lasts + 10 * US
        number = self.maker.operator("aten::_to_copy", begin - 1, self.now - begin + 2)
        self.maker.copy(
            "Memcpy DtoH (Device -> Pageable)", start, lasts, launched=begin, call_ns=self.now - begin,
            operator=number, caller="cudaMemcpyAsync", size=lasts * 3,
        )  # fmt: skip

    def _logging_sync(self) -> None:
        """A logger that waits for the device, and then writes for a while; no operator is around it."""
        begin = self.now
        self.now = max(self.now + 5 * US, *self.free.values()) + 5 * US
        self.maker.call("cudaDeviceSynchronize", begin, self.now - begin)
        self.now += self.about(self.program.size("logging sync") * 3000 * US, self.step, "logging")

    def _optimizer_loop(self) -> None:
        """There is a small kernel for each of many parameters, each by an operator of its own."""
        count, kernel = round(self.program.size("optimizer loop") * 400), ADD.replace("float", "c10::Half")
        if "optimizer loop" in self.program.mended:
            self._work("aten::_foreach_add_", kernel, 2 * US * count, "parameters")
            return
        for index in range(count):
            self._work("aten::add_", kernel, 2 * US, index, "parameter")

    def _late_graph(self) -> None:
        """Python takes its time to prepare the inputs of a graph."""
        if "late graph" not in self.program.mended:
            self.now += self.about(self.program.size("late graph") * 8000 * US, self.step, "prepare")
        begin, number = self.now, self.maker.next_number() + 700_000
        self.now += 40 * US
        self.maker.call("cudaGraphLaunch", begin, self.now - begin, correlation=number)
        at = max(self.now + LATENCY_NS, self.free["compute"] + GAP_NS)
        for index in range(10):
            lasts = self.about(40 * US, self.step, index, "replayed")
            self.maker.kernel(GEMM, at, lasts, correlation=number)
            at += lasts + GAP_NS
        self.free["compute"] = at

    def _compared_algorithms(self) -> None:
        """Convolutions whose first call runs and times each algorithm there is, as cuDNN's benchmark does."""
        tries = self.step == 0 and "compared algorithms" not in self.program.mended
        others = [round(self.program.size("compared algorithms") * 300) * US] * 6 if tries else []
        for layer in range(4):
            begin, number, marker = self.now, self.maker.next_number(), len(self.maker.events)
            self.now += 3 * US
            for algorithm, duration in enumerate([60 * US, *others]):
                launched, self.now = self.now, self.now + CALL_NS
                start = max(self.now + LATENCY_NS, self.free["compute"] + GAP_NS)
                lasts = self.about(duration, self.step, layer, algorithm, "algorithm")
                self.free["compute"] = start + lasts
                name = CONV.replace("128x128", f"{16 << algorithm}x64")
                self.maker.kernel(name, start, lasts, launched=launched, operator=number)
                if algorithm:
                    waits, self.now = self.now, max(self.now, self.free["compute"]) + 5 * US
                    self.maker.call("cudaEventSynchronize", waits, self.now - waits)
            self.now += 2 * US
            inside = {"External id": number}
            self.maker.event("X", "cpu_op", "aten::cudnn_convolution", begin, self.now - begin, args=inside)
            self.maker.events.insert(marker, self.maker.events.pop())

    def _partly_hidden(self) -> Iterator[int]:
        """There is a collective that begins beside the backward and goes on after it; the optimizer waits for it."""
        begin = self.now
        self.now += 8 * US
        launched, self.now = self.now, self.now + CALL_NS
        start = max(self.now + LATENCY_NS, self.free["communication"] + GAP_NS, self.free["compute"])
        lasts = self.about((600 + self.program.size("partly hidden communication") * 4000) * US, self.step, "partly")
        end = ((yield start) or start) + lasts
        self.free["communication"] = end
        self.now += 2 * US
        number = self.maker.operator("c10d::allreduce_", begin, self.now - begin, thread=AUTOGRAD)
        self.maker.kernel(REDUCE, start, end - start, launched=launched, operator=number, stream=20, thread=AUTOGRAD)

    def _item(self, *key: Any) -> None:
        """`.item()`: a tiny copy back, and a wait for everything before it."""
        begin = self.now
        number = self.maker.operator("aten::item", begin, 0)
        self.now += 5 * US
        waits = self.now
        self.now = max(self.now, self.free["compute"]) + 8 * US
        self.maker.call("cudaStreamSynchronize", waits, self.now - waits, **{"External id": number})
        operator = next(event for event in reversed(self.maker.events) if event["cat"] == "cpu_op")
        operator["dur"].nanoseconds = self.now - begin + US
        self.now += self.about(10 * US + self.program.size("item") * 400 * US, self.step, *key, "after item")

    def _forward(self, layer: int, *, again: bool = False) -> None:
        key: tuple[Any, ...] = (layer, "again" if again else "forward")
        thread = AUTOGRAD if again else MAIN
        number = {"Sequence number": 10_000 + layer, "Fwd thread id": 0} if again else None
        self._work("aten::layer_norm", NORM, 15 * US, *key, "norm", thread=thread, inside=number)
        self._work("aten::linear", GEMM, 120 * US, *key, "qkv", thread=thread, inside=number)
        self._attention(*key, thread=thread, inside=number)
        self._work("aten::linear", GEMM, 160 * US, *key, "mlp", thread=thread, inside=number)
        self._work("aten::gelu", GELU, 20 * US, *key, "gelu", thread=thread, inside=number)
        if self.program.size("item") and not again:
            self._item(*key)

    def _attention(self, *key: Any, thread: int, inside: dict[str, Any] | None) -> None:
        size = self.program.size("unfused attention")
        if not size:
            self._work("aten::_flash_attention_forward", FLASH, 60 * US, *key, "flash", thread=thread, inside=inside)
            return
        parts = (
            ("aten::bmm", GEMM, 0.25),
            ("aten::div", ADD, 0.2),
            ("aten::_softmax", SOFTMAX, 0.3),
            ("aten::bmm", GEMM, 0.25),
        )
        for number, (name, kernel, share) in enumerate(parts):
            duration = share * (60 + 600 * size) * US
            self._work(name, kernel, duration, *key, "scores", number, thread=thread, inside=inside)

    def _backward(self, layer: int) -> None:
        begin = self.now
        key = (layer, "backward")
        marker = len(self.maker.events)
        self.now += 2 * US
        if self.program.size("recompute") >= 1 - layer / LAYERS:
            self._forward(layer, again=True)
        self._work("aten::mm", GEMM, 230 * US, *key, "mlp", thread=AUTOGRAD)
        self._work("aten::_flash_attention_backward", FLASH_BACKWARD, 120 * US, *key, "flash", thread=AUTOGRAD)
        self._work("aten::mm", GEMM, 180 * US, *key, "qkv", thread=AUTOGRAD)
        self.now += US
        own = {"Sequence number": 50 + layer, "Fwd thread id": 1}
        name = "autograd::engine::evaluate_function: AddmmBackward0"
        self.maker.operator(name, begin, self.now - begin, thread=AUTOGRAD, **own)
        self.maker.events.insert(marker, self.maker.events.pop())
        self._straggle(layer)

    def _straggle(self, layer: int) -> None:
        """One rank has more to do than the others."""
        size = self.program.size("straggler")
        if size and self.rank == self.program.ranks - 1:
            self._work("aten::mm", GEMM, size * 900 * US, layer, "more", thread=AUTOGRAD)

    def _all_reduce(self, layer: int) -> Iterator[int]:
        """Gradients of a bucket: beside the backward, or after all of it where it is exposed."""
        exposed = self.program.size("exposed communication")
        if self.program.ranks == 1 and not exposed:
            return
        begin = self.now
        self.now += 8 * US
        launched, self.now = self.now, self.now + CALL_NS
        lasts = self.about((150 + 2500 * exposed) * US, self.step, layer, "reduce")
        arrives = max(self.now + LATENCY_NS, self.free["communication"] + GAP_NS, self.free["compute"])
        ends = (yield arrives) or arrives
        end = ends + lasts
        self.now += 2 * US
        described = {
            "Collective name": "allreduce", "In msg nelems": 1 << 22, "Out msg nelems": 1 << 22, "dtype": "Float",
            "Group size": max(self.program.ranks, 2), "Process Group Name": "0",
        }  # fmt: skip
        number = self.maker.operator("record_param_comms", begin, self.now - begin, thread=AUTOGRAD, **described)
        self.maker.kernel(
            REDUCE, arrives, end - arrives, launched=launched, operator=number, stream=20, thread=AUTOGRAD, **described
        )
        self.free["communication"] = end
        if layer == 0 or exposed:
            self.free["compute"] = max(self.free["compute"], end)  # the optimizer waits for the last bucket

    def _small_kernels(self) -> None:
        """Hundreds of tiny kernels are replayed from a graph: launched in time, each with a gap before it."""
        count = round(self.program.size("small kernels") * 700)
        begin, number = self.now, self.maker.next_number() + 500_000
        self.now += 60 * US
        self.maker.call("cudaGraphLaunch", begin, self.now - begin, correlation=number)
        at = max(self.now + LATENCY_NS, self.free["compute"] + GAP_NS)
        gap = 0 if "small kernels" in self.program.mended else 4 * US
        for index in range(count):
            lasts = self.about(3 * US, self.step, index, "small")
            self.maker.kernel(ADD.replace("float", "double"), at, lasts, correlation=number)
            at += lasts + gap
        self.free["compute"] = at


@dataclass(frozen=True)
class Ran:
    wall_ns: int
    """This is the time of all ranks together."""
    ranks: list[Rank]

    def read(self) -> list[Trace]:
        with TemporaryDirectory() as folder:
            return read_traces([rank.maker.write(Path(folder) / f"rank{rank.rank}.json") for rank in self.ranks])

    def profile(self) -> Profile:
        return profile_of(self.read())


def run(program: Program) -> Ran:
    """All ranks, from collective to collective."""
    ranks = [Rank(program, number) for number in range(program.ranks)]
    programs = [rank.run() for rank in ranks]
    arrived = [next(one, None) for one in programs]
    while all(at is not None for at in arrived):
        latest = max(at for at in arrived if at is not None)
        arrived = [_on(one, latest) for one in programs]
    return Ran(sum(rank.wall_ns for rank in ranks), ranks)


def _on(program: Any, ends: int) -> int | None:
    try:
        found: int = program.send(ends)
    except StopIteration:
        return None
    return found
