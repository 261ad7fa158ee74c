"""This measures a device's limits: matrix products per number format, copy bandwidth, and the time between two tiny operators.

For each figure several shapes are timed, each in short bursts by the device's own clock, and the fastest counts. A ceiling is
what the device can do, so a shape that suits it badly or a neighbour must not lower it. Between bursts a GPU rests, because
products without a pause reach the power limit within a fraction of a second, and clocks fall. Without rests an H200 showed
690 TFLOP/s in bf16, and it is known to reach 791.

A machine that is busy with something else shows too little of itself. Then the ceilings say so, and are measured again at their next use.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from redline.bench.device import Device
from redline.bench.device.failure import is_out_of_memory
from redline.bench.device.process import ProcessorUse
from redline.model.note import Note, note
from redline.model.protocol import OnProgress, Progress
from redline.model.work import Ceilings

Call = Callable[[], Any]
Shape = tuple[int, int, int]
"""A product of an M×K and a K×N matrix has the shape (M, N, K)."""

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""These are the formats of half the length, by the names that the ceilings have."""
GPU_SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 8192, 16384), (16384, 8192, 8192))
"""These are M, N and K, the smallest first, because later ones may not fit. In each, every multiprocessor has many tiles to do."""
CPU_SIZES = (512, 1024, 2048)
"""A CPU is measured with square products of these sizes, as far as they are quick enough."""
CPU_LONGEST_S = 0.25
"""A format that the CPU only emulates is measured at the largest size that is still this quick."""

BURSTS = 12
"""Each shape is timed in this many bursts, of which the fastest counts."""
BURST_S = 0.015
"""A burst is as many calls in a row as take this long. A single call would measure the launch too."""
REST_S = 0.06
"""A GPU rests for this long before each burst, because its power limit holds on average over some tens of milliseconds."""
WARM_S = 0.5
"""Products in the fastest format run for this long before anything is timed, so that clocks rise."""

COPY_BYTES = {True: 1 << 30, False: 1 << 27}
"""At least this many bytes are copied on an accelerator (True) and on a CPU (False)."""
COPY_TO_CACHE = 8
"""Buffers are at least this many times as large as the cache, so that a copy goes through memory."""
LAUNCHES = 500
"""This many tiny operators in a row make one burst, whose mean is the time of a launch."""

BUSY_CORES = 0.25
"""If other processes keep more cores than this busy, a CPU cannot show all it has, and the ceilings say so."""


def measure_ceilings(device: Device, on_progress: OnProgress = lambda progress: None) -> Ceilings:
    """Returns the device's ceilings. The measurement takes some seconds, and `on_progress` hears what is being measured."""

    def tell(what: str) -> None:
        on_progress(Progress(stage="ceilings", detail=what))

    started, info, before = time.perf_counter(), device.info(), ProcessorUse.now()
    notes: list[Note] = []
    samples: dict[str, list[float]] = {}
    shapes: dict[str, Shape] = {}
    with torch.inference_mode():
        tell("warming up the device")
        _warm(device)
        for form in _formats(device):
            tell(f"{form} matrix products")
            products = _products(device, form, notes)
            if products:
                shapes[form] = max(products, key=lambda shape: math.prod(shape) / min(products[shape]))
                samples[form] = products[shapes[form]]
        tell("copy bandwidth")
        copies = _copies(device)
        copied_bytes = max(copies, key=lambda size: size / min(copies[size]))
        samples["copy"] = copies[copied_bytes]
        tell("launch time")
        samples["launch"] = _launches(device)
    wall_s = time.perf_counter() - started
    use = ProcessorUse.now().since(before, wall_s)
    device.release_cache()
    # A copy reads every byte and writes it, and a product has two FLOPs for each of its terms.
    work = {**{form: 2 * math.prod(shape) for form, shape in shapes.items()}, "copy": 2 * copied_bytes}
    launch_s = statistics.median(samples["launch"])
    return Ceilings(
        kind=device.kind,
        name=info.name,
        driver=info.driver,
        torch=str(torch.__version__),
        threads=None if device.is_accelerator else torch.get_num_threads(),
        flops_per_s={form: work[form] / min(samples[form]) for form in shapes},
        shapes={form: "×".join(map(str, shape)) for form, shape in shapes.items()},
        copy_bytes_per_s=work["copy"] / min(samples["copy"]),
        launch_s=launch_s,
        doubts=tuple(_doubts(device, use["others_cpu_s"] / wall_s, use["busiest"])),
        cache_bytes=device.cache_bytes(),
        measured_at=time.time(),
        seconds=time.perf_counter() - started,
        notes=tuple(notes),
    )


def _doubts(device: Device, others_cores: float, busiest: tuple[str, ...]) -> Iterator[Note]:
    """Yields why the figures may be less than the device can do."""
    foreign = device.look(0.0, neighbours=True).foreign
    if foreign:
        yield note("shared-gpu", f"other processes were on the GPU: {', '.join(foreign)}", about="device")
    if not device.is_accelerator and others_cores > BUSY_CORES:
        named = f" ({'; '.join(busiest)})" if busiest else ""
        yield note("shared-cpu", f"other processes kept {others_cores:.1f} cores busy{named}", about="device")


