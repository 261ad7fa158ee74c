"""The dashboard is one HTML file: for each subject how fast it is and what to switch on, then charts, and all rows as data."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from redline import __version__
from redline.analyze.profile import Profile
from redline.model.fields import Frozen
from redline.model.metrics import THROUGHPUT, Row
from redline.model.spec import BASELINE
from redline.model.units import THIN_SPACE
from redline.show.contents import METHOD, Contents, Section
from redline.show.payload import as_json, payload_of
from redline.show.result import Result

FINDINGS = 3
"""This many findings of each profile are shown, namely those that could bring the most."""

IN_THE_WAY = {
    "host": "the host: the device waits for Python to launch work",
    "launch": "gaps between kernels that were launched in time",
    "compute": "arithmetic: the matrix units are the limit",
    "memory": "memory traffic: operators move more bytes than they compute on",
    "data": "the data loader: the device waits for batches",
    "communication": "communication between devices",
    "device": "the device's own work; a profile tells whether arithmetic or memory",
    "unknown": "not known: there is no profile and no ceiling yet",
}


class Station(Frozen):
    """A station is one of now, reached and possible."""

    label: str
    value: str
    about: str = ""
    doubt: str = ""


class Answer(Frozen):
    """The answer is the card that the first screen shows for a subject."""

    title: str
    row: int
    """It is about the line with this number, by which filters can act on it."""
    stations: tuple[Station, ...]
    in_the_way: str
    switch_on: str
    code: str = ""
    """This line of Python code applies the recipe."""
    command: str = ""


def answers_of(contents: Contents) -> Iterator[Answer]:
    for section in contents.sections:
        timed = [(at, row) for at, row in zip(section.numbers, section.table.rows, strict=True) if "throughput" in row]
        if timed:
            yield _answer(section, timed, contents)


def _answer(section: Section, timed: list[tuple[int, Row]], contents: Contents) -> Answer:
    proven = [one for one in timed if one[1].get("verdict") == "faster" and one[1].get("numerics") == "passed"]
    at, best = max(proven, key=lambda one: one[1].value("ratio"), default=timed[0])
    beside = [row for _, row in timed if row.get("batch") == best.get("batch")]
    first = best.get("compared_with") if proven else BASELINE
    now = next((row for row in beside if row.get("recipe") == first), beside[0])
    reached = Station(label="reached", value="–", doubt="no recipe is proven faster")
    if proven:
        about = f"{best['recipe']}: {best['ratio']} as fast as {now['recipe']}"
        reached = Station(label="reached", value=_speed(best), about=about, doubt=_doubt(best))
    summary = contents.lines[at].row
    batch = f"batch {best['batch']}" if best.get("batch") else ""
    return Answer(
        title=" · ".join(part for part in (str(section.subject), batch) if part),
        row=at,
        stations=(
            Station(label="now", value=_speed(now), about=f"{now['recipe']}, p50 {now.cell('latency_p50') or 'n/a'}", doubt=_doubt(now)),
            reached,
            _possible(best),
        ),
        in_the_way=_in_the_way(section, best, contents),
        switch_on=str(best["recipe"]) if proven else "not decided yet; the command compares recipes in turns",
        code=_code(section, str(best["recipe"])) if proven else "",
        command=summary.command("run", [str(now["recipe"]), *([str(best["recipe"])] if proven else summary.worth_trying)]) or "",
    )  # fmt: skip


def _code(section: Section, recipe: str) -> str:
    if section.subject.task == "train":
        return f"redline.recipe({recipe!r}, task='train').training_step(model, loss, inputs, targets)"
    return f"redline.recipe({recipe!r}).apply(model, *example_inputs)"


def _speed(row: Row) -> str:
    metric = row.metric("throughput")
    return metric.in_words if metric is not None else "–"


def _doubt(row: Row) -> str:
    trust = str(row.get("trust") or "")
    return "" if trust == "valid" else trust


def _possible(row: Row) -> Station:
    """Returns the speed at which the device's limits would be reached."""
    speed, left = row.metric("throughput"), row.metric("headroom")
    if speed is None or speed.value is None or left is None or left.value is None:
        return Station(label="possible", value="–", doubt="it needs the device's ceilings: redline roofline")
    limit = THROUGHPUT(speed.value * left.value, item=speed.unit.removesuffix("/s"))
    return Station(label="possible", value=limit.in_words, about=f"the roofline; {left} left")


