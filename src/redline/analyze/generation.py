"""This module derives from timed generations how long the first token and the others take, and how near these are to the speed of
memory."""

from __future__ import annotations

from itertools import chain
from statistics import median

from redline.analyze.blocks import timed_blocks
from redline.analyze.statistics import percentile
from redline.model.fields import Frozen
from redline.model.identity import batch_of
from redline.model.record import RunRecord
from redline.model.work import CacheKind, Ceilings, GenerationInfo

READING_SHARE = 0.6
"""If reading the weights takes at least this share of the time per token, memory limits decoding."""
IN_CACHE_SHARE = 1.1
"""More than memory can do, beyond what two clocks differ by: the weights stay in a cache of the processor."""


class TokenTimes(Frozen):
    """These are seconds per output token. A percentile is None where too few samples would make it up."""

    p50: float
    p95: float | None
    p99: float | None
    n: int


class Generation(Frozen):
    """This describes prefill and decode, each by itself. Rates count the whole batch."""

    ttft_s: float
    tpot_s: TokenTimes | None
    """It is None where one token is written."""
    decode_share: float
    """This is the share of the time of a generation that decoding takes."""
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    weight_bytes: int
    bytes_per_weight: float | None
    """It is None where the model has no weights."""
    cache_bytes: int
    cache: CacheKind
    read_bytes: int
    """A decode step has to read this much: the weights, and the filled part of the cache."""
    read_s: float | None
    """Reading that takes at least so long at the copy bandwidth. It is None where the bandwidth is not known."""
    bandwidth_share: float | None
    """This is that time over the time per token. It is None where the tokens come faster than memory could be read."""
    reads_from_cache: bool
    """Tokens come faster than that: what they read stays in a cache of the processor."""
    host_share: float | None
    """This is the host time to issue a decode step over the time per token. It is None where nothing is issued ahead of the device."""

    @property
    def where(self) -> str:
        """Returns how keys and values are kept; `in cache` where what is read stays in a cache of the processor."""
        return "in cache" if self.reads_from_cache else self.cache

    @property
    def reads_all_the_time(self) -> bool:
        """Returns whether memory limits decoding."""
        return self.bandwidth_share is not None and self.bandwidth_share >= READING_SHARE


def generation_of(record: RunRecord, ceilings: Ceilings | None = None) -> Generation | None:
    """Returns the generation, or None for a record of another task, and where nothing was timed."""
    info = record.prepared.generation if record.prepared else None
    blocks = timed_blocks(record, "throughput")
    first = list(chain.from_iterable(block.phases.get("prefill", ()) for block in blocks))
    if info is None or not first:
        return None
    decode = list(chain.from_iterable(block.phases.get("decode", ()) for block in blocks))
    tokens = list(chain.from_iterable(block.token_s for block in blocks))
    issues = list(chain.from_iterable(block.token_issue_s for block in blocks))
    copied = ceilings.copy_bytes_per_s if ceilings is not None else info.copy_bytes_per_s
    batch, ttft_s, tpot_s = batch_of(record) or 1, median(first), median(tokens) if tokens else None
    read_bytes, parameters = _read_bytes(info), record.prepared.workload.parameters if record.prepared else 0
    read_s = read_bytes / copied if copied else None
    share = read_s / tpot_s if tpot_s and read_s is not None else None
    reads_from_cache = share is not None and share > IN_CACHE_SHARE
    return Generation(
        ttft_s=ttft_s,
        tpot_s=_token_times(tokens),
        decode_share=sum(decode) / max(sum(first) + sum(decode), 1e-12),
        prefill_tokens_per_s=batch * info.prompt / ttft_s if ttft_s else None,
        decode_tokens_per_s=batch / tpot_s if tpot_s else None,
        weight_bytes=info.weight_bytes,
        bytes_per_weight=info.weight_bytes / parameters if parameters else None,
        cache_bytes=info.cache_bytes,
        cache=info.cache_kind,
        read_bytes=read_bytes,
        read_s=read_s,
        bandwidth_share=None if reads_from_cache else share,
        reads_from_cache=reads_from_cache,
        host_share=median(issues) / tpot_s if tpot_s and issues else None,
    )


def _token_times(tokens: list[float]) -> TokenTimes | None:
    if not tokens:
        return None
    return TokenTimes(p50=median(tokens), p95=percentile(tokens, 0.95), p99=percentile(tokens, 0.99), n=len(tokens))


def _read_bytes(info: GenerationInfo) -> int:
    cache = info.cache_read_bytes if info.cache_read_bytes is not None else info.cache_bytes
    return info.read_bytes + cache
