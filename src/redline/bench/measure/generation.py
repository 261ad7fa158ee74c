"""This times generations, and finds out what a token has to read."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from redline.bench.count.counter import Kinds, WorkCounter
from redline.bench.count.operators import Known, moved_bytes
from redline.bench.device.base import Device
from redline.bench.measure.blocks import OVERRUN, plan_steps, watched
from redline.bench.measure.ceilings import COPY_BYTES, copy_of, time_bursts
from redline.bench.workload.generation import GenerateStep, Timing
from redline.bench.workload.structure import stored
from redline.model.protocol import Measure
from redline.model.record import Block
from redline.model.work import GenerationInfo

COPIES = 8
"""The copy bandwidth is the best of this many copies."""
WATCHED_TOKENS = 4
"""The reads of weights are watched in this many decode steps: which experts they need differs from token to token."""


def measure_generations(step: GenerateStep, device: Device, request: Measure, estimate_s: float) -> Block:
    """Returns a block of whole generations, each of which starts on an idle device."""
    _, timed = plan_steps(request, estimate_s)
    timings: list[Timing] = []
    with step.context(), watched(device) as seen:
        deadline = time.perf_counter() + OVERRUN * request.seconds
        while len(timings) < timed and (not timings or time.perf_counter() < deadline):
            timings.append(step.timed())
    is_ahead = device.is_accelerator
    return Block(
        **seen,
        kind=request.kind,
        round=request.round,
        clock="host",
        samples=tuple(timing.whole_s for timing in timings),
        issue_s=tuple(timing.issue_s for timing in timings) if is_ahead else (),
        phases={
            "prefill": tuple(timing.first_s for timing in timings),
            "decode": tuple(max(timing.whole_s - timing.first_s, 0.0) for timing in timings),
        },
        token_s=tuple(max(seconds, 0.0) for timing in timings for seconds in timing.token_s),
        token_issue_s=tuple(timing.token_issue_s for timing in timings) if is_ahead else (),
    )


def generation_info(step: GenerateStep, device: Device, *, watch: bool = True) -> GenerationInfo:
    """Returns what a token has to read, and how large the cache is.

    Near the edge of memory nothing more may run. There `watch` is False, and all weights count that a token may read.
    """
    decoder = step.decoder
    cache_bytes = _bytes(decoder.cache_tensors())  # as the last text has left it
    cache_read_bytes = round(sum(share * _bytes([tensor]) for tensor, share in decoder.cache_reads()))
    return GenerationInfo(
        prompt=decoder.prompt.shape[1],
        new_tokens=decoder.new_tokens,
        weight_bytes=_bytes(decoder.parameters()),
        read_bytes=round(_read_bytes(step)) if watch else _bytes(decoder.decoding_parameters()),
        cache_bytes=cache_bytes,
        cache_read_bytes=cache_read_bytes,
        copy_bytes_per_s=_copy_bytes_per_s(device),
        is_static=decoder.is_static,
        cache=decoder.cache_kind,
    )


def token_reads(about: Known, inputs: Sequence[Tensor], written: int) -> tuple[list[int], int]:
    """Returns what `moved_bytes` returns, except that tables of which rows are taken do not count, and of many experts only those
    that a token is sent to."""
    read, written = moved_bytes(about, inputs, written)
    ends = next((tensor for tensor in inputs if tensor.dtype == torch.int32), None)
    if about.name == "embedding":
        read = [0] * len(read)
    elif "grouped_mm" in about.name and ends is not None:
        used = int((ends.diff(prepend=ends.new_zeros(1)) > 0).sum())
        experts = [len(tensor) if tensor.ndim == 3 else used for tensor in inputs]
        read = [size * used // max(count, 1) for size, count in zip(read, experts, strict=True)]
    return read, written


def _read_bytes(step: GenerateStep) -> float:
    """Returns the bytes of weights that a decode step reads, on average over a few. Of a quantized model, all that it holds count."""
    decoder = step.decoder
    is_quantized = any(len(stored(weight)) > 1 for weight in decoder.parameters())
    if is_quantized or decoder.new_tokens == 1:
        return _bytes(decoder.decoding_parameters())
    taken = []
    with step.context(), torch.compiler.set_stance("force_eager"):
        step.prefill()
        for _ in range(min(decoder.new_tokens - 1, WATCHED_TOKENS)):
            with WorkCounter(decoder.parameters(), Kinds(), token_reads) as counter:
                step.decode_eagerly()
            taken.append(counter.touched.bytes())
    return sum(taken) / len(taken)


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes that the tensors hold, each once. A quantized tensor counts as the tensors that it is made of."""
    parts = {part.data_ptr(): part for tensor in tensors for part in stored(tensor)}
    return sum(part.numel() * part.element_size() for part in parts.values())


def _copy_bytes_per_s(device: Device) -> float | None:
    """Returns the bytes that a copy reads and writes per second, or None if its buffers may not fit into memory."""
    size, available = COPY_BYTES[device.is_accelerator], device.info().memory_bytes
    if available is not None and 8 * size > available:
        return None
    best_s = min(time_bursts(device, copy_of(device, size), COPIES, 0.0))
    device.release_cache()
    return 2 * size / max(best_s, 1e-9)
