"""An alarm for long trainings: something happens when the throughput falls."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Callable

import msgspec

from redline.analyze.watch import Rates
from redline.errors import UsageError

FEWEST_STEPS = 20
"""Of a piece whose rate is compared."""
DELIVERY_S = 30.0


def parse_share(text: str) -> float:
    """`20%` or `0.2`."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise UsageError(f"--alert-drop must be a share such as 20% or 0.2, got {text!r}") from None
    if not 0 < share < 1:
        raise UsageError(f"--alert-drop must be between 0 and 100 %, got {text!r}")
    return share


class Alarm:
    """Compares the pace of the newest steps with the best pace so far; alerts once per drop, and again after a recovery."""

    def __init__(self, target: str, drop: float, deliver: Callable[[str, bytes], None] | None = None) -> None:
        self._target = target
        self._drop = drop
        self._deliver = deliver or deliver_alert
        self._seen: tuple[int, float] | None = None
        self._best = 0.0
        self._is_down = False

    def hear(self, rates: Rates) -> None:
        if rates.steps_per_s is None:
            return
        steps, seconds = rates.steps, rates.steps / rates.steps_per_s
        if self._seen is None:
            self._seen = (steps, seconds)
            return
        newer, took = steps - self._seen[0], seconds - self._seen[1]
        if newer < FEWEST_STEPS or took <= 0:
            return
        self._seen = (steps, seconds)
        pace = newer / took
        is_down = pace < (1 - self._drop) * self._best
        if is_down and not self._is_down:
            told = {"event": "throughput-fell", "step": steps, "steps_per_s": pace, "best_steps_per_s": self._best}
            self._deliver(self._target, msgspec.json.encode(told))
        self._is_down = is_down
        self._best = max(self._best, pace)


def deliver_alert(target: str, body: bytes) -> None:
    """Post to a URL, or run a command with the message on its stdin. A failure is reported and has no other effect."""
    try:
        if target.startswith(("http://", "https://")):
            request = urllib.request.Request(target, body, {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=DELIVERY_S).close()
        else:
            subprocess.run(target, shell=True, input=body, timeout=DELIVERY_S, check=True)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"redline: the alert was not delivered: {error}", file=sys.stderr)  # noqa: T201  (nobody else tells)
