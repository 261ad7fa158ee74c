"""Traces, damaged in every way that was met or thought of; and what no profile of them may say.

Used by `tests/mutate_traces.py` for a hundred thousand of them, and by the tests for a sample.
"""

from __future__ import annotations

import gzip
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from kineto import ADD, GEMM, REDUCE, TraceMaker
from troubles import Program, run

from redline.analyze.profile import Profile, profile_of
from redline.model.errors import TraceError
from redline.show.profile import kernel_csv
from redline.trace.decode import read_traces
from redline.verbs.profile import result_of

US = 1000
NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
NASTY_NUMBERS = (
    b"0", b"-1", b"-0.0", b"1e400", b"-1e400", b"NaN", b"Infinity", b"null", b"true", b'"12"', b'"soon"', b"[]", b"{}",
    b"18446744073709551615", b"18446744073709551.615", b"9223372036854775807", b"-9223372036854775808",
    b"9007199254740993", b"3155760000000000", b"0.0000000000000000001", b"9" * 400, b"1e18", b"1755000000000000.123",
)  # fmt: skip
NASTY_BYTES = (
    b"\xff", b"\xc3", b"\x00", b"\x1b", rb"\ud800", rb"\udc00\ud800", rb"\u0000", b'"', b"\\", b"{", b"}", b"[", b"]", b",",
    b"},{", b'"traceEvents": [', "\u202e".encode(), b"\n" * 50, b" " * 300, b"<script>", b"=cmd()",
)  # fmt: skip

Mutation = Callable[[bytes, random.Random], bytes]


def flip(text: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(text))
    return text[:at] + bytes([text[at] ^ (1 << chance.randrange(8))]) + text[at + 1 :]


def drop(text: bytes, chance: random.Random) -> bytes:
    at, length = chance.randrange(len(text)), chance.choice((1, 1, 1, 2, 7, 60, 500))
    return text[:at] + text[at + length :]


def insert(text: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(text))
    return text[:at] + chance.choice(NASTY_BYTES) + text[at:]


def truncate(text: bytes, chance: random.Random) -> bytes:
    return text[: chance.randrange(len(text))]


def repeat(text: bytes, chance: random.Random) -> bytes:
    at, length = chance.randrange(len(text)), chance.choice((1, 10, 200, 3000))
    return text[:at] + text[at : at + length] * 2 + text[at + length :]


def swap(text: bytes, chance: random.Random) -> bytes:
    a, b = sorted((chance.randrange(len(text)), chance.randrange(len(text))))
    length = min(chance.choice((1, 8, 300)), b - a)
    return text[:a] + text[b : b + length] + text[a + length : b] + text[a : a + length] + text[b + length :]


def number(text: bytes, chance: random.Random) -> bytes:
    """One of the numbers, or all that look the same, becomes another."""
    found = list(NUMBER.finditer(text))
    one = chance.choice(found)
    nasty = chance.choice(NASTY_NUMBERS)
    if chance.random() < 0.1:
        return re.sub(rb"(?<![\w.])" + re.escape(one.group()) + rb"(?![\w.])", nasty, text)
    return text[: one.start()] + nasty + text[one.end() :]


def rename(text: bytes, chance: random.Random) -> bytes:
    """A key or a value that is a word becomes another one of the file."""
    words = list(re.finditer(rb'"[^"\\]{1,60}"', text))
    one, other = chance.choice(words), chance.choice(words)
    return text[: one.start()] + other.group() + text[one.end() :]


MUTATIONS: tuple[Mutation, ...] = (flip, drop, insert, truncate, repeat, swap, number, number, number, rename)


