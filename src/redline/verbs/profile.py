"""`redline profile`: where the time and the memory of a step go, what is in the way, and what to change."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from redline.analyze.advice import command_line
from redline.analyze.finding import LARGEST_GAIN
from redline.analyze.profile import Profile, with_tool
from redline.analyze.profile_diff import Changed, ProfileDiff, diff_profiles
from redline.model.errors import BenchError, Exit, UsageError
from redline.model.fields import MOST_ROWS
from redline.model.metrics import Fact, Figure, Headline, Metric, Row, Table
from redline.model.note import Note, note
from redline.model.protocol import AskMemory, MemoryAnswer
from redline.model.protocol import Profile as ProfileRequest
from redline.model.record import RunRecord, new_id
from redline.model.settings import OUTPUT, setting
from redline.model.spec import RunSpec
from redline.model.units import counted, printable
from redline.model.work import MemoryCategory, MemoryRow
from redline.search.grid import listed
from redline.search.vendors import TOOLS, check_device, find_tool, profile_behind
from redline.show.folder import write_text
from redline.show.page import page
from redline.show.profile import kernel_csv, memory_figure, profile_page, step_figure
from redline.show.result import Result
from redline.trace.decode import read_traces
from redline.trace.lanes import Lanes, lanes_of
from redline.trace.names import label_of
from redline.trace.tables import OperatorRow
from redline.trace.vendors import merged, read_file
from redline.verbs.capture import DEFAULT_STEPS, keep_memory, profile_spec, read_profile, require_profiled
from redline.verbs.verb import WORKLOAD, Recipes, verb
from redline.verbs.workspace import Workspace, one_spec, specs_of, use

Sort = Literal["device", "host", "memory", "calls"]
SHOWN = 8
"""Rows of each table that are shown without -v."""
PERFETTO = "https://ui.perfetto.dev"

What = Annotated[
    Any,
    setting(
        "A model: a name ('redline models'), timm:NAME, hf:NAME, or your own as file.py:factory. Or traces from anywhere, one per "
        "rank: a path to a file is a trace ('-' reads stdin), and so are a path to a folder with a slash in it and the id of a record.",
        kind=list[str],
        is_argument=True,
        shape="MODEL|TRACE...",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ProfileResult(Result):
    """The result holds the profile itself and the record of what was measured beside it, or with the rows of memory."""

    profile: Profile | None = None
    record: RunRecord | None = None
    memory: tuple[MemoryRow, ...] = ()

    def to_html(self) -> str:
        """Returns one page with pictures and tables. It fetches nothing."""
        if self.profile is None:
            return page(str(self.headline), self, is_file=True)
        return profile_page(self, self.profile, captured_lanes(self.profile))


@verb(
    takes=(*WORKLOAD, "ranks", "batch_per_rank", "max_memory"),
    examples=(
        "redline profile resnet50 -r fp16+channels-last --batch 32",
        "redline profile rank0.json.gz rank1.json.gz --html page.html",
        "redline profile resnet50 --task train --memory -r baseline -r amp-bf16",
    ),
    also=("plot", "html", "save", "report"),
)
def profile(
    what: What = (),
    inputs: Any | None = None,
    *,
    recipes: Recipes = "baseline",
    loss: Any | None = None,
    memory: Annotated[
        bool, setting("Show what a step of each model under each recipe holds in memory instead.")
    ] = False,
    diff: Annotated[Any, setting("Compare two traces, folders or records.", kind=tuple[str, str], shape="A B")] = None,
    import_: Annotated[
        Any,
        setting(
            "Read a file of rocprof, rocprofv2, rocprofv3, nsys or ncu; repeat for several.",
            option="--import",
            kind=list[str],
        ),
    ] = (),
    tool: Annotated[
        str | None,
        setting("A vendor profiler captures.", shape="[nsys|ncu|rocprof|rocprofv2|rocprofv3|rocprof-compute]"),
    ] = None,
    steps: Annotated[
        int | None, setting("Steps to capture. Default: 3, or what the tool needs.", least=1, most=MOST_ROWS)
    ] = None,
    stacks: Annotated[bool, setting("Record Python stacks too.")] = False,
    sort: Annotated[
        Sort | None, setting("Order of the operator table; memory also records allocations.", group=OUTPUT)
    ] = None,
    out: Annotated[Path | None, setting("A folder for the trace, as TensorBoard reads it.", group=OUTPUT)] = None,
    csv: Annotated[
        Path | None,
        setting("Write the kernel table, laid out like rocprof --stats; on a CPU, operators.", group=OUTPUT),
    ] = None,
    workspace: Workspace | None = None,
    **settings: Any,
) -> ProfileResult:
    """Show where a step's time and memory go, and what is in the way.

    A model runs a few steps under torch's profiler, or under a vendor's with --tool. Traces are read from anywhere: several files are
    the ranks of one program.
    """
    words = [what] if isinstance(what, str | Path) or not isinstance(what, list | tuple) else list(what)
    traces = [word for word in words if isinstance(word, Path) or (isinstance(word, str) and is_trace(word))]
    models = [word for word in words if word not in traces]
    reading = {"trace": traces, "import": import_, "diff": diff}
    showing = {"sort": sort, "csv": csv}
    capturing = {"tool": tool, "steps": steps, "stacks": stacks, "out": out}
    if memory:
        tokens_and_ranks = {name: settings.get(name) for name in ("prompt", "new_tokens", "ranks")}
        unused = {**capturing, **showing, **reading, **tokens_and_ranks}
        _leave_out(unused, "--memory runs steps of models and traces nothing")
    elif diff is not None and (words or import_):
        raise UsageError("--diff takes two profiles and nothing else")
    elif traces and models:
        raise UsageError(f"{traces[0]} is a trace and {models[0]} a model: profile one of them")
    elif reads := next(
        (f"--{name}" if name != "trace" else str(given[0]) for name, given in reading.items() if given), ""
    ):
        own = {"recipe": "" if recipes == "baseline" else recipes, **capturing, **settings}
        _leave_out(own, f"{reads} reads what was captured")
        _leave_out(showing if diff is not None else {}, "--diff prints a comparison")
    elif len(models) != 1:
        raise UsageError("name one model, or trace files, or --diff A B")
    elif len(listed(recipes)) > 1:
        raise UsageError("a profile is of one recipe: 'redline profile --diff A B' compares two")
    with use(workspace) as opened:
        record = None
        if memory:
            return _memory(models if len(models) != 1 else models[0], inputs, recipes, loss, settings, opened)
        if diff is not None:
            sides = (side if isinstance(side, Profile) else read_profile(side, workspace=opened) for side in diff)
            return diff_result(diff_profiles(*sides))
        if import_:
            profiled = _imported([*import_, *words])
        elif traces:
            profiled = read_profile(*traces, workspace=opened)
        else:
            spec, working = one_spec(opened, "a profile", models[0], inputs, recipes=recipes, loss=loss, **settings)
            if tool is not None:
                profiled, record = _with_tool(spec, tool, working, steps, out)
            else:
                request = ProfileRequest(path="", active=steps or DEFAULT_STEPS, memory=sort == "memory", stacks=stacks)
                profiled, record = profile_spec(spec, request, working, folder=out)
    if csv is not None:
        write_text(csv, kernel_csv(profiled))
    return result_of(profiled, record, sort)


def is_trace(word: str) -> bool:
    """Returns whether a word names what was captured before, and not a model: a path, stdin, or the id of a record."""
    if word == "-" or word.endswith((".json", ".json.gz")) or re.fullmatch(r"[0-9a-f]{6,}", word):
        return True
    path = Path(word).expanduser()
    return os.sep in word if path.is_dir() else path.exists()


def _leave_out(options: Mapping[str, Any], why: str) -> None:
    """Refuse options that were given and would be ignored."""
    for name in (name for name, value in options.items() if value):
        raise UsageError(f"{why}: leave out --{name.replace('_', '-')}")


def _with_tool(
    spec: RunSpec, tool: str, workspace: Workspace, steps: int | None, folder: Path | None
) -> tuple[Profile, RunRecord]:
    """Returns the same steps under a vendor profiler: its kernel table, and hardware counters where it reads them."""
    chosen = TOOLS.get(tool)
    find_tool(chosen)
    (spec,) = workspace.checked([spec])
    check_device(chosen, spec.device)
    folder = (folder or workspace.traces / f"{chosen.name}-{new_id()}").absolute()
    with workspace.lock(spec.device):
        record, table = profile_behind(spec, chosen, folder, steps, workspace.observer)
        workspace.observer.closed(record)
    require_profiled(record)
    assert table is not None
    return with_tool(table.kernels, table.readings, record, chosen.name, table.notes), record


def _imported(sources: Sequence[str | Path]) -> Profile:
    """Returns a profile from files that a vendor's profiler wrote; several of one tool are added up."""
    files = [read_file(Path(source).expanduser()) for source in sources]
    tools = sorted({tool for tool, _ in files})
    if len(tools) > 1:
        raise UsageError(f"these files are of different tools ({', '.join(tools)}): import them one by one")
    table = merged([table for _, table in files])
    return with_tool(table.kernels, table.readings, None, tools[0], table.notes, tuple(map(str, sources)))


