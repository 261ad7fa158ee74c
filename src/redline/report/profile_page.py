"""A profile as one HTML file that needs nothing else: no script, no font, no picture from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from redline.analyze.profile import Profile
from redline.report.profile import PERFETTO, facts, hints, title
from redline.trace.decode import read_trace
from redline.trace.timeline import Strip, strips_of
from redline.units import format_seconds, format_share

HEIGHT = 60
WIDTH = 960
KERNELS_SHOWN = 200
OPERATORS_SHOWN = 100


def profile_page_of(profile: Profile) -> str:
    """The page, with the timelines of those of its trace files that are still there."""
    files = [Path(source) for source in profile.sources if Path(source).is_file()]
    return profile_page(profile, strips_of([read_trace(file) for file in files]))


def profile_page(profile: Profile, strips: Sequence[Strip] = ()) -> str:
    # Names in traces are not trusted: everything is escaped.
    environment = Environment(
        loader=PackageLoader("redline.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"time": _time, "share": format_share}
    template = environment.get_template("profile.html.j2")
    return template.render(
        profile=profile,
        title=title(profile),
        facts=list(facts(profile)),
        hints=list(hints(profile)),
        pictures=[(strip, _bars(strip)) for strip in strips],
        width=WIDTH,
        height=HEIGHT,
        kernels=profile.kernels[:KERNELS_SHOWN],
        operators=profile.operators[:OPERATORS_SHOWN],
        perfetto=PERFETTO,
    )


def _bars(strip: Strip) -> list[dict[str, Any]]:
    """Rectangles of the picture, one on top of the other in each stretch; those of no height are left out."""
    wide = WIDTH / len(strip.compute)
    bars = []
    for number, shares in enumerate(zip(strip.compute, strip.communication, strip.copy, strict=True)):
        top = float(HEIGHT)
        for kind, share in zip(("compute", "communication", "copy"), shares, strict=True):
            tall = share * HEIGHT
            if tall >= 0.1:
                top -= tall
                bars.append(
                    {
                        "x": f"{number * wide:.2f}",
                        "y": f"{top:.2f}",
                        "w": f"{wide:.2f}",
                        "h": f"{tall:.2f}",
                        "kind": kind,
                    }
                )
    return bars


def _time(value: float | None) -> str:
    return format_seconds(value) if value else ("n/a" if value is None else "0")
