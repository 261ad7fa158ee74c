"""`redline study`: an experiment, which is a file with a question and the grid that answers it."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from redline.analyze.measurement import Measurement, measurements
from redline.analyze.rows import FIGURES, WORDS
from redline.model.errors import Exit, SpecError, UnknownName, UsageError
from redline.model.metrics import Block, Figure, Headline, Row, Table
from redline.model.note import Note, note
from redline.model.settings import DATA, OUTPUT, WHAT, setting, settings_of
from redline.model.spec import DataSpec, TrainSpec
from redline.model.spec_table import read_runs
from redline.model.units import format_share
from redline.search.grid import LeftOut, listed
from redline.show.canvas import save_figure
from redline.show.charts import curve_figure
from redline.show.folder import check_folder, write_text
from redline.show.result import Result, comma_separated, markdown
from redline.show.terminal import markdown_line
from redline.verbs.run import Keeping, measure, result_of, shown
from redline.verbs.verb import MEASURED, WORKLOAD, AnyRecipes, split, verb
from redline.verbs.workspace import Workspace, specs_of, use

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
EXAMPLE = "example"
"""This is the experiment that `--new` copies. It is short and runnable, and has a comment for each thing that a file can say."""
MOST_WORKERS = 4
"""Loader workers that `workers = "auto"` takes at most; below that, one for every two processors."""

GAIN = Figure(name="gain", unit="x", header="× last", better="higher", doc="Samples per second over the run before.")
GAIN_OVER_FIRST = Figure(name="gain_over_first", unit="x", header="× first", better="higher")


def experiments() -> list[str]:
    """Returns the names of the experiments that come with Redline."""
    return sorted(path.stem for path in EXPERIMENTS.glob("*.toml"))


def save(result: Result, folder: str | Path) -> list[Path]:
    """Writes README.md, pictures, results.csv and results.json of an experiment into a folder."""
    folder = Path(folder)
    check_folder(folder)
    pictures = []
    if len({row.get("batch") for row in result if "latency_p50" in row}) > 1:
        for name, figure in (("latency", "latency_p50"), ("throughput", "throughput")):
            pictures.append(save_figure(curve_figure(result.rows, figure), folder / f"{name}.png"))
    elif result.picture is not None:
        pictures.append(save_figure(result.picture(), folder / "speed.png"))
    head = [markdown_line("# {}", result.about["title"]), "", markdown_line("{}", result.about["question"]), ""]
    shown = [f"![{path.stem}]({path.name})" for path in pictures]
    write_text(folder / "README.md", "\n".join([*head, *shown, "", markdown(result)]))
    write_text(folder / "results.csv", comma_separated(result.tables[0]))
    write_text(folder / "results.json", result.to_json())
    return [*pictures, *(folder / name for name in ("README.md", "results.csv", "results.json"))]


@verb(
    takes=(*WORKLOAD, *MEASURED, *(name for name in settings_of(DataSpec) if name != "name"), *settings_of(TrainSpec)),
    settings=Keeping,
    grid=(*WORKLOAD, *MEASURED),
    examples=(
        "redline study precision --out study",
        "redline study ladder --effort quick",
        "redline study --new mine.toml",
    ),
    also=("plot", "save", "report", "log"),
)
def study(
    experiment: Annotated[
        Any,
        setting(
            "precision, ladder or batch; or a TOML file of your own.", kind=str, is_argument=True, shape="NAME|FILE"
        ),
    ] = None,
    *,
    model: Annotated[Any, setting("In place of the file's models.", short="-m", group=WHAT, kind=list[str])] = None,
    recipes: AnyRecipes = None,
    data: Annotated[
        str | None, setting("Train on: cifar10, synthetic, file.py:loaders.", short="-d", group=DATA)
    ] = None,
    new: Annotated[Path | None, setting("Write a commented example there, and stop.", group=OUTPUT)] = None,
    trust: Annotated[bool, setting("Accept a file that another user owns and that names code to run.")] = False,
    out: Annotated[Path | None, setting("A folder for the page, the pictures, CSV and JSON.", group=OUTPUT)] = None,
    workspace: Workspace | None = None,
    **settings: Any,
) -> Result:
    """Measure an experiment: a question, and the grid that answers it.

    precision: number formats and TorchScript over batches and two models, and why one gains more. ladder: from one CPU thread to the
    best recipe on a GPU. batch: throughput and latency against the batch. Options are over the file's settings.

    A run of the file that names a device stays on that kind of device, or is skipped where there is none.
    """
    if new is not None:
        return _new_experiment(Path(new))
    if not experiment:
        known = ", ".join(experiments())
        raise UsageError(f"name an experiment: {known}, or a TOML file (--new FILE.toml writes one)")
    if out is not None:
        check_folder(Path(out))
    how = split(Keeping, settings)
    given = {"model": model, "data": data, "recipe": listed(recipes) if recipes is not None else None}
    path = _file_of(experiment)
    about, tables = read_runs(path, settings | {name: value for name, value in given.items() if value}, trust=trust)
    for key in ("title", "question", "name"):
        if not isinstance(about.get(key, ""), str):
            raise SpecError(f"{path}: {key} must be a text, got {about[key]!r}")
    columns = columns_of(about.get("columns", ()), str(path))
    how = msgspec.structs.replace(how, name=how.name or about.get("name") or _name_of(path, tables))
    with use(workspace) as opened:
        found = [_resolved(table, opened, str(path)) for table in tables]
        ready = [table for table in found if isinstance(table, dict)]
        left_out = [left for left in found if isinstance(left, LeftOut)]
        if not ready:
            reasons = "; ".join(dict.fromkeys(str(left.reason) for left in left_out))
            raise UsageError(f"{path}: nothing to measure: {reasons}")
        measured = measure(ready, opened, how, about={**about, "name": None}, where=str(path))
        if measured.summary is not None:
            measured.summary = replace(measured.summary, left_out=(*left_out, *measured.summary.left_out))
        ceilings_of = opened.ceilings_of(measured.records)
        result = result_of(measured, ceilings_of, verb="study", price=how.price, columns=columns)
        result = shown(_as_study(result, about, measurements(measured.records, ceilings_of)), measured)
        if out is not None:
            written = ", ".join(path.name for path in save(result, out))
            opened.observer.noted(f"written to {out}: {written}")
        return result


def _new_experiment(path: Path) -> Result:
    """Writes a commented example, ready to run; a file that is there stays as it is."""
    if path.exists():
        raise UsageError(f"{path} is there already: give the name of a new file")
    try:
        shutil.copyfile(EXPERIMENTS / f"{EXAMPLE}.toml", path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    headline = Headline(template="A commented example is in {file}.", figures={"file": str(path)})
    return Result(verb="study", headline=headline, next=f"redline study {path}")


def _resolved(table: Mapping[str, Any], workspace: Workspace, where: str) -> dict[str, Any] | LeftOut:
    """Returns the table with numbers and names in place of words, or why it cannot be measured here."""
    rest = dict(table)
    asked, *others = listed(rest.pop("asked_device", "auto"))
    if others:
        raise SpecError(f"{where}: its runs name their devices: give one device at most")
    if rest.get("device") == "gpu":
        device = _gpu(asked, workspace)
        if device is None:
            name = re.sub(r"\s*\(?\{\w+\}\)?", "", str(rest.get("name", ""))) or " ".join(listed(rest.get("model")))
            why = "only the CPU was asked for" if asked == "cpu" else "there is no GPU here"
            return LeftOut(name=name, reason=note("unavailable", why))
        rest["device"] = device
    if "all" in (rest.get("threads"), rest.get("workers")) or rest.get("workers") == "auto":
        environment = workspace.environment("cpu")
        processors = len(environment.affinity) or environment.logical_cores or 1
        rest |= {"threads": processors} if rest.get("threads") == "all" else {}
        rest |= {"workers": min(MOST_WORKERS, max(1, processors // 2))} if rest.get("workers") == "auto" else {}
    return rest


def _gpu(asked: str, workspace: Workspace) -> str | None:
    """Returns the GPU that was asked for or is there, or None where there is none. One that was asked for by name must be there."""
    if asked == "cpu":
        return None
    try:
        (spec,) = workspace.checked(specs_of(workspace, "simple_cnn", device=asked)[0])
    except UsageError:
        if asked != "auto":
            raise
        return None
    return None if spec.device == "cpu" else spec.device


# What it shows


def with_gains(rows: Sequence[Row], measured: Mapping[str, Measurement]) -> Iterator[Row]:
    """Yields the rows; those of trainings with what limits each and what it gains: over the first, and over the one before it."""
    first = last = 0.0
    for row in rows:
        found, rate = measured.get(row.record_id), row.value("throughput")
        if found is None or found.training is None:
            yield row
            continue
        gains = (GAIN(rate / last), GAIN_OVER_FIRST(rate / first)) if rate and last else ()
        first, last = first or rate, rate or last
        limit = limit_of(found)
        facts = {**row.facts, **({"limit": limit} if limit else {})}
        yield msgspec.structs.replace(row, facts=facts, metrics=(*row.metrics, *gains))


LIMITS: dict[str, str] = {
    "host": "the host, which issues the work, limits it",
    "launch": "the gaps between kernels limit it",
    "compute": "arithmetic limits it",
    "memory": "memory bandwidth limits it",
    "data": "the loader limits it",
    "communication": "communication limits it",
}


def limit_of(found: Measurement) -> str:
    """Returns what is in the way of a training, in one sentence."""
    training, is_cpu = found.training, found.device == "cpu"
    if training is None or found.failure is not None or not training.epochs:
        return ""
    label, shares = found.bound.label, training.phase_shares
    if label == "data" or (label not in ("unknown", "device") and not is_cpu):
        return f"{LIMITS[label]}: {found.bound.evidence}"
    if not shares:
        return "its phases were not timed"
    longest = max(shares, key=shares.__getitem__)
    whose = "the device limits it: " if label == "device" and not is_cpu else ""
    phase = "recorded step" if longest == "step" else longest
    text = f"{whose}the {phase} takes {format_share(shares[longest])} of the time"
    cores = found.prepared.environment.logical_cores if found.prepared is not None else None
    if training.utilisation is None:
        return text
    if is_cpu and cores:
        return f"{text}; {training.utilisation * cores:.1f} of the machine's {cores} cores are busy"
    return f"{text}; the device is busy {format_share(training.utilisation)} of the time"


def _as_study(result: Result, about: Mapping[str, Any], measured: Sequence[Measurement]) -> Result:
    """Returns the result with the question above the table."""
    title, question, table = (
        about.get("title", result.about.get("grid", "")),
        about.get("question", ""),
        result.tables[0],
    )
    rows = tuple(with_gains(table.rows, {row.record_id: row for row in measured}))
    headed = "\n".join(filter(None, (title, question, table.title)))
    table = msgspec.structs.replace(table, title=headed, rows=rows)
    limits = "\n".join(f"{table.called(row)}: {row['limit']}" for row in rows if "limit" in row)
    return replace(
        result,
        about={**result.about, "title": title, "question": question},
        tables=(table, *result.tables[1:]),
        notes=(*result.notes, *_step_notes(table)),
        blocks=(*result.blocks, *([Block(title="What limits each", text=limits)] if limits else [])),
        exit_code=Exit.FAILED_ROW if any(record.failure is not None for record in result.records) else Exit.DONE,
    )


def _step_notes(table: Table) -> Iterator[Note]:
    """Accuracy is that after a number of steps, and larger batches take fewer of them."""
    steps = [row.value("steps") for row in table.rows if "accuracy" in row and "steps" in row]
    if steps and max(steps) >= 1.5 * min(steps):
        told = f"accuracy is that after {min(steps):.0f} to {max(steps):.0f} steps: larger batches take fewer in as many epochs"
        yield note("steps-not-marked", f"{told}, so it does not compare recipes")


# Reading the file


def _file_of(experiment: str | Path) -> Path:
    path = Path(experiment)
    if path.suffix == ".toml" or path.is_file():
        return path
    if str(experiment) not in experiments():
        hint = f"there are {', '.join(experiments())}; a file of your own ends in .toml (redline study --new FILE.toml)"
        raise UnknownName("experiment", str(experiment), experiments(), hint=hint)
    return EXPERIMENTS / f"{experiment}.toml"


def columns_of(columns: Any, where: str) -> tuple[str, ...]:
    """Returns the names of figures and words that a file asks for; `epoch time` is `epoch_time`."""
    if not isinstance(columns, list | tuple) or not all(isinstance(name, str) for name in columns):
        raise SpecError(f"{where}: columns must be a list of names, got {columns!r}")
    known = (*(figure.name for figure, _ in FIGURES), GAIN.name, GAIN_OVER_FIRST.name, *WORDS)
    names = tuple(name.replace(" ", "_") for name in columns)
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise SpecError(f"{where}: unknown column {unknown!r}; there are {', '.join(known)}")
    return names


def _name_of(path: Path, tables: Sequence[Mapping[str, Any]]) -> str:
    """The same study has the same name, so that a resume finds it."""
    digest = hashlib.sha256(msgspec.json.encode(tables, enc_hook=str)).hexdigest()[:8]
    stem = re.sub(r"[^\w.+-]+", "-", path.stem)
    return f"{stem}-{digest}"