def captured_lanes(profile: Profile) -> Lanes | None:
    """Returns the first trace of a profile as lanes of boxes, or None where there is no trace file to read."""
    named = profile.capture.trace if profile.capture is not None else next(iter(profile.sources), None)
    if not named or not Path(named).is_file() or not (profile.ranks or profile.operators):
        return None
    return lanes_of(read_traces([Path(named)])[0])


# The fields of the profile's own rows are the figures that it shows, and their names carry the units.

UNITS = {
    "bytes_per_s": "B/s", "flops_per_s": "FLOP/s", "_per_s": "", "_s": "s", "bytes": "B", "share": "share", "efficiency": "share",
    "spread": "share", "ratio": "x", "gain_bound": "x", "flops": "FLOP",
}  # fmt: skip
"""The end of a field's name tells its unit."""
HEADERS = {
    "cpu_self_s": "host self", "cpu_total_s": "host total", "bus_bytes_per_s": "bus",
    "efficiency": "of the limit", "flops_per_s": "reached", "bytes_per_s": "bandwidth", "gain_bound": "at most",
    "device_share": "share", "short_share": "kernels of 10 µs or less", "exposed_communication_s": "exposed",
}  # fmt: skip


def cells(struct: msgspec.Struct) -> Iterator[tuple[str, Fact | Metric]]:
    """Returns the fields of a row: numbers as figures, words as facts, and those of the parts it is made of."""
    for field in msgspec.structs.fields(type(struct)):
        name, value = field.name, getattr(struct, field.name)
        end = next((end for end in UNITS if name.endswith(end)), None)
        if isinstance(value, msgspec.Struct) and not isinstance(value, Note):
            yield from cells(value)
        elif isinstance(value, str | bool | Note):
            yield name, value if isinstance(value, bool) else str(value)
        elif isinstance(value, int | float) or (value is None and end is not None):
            header = HEADERS.get(name, name.removesuffix("_s").replace("_", " "))
            yield name, Figure(name=name, unit=UNITS.get(end or "", ""), header=header)(value)