def _formats(device: Device) -> Iterator[str]:
    """Yields the formats that this device has. A format that it refuses is left out, not guessed."""
    yield "fp32"
    if device.tf32_refusal() is None:
        yield "tf32"
    yield from (form for form, dtype in HALVES.items() if device.refusal_of(dtype) is None)
    if device.is_accelerator:
        yield from ("int8", "fp8")


def _products(device: Device, form: str, notes: list[Note]) -> dict[Shape, list[float]]:
    """Returns the seconds per product in each burst, for each shape that fits. A format that the GPU lacks leaves a note."""
    found: dict[Shape, list[float]] = {}
    device.allow_tf32(form == "tf32")
    try:
        for shape in _shapes(device, form):
            found[shape] = time_bursts(device, _product(device, form, shape), BURSTS, BURST_S, rest_s=REST_S)
    except (RuntimeError, ValueError, NotImplementedError, AttributeError) as error:
        if is_out_of_memory(error) or form not in ("int8", "fp8"):
            if not found:
                raise
        else:  # every GPU is asked for these two, most refuse, and how they refuse differs from version to version
            why = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            notes.append(note("format-not-measured", f"no {form} products: {why}", about=form))
    finally:
        device.allow_tf32(False)
        device.release_cache()
    return found


def _shapes(device: Device, form: str) -> Iterator[Shape]:
    """Yields the shapes to measure. On a CPU it stops at a product that takes too long."""
    if device.is_accelerator:
        # Full fp32 takes twenty times as long as the rest, and smaller shapes show its limit as well.
        yield from GPU_SHAPES[:2] if form == "fp32" else GPU_SHAPES
        return
    for size in CPU_SIZES:
        shape = (size, size, size)
        yield shape
        product = _product(device, form, shape)
        product()
        before = time.perf_counter()
        product()
        if 8 * (time.perf_counter() - before) > CPU_LONGEST_S:
            return


def _product(device: Device, form: str, shape: Shape) -> Call:
    """Returns a product of random numbers. Zeros would not do, because a GPU multiplies them with less power, hence faster."""
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
    dtype = HALVES.get(form, torch.float32)
    a, b = torch.randn(m, k, device=target, dtype=dtype), torch.randn(k, n, device=target, dtype=dtype)
    out = torch.empty(m, n, device=target, dtype=dtype)
    return lambda: torch.mm(a, b, out=out)


def _copies(device: Device) -> dict[int, list[float]]:
    """Returns the seconds per copy in each burst, by the bytes that are copied. Even the smallest size is too large for any cache."""
    least = max(
        COPY_BYTES[device.is_accelerator], 4 * COPY_TO_CACHE * (device.cache_bytes() or 0), 4 * COPY_BYTES[False]
    )
    size = min(least, (device.info().memory_bytes or least) // 8)
    found = {
        part: time_bursts(device, copy_of(device, part), BURSTS, BURST_S, rest_s=REST_S)
        for part in (size // 4, size // 2, size)
    }
    device.release_cache()
    return found


def copy_of(device: Device, size: int) -> Call:
    """Returns a call that copies this many bytes from one place on the device to another."""
    source = torch.empty(size, device=device.torch_device, dtype=torch.uint8).fill_(3)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _launches(device: Device) -> list[float]:
    """Returns the seconds between two tiny operators in each burst, which are the cost of launching one."""
    tiny = torch.zeros(1, device=device.torch_device)

    def many() -> None:
        for _ in range(LAUNCHES):
            tiny.add_(1.0)

    return [burst / LAUNCHES for burst in time_bursts(device, many, BURSTS, 0.0)]


def time_bursts(device: Device, call: Call, bursts: int, burst_s: float, *, rest_s: float = 0.0) -> list[float]:
    """Returns the seconds per call in each of several bursts, by the device's own clock. A GPU rests before each."""
    call()
    device.synchronize()
    before = time.perf_counter()
    call()
    device.synchronize()
    calls = max(1, math.ceil(burst_s / max(time.perf_counter() - before, 1e-6)))
    samples = []
    for _ in range(bursts):
        if device.is_accelerator:
            time.sleep(rest_s)
        call()  # this call wakes the device up, and is not timed
        marks = [device.mark()]
        for _ in range(calls):
            call()
        marks.append(device.mark())
        samples.append(device.seconds_between(marks)[0] / calls)
    return samples


def _warm(device: Device) -> None:
    """Runs products for a while, so that the clocks have risen when the first burst is timed."""
    form = "bf16" if device.is_accelerator and device.refusal_of(torch.bfloat16) is None else "fp32"
    product = _product(device, form, GPU_SHAPES[0] if device.is_accelerator else (1024, 1024, 1024))
    end = time.perf_counter() + WARM_S
    while time.perf_counter() < end:
        product()
        device.synchronize()
