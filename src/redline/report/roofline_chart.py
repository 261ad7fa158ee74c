"""What a roofline picture needs: roofs that were measured or looked up, and where runs lie below them."""

from __future__ import annotations

from redline.spec import Spec


class Roof(Spec):
    """A ceiling: of bandwidth (bytes per second, the slope) or of arithmetic (FLOP per second, flat)."""

    label: str
    bytes_per_s: float | None = None
    flops_per_s: float | None = None


class RooflinePoint(Spec):
    label: str
    intensity: float
    """FLOP per byte of compulsory traffic."""
    flops_per_s: float
    told: str = ""
    """The raw numbers and the verdict, for whoever points at it."""


class RooflineChart(Spec):
    title: str
    roofs: tuple[Roof, ...]
    points: tuple[RooflinePoint, ...]
