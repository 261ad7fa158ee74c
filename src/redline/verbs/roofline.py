"""`redline roofline`: the device's ceilings, how far a model is from them, and single operators against them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from statistics import median
from typing import Annotated, Any

from redline.analyze.advice import command_line, worth_trying
from redline.analyze.attainable import ClassLimit, operator_time
from redline.analyze.profile import Profile
from redline.analyze.roofline import Datasheet, Roofline, roofline_of
from redline.model.errors import BenchError, Exit, UsageError
from redline.model.identity import conditions_text, device_key
from redline.model.metrics import Fact, Figure, Headline, Row, Table
from redline.model.note import Note, note
from redline.model.protocol import AskOperators, OperatorCase, OperatorName, OperatorTimes
from redline.model.record import RunRecord
from redline.model.settings import WHAT, setting
from redline.model.spec import RunSpec
from redline.model.units import counted, format_bytes
from redline.model.work import NOT_COUNTED, Ceilings, OperatorTime
from redline.show.canvas import label_text, new_figure
from redline.show.result import Result
from redline.trace.names import class_of
from redline.verbs.capture import profile_spec
from redline.verbs.flops import module_profile, module_seconds
from redline.verbs.verb import ONE_STEP, ModelName, Recipes, verb
from redline.verbs.workspace import Workspace, one_spec, specs_of, use

MEASURED = Figure(name="measured", unit="s", better="lower", doc="Time of a step, or of one call of an operator.")
ROOF = Figure(name="roofline", unit="s", doc="The least time that the work takes on this device.")
HEADROOM = Figure(name="headroom", unit="x", better="lower", doc="Measured time over roofline time.")
OF_PEAK = Figure(name="of_peak", unit="share", better="higher", doc="Share of the step that its products need.")
MFU = Figure(name="mfu", unit="share", header="MFU", better="higher", doc="The same against the datasheet's peak.")
OF_ROOF = Figure(name="of_roofline", unit="share", better="higher", doc="Roofline time over measured time.")
INTENSITY = Figure(name="intensity", header="FLOP/byte", doc="FLOPs per byte; of a step per compulsory byte.")
FLOPS = Figure(name="flops", unit="FLOP", header="FLOPs", doc="Products, forward and backward.")
BYTES = Figure(name="bytes", unit="B", doc="Bytes that must move: of a step the compulsory ones, else unfused.")
RATE = Figure(name="achieved_flops", unit="FLOP/s", header="FLOP/s", better="higher", doc="FLOPs over measured time.")
SPEED = Figure(name="achieved_bytes", unit="B/s", header="bytes/s", better="higher", doc="Bytes over measured time.")
UNFUSED = Figure(name="unfused", unit="s", doc="What the operators need one by one, each at its own limit.")
CALLS = Figure(name="calls", doc="Calls in one step.")
REACHED = Figure(name="reached", unit="share", better="higher", doc="Measured over the datasheet's figure.")
SPREAD = Figure(name="spread", unit="share", header="±", doc="Half of the range of the bursts, over their median.")

ABOVE = 1.05
"""An efficiency beyond this is not explained by the spread of the two measurements."""
OF_GENERATION = "a generation has its roofline in 'redline run --task generate': the share of the copy bandwidth that decoding reaches"


@verb(
    takes=ONE_STEP,
    examples=(
        "redline roofline",
        "redline roofline resnet50 --batch 32 -r baseline -r fp16+channels-last",
        "redline roofline resnet50 --batch 32 --ops",
    ),
    tasks=("infer", "train", "step"),
    also=("plot", "save"),
)
def roofline(
    model: ModelName = None,
    inputs: Any | None = None,
    *,
    recipes: Recipes = "baseline",
    last: Annotated[bool, setting("Use the last run; measure nothing.", group=WHAT)] = False,
    ops: Annotated[
        bool, setting("Time single operators: those the model calls, or the usual ones.", group=WHAT)
    ] = False,
    fresh: Annotated[bool, setting("Measure the ceilings again, even if they are known.")] = False,
    loss: Any | None = None,
    workspace: Workspace | None = None,
    **settings: Any,
) -> Result:
    """Show the device's ceilings, and how far a model is from them.

    Without a model it measures what the device can do at most: matrix products, copy bandwidth, launches; next to the datasheet. That is
    done once per device, driver and torch version, and kept in the history. With a model it times and profiles each recipe once, and
    shows intensity, roofline time, efficiency and headroom.
    """
    _refuse_mixtures(model, recipes, settings, last=last)
    with use(workspace) as opened:
        if last:
            return _of_last(opened)
        if model is None:
            spec = one_spec(opened, "a roofline", "simple_cnn", None, **settings)[0]
            (spec,) = opened.checked([spec])  # any model will do: it is not run
            cases = operator_cases(spec.device) if ops else []
            known = opened.device_ceilings(spec.device, spec.threads, fresh=fresh)
            return _of_operators(spec, cases, known, opened) if ops else _of_device(known)
        specs, working = specs_of(opened, model, inputs, recipes=recipes, loss=loss, **settings)
        if len({spec.workload.model for spec in specs}) != 1 or (ops and len(specs) != 1):
            raise UsageError("a roofline is of one model, under one or more recipes; with ops under one")
        if specs[0].workload.task == "generate":
            raise UsageError(OF_GENERATION)
        specs = working.checked(specs)
        known = working.device_ceilings(specs[0].device, specs[0].threads, fresh=fresh)
        return _of_operators(specs[0], [], known, working) if ops else _of_recipes(specs, known, working)


def _refuse_mixtures(model: Any, recipes: str | Iterable[str], settings: Mapping[str, Any], *, last: bool) -> None:
    of_model = sorted(settings.keys() - {"device", "threads"})
    if last and (model is not None or recipes != "baseline" or settings):
        raise UsageError("--last takes the last run, and nothing else")
    if model is None and recipes != "baseline":
        raise UsageError("a recipe goes with a model: name one")
    if model is None and of_model:
        raise UsageError(f"{of_model[0].replace('_', '-')} goes with a model: name one")


# The ceilings


def _of_device(known: Ceilings) -> Result:
    table = ceilings_table(known)
    *products, copy, _ = table.rows
    best = max(products, key=lambda row: row.value("measured"), default=copy)
    headline = Headline(
        template="{device} reaches {products} in {what} and copies {copy}.",
        figures={"device": known.name, "products": best["measured"], "what": best["what"], "copy": copy["measured"]},
    )
    doubts = tuple(note(each.code, f"not trusted: {each}; measured again at the next use") for each in known.doubts)
    return Result(
        verb="roofline",
        headline=headline,
        tables=(table,),
        about={
            "device": known.name,
            "kind": known.kind,
            "threads": known.threads,
            "torch": known.torch,
            "driver": known.driver,
            "measured_at": _when(known),
            "cache_bytes": known.cache_bytes,
            "is_trusted": known.is_trusted,
        },
        notes=(*doubts, *_datasheet_notes(known), *known.notes),
        next="redline roofline resnet50",
        picture=lambda: _picture(known, (), ()),
    )


def ceilings_table(known: Ceilings) -> Table:
    """Returns what is reached by the device, beside what its datasheet promises."""
    sheet = Datasheet.of(known.name)
    peaks = sheet.flops_per_s if sheet else {}
    cache = f" larger than the cache of {format_bytes(known.cache_bytes)}" if known.cache_bytes else ""

    def row(what: str, unit: str, best: float | None, promised: float | None, by: str) -> Row:
        figures = (
            Figure(name="measured", unit=unit, doc="The best of all bursts.")(best),
            *([Figure(name="datasheet", unit=unit, doc="What the vendor promises.")(promised)] if promised else []),
            *([REACHED(best / promised)] if best and promised else []),
        )
        return Row(facts={"what": what, "by": by}, metrics=figures)

    forms = dict.fromkeys((*known.flops_per_s, *peaks))
    products = [
        row(f"{form} products", "FLOP/s", known.flops_per_s.get(form), peaks.get(form), known.shapes.get(form, ""))
        for form in forms
    ]
    copied = sheet.bytes_per_s if sheet else None
    copy = row("copy, read and write", "B/s", known.copy_bytes_per_s, copied, f"buffers{cache}")
    launch = row("one tiny operator", "s", known.launch_s, None, "from Python")
    threads = counted(known.threads, "thread") if known.threads else ""
    driver = f"driver {known.driver}" if known.driver else ""
    parts = (known.name, threads, f"torch {known.torch}", driver, f"measured {_when(known)}")
    return Table(
        name="ceilings",
        title=" · ".join(part for part in parts if part),
        rows=(*products, copy, launch),
        columns=("what", "measured", "datasheet", "reached", "by"),
    )


def _when(known: Ceilings) -> str:
    return datetime.fromtimestamp(known.measured_at).strftime("%Y-%m-%d %H:%M")


def _datasheet_notes(known: Ceilings) -> Iterator[Note]:
    sheet = Datasheet.of(known.name)
    if sheet is not None:
        checked = "" if sheet.verified else ", not checked against a source"
        yield note("no-ceiling", f"datasheet: {sheet.card} ({sheet.source}{checked})")
    elif known.kind != "cpu":
        yield note("no-ceiling", "no datasheet peaks are known for this card: measured only")


# A model under them


def _of_recipes(specs: Sequence[RunSpec], known: Ceilings, workspace: Workspace) -> Result:
    found: list[tuple[RunRecord, Profile | None]] = []
    failures: dict[str, str] = {}
    for spec in specs:
        try:
            result = profile_spec(spec, module_profile(), workspace)
        except BenchError as error:
            if len(specs) == 1:
                raise
            failures[str(spec.recipe)] = str(error)  # the others still run
            continue
        assert result.record is not None
        found.append((result.record, result.profile))
    if not found:
        raise BenchError("unsupported", "; ".join(f"{recipe}: {said}" for recipe, said in failures.items()))
    return under_roofs(found, known, failures)


def _of_last(workspace: Workspace) -> Result:
    with workspace.reading() as history:
        records = [one for one in history.latest_group() if one.prepared is not None and one.prepared.work is not None]
        if not records:
            raise UsageError("the last run has no counted work: name a model, or run 'redline run' first")
        assert records[0].prepared is not None
        known = history.ceilings(device_key(records[0].prepared.environment))
    if known is None:
        raise UsageError("the ceilings of that device are not measured yet: 'redline roofline' does it")
    return under_roofs([(record, None) for record in records], known)


def under_roofs(
    found: Sequence[tuple[RunRecord, Profile | None]], known: Ceilings, failures: Mapping[str, str] | None = None
) -> Result:
    """Records under the ceilings of their device. With a profile, kinds of operators and modules carry the time they took."""
    recipes, kinds, modules, notes = [], [], [], []
    rooflines = []
    for record, profile in found:
        one = _roofline(record, known, profile)
        rooflines.append((record, one))
        recipe = str(record.spec.recipe)
        recipes.append(_recipe_row(record, one))
        kinds += [_kind_row(recipe, kind) for kind in one.classes]
        modules += list(_module_rows(recipe, record))
        notes += [note(each.code, f"{recipe}: {each}") for each in (*one.notes, *_in_cache(one), one.bound.evidence)]
    broken = [Row(facts={"recipe": recipe}, failure=said) for recipe, said in (failures or {}).items()]
    (first, _), several = found[0], len(found) > 1
    assert first.prepared is not None
    environment, batch = first.prepared.environment, first.prepared.workload.batch
    about: dict[str, Fact] = {
        "model": first.spec.workload.model,
        "task": first.spec.workload.task,
        "batch": batch,
        "setting": conditions_text(first),
        "device": environment.device.name,
    }
    words = (about["model"], about["task"], f"batch {batch}" if batch else "", about["setting"], about["device"])
    whole = ("recipe", "measured", "roofline", "headroom", "bound", "of_peak", "flops", "bytes", "intensity", "mfu")
    of_kind = ("kind", "attainable", "measured", "of_roofline", "limited_by", "calls", "flops", "bytes", "intensity")
    is_beaten = any(one.error for _, one in rooflines)
    return Result(
        verb="roofline",
        headline=_headline(recipes, rooflines),
        tables=(
            Table(
                name="recipes",
                title=" · ".join(str(each) for each in words if each),
                rows=(*recipes, *broken),
                columns=whole,
            ),
            Table(
                name="kinds",
                title="operators unfused, by kind",
                rows=tuple(kinds),
                columns=("recipe", *of_kind) if several else of_kind,
            ),
            Table(name="modules", title="modules without others inside", rows=tuple(modules), is_detail=True),
            ceilings_table(known).as_detail(),
        ),
        about=about,
        notes=tuple(notes),
        next=_next(rooflines, known),
        record_ids=tuple(record.id for record, _ in found),
        # A row above its roof: the count or a ceiling is wrong, and no figure here can be relied on.
        exit_code=Exit.FAILED_ROW if is_beaten or broken else Exit.DONE,
        picture=lambda: _picture(known, recipes, [*kinds, *modules]),
    )


def _roofline(record: RunRecord, known: Ceilings, profile: Profile | None) -> Roofline:
    prepared = record.prepared
    # If a recipe dissolves operators, one kernel does the work of several kinds.
    is_whole = prepared is not None and not prepared.capabilities.dissolves_modules
    found = roofline_of(record, known, class_times=kind_seconds(profile) if profile and is_whole else None)
    if found is None:
        notes = prepared.workload.notes if prepared else ()
        why = next((str(each) for each in notes if each.code in NOT_COUNTED), "nothing was counted or measured")
        why = OF_GENERATION if record.spec.workload.task == "generate" else why
        raise UsageError(f"{record.spec.workload.model} under {record.spec.recipe}: {why}")
    return found


def kind_seconds(profile: Profile) -> dict[str, float]:
    """Returns seconds of a step by the operator that launched the work: a convolution may run as a kernel called gemm."""
    seconds: dict[str, float] = {}
    for row in profile.operators:
        own_s = row.device_self_s if profile.has_device else row.cpu_self_s
        kind = class_of(row.name)
        seconds[kind] = seconds.get(kind, 0.0) + own_s / (profile.steps_seen or 1)
    return {kind: taken for kind, taken in seconds.items() if taken > 0}


def _recipe_row(record: RunRecord, one: Roofline) -> Row:
    assert record.prepared is not None
    assert record.prepared.work is not None
    formats = ", ".join(record.prepared.work.flops_by_format())
    return Row(
        facts={
            "recipe": str(record.spec.recipe),
            "bound": one.bound.label,
            "roof_from": one.limited_by,
            "formats": formats,
        },
        metrics=(
            MEASURED(one.measured_s),
            ROOF(one.attainable_s),
            HEADROOM(one.headroom),
            OF_PEAK(one.efficiency),
            FLOPS(one.flops),
            BYTES(one.compulsory_bytes),
            INTENSITY(one.intensity),
            MFU(one.mfu),
            RATE(one.achieved_flops_per_s),
            SPEED(one.achieved_bytes_per_s),
            UNFUSED(one.unfused_s),
        ),
        failure=str(one.error or ""),
        record_id=record.id,
    )


def _kind_row(recipe: str, one: ClassLimit) -> Row:
    return Row(
        facts={"kind": one.name, "recipe": recipe, "limited_by": one.limited_by},
        metrics=(
            Figure(name="attainable", unit="s", doc="The sum of what each operator needs by itself.")(one.attainable_s),
            *([MEASURED(one.measured_s), OF_ROOF(one.efficiency)] if one.measured_s else []),
            CALLS(one.calls),
            FLOPS(one.flops),
            BYTES(one.bytes),
            INTENSITY(one.intensity),
            *([RATE(one.flops / one.measured_s)] if one.measured_s and one.flops else []),
        ),
    )


def _module_rows(recipe: str, record: RunRecord) -> Iterator[Row]:
    """Points under the roofline: the modules that compute and have no modules inside."""
    work = record.prepared.work if record.prepared else None
    if work is None or not work.modules:
        return
    times, around = module_seconds(record), {module.path.rpartition(".")[0] for module in work.modules if module.path}
    for module in work.modules:
        seconds, flops = times.get(module.path), module.flops + module.backward_flops
        moved = module.bytes + module.backward_bytes
        if seconds and module.flops and moved and module.path not in around:
            yield Row(
                facts={"module": module.path, "recipe": recipe, "type": module.type},
                metrics=(
                    MEASURED(seconds),
                    FLOPS(flops),
                    BYTES(moved),
                    INTENSITY(flops / moved),
                    RATE(flops / seconds),
                ),
            )


def _in_cache(one: Roofline) -> Iterator[Note]:
    quick = [each.name for each in one.classes if (each.efficiency or 0) > 1 and each.limited_by == "memory"]
    if quick:
        text = f"{', '.join(quick)} exceed the copy bandwidth: their data was still in cache, or fused away"
        yield note("fits-in-cache", text)


def _headline(rows: Sequence[Row], rooflines: Sequence[tuple[RunRecord, Roofline]]) -> Headline:
    """Returns the fastest recipe and how far it is from its roof."""
    best = min(rows, key=lambda row: row.value("measured"))
    figures = {name: best[name] for name in ("recipe", "measured", "roofline", "headroom", "bound", "formats")}
    known = best.metric("headroom")
    if best.failure:
        text = "{recipe} takes {measured}, less than its roofline of {roofline}: a count or a ceiling is wrong."
    elif known is None or known.value is None:
        text = "{recipe} takes {measured}; the device's ceilings do not tell how fast its {formats} products can be."
    else:
        text = "{recipe} takes {measured}, {headroom} the roofline time of {roofline}; what limits it: {bound}."
    return Headline(template=text, figures=figures)


def _next(rooflines: Sequence[tuple[RunRecord, Roofline]], known: Ceilings) -> str:
    if any(one.error for _, one in rooflines):
        return "redline roofline --fresh"
    record, best = min(rooflines, key=lambda pair: pair[1].measured_s)
    batch, recipe = record.spec.workload.batch, str(record.spec.recipe)
    measured = [str(each.spec.recipe) for each, _ in rooflines]
    options = worth_trying(record, known, host_bound=best.bound.label == "host", known=measured)
    is_known = best.bound.label in ("host", "memory", "compute") and best.bound.evidence.code != "outside-operators"
    if is_known and options:
        return command_line("roofline", record.spec, batch=batch, recipes=(recipe, *options)) or ""
    return command_line("profile", record.spec, batch=batch) or ""


# Single operators


def _of_operators(spec: RunSpec, cases: Sequence[OperatorCase], known: Ceilings, workspace: Workspace) -> Result:
    """Returns the cases, or where there are none what the model of the spec calls."""
    asked = AskOperators(device=spec.device, threads=spec.threads, cases=tuple(cases), spec=None if cases else spec)
    with workspace.lock(spec.device):
        times = workspace.ask(asked, OperatorTimes, None if cases else spec.launch)
    rows = [operator_row(row, known) for row in times.rows]
    if not cases:  # the most time in one forward first; what was refused last
        rows.sort(key=lambda row: -row.value("measured") * row.value("calls"))
    return operators_result(rows, known, times.notes, "" if cases else spec.workload.model)


def operators_result(rows: Sequence[Row], known: Ceilings, notes: Sequence[Note] = (), model: str = "") -> Result:
    judged = [row for row in rows if not row.failure]
    slowest = max(judged, key=lambda row: row.value("measured") * row.value("calls"), default=None)
    headline = None
    if slowest is not None:
        reached = ", {of_roofline} of its roofline" if slowest.value("of_roofline") else ""
        headline = Headline(
            template=f"{{operator}} {{shape}} in {{format}} takes most of the time: {{measured}} a call{reached}.",
            figures={name: slowest[name] for name in ("operator", "shape", "format", "measured", "of_roofline")},
        )
    whole = (
        "operator",
        "shape",
        "format",
        "measured",
        "of_roofline",
        "limit",
        "spread",
        "achieved_flops",
        "achieved_bytes",
    )
    return Result(
        verb="roofline",
        headline=headline,
        tables=(
            Table(name="operators", title=f"single operators · {known.name}", rows=tuple(rows), columns=whole),
            ceilings_table(known).as_detail(),
        ),
        about={"model": model or None, "device": known.name},
        notes=tuple(notes),
        exit_code=Exit.FAILED_ROW if rows and not judged else Exit.DONE,
        picture=lambda: _picture(known, (), judged),
    )


OUTSIDE_CACHE = 1.0
"""An operator with less data than this many last caches may read what the one before left there, and beat the copy bandwidth."""


def operator_row(timed: OperatorTime, known: Ceilings) -> Row:
    """Returns one operator against the least time it can take: none is known without a ceiling, or where its data fits in the cache."""
    seconds = median(timed.samples) if timed.samples else None
    least_s, side = operator_time(timed, known)
    in_cache = bool(known.cache_bytes and timed.bytes < OUTSIDE_CACHE * known.cache_bytes) and side == "memory"
    reached = least_s / seconds if seconds and side is not None and not in_cache else None
    facts: dict[str, Fact] = {"operator": timed.operator, "shape": timed.shape, "format": timed.number_format}
    facts |= {"kind": timed.kind, "limit": "in cache" if in_cache else side}
    if timed.refusal is not None or not seconds:
        return Row(facts=facts, failure=f"{timed.shape} {timed.number_format}: {timed.refusal or 'not timed'}")
    notes = []
    if reached is not None and reached > ABOVE:
        text = "faster than the roofline: measure the ceilings again ('redline roofline --fresh')"
        if timed.kind == "convolution" and side == "compute":
            text = "faster than the count allows: the library uses an algorithm with fewer products (Winograd or FFT)"
        notes.append(note("limit-beaten", f"{timed.shape} {timed.number_format}: {text}"))
    return Row(
        facts=facts,
        metrics=(
            MEASURED(seconds),
            OF_ROOF(reached),
            SPREAD((max(timed.samples) - min(timed.samples)) / 2 / seconds),
            *([RATE(timed.flops / seconds)] if timed.flops else []),
            SPEED(timed.bytes / seconds),
            CALLS(timed.calls),
            FLOPS(timed.flops),
            BYTES(timed.bytes),
            *([INTENSITY(timed.flops / timed.bytes)] if timed.flops and timed.bytes else []),
        ),
        notes=tuple(notes),
    )


USUAL: dict[str, dict[OperatorName, tuple[tuple[int, ...], ...]]] = {
    "gpu": {
        "matmul": ((1024,) * 3, (4096,) * 3, (8192,) * 3),
        "conv": ((32, 64, 56, 56, 64, 3), (32, 256, 14, 14, 256, 3), (64, 128, 28, 28, 128, 3)),
        "attention": ((8, 16, 1024, 64), (8, 16, 4096, 64)),
        "norm": ((8192, 1024), (65536, 4096)),
        "elementwise": ((2**20,), (2**28,)),
    },
    "cpu": {
        "matmul": ((128,) * 3, (512,) * 3),
        "conv": ((1, 64, 56, 56, 64, 3), (4, 128, 28, 28, 128, 3)),
        "attention": ((1, 8, 256, 64),),
        "norm": ((1024, 1024),),
        "elementwise": ((2**16,), (2**25,)),
    },
}
"""The sizes are small enough to be quick, and lie on either side of the cache. They are M, N, K (matmul), N, C, H, W, K, R (conv: K
output channels, an R×R kernel), batch, heads, length, width (attention), rows, width (norm), and a number (elementwise)."""
FORMATS = {"gpu": ("fp32", "tf32", "fp16", "bf16"), "cpu": ("fp32", "bf16")}


def operator_cases(device: str) -> list[OperatorCase]:
    """Returns the usual operators at their usual sizes, in each format that the device is asked about."""
    kind = "cpu" if device == "cpu" else "gpu"
    return [
        OperatorCase(operator=operator, shape=shape, number_format=form)
        for operator, shapes in USUAL[kind].items()
        for shape in shapes
        for form in FORMATS[kind]
        if form != "tf32" or operator in ("matmul", "conv")
    ]


# The picture


def _picture(known: Ceilings, recipes: Sequence[Row], parts: Sequence[Row]) -> Any:
    """Draws rows under the roofs of their device: whole steps are stars, their parts points, and both axes logarithmic."""
    figure, axes = new_figure(9, 6)
    bandwidth = known.copy_bytes_per_s
    points = [row for row in (*parts, *recipes) if row.value("intensity") and row.value("achieved_flops")]
    across = [row.value("intensity") for row in points]
    low, high = min(across, default=0.1) / 3, max(across, default=1000.0) * 3
    used = {form for row in recipes for form in str(row["formats"]).split(", ")} or set(known.flops_per_s)
    for form in sorted(used & known.flops_per_s.keys()):
        peak = known.flops_per_s[form]
        ridge = peak / bandwidth
        axes.plot([low, max(ridge, low), high], [min(low, ridge) * bandwidth, peak, peak], "-", color="0.3")
        axes.annotate(f"{form} {peak / 1e12:.3g} TFLOP/s", (high, peak), ha="right", va="bottom", fontsize=8)
    axes.annotate(f"copy {bandwidth / 1e9:.4g} GB/s", (low * 1.5, low * 1.5 * bandwidth), fontsize=8, rotation=30)
    colours = {row["recipe"]: f"C{number % 10}" for number, row in enumerate(recipes)}
    for row in points:
        where, colour = (row.value("intensity"), row.value("achieved_flops")), colours.get(row.get("recipe"), "C0")
        if "headroom" in row:
            left = f" ({row['headroom']} the roofline)" if row.value("headroom") else ""
            axes.plot(*where, "*", color=colour, markersize=14, label=label_text(f"{row['recipe']}{left}"))
            continue
        axes.plot(*where, ".", color=colour, alpha=0.6)
        if "kind" in row:
            axes.annotate(label_text(str(row["kind"])), where, fontsize=7, xytext=(3, 3), textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylabel="FLOP/s")
    axes.set_xlabel("FLOPs per byte (points: unfused; stars: whole step, compulsory bytes)")
    if recipes:
        axes.legend(fontsize="small", loc="lower right")
    figure.suptitle(label_text(known.name))
    return figure