def row_of(struct: msgspec.Struct, *, is_detail: bool = False, **facts: Fact) -> Row:
    values = dict(cells(struct))
    words = {name: value for name, value in values.items() if not isinstance(value, Metric)}
    metrics = tuple(value for value in values.values() if isinstance(value, Metric))
    return Row(facts={**facts, **words}, metrics=metrics, is_detail=is_detail)


def table_of(name: str, title: str, structs: Iterable[Any], columns: str, **called: Any) -> Table:
    """Makes a table of rows that are structs. `called`: more columns, each with the function that says its cell."""
    rows = [
        row_of(struct, is_detail=number >= SHOWN, **{column: say(struct) for column, say in called.items()})
        for number, struct in enumerate(structs)
    ]
    return Table(name=name, title=title, rows=tuple(rows), columns=(*called, *columns.split()))


def result_of(profile: Profile, record: RunRecord | None = None, sort: Sort | None = None) -> ProfileResult:
    """Returns the findings in the order of what they bring, then every table."""
    return ProfileResult(
        verb="profile",
        headline=_headline(profile),
        tables=(
            Table(name="findings", rows=tuple(map(_finding_row, profile.findings)), is_list=True),
            *_shown_first(profile, sort),
        ),
        about=_about(profile),
        notes=tuple(_notes(profile)),
        next=_next(profile),
        record_ids=(record.id,) if record is not None and record.trace is not None else (),
        picture=lambda: _picture(profile),
        profile=profile,
        record=record,
    )