def _in_the_way(section: Section, best: Row, contents: Contents) -> str:
    wanted = (section.subject.model, section.subject.task, best.get("recipe"))
    for profile in contents.profiles:
        capture = profile.capture
        if capture is not None and (capture.model, capture.task, capture.recipe) == wanted and profile.findings:
            return str(profile.findings[0].evidence)
    return IN_THE_WAY[str(best.get("bound") or "unknown")]


class Card(Frozen):
    kind: str
    headline: str
    details: tuple[str, ...]


def cards_of(contents: Contents) -> Iterator[Card]:
    """Yields what is in the way, as the profiles tell it, and what failed."""
    for profile in contents.profiles:
        yield from _findings(profile)
    for section in contents.sections:
        failed = [f"{section.table.called(row)}: {row.failure}" for row in section.table.rows if row.failure]
        if failed:
            yield Card(kind="failed", headline=f"{section.subject}: {len(failed)} failed", details=tuple(failed[:6]))


def _findings(profile: Profile) -> Iterator[Card]:
    capture = profile.capture
    about = f"{capture.model} · {capture.task} · {capture.recipe} · batch {capture.batch}" if capture else ""
    for finding in profile.findings[:FINDINGS]:
        yield Card(
            kind="profile",
            headline=f"{finding.code}: at most {finding.gain_bound:.2f}× faster without it",
            details=tuple(part for part in (about, str(finding.evidence), f"next: {finding.next}") if part),
        )


Payload = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    id: str
    """This is also the name of its drawing function in charts.js."""
    title: str
    about: str
    has_data: Callable[[Payload], bool]
    wide: bool = False


def _has(*columns: str) -> Callable[[Payload], bool]:
    return lambda payload: any(column in payload["columns"] for column in columns)


def _filled(part: str) -> Callable[[Payload], bool]:
    return lambda payload: bool(payload[part])


def _drawn(table: str) -> Callable[[Payload], bool]:
    return lambda payload: table in payload["tables"]


def _several_batches(payload: Payload) -> bool:
    batches = payload["columns"].get("batch", [])
    return "throughput" in payload["columns"] and len({batch for batch in batches if batch is not None}) > 1


def _memory_by_batch(payload: Payload) -> bool:
    return _several_batches(payload) and _has("memory")(payload)


def _phases(payload: Payload) -> bool:
    return _has("forward")(payload) or any(profile["phases"] for profile in payload["profiles"])


CHARTS = (
    Chart(
        "gains",
        "From the baseline to the fastest recipe",
        "Measured times of a step: the baseline, the winner without each of its switches, the winner; and the roofline.",
        _drawn("gains"),
        wide=True,
    ),
    Chart(
        "recipes",
        "Recipes compared",
        "Throughput with its 95 % interval. Hatched bars are unreliable; hover over one to see why.",
        _has("throughput"),
        wide=True,
    ),
    Chart(
        "throughput",
        "Throughput against batch",
        "Items per second with intervals. A star marks the knee: 90 % of the limit.",
        _several_batches,
    ),
    Chart(
        "latency",
        "Latency against batch",
        "Median of a step; p95 is dotted where there are enough samples.",
        _several_batches,
    ),
    Chart(
        "memory",
        "Memory against batch",
        "What must fit: reserved by the allocator, on a CPU the worker's resident memory. Crosses failed.",
        _memory_by_batch,
    ),
    Chart(
        "held",
        "Memory over a step",
        "Allocated bytes by kind; the dashed line is what the allocator has reserved. From redline profile --memory.",
        _filled("memories"),
        wide=True,
    ),
    Chart(
        "distribution",
        "Latency distribution",
        "The share of steps that took at most this long. A steep line means steady times; a stair means two speeds in one run.",
        _filled("distributions"),
    ),
    Chart(
        "cold",
        "Cold start and compiling",
        "Time before the first steady step, without importing torch.",
        _has("build_time", "first_call_time"),
    ),
    Chart(
        "learning",
        "Losses and accuracy",
        "By epoch; training losses dashed. Accuracy is on the held-out part.",
        _drawn("epochs"),
    ),
    Chart(
        "epochs",
        "Epochs",
        "Time, speed, share of the time spent waiting for data, memory and utilisation of each epoch.",
        _drawn("epochs"),
    ),
    Chart(
        "load",
        "Latency under load",
        "Requests that arrive at random; latency counts from the intended arrival. p50 dashed.",
        _drawn("loads"),
    ),
    Chart(
        "generation",
        "Text generation",
        "Tokens written per second against the time per token; each point is a batch under a recipe.",
        _has("tpot"),
    ),
    Chart("phases", "Phases of a step", "Median seconds of a training step, phase by phase.", _phases),
    Chart(
        "kernels",
        "Time by kernel class",
        "From the profiles: where the device's busy time goes; on a CPU, operators by class.",
        _filled("profiles"),
        wide=True,
    ),
    Chart(
        "treemap",
        "Kernels by their time",
        "Each area is as large as the time of a kernel; kernels of one class lie together. Click a class to look closer.",
        lambda payload: any(profile["kernels"] for profile in payload["profiles"]),
        wide=True,
    ),
    Chart(
        "roofline",
        "Roofline",
        "Runs below the device's ceilings. The distance upwards is headroom.",
        _filled("rooflines"),
        wide=True,
    ),
    Chart(
        "telemetry",
        "Telemetry over time",
        "State of the device during the timed blocks, in seconds since the first one.",
        _filled("telemetry"),
        wide=True,
    ),
)


