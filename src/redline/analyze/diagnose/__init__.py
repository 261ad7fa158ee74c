"""What is in the way and what to try next: each rule is one small function from a profile to a finding, or to nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from redline.analyze.diagnose import busy, waiting
from redline.analyze.diagnose.finding import Finding

if TYPE_CHECKING:
    from redline.analyze.profile import Profile

__all__ = ["RULES", "Finding", "diagnose"]

RULES: tuple[Callable[[Profile], Finding | None], ...] = (
    waiting.data_loader,
    waiting.host,
    waiting.launch,
    waiting.copies,
    waiting.communication,
    busy.layout_conversions,
    busy.fp32_products,
    busy.batch_norm_in_eval,
    busy.unfused_elementwise,
)


def diagnose(profile: Profile) -> list[Finding]:
    """The largest possible gain first."""
    found = [finding for rule in RULES if (finding := rule(profile)) is not None]
    return sorted(found, key=lambda finding: -finding.gain_bound)
