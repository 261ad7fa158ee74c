"""Programs of other people, played on a small machine whose every nanosecond is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kineto import MAIN, TraceMaker

from redline.analyze.profile import Profile

US, MS = 1000, 1_000_000
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
GEMM = "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn"


class Program:
    """This is a host that launches onto the streams of one device."""

    def __init__(self, *, rocm: bool = False) -> None:
        self.maker = TraceMaker(rocm=rocm)
        self.now = 0
        self.main = 0 if rocm else 7
        self.free = {self.main: 0}

    def work(
        self, name: str, kernel: str, lasts: int, *, host: int = 10 * US, stream: int | None = None, **how: Any
    ) -> None:
        where = self.main if stream is None else stream
        begin, launched = self.now, self.now + host // 2
        start = max(launched + 8 * US, self.free.get(where, 0) + US, how.pop("after", 0))
        self.free[where], self.now = start + lasts, begin + host
        number = self.maker.operator(name, begin, host, thread=how.get("thread", MAIN))
        self.maker.kernel(kernel, start, lasts, launched=launched, operator=number, stream=where, **how)

    def products(self, count: int, lasts: int, *, host: int = 10 * US) -> None:
        for _ in range(count):
            self.work("aten::mm", GEMM, lasts, host=host)

    def wait(self, call: str, stream: int = 7) -> None:
        begin, self.now = self.now, self.free[stream] + 5 * US
        self.maker.call(call, begin, self.now - begin)

    def copy(
        self, name: str, lasts: int, *, blocks: bool, stream: int | None = None, caller: str = "cudaMemcpyAsync"
    ) -> None:
        where = self.main if stream is None else stream
        begin, start = self.now, max(self.now + 8 * US, self.free.get(where, 0) + US)
        self.free[where] = start + lasts
        self.now = self.free[where] + 8 * US if blocks else begin + 5 * US
        number = self.maker.operator("aten::copy_", begin - 1, self.now - begin + 2)
        self.maker.copy(
            name, start, lasts, launched=begin, call_ns=self.now - begin, operator=number, stream=where, caller=caller,
            size=lasts * 20,
        )  # fmt: skip

    def step(self, number: int, begin: int) -> None:
        self.maker.annotation(f"ProfilerStep#{number}", begin, self.now - begin)

    def profile(self) -> Profile:
        return self.maker.profile()


def served(frame: str | None) -> Program:
    """Requests that come every 20 ms and take 3 ms of the device."""
    program = Program()
    for _ in range(8):
        if frame is not None:
            program.maker.frame(frame, program.now, 17 * MS)
            program.maker.frame("threading.py(288): wait", program.now + 5 * US, 17 * MS - 10 * US)
        program.now += 17 * MS
        program.products(10, 280 * US)
        program.copy("Memcpy DtoH (Device -> Pageable)", 20 * US, blocks=True)
    return program


class OnHost:
    """A program without a device: its operators are the work. `pause_ns`: Python between one and the next."""

    def __init__(self, *, pause_ns: int = 3 * US) -> None:
        self.maker, self.now, self.pause_ns = TraceMaker(), 0, pause_ns

    def work(self, name: str, lasts: int, **how: Any) -> None:
        self.maker.operator(name, self.now, lasts, **how)
        self.now += lasts + self.pause_ns

    def layers(self) -> None:
        for _ in range(5):
            self.work("aten::addmm", 900 * US)
            self.work("aten::layer_norm", 60 * US)

    def steps(self, *parts: Callable[[], None], count: int = 4) -> OnHost:
        for number in range(count):
            begin = self.now
            for part in parts:
                part()
            self.maker.annotation(f"ProfilerStep#{number}", begin, self.now - begin)
        return self

    def load(self, lasts: int) -> None:
        """At its end a batch is put together by operators, as without workers."""
        self.maker.annotation(LOADER, self.now, lasts)
        self.maker.operator("aten::stack", self.now + lasts - 200 * US, 200 * US)
        self.now += lasts

    def sleep(self, lasts: int) -> None:
        self.now += lasts

    def profile(self) -> Profile:
        return self.maker.profile()
