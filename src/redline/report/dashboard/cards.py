"""What to do, as cards: what decides first, then what a profile found, then what to keep away from."""

from __future__ import annotations

from collections.abc import Iterator

from redline.analyze.profile import Profile
from redline.report.contents import Contents
from redline.spec import Spec

FIRST = ("recipe", "throughput", "latency")
FINDINGS = 3
"""Of each profile: those that could bring the most."""


class Card(Spec):
    kind: str
    headline: str
    details: tuple[str, ...]


def cards_of(contents: Contents) -> list[Card]:
    told = [Card(kind=each.kind, headline=each.headline, details=each.details) for each in contents.advice]
    deciding = sorted((card for card in told if card.kind in FIRST), key=lambda card: FIRST.index(card.kind))
    found = [card for profile in contents.profiles for card in _findings(profile)]
    return [*deciding, *found, *(card for card in told if card.kind not in FIRST)]


def _findings(profile: Profile) -> Iterator[Card]:
    capture = profile.capture
    about = f"{capture.model} · {capture.task} · {capture.recipe} · batch {capture.batch}" if capture else ""
    for finding in profile.findings[:FINDINGS]:
        yield Card(
            kind="profile",
            headline=f"{finding.code}: at most {finding.gain_bound:.2f}× faster without it",
            details=tuple(part for part in (about, finding.evidence, f"next: {finding.next}") if part),
        )
