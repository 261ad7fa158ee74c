"""Timed generations, and what a token has to read."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from redline.bench.device.base import Device
from redline.bench.device.process import ProcessorUse
from redline.bench.measure.blocks import OVERRUN, Sampling, quiet_collector
from redline.bench.workload.decoder import WholeGenerator
from redline.bench.workload.generation import GenerateStep
from redline.model.protocol import Measure
from redline.model.record import Block
from redline.model.work import GenerationInfo

COPY_BYTES = {True: 2**30, False: 2**27}
"""Copied to see how fast memory is, on an accelerator and on a CPU: more than any cache holds."""
COPIES = 8
WATCHED_TOKENS = 4
"""Decode steps whose reads of weights are watched: which experts they need differs from token to token."""


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


def generation_info(step: GenerateStep, device: Device, *, watch: bool = True) -> GenerationInfo:
    """`watch` False: near the edge of memory, where nothing more may run, all weights count that a token may read."""
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


class WeightReads(TorchDispatchMode):
    """Which parts of a model's weights its operators read: of many experts only those that a token is sent to.

    Tables of which rows are taken do not count.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        """Bytes of weights by the storage they are in, which several layers may share."""
        for weight in {id(weight): weight for weight in weights}.values():
            key = weight.untyped_storage().data_ptr()
            self._sizes[key] = self._sizes.get(key, 0) + weight.numel() * weight.element_size()
        self._parts: dict[int, dict[tuple[int, int], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if not is_view and func is not torch.ops.aten.embedding.default:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                    self._note(func, tensor, found, kwargs, args)
        return found

    def _note(self, func: Any, tensor: Tensor, found: Any, kwargs: Any, args: Any) -> None:
        key = tensor.untyped_storage().data_ptr()
        if key not in self._sizes:
            return
        read = tensor.numel() * tensor.element_size()
        if "grouped_mm" in func.__name__:
            ends = kwargs.get("offs") if kwargs.get("offs") is not None else args[2] if len(args) > 2 else None
            if isinstance(ends, Tensor) and tensor.ndim == 3:
                begins = torch.cat([ends.new_zeros(1), ends[:-1]])
                read = read * int((ends > begins).sum()) // tensor.shape[0]
        elif func.__name__.startswith("index") and isinstance(found, Tensor):
            read = found.numel() * tensor.element_size()
        self._parts.setdefault(key, {})[int(tensor.storage_offset()), tensor.numel()] = read

    def bytes(self) -> int:
        return sum(min(sum(parts.values()), self._sizes[key]) for key, parts in self._parts.items())


def _read_bytes(step: GenerateStep) -> float:
    """Bytes of weights per decode step, on average over a few; those of a quantized model by what it holds."""
    decoder = step.decoder
    if isinstance(decoder, WholeGenerator) or any(len(_parts(each)) > 1 for each in decoder.parameters()):
        return _bytes(decoder.decoding_parameters())
    taken = []
    with step.context(), torch.compiler.set_stance("force_eager"):
        step.prefill()
        for _ in range(min(decoder.new_tokens - 1, WATCHED_TOKENS)):
            with WeightReads(decoder.parameters()) as reads:
                step.decode_eagerly()
            taken.append(reads.bytes())
    return sum(taken) / len(taken) if taken else _bytes(decoder.decoding_parameters())


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
