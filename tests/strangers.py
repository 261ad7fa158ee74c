"""Programs of other people, played on a small machine whose every nanosecond is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kineto import MAIN, TraceMaker

from redline.analyze.profile import Profile, profile_of
from redline.trace.decode import read_traces

US, MS = 1000, 1_000_000
GEMM = "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn"


class Program:
    """A host that launches onto the streams of one device."""

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

    def profile(self, folder: Path) -> Profile:
        return profile_of(read_traces([self.maker.write(folder / "trace.json")]))
