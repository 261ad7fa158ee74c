"""The device's limits, measured: matrix products per number format, copy bandwidth, the time between two tiny operators.

For each figure several shapes are timed, each in short bursts by the device's own clock; the fastest counts. A ceiling is
what the device can do, so that neither a shape it does not like nor a neighbour speaks against it. Between bursts a GPU
rests: products without a pause reach the power limit within a fraction of a second, and clocks fall. Without rests bf16
came to 690 TFLOP/s on an H200 of which 791 are known.

A machine that is busy with something else shows too little of itself. Then all is measured again, some seconds later, and
each figure is the best that was seen; where it stays busy the ceilings say so, and are measured anew at their next use.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from redline.bench.device import Device, open_device, resolve_device
from redline.bench.device.failure import is_out_of_memory
from redline.bench.device.process import ProcessorUse
from redline.model.note import Note, note
from redline.model.protocol import OnProgress, Progress
from redline.model.questions import CeilingsAnswer
from redline.model.work import Ceilings

Call = Callable[[], Any]

GPU_SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 8192, 16384), (16384, 8192, 8192))
"""M, N, K, the smallest first: what comes later may not fit. Every multiprocessor has many tiles to do."""
CPU_SIZES = (512, 1024, 2048)
CPU_LONGEST_S = 0.25
"""A format that the CPU only emulates is measured at the largest size that is still this quick."""

BURSTS = 12
BURST_S = 0.015
"""As many calls in a row as take this long: a single one would measure the launch too."""
REST_S = 0.06
"""Before each burst on a GPU: its power limit holds on average over some tens of milliseconds."""
WARM_S = 0.5
"""Of products in the fastest format before anything is timed: clocks rise."""

COPY_BYTES = 1 << 30
SMALLEST_COPY_BYTES = 1 << 27
COPY_TO_CACHE = 8
"""Buffers are at least this many times as large as the cache."""
LAUNCHES = 500

ATTEMPTS = 3
PAUSE_S = 3.0
"""Before another attempt on a busy machine."""
BUSY_CORES = 0.25
"""Kept busy by others while a CPU was measured: it then cannot show all it has."""
REPEATED = 0.05
FEWEST_REPEATS = 2
"""A best that fewer bursts come this close to was luck, or all others were held up."""


def answer_ceilings(device: str, threads: int | None, on_progress: OnProgress) -> CeilingsAnswer:
    if threads is not None:
        torch.set_num_threads(threads)
    return CeilingsAnswer(ceilings=measure_ceilings(open_device(resolve_device(device)), on_progress))


def measure_ceilings(device: Device, on_progress: OnProgress = lambda progress: None) -> Ceilings:
    """Again while the machine is busy, a few times at most."""

    def tell(what: str) -> None:
        on_progress(Progress(stage="ceilings", detail=what))

    best = _measured(device, tell)
    for attempt in range(1, ATTEMPTS):
        if best.is_trusted:
            break
        tell(f"the machine is busy: once more in {PAUSE_S:.0f} s, attempt {attempt + 1} of {ATTEMPTS}")
        time.sleep(PAUSE_S)
        again = _measured(device, tell)
        best = again.with_best_of(best)
    return best


@dataclass
class Timing:
    """Of bursts: seconds per call in the fastest, and in the middle one."""

    best_s: float
    usual_s: float
    repeats: int
    """Bursts next to the fastest."""


def _measured(device: Device, tell: Callable[[str], None]) -> Ceilings:
    started = time.perf_counter()
    info = device.info()
    notes: list[Note] = []
    before = ProcessorUse.now()
    with torch.inference_mode():
        tell("warming up the device")
        _warm(device)
        best: dict[str, tuple[float, str, Timing]] = {}
        for form in _formats(device):
            tell(f"{form} matrix products")
            if (found := _best_product(device, form, notes)) is not None:
                best[form] = found
        tell("copy bandwidth")
        copied, copying = _copy_bytes_per_s(device)
        tell("launch time")
        launching = _launch(device)
    wall_s = time.perf_counter() - started
    use = ProcessorUse.now().since(before, wall_s)
    device.release_cache()
    timings = {**{form: timing for form, (_, _, timing) in best.items()}, "copy": copying, "launch": launching}
    return Ceilings(
        kind=device.kind,
        name=info.name,
        driver=info.driver,
        torch=str(torch.__version__),
        threads=None if device.is_accelerator else torch.get_num_threads(),
        flops_per_s={form: flops for form, (flops, _, _) in best.items()},
        shapes={form: shape for form, (_, shape, _) in best.items()},
        copy_bytes_per_s=copied,
        launch_s=launching.usual_s,
        usual={
            **{form: flops * timing.best_s / timing.usual_s for form, (flops, _, timing) in best.items()},
            "copy": copied * copying.best_s / copying.usual_s,
            "launch": launching.usual_s,
        },
        doubts=tuple(_doubts(device, use["others_cpu_s"] / wall_s, use["busiest"], timings)),
        cache_bytes=device.cache_bytes(),
        measured_at=time.time(),
        seconds=time.perf_counter() - started,
        notes=tuple(notes),
    )


def _doubts(
    device: Device, others_cores: float, busiest: tuple[str, ...], timings: dict[str, Timing]
) -> Iterator[Note]:
    """Why the figures may be less than the device can do."""
    foreign = device.look(0.0, neighbours=True).foreign
    if foreign:
        yield note("shared-gpu", f"other processes were on the GPU: {', '.join(foreign)}", about="device")
    if not device.is_accelerator and others_cores > BUSY_CORES:
        named = f" ({'; '.join(busiest)})" if busiest else ""
        yield note("shared-cpu", f"other processes kept {others_cores:.1f} cores busy{named}", about="device")
    for figure, timing in timings.items():
        if figure != "launch" and timing.repeats < FEWEST_REPEATS:
            text = f"{figure}: only {timing.repeats} of {BURSTS} bursts came within {REPEATED:.0%} of the best"
            yield note("not-repeated", text, about=figure)


def _formats(device: Device) -> list[str]:
    """Those this device has; what it refuses is left out, not guessed."""
    found = ["fp32"]
    if device.tf32_refusal() is None:
        found.append("tf32")
    found += [
        form for form, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)) if not device.refusal_of(dtype)
    ]
    if device.is_accelerator:
        found += ["int8", "fp8"]
    return found


def _best_product(device: Device, form: str, notes: list[Note]) -> tuple[float, str, Timing] | None:
    """FLOP/s, the shape that reached them, and its bursts."""
    found: list[tuple[float, str, Timing]] = []
    device.allow_tf32(form == "tf32")
    try:
        for shape in _shapes(device, form):
            timing = _timed(device, _product(device, form, shape))
            flops = 2 * shape[0] * shape[1] * shape[2] / timing.best_s
            found.append((flops, "×".join(map(str, shape)), timing))
    except (RuntimeError, ValueError, NotImplementedError, AttributeError) as error:
        if is_out_of_memory(error) or form in ("fp32", "bf16", "fp16", "tf32"):
            if not found:
                raise
        else:  # int8 and fp8 are asked of every GPU; most say no, and how differs from version to version
            why = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            notes.append(note("format-not-measured", f"no {form} products: {why}", about=form))
    finally:
        device.allow_tf32(False)
        device.release_cache()
    return max(found, key=lambda each: each[0], default=None)


def _shapes(device: Device, form: str) -> list[tuple[int, int, int]]:
    if device.is_accelerator:
        # Full fp32 takes twenty times as long as the rest, and smaller shapes tell it as well.
        return list(GPU_SHAPES[:2] if form == "fp32" else GPU_SHAPES)
    shapes: list[tuple[int, int, int]] = []
    for size in CPU_SIZES:
        shape = (size, size, size)
        shapes.append(shape)
        product = _product(device, form, shape)
        product()
        before = time.perf_counter()
        product()
        if 8 * (time.perf_counter() - before) > CPU_LONGEST_S:
            break
    return shapes


def _product(device: Device, form: str, shape: tuple[int, int, int]) -> Call:
    """Random numbers, never zeros: a GPU multiplies zeros with less power, hence faster."""
    m, n, k = shape
    target = device.torch_device
    if form == "int8":
        first = torch.randint(-128, 127, (m, k), device=target, dtype=torch.int8)
        second = torch.randint(-128, 127, (n, k), device=target, dtype=torch.int8)
        return lambda: torch._int_mm(first, second.t())
    if form == "fp8":
        kind = torch.float8_e4m3fnuz if device.kind == "rocm" else torch.float8_e4m3fn
        left, right = torch.randn(m, k, device=target).to(kind), torch.randn(n, k, device=target).to(kind)
        one = torch.ones((), device=target)
        return lambda: torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(form, torch.float32)
    a, b = torch.randn(m, k, device=target, dtype=dtype), torch.randn(k, n, device=target, dtype=dtype)
    out = torch.empty(m, n, device=target, dtype=dtype)
    return lambda: torch.mm(a, b, out=out)


def _copy_bytes_per_s(device: Device) -> tuple[float, Timing]:
    """Both directions count: a copy reads every byte and writes it."""
    size = _copy_size(device)
    sizes = (size // 4, size // 2, size)
    found = [(elements, _timed(device, _copy(device, elements))) for elements in sizes]
    device.release_cache()
    return max(((2 * elements / timing.best_s, timing) for elements, timing in found), key=lambda each: each[0])


def _copy(device: Device, elements: int) -> Call:
    source = torch.empty(elements, device=device.torch_device, dtype=torch.uint8).fill_(3)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _copy_size(device: Device) -> int:
    """The smallest of the three buffers, a quarter of this, must still be too large for any cache."""
    cache = device.cache_bytes() or 0
    least = max(SMALLEST_COPY_BYTES if not device.is_accelerator else COPY_BYTES, 4 * COPY_TO_CACHE * cache)
    available = device.info().memory_bytes or least
    return int(min(max(least, 4 * SMALLEST_COPY_BYTES), available // 8))


def _launch(device: Device) -> Timing:
    tiny = torch.zeros(1, device=device.torch_device)

    def many() -> None:
        for _ in range(LAUNCHES):
            tiny.add_(1.0)

    many()
    device.synchronize()
    samples = []
    for _ in range(BURSTS):
        marks = [device.mark()]
        many()
        marks.append(device.mark())
        samples.append(device.seconds_between(marks)[0] / LAUNCHES)
    return _timing(samples)


def _timed(device: Device, call: Call) -> Timing:
    call()
    device.synchronize()
    before = time.perf_counter()
    call()
    device.synchronize()
    calls = max(1, round(BURST_S / max(time.perf_counter() - before, 1e-6)))
    return _timing([_burst_s(device, call, calls) / calls for _ in range(BURSTS)])


def _timing(samples: list[float]) -> Timing:
    best = min(samples)
    repeats = sum(sample <= best * (1 + REPEATED) for sample in samples) - 1
    return Timing(best_s=best, usual_s=statistics.median(samples), repeats=repeats)


def _burst_s(device: Device, call: Call, calls: int) -> float:
    if device.is_accelerator:
        time.sleep(REST_S)
    call()  # wakes it up, and is not timed
    marks = [device.mark()]
    for _ in range(calls):
        call()
    marks.append(device.mark())
    return device.seconds_between(marks)[0]


def _warm(device: Device) -> None:
    form = "bf16" if device.is_accelerator and device.refusal_of(torch.bfloat16) is None else "fp32"
    product = _product(device, form, GPU_SHAPES[0] if device.is_accelerator else (1024, 1024, 1024))
    end = time.perf_counter() + WARM_S
    while time.perf_counter() < end:
        product()
        device.synchronize()