def seeds() -> list[bytes]:
    """Sound traces of many kinds, small enough to be read a hundred times a second."""
    found = []
    for rocm in (False, True):
        maker = TraceMaker(rocm=rocm)
        maker.gpu("AMD Instinct MI300X" if rocm else "NVIDIA H100 80GB HBM3", (9, 0))
        maker.header["distributedInfo"] = {"rank": 0, "world_size": 8}
        for step in range(3):
            begin = 1000 * step * US
            maker.annotation(f"ProfilerStep#{step}", begin, 900 * US)
            maker.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", begin, 50 * US)
            operator = maker.operator(
                "aten::mm", begin + 60 * US, 40 * US, dims=[[64, 32], [32, 16]], types=["float", "float"]
            )
            maker.kernel(GEMM, begin + 100 * US, 200 * US, launched=begin + 70 * US, operator=operator)
            maker.kernel(REDUCE, begin + 250 * US, 200 * US, launched=begin + 80 * US, stream=20)
            maker.copy("Memcpy HtoD", begin + 480 * US, 20 * US, launched=begin + 90 * US, size="4096")
            maker.memory(begin + 65 * US, 4096)
            maker.call("cudaStreamSynchronize", begin + 100 * US, 410 * US)
            maker.frame("train.py(12): step", begin, 900 * US)
            maker.kernel(ADD, begin + 600 * US, 50 * US, launched=begin + 550 * US)
        found += [maker.text(layout).encode() for layout in ("kineto", "compact")]
    host = TraceMaker()
    for index in range(20):
        host.operator("aten::conv2d", index * 100 * US, 70 * US)
    found.append(host.text().encode())
    pair = run(Program(0, {"item": 0.3, "unfused attention": 0.3}))
    pair.ranks[0].maker.events = pair.ranks[0].maker.events[:80]
    found.append(pair.ranks[0].maker.text("compact").encode())
    return found


def mutated(originals: list[bytes], numbers: Iterable[int], seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """What was done, and the damaged text; one in ten is gzipped and damaged after that."""
    for index in numbers:
        chance = random.Random(f"{seed}/{index}")
        text = chance.choice(originals)
        packed = chance.random() < 0.1
        text = gzip.compress(text, 1) if packed else text
        done = []
        for _ in range(chance.choice((1, 1, 1, 2, 5))):
            mutation = chance.choice(MUTATIONS[:6] if packed else MUTATIONS)
            if text and (packed or NUMBER.search(text)):
                text = mutation(text, chance)
                done.append(mutation.__name__)
        yield f"{index}: {'gzipped, ' if packed else ''}{', '.join(done)}", text


def profile_all(path: Path, *, terminal: bool = True) -> Profile | None:
    """Everything that `redline profile` may print; None where the file is refused in one line.

    Without `terminal` all but the tables of the terminal, which take most of the time.
    """
    try:
        profile = profile_of(read_traces([path]))
    except TraceError as error:
        if "\n" in str(error):
            raise
        return None
    result = result_of(profile)
    for text in [result.to_json(), kernel_csv(profile), result.to_html()] + ([str(result)] if terminal else []):
        text.encode()
    return profile


def impossible(profile: Profile) -> list[str]:
    """Figures that no program can have."""
    found = [
        f"{name} = {value}" for name, value in _numbers(msgspec.to_builtins(profile)) if not _is_possible(name, value)
    ]
    timeline, idle = profile.timeline, profile.idle
    if profile.has_device and profile.ranks:
        if timeline.busy_s > timeline.span_s * (1 + 1e-9):
            found.append("busy for longer than the span")
        parts = (
            idle.host_wait_s, idle.sync_s, idle.data_wait_s, idle.allocator_s, idle.warm_up_s, idle.latency_s,
            idle.launch_gap_s, idle.dependency_s, idle.unknown_s,
        )  # fmt: skip
        if not math.isclose(sum(parts), timeline.idle_s, rel_tol=1e-6, abs_tol=1e-9):
            found.append(f"causes add up to {sum(parts)}, idle is {timeline.idle_s}")
    found += [f"{one.code} makes it slower" for one in profile.findings if one.gain_bound < 1]
    return found


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _numbers(one, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        if value and all(type(one) is float for one in value):  # a strip or a curve: its extremes tell
            value = (min(value), max(value)) if all(map(math.isfinite, value)) else (math.nan,)
        for one in value:
            yield from _numbers(one, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


def _is_possible(name: str, value: float) -> bool:
    last = name.rpartition(".")[2]
    if not math.isfinite(value):
        return False
    if last in ("device", "rank", "bytes", "min_s", "device_allocated_bytes", "median_latency_s"):
        return True  # numbers as the file gives them
    if last.endswith("share") or (".strips." in name and last != "span_s"):
        return -1e-9 <= value <= 1 + 1e-6
    return value >= 0