AT_A_GLANCE = frozenset(("timeline", "phases", "ranks", "counters"))
"""Tables that are shown without -v, beside the findings and the longest kernels."""


def _shown_first(profile: Profile, sort: Sort | None) -> Iterator[Table]:
    """Yields all tables; without -v a terminal shows few, among them the operators where they were asked for or are all there is."""
    work = "kernels" if profile.kernels and profile.has_device and sort is None else "operators"
    for table in _tables(profile, sort or ("device" if profile.has_device else "host")):
        yield table if table.name in AT_A_GLANCE or table.name == work else table.as_detail()


WHOLE = Figure(name="whole", unit="s", doc="The time of the recorded steps without the profiler, where that is known.")


def _headline(profile: Profile) -> Headline:
    label, whole = profile.bound.label, WHOLE(profile.whole_s)
    if profile.missing:
        return Headline(template="No conclusion can be drawn: {missing}.", figures={"missing": profile.missing})
    if not profile.findings:
        return Headline(
            template="Nothing stands out in {whole}; the limit is {bound}: {evidence}.",
            figures={"whole": whole, "bound": label, "evidence": str(profile.bound.evidence)},
        )
    first = dict(cells(profile.findings[0]))
    figures = {"code": first["code"], "saves": first["saves_s"], "gain": first["gain_bound"]}
    return Headline(
        template="{code} costs {saves} of {whole}: without it the steps are at most {gain} as fast (bound: {bound}).",
        figures={**figures, "whole": whole, "bound": label},
    )


def _finding_row(finding: Any) -> Row:
    row = row_of(finding)
    gain = row.metric("gain_bound")
    if gain is not None and gain.value == LARGEST_GAIN:
        metrics = tuple(metric for metric in row.metrics if metric is not gain)
        row = msgspec.structs.replace(row, metrics=(*metrics, gain.figure(gain.value, gain.value)))
    facts = {"finding": finding.code, "evidence": finding.evidence, "change": finding.next, "recipe": finding.recipe}
    return msgspec.structs.replace(row, facts=facts)


