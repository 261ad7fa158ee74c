"""Timed generations, and what a token has to read."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch import Tensor

from redline.bench.device.base import Device
from redline.bench.device.process import ProcessorUse
from redline.bench.measure.blocks import OVERRUN, Sampling, quiet_collector
from redline.bench.workload.generation import GenerateStep
from redline.protocol import Measure
from redline.record import Block, GenerationInfo

COPY_BYTES = {True: 2**30, False: 2**27}
"""Copied to see how fast memory is, on an accelerator and on a CPU: more than any cache holds."""
COPIES = 8


def measure_generations(step: GenerateStep, device: Device, request: Measure, estimate_s: float) -> Block:
    """Time whole generations, each started on an idle device."""
    planned = max(1, round(request.seconds / max(estimate_s, 1e-7)))
    timed = min(planned, request.max_steps) if request.max_steps else planned
    device.synchronize()
    device.reset_peaks()
    before = ProcessorUse.now()
    whole: list[float] = []
    first: list[float] = []
    issued: list[float] = []
    token_issued: list[float] = []
    tokens: list[float] = []
    with step.context(), quiet_collector(), Sampling(device) as sampling:
        started_at, started = time.time(), time.perf_counter()
        deadline = started + OVERRUN * request.seconds
        for _ in range(timed):
            timing = step.timed()
            first.append(timing.first_s)
            whole.append(timing.whole_s)
            issued.append(timing.issue_s)
            token_issued.append(timing.token_issue_s)
            tokens += timing.token_s
            if time.perf_counter() > deadline:
                break
        wall_s = time.perf_counter() - started
        used = ProcessorUse.now().since(before, wall_s)
    return Block(
        **used,
        kind=request.kind,
        clock="host",
        samples=tuple(whole),
        issue_s=tuple(issued) if device.is_accelerator else (),
        phases={
            "prefill": tuple(first),
            "decode": tuple(max(each - one, 0.0) for each, one in zip(whole, first, strict=True)),
        },
        token_s=tuple(max(each, 0.0) for each in tokens),
        token_issue_s=tuple(token_issued) if device.is_accelerator else (),
        wall_s=wall_s,
        started_at=started_at,
        round=request.round,
        memory=device.memory(),
        energy_j=sampling.energy_j,
        telemetry=sampling.samples,
    )


def generation_info(step: GenerateStep, device: Device) -> GenerationInfo:
    decoder = step.decoder
    return GenerationInfo(
        prompt=decoder.prompt.shape[1],
        new_tokens=decoder.new_tokens,
        weight_bytes=_bytes(decoder.parameters()),
        read_bytes=_bytes(decoder.decoding_parameters()),
        cache_bytes=_bytes(decoder.cache_tensors()),
        cache_read_bytes=round(sum(share * _bytes([tensor]) for tensor, share in decoder.cache_reads())),
        copy_bytes_per_s=_copy_bytes_per_s(device),
        is_static=decoder.is_static,
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    """What the tensors hold, those of a quantized one in place of itself; each once."""
    plain: dict[int, int] = {}
    for tensor in tensors:
        for part in _parts(tensor):
            plain[part.data_ptr()] = part.numel() * part.element_size()
    return sum(plain.values())


def _parts(tensor: Tensor) -> list[Tensor]:
    flatten = getattr(tensor, "__tensor_flatten__", None) if type(tensor) is not torch.nn.Parameter else None
    held = tensor.data if type(tensor) is torch.nn.Parameter else tensor
    flatten = flatten or getattr(held, "__tensor_flatten__", None)
    if flatten is None or type(held) is Tensor:
        return [tensor]
    names, _ = flatten()
    return [part for name in names for part in _parts(getattr(held, name))]


def _copy_bytes_per_s(device: Device) -> float | None:
    size = COPY_BYTES[device.is_accelerator]
    available = device.info().memory_bytes
    if available is not None and 8 * size > available:
        return None
    source = torch.ones(size, dtype=torch.uint8, device=device.torch_device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(COPIES):
        marks = [device.mark()]
        target.copy_(source)
        marks.append(device.mark())
        best = max(best, 2 * size / max(device.seconds_between(marks)[0], 1e-9))
    del source, target
    device.release_cache()
    return best
