"""A rule, what it finds, and how much that can gain. The same for a trace and for the facts of a run without one.

A rule says what it removes from the steps, and from which share of the time on that is worth saying. What the removal saves is never
the rule's to decide: the facts at hand play the steps again without it. A rule whose facts are missing stays silent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from redline.model.fields import Frozen
from redline.model.note import Note
from redline.model.units import format_seconds

LARGEST_GAIN = 100.0
"""A gain that is bounded by nothing is not told as infinity."""
WORTH_A_LINE = 0.02
"""The least share of the time that is worth a line of its own."""

BoundLabel = Literal["host", "launch", "compute", "memory", "data", "communication", "device", "unknown"]
"""`device`: the device is the limit, and whether by its arithmetic or by its memory is not known."""


class Bound(Frozen, frozen=True, kw_only=True):
    """This limits the steps, and the evidence says how that is known."""

    label: BoundLabel
    evidence: Note


class Finding(Frozen):
    code: str
    evidence: str
    next: str
    """This is worth a try: a recipe of Redline where Redline captured the profile, else a change of the program."""
    gain_bound: float
    """The steps can become at most so many times faster, if all of this were gone."""
    saves_s: float = 0.0
    """The steps would end so much earlier without it. Findings are ordered by this, and bounded by it."""
    recipe: str | None = None
    """This is the recipe that `next` names, if it names one."""


class Advice(NamedTuple):
    text: str
    recipe: str | None = None


class Removal(Frozen):
    """This is what a cause stands for in the steps, and what they would save without it."""

    saves_s: float
    """The steps would end so much earlier, played again without it."""
    seconds: float
    """The device was waiting for it or working at it for so long."""
    count: int = 0
    """It counts pieces of work, or calls."""
    what: str = ""
    """This took most of it."""


class Facts(Protocol):
    """Rules look at these: they are the steps of a trace, or the phases of a run."""

    @property
    def whole_s(self) -> float:
        """Returns the time of the steps, against which gains are held."""

    def words(self, gone: Removal, /) -> Mapping[str, str]:
        """Returns what is filled into the gaps of a rule's text."""


F = TypeVar("F", bound=Facts)


@dataclass(frozen=True, kw_only=True)
class Rule(Generic[F]):
    code: str
    removes: Callable[[F], Removal | None]
    """Returns what is gone with the cause. It is None where the facts do not show it."""
    says: str | Callable[[F, Removal], str]
    """This is the evidence. The facts at hand fill the gaps of a text, here and in the change."""
    change: str | Callable[[F, Removal], Advice | str] = ""
    least_share: float = WORTH_A_LINE
    limit: BoundLabel | None = None
    """This limits the steps if the rule comes first. It is None for work of the device, whose own limit then counts."""

    def finding(self, facts: F) -> Finding | None:
        gone = self.removes(facts)
        if gone is None or not gone.saves_s or gone.saves_s < self.least_share * facts.whole_s:
            return None
        words = facts.words(gone)
        says, change = (
            text.format(**words) if isinstance(text, str) else text(facts, gone) for text in (self.says, self.change)
        )
        advice = change if isinstance(change, Advice) else Advice(change)
        return Finding(
            code=self.code,
            evidence=str(says),
            next=advice.text,
            recipe=advice.recipe,
            gain_bound=gain_of(gone.saves_s, facts.whole_s),
            saves_s=gone.saves_s,
        )


def findings_of(rules: Iterable[Rule[F]], facts: F) -> list[Finding]:
    """Returns whatever costs a noticeable share of the time, with what would save the most first."""
    found = [finding for rule in rules if (finding := rule.finding(facts)) is not None]
    return sorted(found, key=lambda finding: (-finding.saves_s, finding.code))


def gain_of(saves_s: float, whole_s: float) -> float:
    """Returns the time of the steps over what would be left of it."""
    left_s = whole_s - saves_s
    return min(whole_s / left_s, LARGEST_GAIN) if left_s > 0 else LARGEST_GAIN


def words_of(gone: Removal) -> dict[str, str]:
    """Returns what every rule's text may say of what it removes."""
    mean = format_seconds(gone.seconds / max(gone.count, 1))
    return {
        "seconds": format_seconds(gone.seconds),
        "count": f"{gone.count:,}",
        "what": gone.what,
        "first": gone.what.partition(" ")[0],
        "mean": mean,
        "often": "once" if gone.count == 1 else f"{gone.count:,} times, {mean} each on average",
    }


@dataclass(frozen=True)
class Lanes:
    """A step of which no trace was recorded: how long the host and the device take in it, side by side.

    It lasts at least as long as either of them. Whatever neither explains is time in which one waited for the other.
    """

    step_s: float
    host_s: float
    """This is the host's own time, waits for the device included."""
    device_s: float

    def without(self, *, host_s: float = 0.0, device_s: float = 0.0, count: int = 0, what: str = "") -> Removal:
        """Returns what the step saves, played again with so much less to do or to wait for on each side; no lane overtakes the other."""
        left_s = max(self.host_s - host_s, self.device_s - device_s, self.step_s - host_s - device_s, 0.0)
        return Removal(saves_s=max(self.step_s - left_s, 0.0), seconds=max(host_s, device_s), count=count, what=what)
