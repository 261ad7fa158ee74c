"""Which generation keeps its targets: the first token within a time, and each further one within another."""

from __future__ import annotations

from collections.abc import Sequence

from redline.analyze.summary import RunSummary
from redline.spec import Frozen


class TokenTargets(Frozen):
    ttft_s: float | None = None
    """For the median time to the first token."""
    tpot_s: float | None = None
    """For p95 of the time per token after the first; with too few tokens for p95, for the median."""


class UnderTargets(Frozen):
    """The fastest row that keeps the targets."""

    targets: TokenTargets
    kept: tuple[str, ...]
    """Ids of the records that keep them."""
    record_id: str | None
    """None: no row does."""
    recipe: str | None = None
    batch: int | None = None
    prompt: int | None = None
    new_tokens: int | None = None
    decode_tokens_per_s: float | None = None


def under_targets(rows: Sequence[RunSummary], targets: TokenTargets) -> UnderTargets:
    kept = [row for row in rows if _keeps(row, targets)]
    best = max(kept, key=lambda row: row.decode_tokens_per_s or 0.0, default=None)
    if best is None:
        return UnderTargets(targets=targets, kept=(), record_id=None)
    return UnderTargets(
        targets=targets,
        kept=tuple(row.record_id for row in kept),
        record_id=best.record_id,
        recipe=best.recipe,
        batch=best.batch,
        prompt=best.conditions.prompt,
        new_tokens=best.conditions.new_tokens,
        decode_tokens_per_s=best.decode_tokens_per_s,
    )


def _keeps(row: RunSummary, targets: TokenTargets) -> bool:
    if row.ttft_s is None or row.tpot_s is None or (row.numerics is not None and row.numerics.is_wrong):
        return False
    token_s = row.tpot_s.p50 if row.tpot_s.p95 is None else row.tpot_s.p95
    first_kept = targets.ttft_s is None or row.ttft_s <= targets.ttft_s
    return first_kept and (targets.tpot_s is None or token_s <= targets.tpot_s)