def _tables(profile: Profile, sort: Sort) -> Iterator[Table]:
    work = "device" if profile.has_device else "host"
    yield Table(name="timeline", title="where the time goes", rows=tuple(_timeline(profile)))
    yield Table(name="figures", title="steps and launches", rows=tuple(_figures(profile)), columns=("of", "value"))
    steps = (
        f"of {counted(profile.steps_seen, 'step')}, under the profiler" if profile.steps_seen else "of the whole trace"
    )
    bottleneck = f"; bottleneck: {profile.bottleneck}" if profile.bottleneck else ""
    columns = "host_s" + " device_s" * profile.has_device
    yield table_of("phases", f"phases {steps}{bottleneck}", profile.phases, columns, phase=lambda row: row.name)
    yield table_of(
        "ranks", "devices", profile.ranks if len(profile.ranks) > 1 else (),
        "busy_s idle_s communication_s waiting_s exposed_communication_s span_s host_wait_s device",
        of=lambda row: f"process {row.process}" if row.process else f"rank {row.rank}" if row.rank is not None else label_of(row.source),
    )  # fmt: skip
    other = profile.unclassified_share
    title = f"time by class; not classified (other): {other:.0%}" if other >= 0.005 else "time by class"
    yield table_of("classes", title, profile.classes, "total_s share calls", of=lambda row: row.name)
    yield table_of(
        "kernels", f"kernels: {profile.kernels_for_most} of {len(profile.kernels)} take 80 % of the time", profile.kernels,
        "kernel_class total_s share calls mean_s min_s max_s", kernel=lambda row: row.short_name,
    )  # fmt: skip
    copies = "total_s share calls bytes bytes_per_s"
    yield table_of("copies", "copies and fills", profile.copies, copies, direction=lambda row: label_of(row.name))
    short = {row.name: row.short_name for row in profile.kernels}
    rows = tuple(_counter(counter, short) for counter in profile.counters)
    counters = ("kernel", "name", "value", "verdict", "meaning")
    yield Table(name="counters", title="hardware counters", rows=rows, columns=counters)
    by, rank = SORTS[sort]
    device, below = ("device_self_s device_share ", "device_total_s ") if profile.has_device else ("", "")
    taken = (
        f" {side}_allocated_bytes"
        for side in ("device", "cpu")
        if any(getattr(row, f"{side}_allocated_bytes") for row in profile.operators)
    )
    yield table_of(
        "operators", f"operators, by {by}", sorted(profile.operators, key=rank, reverse=True),
        f"{device}calls cpu_self_s {below}cpu_total_s{''.join(taken)}", operator=lambda row: label_of(row.name),
    )  # fmt: skip
    is_judged = any(row.efficiency is not None for row in profile.limits)
    against = (
        f"against what {profile.limits[0].limit_of} allows"
        if is_judged
        else "and what they reach (the device's limits are not known)"
    )
    yield table_of(
        "limits", f"operators {against}, by {work} time", profile.limits,
        f"device_s {'efficiency limited_by ' if is_judged else ''}number_format bytes_per_s flops_per_s calls intensity",
        operator=lambda row: row.label,
    )  # fmt: skip
    yield table_of(
        "waits", "where the host waited for the device", profile.waits if profile.has_device else (),
        "operator frame calls blocked_s idle_s", waits_in=lambda row: row.call,
    )  # fmt: skip
    late = [f"; {one.label} came last in {one.last} of {one.collectives}" for one in profile.stragglers[:1]]
    yield table_of(
        "collectives", "".join(("collectives", *late)), profile.collectives,
        "total_s message_bytes group_size calls mean_s max_s hidden_s wait_s transfer_s bus_bytes_per_s",
        collective=lambda row: f"{row.name} {row.dtype}".strip(),
    )  # fmt: skip
    parts = f"{work}_s share calls{' backward_s' * any(row.backward_s for row in profile.parts)}{' device_self_s' * profile.has_device}"
    yield table_of(
        "parts",
        "time by module and annotation, each with what is inside it",
        profile.parts,
        parts,
        part=lambda row: label_of(row.path),
    )


SORTS: dict[Sort, tuple[str, Callable[[OperatorRow], float]]] = {
    "device": ("device time", lambda row: row.device_self_s),
    "host": ("host time", lambda row: row.cpu_self_s),
    "memory": ("memory taken", lambda row: row.device_allocated_bytes + row.cpu_allocated_bytes),
    "calls": ("calls", lambda row: row.calls),
}