def charts_of(payload: Payload) -> list[Chart]:
    return [chart for chart in CHARTS if chart.has_data(payload)]


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
"""The scripts are in this order because each may use those before it."""
STYLE = "style.css"


def dashboard(contents: Contents, result: Result) -> str:
    """Returns the page. `result` has the tables of the report, which it shows below its charts."""
    payload = payload_of(contents, result)
    script = _script()
    library, packed = _library()
    # Names are not trusted, so everything that the template fills in is escaped, and the data is not markup.
    environment = Environment(
        loader=PackageLoader("redline.show"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["unbroken"] = unbroken
    tables = [table for table in result.tables if table.name in ("knees", "searches", "machines")]
    return environment.get_template("dashboard.html.j2").render(
        contents=contents,
        charts=charts_of(payload),
        answers=list(answers_of(contents)),
        cards=list(cards_of(contents)),
        tables=tables,
        method=METHOD,
        version=__version__,
        policy=_policy(script, library),
        style=Markup(_static(STYLE)),
        script=Markup(script),
        packed=Markup(packed),
        data=Markup(as_json(payload)),
    )


_KEPT_WHOLE = re.compile(rf"\([^()\s]{{1,12}}–[^()\s]{{1,12}}\)|\d{{1,3}}(?:{THIN_SPACE}\d{{3}})+")


_JOINT = re.compile(r"(?<=\w)([+:/])(?=\w)")
"""A line may end at one of these signs between two words, as they stand in a recipe."""


def unbroken(text: str) -> Markup:
    """Returns the text escaped. No line ends inside an interval or a number, and a recipe breaks between its switches."""
    whole = _KEPT_WHOLE.sub(lambda found: f'<span class="nb">{found.group()}</span>', str(escape(text)))
    return Markup(_JOINT.sub(r"\1<wbr>", whole))


def dashboard_policy() -> str:
    """Returns the content policy of a dashboard: it may run its own scripts and load nothing."""
    return _policy(_script(), _library()[0])


def _policy(*scripts: str) -> str:
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"


def script_policy(script: str) -> str:
    """Returns the part of a content policy by which a page may run this script and no other."""
    return f"; script-src 'sha256-{_digest(script)}'"


def lanes_script() -> str:
    """Returns the script for a page that has one captured step to show and nothing else."""
    start = 'drawLanes(document.querySelector(".boxes"), JSON.parse(document.getElementById("lanes").textContent));'
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
    """Returns plotly.js as text, and gzipped in base64."""
    source: Any = files("plotly") / "package_data" / "plotly.min.js"
    # A browser reads a script's line ends as plain ones; the hash must be of the same text.
    text: str = source.read_text(encoding="utf-8").replace("\r\n", "\n").replace("\r", "\n")
    packed = gzip.compress(text.encode(), compresslevel=9, mtime=0)
    return text, base64.b64encode(packed).decode()
