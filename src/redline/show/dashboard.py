"""The dashboard, one HTML file: cards that say what to do, tiles, charts, and all rows as data."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from redline import __version__
from redline.analyze.profile import Profile
from redline.analyze.recommend import Advice, largest_gain, rate, recommendable
from redline.analyze.summary import RunSummary
from redline.model.fields import Frozen
from redline.model.units import THIN_SPACE, format_seconds
from redline.show import tune
from redline.show.answers import answers_of
from redline.show.contents import METHOD, Contents, machines_of
from redline.show.payload import as_json, payload_of

FIRST = ("recipe", "throughput", "latency")
FINDINGS = 3
"""For each profile: those that could bring the most."""


class Card(Frozen):
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


class Tile(Frozen):
    label: str
    value: str
    about: str
    verdict: str = ""
    trusted: bool = True


def tiles_of(contents: Contents) -> list[Tile]:
    rows = {row.record_id: row for row in contents.rows} | {line.row.record_id: line.row for line in contents.lines}
    tiles = [_speed_up(contents.advice, rows), _fastest(contents), _quickest(contents), _counts(contents)]
    return [tile for tile in tiles if tile is not None]


def _speed_up(advice: Sequence[Advice], rows: dict[str, RunSummary]) -> Tile | None:
    """The gain that the headline tells, as it tells it."""
    best = largest_gain([each for each in advice if each.record_id in rows])
    if best is None or best.ratio is None:
        return None
    row = rows[best.record_id]
    between = f"{best.low:.2f}–{best.high:.2f}, " if best.low is not None and best.high is not None else ""
    return _tile("Speed-up", f"{best.ratio:.2f}×", f"{between}{_where(row)}", row)


def _fastest(contents: Contents) -> Tile | None:
    rows = _believed(recommendable(contents.lines))
    best = max(rows, key=lambda row: row.delivered_per_s or 0.0, default=None)
    return _tile("Highest throughput", rate(best), _where(best), best) if best else None


def _quickest(contents: Contents) -> Tile | None:
    sound = recommendable(contents.lines)
    rows = _believed([row for row in sound if row.task == "infer" and row.latency_s is not None])
    best = min(rows, key=lambda row: row.latency_s.p50 if row.latency_s else 0.0, default=None)
    if best is None or best.latency_s is None:
        return None
    tail = f", p95 {format_seconds(best.latency_s.p95)}" if best.latency_s.p95 is not None else ""
    return _tile("Lowest median latency", format_seconds(best.latency_s.p50), _where(best) + tail, best)


def _believed(rows: list[RunSummary]) -> list[RunSummary]:
    """Without the noisy ones, unless there are no others."""
    return [row for row in rows if row.verdict.trusted] or rows


def _counts(contents: Contents) -> Tile:
    failed = sum(row.failure is not None for row in contents.rows)
    labels = Counter(label for row in contents.rows if row.failure is None for label in row.verdict.labels)
    told = ", ".join(f"{count} {label}" for label, count in labels.most_common())
    about = ", ".join(part for part in (told, f"{failed} failed" if failed else "") if part)
    return Tile(label="Records", value=f"{len(contents.rows)}", about=about)


def _tile(label: str, value: str, about: str, row: RunSummary) -> Tile:
    return Tile(
        label=label,
        value=value,
        about=about,
        verdict=", ".join(row.verdict.labels),
        trusted=row.verdict.trusted,
    )


def _where(row: RunSummary) -> str:
    batch = f" at batch {row.batch}" if row.batch else ""
    return f"{row.model} with {row.recipe}{batch}"


Payload = dict[str, Any]


@dataclass(frozen=True)
class Section:
    id: str
    """The name of its drawing function in charts.js."""
    title: str
    about: str
    has_data: Callable[[Payload], bool]
    wide: bool = False


def _has(*columns: str) -> Callable[[Payload], bool]:
    return lambda payload: any(column in payload["columns"] for column in columns)


def _filled(part: str) -> Callable[[Payload], bool]:
    return lambda payload: bool(payload[part])


def _several_batches(payload: Payload) -> bool:
    batches = payload["columns"].get("batch", [])
    return "throughput_per_s" in payload["columns"] and len({batch for batch in batches if batch is not None}) > 1


def _memory_by_batch(payload: Payload) -> bool:
    return _several_batches(payload) and _has("peak_reserved_bytes", "peak_rss_bytes")(payload)


def _phases(payload: Payload) -> bool:
    return _has("forward_s")(payload) or any(profile["phases"] for profile in payload["profiles"])


SECTIONS = (
    Section(
        "gains",
        "From the baseline to the fastest recipe",
        "Measured times of a step: the baseline, the winner without each of its switches, the winner; and the roofline.",
        _filled("gain_paths"),
        wide=True,
    ),
    Section(
        "recipes",
        "Recipes compared",
        "Throughput with its 95 % interval. Hatched bars are unreliable; hover over one to see why.",
        _has("throughput_per_s"),
        wide=True,
    ),
    Section(
        "throughput",
        "Throughput against batch",
        "Items per second with intervals. A star marks the knee: 90 % of the limit.",
        _several_batches,
    ),
    Section(
        "latency",
        "Latency against batch",
        "Median of a step; p95 is dotted where there are enough samples.",
        _several_batches,
    ),
    Section(
        "memory",
        "Memory against batch",
        "What must fit: reserved by the allocator, on a CPU the worker's resident memory. Crosses failed.",
        _memory_by_batch,
    ),
    Section(
        "held",
        "Memory over a step",
        "Allocated bytes by kind; the dashed line is what the allocator has reserved. From redline profile --memory.",
        _filled("memories"),
        wide=True,
    ),
    Section(
        "distribution",
        "Latency distribution",
        "The share of steps that took at most this long. A steep line means steady times; a stair means two speeds in one run.",
        _filled("distributions"),
    ),
    Section(
        "cold",
        "Cold start and compiling",
        "Time before the first steady step, without importing torch.",
        _has("build_s", "first_call_s"),
    ),
    Section(
        "learning",
        "Losses and accuracy",
        "By epoch; training losses dashed. Accuracy is on the held-out part.",
        _filled("trainings"),
    ),
    Section(
        "epochs",
        "Epochs",
        "Time, speed, share of the time spent waiting for data, memory and utilisation of each epoch.",
        _filled("trainings"),
    ),
    Section(
        "load",
        "Latency under load",
        "Requests that arrive at random; latency counts from the intended arrival. p50 dashed.",
        _filled("loads"),
    ),
    Section(
        "generation",
        "Text generation",
        "Tokens written per second against the time per token; each point is a batch under a recipe.",
        _has("tpot_s"),
    ),
    Section("phases", "Phases of a step", "Median seconds of a training step, phase by phase.", _phases),
    Section(
        "kernels",
        "Time by kernel class",
        "From the profiles: where the device's busy time goes; on a CPU, operators by class.",
        _filled("profiles"),
        wide=True,
    ),
    Section(
        "treemap",
        "Kernels by their time",
        "Each area is as large as the time of a kernel; kernels of one class lie together. Click a class to look closer.",
        lambda payload: any(profile["kernels"] for profile in payload["profiles"]),
        wide=True,
    ),
    Section(
        "roofline",
        "Roofline",
        "Runs below the device's ceilings. The distance upwards is headroom.",
        _filled("rooflines"),
        wide=True,
    ),
    Section(
        "telemetry",
        "Telemetry over time",
        "State of the device during the timed blocks, in seconds since the first one.",
        _filled("telemetry"),
        wide=True,
    ),
)


def sections_of(payload: Payload) -> list[Section]:
    return [section for section in SECTIONS if section.has_data(payload)]


SCRIPTS = (
    "data.js",
    "theme.js",
    "filters.js",
    "plots.js",
    "charts.js",
    "table.js",
    "answers.js",
    "compare.js",
    "boxes.js",
    "main.js",
)
"""In this order: each may use those before it."""
STYLE = "style.css"


def dashboard(contents: Contents) -> str:
    payload = payload_of(contents)
    script = _script()
    library, packed = _library()
    # Names are not trusted: everything the template fills in is escaped, and the data is not markup.
    environment = Environment(
        loader=PackageLoader("redline.show"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["unbroken"] = unbroken
    return environment.get_template("dashboard.html.j2").render(
        contents=contents,
        sections=sections_of(payload),
        tiles=tiles_of(contents),
        answers=answers_of(contents),
        advice=cards_of(contents),
        machines=machines_of(contents.records),
        told=tune,
        method=METHOD,
        version=__version__,
        policy=_policy(script, library),
        style=Markup(_static(STYLE)),
        script=Markup(script),
        packed=Markup(packed),
        data=Markup(as_json(payload)),
    )


_KEPT_WHOLE = re.compile(rf"\([^()\s]{{1,12}}–[^()\s]{{1,12}}\)|\d{{1,3}}(?:{THIN_SPACE}\d{{3}})+")


def unbroken(text: str) -> Markup:
    """Escaped, with intervals and numbers that no line ends inside of."""
    return Markup(_KEPT_WHOLE.sub(lambda found: f'<span class="nb">{found.group()}</span>', str(escape(text))))


def dashboard_policy() -> str:
    """What a dashboard may load and run."""
    return _policy(_script(), _library()[0])


def _policy(*scripts: str) -> str:
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"


def script_policy(script: str) -> str:
    """What lets a page run this script of ours and no other."""
    return f"; script-src 'sha256-{_digest(script)}'"


def lanes_script() -> str:
    """The script of a page that shows one captured step and nothing else."""
    start = (
        'drawLanes(document.querySelector(".boxes"), null, JSON.parse(document.getElementById("lanes").textContent));'
    )
    return f'(() => {{\n"use strict";\n{_static("boxes.js")}\n{start}\n}})();'


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _script() -> str:
    parts = "\n".join(_static(name) for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{parts}\n}})();'


def _static(name: str) -> str:
    return (files("redline.show") / "static" / name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _library() -> tuple[str, str]:
    """plotly.js as text, and gzipped in base64."""
    source: Any = files("plotly") / "package_data" / "plotly.min.js"
    # A browser reads a script's line ends as plain ones; the hash must be of the same text.
    text: str = source.read_text(encoding="utf-8").replace("\r\n", "\n").replace("\r", "\n")
    packed = gzip.compress(text.encode(), compresslevel=9, mtime=0)
    return text, base64.b64encode(packed).decode()