def _counter(counter: Any, short: dict[str, str]) -> Row:
    row = row_of(counter)
    value = Figure(name="value", unit="B" if counter.unit == "bytes" else "share")(counter.value)
    kernel = "all" if counter.kernel is None else short.get(counter.kernel, label_of(counter.kernel))
    return msgspec.structs.replace(row, facts={**row.facts, "kernel": kernel}, metrics=(value,))


SECONDS, SHARE = Figure(name="seconds", unit="s", header="time"), Figure(name="share", unit="share")


def _timeline(profile: Profile) -> Iterator[Row]:
    """Yields what the device did, or the host where it is the device, and why it was idle."""
    times, whole = dict(_seconds(profile.timeline)), profile.timeline.span_s
    is_table = bool(profile.counters) or not (profile.ranks or profile.operators)  # of kernels, which has no timeline
    rows = [(name, times.pop(name), 0) for name in ("span", "busy", "idle")]
    rows += sorted(((name, value, 1) for name, value in _seconds(profile.idle)), key=lambda row: -row[1])
    rows += [(name, value, 2 if name.startswith("exposed") else 1) for name, value in times.items()]
    for name, value, depth in rows:
        if (value or not depth) and not (is_table and name in ("span", "idle")):
            metrics = (SECONDS(value), SHARE(value / whole if whole else None))
            yield Row(facts={"part": name.replace("_", " ")}, metrics=metrics, depth=depth)


def _seconds(struct: msgspec.Struct) -> list[tuple[str, float]]:
    return [(name.removesuffix("_s"), getattr(struct, name)) for name in struct.__struct_fields__]


OFTEN_READ = frozenset(
    ("step: mean", "step: spread", "step without the profiler", "launch: calls", "launch: mean call", "launch: median kernel",
     "launch: kernels of 10 µs or less", "host over device", "generation: ttft", "generation: p50")
)  # fmt: skip


def _figures(profile: Profile) -> Iterator[Row]:
    """Yields one figure a row: of steps, launches, the host, a generation, and what is not counted."""
    capture, launches, outside = profile.capture, profile.launches, profile.outside
    known: list[tuple[str, Fact | Metric]] = []
    if capture is not None:
        known = [("step without the profiler", SECONDS(capture.step_s)), ("capture", SECONDS(capture.capture_s))]
    parts: dict[str, Any] = {
        "step": profile.steps,
        "launch": launches if launches.calls else None,
        "host": profile.host,
    }
    parts |= {"generation": profile.generation, "not counted": outside if outside else None}
    for part, struct in parts.items():
        cell_of = cells(struct) if struct is not None else ()
        known += [(f"{part}: {value.header}", value) for _, value in cell_of if isinstance(value, Metric)]
    for name, value in known:
        if isinstance(value, Metric) and value.value is not None:
            value = msgspec.structs.replace(
                value, figure=msgspec.structs.replace(value.figure, name="value", header="value")
            )
            name = "host over device" if name == "host: ratio" else name
            yield Row(facts={"of": name}, metrics=(value,), is_detail=name not in OFTEN_READ)


def _about(profile: Profile) -> dict[str, Fact]:
    capture, hardware = profile.capture, profile.hardware
    ranks = sorted({rank.rank for rank in profile.ranks if rank.rank is not None})
    world = max((rank.world_size or 1 for rank in profile.ranks), default=1)
    about: dict[str, Fact] = {"of": " · ".join(map(printable, profile.sources)), "device": label_of(hardware.name)}
    if capture is not None:
        about = {
            "of": capture.model,
            "task": capture.task,
            "recipe": capture.recipe,
            "batch": f"batch {capture.batch}" if capture.batch else None,
            "setting": capture.setting,
            "tool": f"under {capture.tool}",
            "trace": capture.trace,
            "device": label_of(hardware.name) or capture.device_name,
        }
    if hardware.capability:
        newer = " or newer" if hardware.at_least else ""
        about["capability"] = f"compute capability {hardware.capability[0]}.{hardware.capability[1]}{newer}"
    if ranks and world > 1:
        about["ranks"] = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {world}"
    about |= {"bound": profile.bound.label, "bottleneck": profile.bottleneck}
    return {name: value for name, value in about.items() if value}


