"""A note is a reason, a remark or a piece of evidence: it has a code for programs and a text for people.

Branches look at the code. The text can be printed and nothing else: a note is not a string, so comparing it with one,
searching it or matching a pattern against it raises. Rewording a sentence therefore never changes what Redline does.
"""

from __future__ import annotations

from typing import Any, Literal

from redline.model.fields import Frozen

Code = Literal[
    # what a measurement can be doubted for, and what is worth knowing about it
    "note",  # written before notes had codes
    "failed",
    "not-timed",
    "few-samples",
    "few-rounds",
    "wide-interval",
    "spread",
    "throttled",
    "clock-limited",
    "steady",
    "not-steady",
    "not-waited-for",
    "shared-gpu",
    "shared-cpu",
    "others-at-work",
    "not-isolated",
    "contended",
    "one-process",
    "left-out",
    "interrupted",
    "measured-separately",
    "crowded",
    "by-batch",
    "not-kept",
    "nothing-captured",
    "captured",
    # how a recipe's outputs compare with strict fp32
    "reference",
    "unchecked",
    "other-structure",
    "not-finite",
    "no-signal",
    "unresolved",
    "not-repeatable",
    "within-tolerance",
    "above-tolerance",
    # what limits a step
    "not-measured",
    "host",
    "not-host",
    "same-as-device",
    "outside-operators",
    "step-waits",
    "no-issue-times",
    "work",
    "data",
    "communication",
    "launch",
    "memory",
    "device-busy",
    "kernel-table",
    "limit-beaten",
    "no-ceiling",
    "fits-in-cache",
    "counted-for-inputs",
    "counted-one-draw",
    "work-not-counted",
    "work-changes",
    "backward-not-counted",
    "modules-dissolved",
    "modules-not-marked",
    "format-not-measured",
    "not-repeated",  # in ceilings of older versions
    "busy-ceilings",
    # why two sets of records compare as they do
    "differs",
    "invalid-run",
    "single-runs",
    "spoilt",
    "across-band",
    "part-slower",
    "noisy",
    "one-after-the-other",
    "pace-changed",
    "wrong-answers",
    # what a gate or a history says beside its ratios
    "unknown",
    "counted",
    "compared",
    "grown",
    "other-outputs",
    "outputs-vary",
    "not-runnable",
    "no-baseline",
    "budget",
    # what a workload, a switch or a profiler says about itself
    "default-batch",
    "changed-batch",
    "batch-unknown",
    "one-input-set",
    "masked-positions",
    "not-calibrated",
    "input",
    "model",
    "calibrated",
    "signal",
    "switch",
    "profiler",
    "steps-not-marked",
    "other-data",
    "random-labels",
    "frozen",
    "stays-in-eval",
    "random-in-eval",
    "mixes-samples",
    "no-validation",
    "held-out-is-trained-on",
    "repeated-samples",
    "unused-number",
    "unchanged",
    "not-learned",
    "no-checkpoint",
    "last-batch",
    "no-trace",
    "given-twice",
    "clocks-disagree",
    "capture-and-replay",
    "unknown-events",
    # what a search left out, rejected or did not finish
    "unavailable",
    "irrelevant",
    "caution",
    "quantizes",
    "not-asked-for",
    "excluded",
    "impossible",
    "too-late",
    "no-check",
    "check-not-run",
    "check-failed",
    "check-error",
    "slower",
    "rejected-in-final",
    "ruled-out",
    "nothing-runs",
    "baseline-too-slow",
    "no-energy",
    "short-race",
    "gains-unknown",
    "one-branch",
    "fewer-digits",
    "untried",
    "timed-before",
    "batch-not-searched",
    "batch-not-raced",
    "other-winner",
    "no-snippet",
    "given-up",
    "earlier",
    "earlier-unlike",
    "no-batch",
    "no-knee",
    "doubted-trials",
    "over-target",
    "short-of-memory",
    "fragmented",
    "other-failure",
    # what several ranks say
    "uneven-batch",
    "broken-collective",
    "oversubscribed",
    "straggler",
    "communication-bound",
    "host-bound",
    "unexplained",
    "unlike-device",
    "slow-device",
    "no-processor",
    "computes-longer",
    "waits-for-something",
    "cause-unknown",
    # what a report is made without
    "unreadable",
    "lost",
    "trace-gone",
    "padding",
    "prompt",
]
RETIRED: tuple[Code, ...] = (
    "not-repeated",
    "note",
    "counted-one-draw",
    "stays-in-eval",
    "random-in-eval",
    "mixes-samples",
    "no-validation",
    "repeated-samples",
    "no-checkpoint",
    "timed-before",
    "batch-not-searched",
    "batch-not-raced",
    "other-winner",
    "earlier",
    "earlier-unlike",
)
"""Records of earlier versions hold these, and must still load; nothing writes them any more."""


class Note(Frozen, eq=False, rename={"_text": "text"}):
    """Made by `note`. Prints as its text; in JSON it is an object of code, about and text."""

    code: Code
    about: str = ""
    """This says what the note is about, where that varies: `throughput`, a switch, the name of a field."""
    _text: str = ""

    def __str__(self) -> str:
        return self._text

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            raise TypeError("a note is not compared with a text: look at its code")
        return isinstance(other, Note) and self._whole == other._whole

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._whole)

    def __contains__(self, _: object) -> bool:
        raise TypeError("a note is not searched: look at its code")

    @property
    def _whole(self) -> tuple[str, str, str]:
        return self.code, self.about, self._text


def note(code: Code, text: object, about: str = "") -> Note:
    """Returns a note of one line; `text` is anything that prints."""
    return Note(code=code, about=about, _text=" ".join(str(text).split()))


def notes_from_texts(texts: Any) -> Any:
    """Notes as plain tables, from the plain texts that records of schema 1 hold; anything else stays as it is."""
    if isinstance(texts, list):
        return [notes_from_texts(text) for text in texts]
    return {"code": "note", "about": "", "text": texts} if isinstance(texts, str) else texts
