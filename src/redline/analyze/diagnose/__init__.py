"""What is in the way of a profiled program, what to try next, and what that can bring at most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redline.analyze.diagnose.finding import Explained, Finding, explained, losses_by_code
from redline.analyze.diagnose.waiting import WAITING
from redline.analyze.diagnose.working import WORKING

if TYPE_CHECKING:
    from redline.analyze.profile import Profile

__all__ = ["RULES", "Explained", "Finding", "diagnose", "explained"]

RULES = {**WAITING, **WORKING}
"""For each loss, the rule that makes a finding of it."""


def diagnose(profile: Profile) -> list[Finding]:
    """Whatever costs a noticeable share of the time, what would save the most first."""
    found = [
        finding
        for code, loss in losses_by_code(profile).items()
        if code in RULES and (finding := RULES[code](profile, loss)) is not None
    ]
    return sorted(found, key=lambda finding: (-finding.saves_s, -finding.gain_bound, finding.code))