def _notes(profile: Profile) -> Iterator[Note]:
    """Returns what is missing first."""
    yield from (note("lost", reason) for reason in (profile.lost.reasons if profile.lost else ()))
    if profile.findings and str(profile.bound.evidence) not in [finding.evidence for finding in profile.findings]:
        yield note("note", f"bound: {profile.bound.label}: {profile.bound.evidence}")
    yield from profile.notes


def _next(profile: Profile) -> str:
    capture = profile.capture
    if capture is not None and capture.trace and capture.trace.endswith(".json.gz"):
        return f"redline profile --diff {capture.record_id[:13]} OTHER; or open {capture.trace} at {PERFETTO} (it stays in the browser)"
    if capture is not None and capture.trace:
        return f"look at the files of {capture.tool}: {capture.trace}"
    is_table = any(remark.code == "kernel-table" for remark in profile.notes)
    return "" if is_table else f"open the file at {PERFETTO} for the whole timeline (it stays in the browser)"


def _picture(profile: Profile) -> Any:
    """Draws the captured step."""
    lanes = captured_lanes(profile)
    if lanes is None:
        raise UsageError("there is nothing to draw here: a table of kernels has no timeline")
    return step_figure(lanes, str(_about(profile)["of"]))


# Two profiles


def diff_result(changed: ProfileDiff) -> ProfileResult:
    """Returns which kernels and operators changed between two profiles, what changed most first."""
    titles = {"classes": "classes", "kernels": "kernels", "operators": "operators"}
    titles |= {"parts": "by module and annotation, each with what is inside it"}
    times = f"per {changed.unit}; before: {changed.before}; after: {changed.after}"
    gone = (("resolved", changed.findings_gone), ("new", changed.findings_new))
    return ProfileResult(
        verb="profile",
        headline=Headline(template="{answer}.", figures={"answer": changed.answer}),
        tables=(
            _changes("times", times, (changed.step, changed.busy)),
            *(_changes(name, title, getattr(changed, name)) for name, title in titles.items()),
        ),
        about={"before": changed.before, "after": changed.after, "unit": changed.unit},
        notes=(*(note("differs", f"{code}: {', '.join(codes)}") for code, codes in gone if codes), *changed.notes),
    )


def _changes(name: str, title: str, rows: Sequence[Changed]) -> Table:
    counts = ", ".join(f"{count} {change}" for change, count in Counter(row.change for row in rows).items())
    columns = "change before_s after_s difference_s ratio calls_before calls_after"
    title = f"{title}: {counts}" if len(rows) > 2 or name != "times" else title
    return table_of(name, title, rows, columns, of=lambda row: row.short_name)


# Memory


def _memory(
    models: Any, inputs: Any, recipes: str | Iterable[str], loss: Any, settings: dict[str, Any], workspace: Workspace
) -> ProfileResult:
    """Run two steps of each model under each recipe and tell whose memory the second one's peak is.

    Where memory runs out, the error names who asked for it and who held the rest, and a snapshot lies beside the history.
    """
    if isinstance(models, list) and not models:
        raise UsageError("name a model, such as resnet50")
    specs, working = specs_of(workspace, models, inputs, recipes=recipes, loss=loss, **settings)
    if any(spec.workload.task == "generate" for spec in specs):
        raise UsageError(
            "--memory looks at a step of inference or training; 'redline run --task generate' tells the memory of weights, "
            "cache and the whole generation"
        )
    first: dict[str, int] = {}
    rows: list[MemoryRow] = []
    failures: dict[str, BenchError] = {}
    for spec in working.checked(specs):
        model, recipe = spec.workload.model, str(spec.recipe)
        try:
            with working.lock(spec.device):
                answer = working.ask(AskMemory(spec=spec), MemoryAnswer, spec.launch)
        except BenchError as error:
            failures[f"{model} {recipe}"] = error  # the others still run
            continue
        saved = first[model] - answer.use.peak_bytes if model in first else None
        first.setdefault(model, answer.use.peak_bytes)
        device, batch = answer.environment.device.name, answer.workload.batch
        told: dict[str, Any] = {
            "model": model,
            "task": spec.workload.task,
            "recipe": recipe,
            "batch": batch,
            "device": device,
        }
        rows.append(MemoryRow(**told, use=answer.use, saved_bytes=saved))
        keep_memory(rows[-1], working)
    if not rows:
        raise next(iter(failures.values()))
    is_sized = rows[0].batch is not None and rows[0].task in ("infer", "train")
    after = command_line("batch", specs[0]) if is_sized else None
    return memory_result(rows, {name: str(error) for name, error in failures.items()}, after or "")


PEAK = Figure(name="peak_bytes", unit="B", header="peak", better="lower")
SAVED = Figure(
    name="saved_share", unit="share", header="saved", better="higher", doc="Of the peak of the first recipe."
)


def memory_result(rows: Sequence[MemoryRow], failures: dict[str, str] | None = None, after: str = "") -> ProfileResult:
    """Recipes beside each other by kind of memory, then who holds each peak."""
    first, models = rows[0], list(dict.fromkeys(row.model for row in rows))
    most_of = {kind: max(row.use.categories.get(kind, 0) for row in rows) for kind in get_args(MemoryCategory)}
    kinds = sorted((kind for kind in most_of if most_of[kind]), key=lambda kind: -most_of[kind])
    columns = ("recipe", *["model"] * (len(models) > 1), "peak_bytes", "saved_share", *kinds, "fragments_bytes")
    failed = [Row(facts={"recipe": name}, failure=f"failed: {said}") for name, said in (failures or {}).items()]
    batch = f" · batch {first.batch}" if first.batch else ""
    title = f"{' · '.join(models)} · {first.task}{batch} · {first.device}"
    most = kinds[0] if kinds else "nothing"
    figures: dict[str, Any] = {
        "model": first.model,
        "peak": PEAK(first.use.peak_bytes),
        "phase": first.use.peak_phase,
        "most": most,
    }
    return ProfileResult(
        verb="profile",
        headline=Headline(
            template="A step of {model} holds {peak} at its peak, in the {phase} pass; {most} are the largest part.",
            figures=figures,
        ),
        tables=(
            Table(name="recipes", title=title, rows=(*(_memory_row(row, kinds) for row in rows), *failed), columns=columns),
            *(
                table_of("holders" if row is first else f"holders_{number}", f"who holds the peak of {row.model} {row.recipe}",
                         row.use.holders, "bytes share category line", module=lambda one: one.module or "(no module)")
                for number, row in enumerate(rows) if row.saved_bytes is None
            ),
        ),
        next=after,
        exit_code=Exit.FAILED_ROW if failures else Exit.DONE,
        picture=lambda: memory_figure(rows),
        memory=tuple(rows),
    )  # fmt: skip


def _memory_row(row: MemoryRow, kinds: Sequence[MemoryCategory]) -> Row:
    use, saved = row.use, row.saved_bytes
    sizes: dict[str, int | None] = {
        **{str(kind): use.categories.get(kind, 0) for kind in kinds},
        "fragments": use.fragments_bytes,
        "saved": saved,
    }
    names = {"fragments": "fragments_bytes", "saved": "saved_bytes"}
    metrics = [Figure(name=names.get(name, name), unit="B", header=name)(size) for name, size in sizes.items()]
    metrics.append(SAVED(None if saved is None else saved / (use.peak_bytes + saved)))
    facts: dict[str, Fact] = {"recipe": row.recipe, "model": row.model, "task": row.task, "batch": row.batch}
    facts |= {"device": row.device, "peak_phase": use.peak_phase}
    return Row(facts=facts, metrics=(PEAK(use.peak_bytes), *metrics))
