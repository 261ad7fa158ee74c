"""`redline study`: an experiment, which is a file with a question and the grid that answers it."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec

from redline.analyze.profile import Profile, profile_of
from redline.analyze.rows import FIGURES, WORDS
from redline.analyze.summary import CeilingsOf, RunSummary, replicate_rows
from redline.analyze.train import TrainingSummary, training_of
from redline.model.errors import Exit, SpecError, TraceError, UnknownName, UsageError
from redline.model.metrics import Block, Fact, Figure, Headline, Metric, Row, Table
from redline.model.note import Note, note
from redline.model.protocol import Profile as ProfileRequest
from redline.model.record import RunRecord
from redline.model.settings import DATA, OUTPUT, WHAT, setting, settings_of
from redline.model.spec import DataSpec, RunSpec, TrainSpec
from redline.model.spec_table import read_runs
from redline.model.units import format_share
from redline.search.grid import GridSummary, LeftOut, listed
from redline.search.train import After
from redline.search.tune.state import usual_jobs
from redline.show.canvas import save_figure
from redline.show.charts import curve_figure
from redline.show.folder import check_folder, write_text
from redline.show.result import Result, comma_separated, markdown
from redline.show.terminal import markdown_line
from redline.trace.decode import read_trace
from redline.verbs import public
from redline.verbs.capture import trace_name
from redline.verbs.run import Keeping, Measured, measure, result_of, shown
from redline.verbs.verb import MEASURED, WORKLOAD, AnyRecipes, split, verb
from redline.verbs.workspace import Workspace, specs_of, use

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
EXAMPLE = "example"
"""The experiment that `--new` copies: short, runnable, and with a comment for each thing that a file can say."""
MOST_WORKERS = 4
"""Loader workers that `workers = "auto"` takes at most; below that, one for every two processors."""
TUNE_SECONDS = 120.0
"""How long a run with `recipe = "tune"` searches, unless it says `tune_seconds`."""

GAIN = Figure(name="gain", unit="x", header="× last", better="higher", doc="Samples per second over the run before.")
GAIN_OVER_FIRST = Figure(name="gain_over_first", unit="x", header="× first", better="higher")


def experiments() -> list[str]:
    """Returns the names of the experiments that come with Redline."""
    return sorted(path.stem for path in EXPERIMENTS.glob("*.toml"))


def save(result: Result, folder: str | Path) -> list[Path]:
    """Write README.md, pictures, results.csv and results.json of an experiment into a folder."""
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
    _check_about(about, str(path))
    name = how.name or about.get("name") or _name_of(path, tables)
    about = {**about, "columns": columns_of(about.get("columns", ()), str(path))}
    with use(workspace) as opened:
        going = _Study(str(path), about, tables, msgspec.structs.replace(how, name=name), opened)
        result = going.measure()
        if out is not None:
            written = ", ".join(path.name for path in save(result, out))
            opened.observer.noted(f"written to {out}: {written}")
        return result


def _new_experiment(path: Path) -> Result:
    """A commented example, ready to run; a file that is there stays as it is."""
    if path.exists():
        raise UsageError(f"{path} is there already: give the name of a new file")
    try:
        shutil.copyfile(EXPERIMENTS / f"{EXAMPLE}.toml", path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    headline = Headline(template="A commented example is in {file}.", figures={"file": str(path)})
    return Result(verb="study", headline=headline, next=f"redline study {path}")


class _Skipped(Exception):
    """Why a run of an experiment is not measured here."""


@dataclass
class _Study:
    """An experiment on its way: its runs in stages, since some take their batch or recipe from those before them."""

    where: str
    about: Mapping[str, Any]
    tables: Sequence[dict[str, Any]]
    how: Keeping
    workspace: Workspace
    parts: list[Measured] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def measure(self) -> Result:
        for stage in _stages(self.tables):
            ready = [resolved for table in stage if (resolved := self._resolved(table)) is not None]
            if not ready:
                continue
            # The first stage has made room; what it measured stays.
            resume = self.how.resume or bool(self.parts)
            how = msgspec.structs.replace(self.how, jobs=self._jobs_for(ready[0]), resume=resume)
            if self.about.get("explain") and self.workspace.keeps and not how.dry_run:
                self.workspace.device_ceilings(_device_of(ready[0]))
            try:
                part = measure(
                    ready,
                    self.workspace,
                    how,
                    about={**self.about, "name": None},
                    where=self.where,
                    after=self._after,
                )
            except KeyboardInterrupt:
                if not self.parts:
                    raise
                part = Measured(was_interrupted=True)
            self.parts.append(part)
            if part.was_interrupted:
                break
        if not self.parts:
            reasons = "; ".join(dict.fromkeys(str(left.reason) for left in self.left_out))
            raise UsageError(f"{self.where}: nothing to measure: {reasons}")
        return self._result()

    def _result(self) -> Result:
        # Runs of one spec, such as the best of several batches and the run that takes it up, share a record.
        records = {record.id: record for part in self.parts for record in part.records}
        summaries = [part.summary for part in self.parts if part.summary is not None]
        found = Measured(
            records=list(records.values()),
            summary=GridSummary(
                name=self.how.name or "",
                cells=tuple(cell for summary in summaries for cell in summary.cells),
                left_out=(*self.left_out, *(left for summary in summaries for left in summary.left_out)),
                idle_exclusions=tuple(idle for summary in summaries for idle in summary.idle_exclusions),
            ),
            decided=[replicates for part in self.parts for replicates in part.decided],
            estimate=next((part.estimate for part in self.parts if part.estimate is not None), None),
            was_interrupted=any(part.was_interrupted for part in self.parts),
        )
        ceilings_of = self.workspace.ceilings_of(found.records)
        settled = [(cell.run, known.record_id) for part in summaries for cell, known in part.cells if known is not None]
        trained = [(run, records[id]) for run, id in settled if id in records and records[id].spec.train]
        rungs = rungs_of(trained, {record.id: profile for _, record in trained if (profile := _profile_of(record))})
        result = result_of(
            found,
            ceilings_of,
            verb="study",
            price=self.how.price,
            columns=self.about["columns"],
            besides=partial(_with_rung, rungs),
        )
        return shown(_as_study(result, self.about, self.how.name or "", ceilings_of), found)

    def _jobs_for(self, table: Mapping[str, Any]) -> int:
        """Asked for, or as the file says: `auto` is as many as the machine has processors for."""
        jobs = self.how.jobs if self.how.jobs is not None else self.about.get("jobs", 1)
        if jobs != "auto":
            return int(jobs)
        (spec,) = self.workspace.checked(specs_of(self.workspace, "simple_cnn", device=_device_of(table))[0])
        usual = usual_jobs(spec)
        return usual if spec.device == "cpu" else 2 * usual  # on a GPU most of them wait

    def _resolved(self, table: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns the table with numbers and names in place of words; None where it cannot be measured, which is noted."""
        try:
            return self._with_values(dict(table))
        except _Skipped as skipped:
            self.left_out.append(
                LeftOut(
                    name=re.sub(r"\s*\(?\{\w+\}\)?", "", str(table.get("name", "")))
                    or " ".join(listed(table.get("model"))),
                    reason=note("unavailable", str(skipped)),
                )
            )
            return None

    def _with_values(self, table: dict[str, Any]) -> dict[str, Any]:
        asked, *others = listed(table.pop("asked_device", "auto"))
        seconds = table.pop("tune_seconds", TUNE_SECONDS)
        if others:
            raise SpecError(f"{self.where}: its runs name their devices: give one device at most")
        if table.get("device") == "gpu":
            table["device"] = self._gpu(asked)
        if table.get("threads") == "all":
            table["threads"] = self._processors()
        if table.get("workers") == "auto":
            table["workers"] = min(MOST_WORKERS, max(1, self._processors() // 2))
        if table.get("batch") == "best" or table.get("recipe") == "tune":
            fastest = self._fastest(table.get("device"))
            if table.get("batch") == "best":
                table["batch"] = fastest.spec.workload.batch
            if table.get("recipe") == "tune":
                table["recipe"] = self._tuned(fastest, table.get("batch"), seconds)
        return table

    def _gpu(self, asked: str) -> str:
        if asked == "cpu":
            raise _Skipped("only the CPU was asked for")
        try:
            (spec,) = self.workspace.checked(specs_of(self.workspace, "simple_cnn", device=asked)[0])
        except UsageError:
            if asked != "auto":
                raise
            raise _Skipped("there is no GPU here") from None
        if spec.device == "cpu":
            raise _Skipped("there is no GPU here")
        return spec.device

    def _processors(self) -> int:
        environment = self.workspace.environment("cpu")
        return len(environment.affinity) or environment.logical_cores or 1

    def _fastest(self, device: Any) -> RunRecord:
        """The record of the fastest run so far, on this device where one is named."""
        records = [record for part in self.parts for record in part.records]
        here = [record for record in records if not listed(device) or record.spec.device in listed(device)]
        rows = [row for row in replicate_rows(here) if row.throughput_per_s]
        if not rows:
            raise _Skipped("no run before it on this device has a speed")
        fastest = max(rows, key=lambda row: row.throughput_per_s or 0.0)
        return next(record for record in here if record.id == fastest.record_id)

    def _tuned(self, fastest: RunRecord, batch: Any, seconds: float) -> str:
        """Returns the best recipe for the bare step of the fastest run so far."""
        workload, info = fastest.spec.workload, fastest.prepared.data if fastest.prepared is not None else None
        shape: dict[str, Any] = {"image_size": workload.image_size, "classes": workload.classes, "stem": workload.stem}
        if info is not None:
            shape = {"image_size": info.shape[-1] if info.shape else None, "classes": info.classes, "stem": info.stem}
        name = self.how.name or ""
        tuned = public("tune")(
            workload.model,
            name=name,
            resume=self.how.resume and self.workspace.history.tunes().load(name) is not None,
            task=workload.task,
            batch=batch,
            optimizer=workload.optimizer,
            device=fastest.spec.device,
            budget=seconds,
            workspace=self.workspace,
            **shape,
        )
        if tuned.winner is None:
            raise _Skipped(f"no recipe was found in {seconds:g} s that may be recommended")
        return str(tuned.winner.recipe)

    def _after(self, spec: RunSpec) -> After | None:
        if spec.train is None:
            return None
        request = ProfileRequest(path=trace_name(spec), wait=0, warmup=1, active=1 if spec.device == "cpu" else 3)
        return After(profile=request, traces=self.workspace.traces)


# What it shows


Rung = tuple[tuple[Metric, ...], dict[str, Fact]]


def rungs_of(
    trainings: Sequence[tuple[str, RunRecord]], profiles: Mapping[str, Profile]
) -> dict[tuple[str, str], Rung]:
    """Returns what each training gains over those before it and what limits it, by its record and the name of its run.

    Gains are in samples per second, over the first that ran and over the one that ran before it.
    """
    rungs: dict[tuple[str, str], Rung] = {}
    first: float | None = None
    last: float | None = None
    for run, record in trainings:
        row, profile = training_of(record), profiles.get(record.id)
        cores = record.prepared.environment.logical_cores if record.prepared is not None else None
        rate = row.samples_per_s
        gains = (GAIN(rate / last), GAIN_OVER_FIRST(rate / first)) if rate and first and last else ()
        words = {"limit": limit_of(row, profile, cores), "top_operator": top_operator(profile) if profile else None}
        rungs[record.id, run] = gains, {name: word for name, word in words.items() if word}
        if rate:
            first, last = first or rate, rate
    return rungs


def _with_rung(rungs: Mapping[tuple[str, str], Rung], row: Row, run: str) -> Row:
    gains, words = rungs.get((row.record_id, run), ((), {}))
    return msgspec.structs.replace(row, facts={**row.facts, **words}, metrics=(*row.metrics, *gains))


def top_operator(profile: Profile) -> str | None:
    """Returns the operator that takes most, by the time of the device where there is one, else of the host; without those it called.

    A replayed graph is one launch: of its kernels the class that takes most is named.
    """
    times = {row.name: row.device_self_s if profile.has_device else row.cpu_self_s for row in profile.operators}
    best = max(times, key=lambda name: times[name], default=None)
    if best is None or times[best] <= 0:
        return None
    replayed = any(row.name == best and row.source == "graph" for row in profile.operators)
    most = max(profile.classes, key=lambda row: row.total_s, default=None) if replayed else None
    return best.removeprefix("aten::") if most is None else f"{most.name} kernels of the graph"


LIMITS: dict[str, str] = {
    "host": "the host, which issues the work, limits it",
    "launch": "the gaps between kernels limit it",
    "compute": "arithmetic limits it",
    "memory": "memory bandwidth limits it",
    "data": "copies to the device limit it",
    "communication": "communication limits it",
}


def limit_of(row: TrainingSummary, profile: Profile | None, cores: int | None) -> str:
    """Returns what is in the way of a training, in one sentence."""
    if row.failure is not None or not row.epochs:
        return ""
    if row.bound.label == "data":
        return f"the loader limits it: {row.bound.evidence}"
    bound = profile.bound if profile is not None else row.bound
    if bound.label not in ("unknown", "device") and row.device != "cpu":
        return f"{LIMITS[bound.label]}: {bound.evidence}"
    longest = max(row.phase_shares, key=lambda name: row.phase_shares[name], default=None)
    if longest is None:
        return "its phases were not timed"
    operator = top_operator(profile) if profile is not None else None
    most = f", most of it {operator}" if operator else ""
    whose = "the device limits it: " if bound.label == "device" and row.device != "cpu" else ""
    phase = "recorded step" if longest == "step" else longest
    return f"{whose}the {phase} takes {format_share(row.phase_shares[longest])} of the time{most}{_busy(row, cores)}"


def _busy(row: TrainingSummary, cores: int | None) -> str:
    if row.utilisation is None:
        return ""
    if row.device == "cpu" and cores:
        return f"; {row.utilisation * cores:.1f} of the machine's {cores} cores are busy"
    return f"; the device is busy {format_share(row.utilisation)} of the time"


def _as_study(result: Result, about: Mapping[str, Any], name: str, ceilings_of: CeilingsOf) -> Result:
    """Returns the result with the question above the table, and the answer that the experiment asks for."""
    title, question = about.get("title", name), about.get("question", "")
    table, headline, blocks = result.tables[0], result.headline, result.blocks
    limits = [f"{table.called(row)}: {row['limit']}" for row in table.rows if "limit" in row]
    if limits:
        blocks = (*blocks, Block(title="What limits each", text="\n".join(limits)))
    if any("gain_over_first" in row for row in table.rows):
        headline = _of_rungs(table)
    if about.get("explain") and any(row.metrics for row in table.rows):
        headline = why(table, replicate_rows(result.records, ceilings_of))
    headed = msgspec.structs.replace(table, title="\n".join(filter(None, (title, question, table.title))))
    return replace(
        result,
        about={**result.about, "title": title, "question": question},
        headline=headline,
        tables=(headed, *result.tables[1:]),
        notes=(*result.notes, *_step_notes(table)),
        blocks=blocks,
        exit_code=Exit.FAILED_ROW if any(record.failure is not None for record in result.records) else Exit.DONE,
    )


def _of_rungs(table: Table) -> Headline:
    """Returns which training is the fastest; nothing is said where a speed is not to be relied on."""
    ran = [row for row in table.rows if "throughput" in row]
    best = max(ran, key=lambda row: row.value("throughput"))
    doubted = [row for row in ran if row.get("trust") != "valid" or any(note.about == "throughput" for note in row.notes)]  # fmt: skip
    figures: dict[str, Metric | Fact] = {
        "called": table.called(best),
        "speed": best.get("throughput"),
        "gain": best.get("gain_over_first"),
    }
    if len(ran) == 1:
        return Headline(template="{called} reaches {speed}.", figures=figures)
    if doubted:
        figures["doubted"] = table.called(doubted[0])
        return Headline(template="It is not decided which is the fastest, because the speed of {doubted} is doubted; {called} was seen at {speed}.", figures=figures)  # fmt: skip
    gain = ", {gain} as fast as the first" if best is not ran[0] else ", and no run after it is faster"
    return Headline(template=f"The fastest is {{called}}: {{speed}}{gain}.", figures=figures)


def _step_notes(table: Table) -> Iterator[Note]:
    """Accuracy is that after a number of steps, and larger batches take fewer of them."""
    steps = [row.value("steps") for row in table.rows if "accuracy" in row and "steps" in row]
    if steps and max(steps) >= 1.5 * min(steps):
        told = f"accuracy is that after {min(steps):.0f} to {max(steps):.0f} steps: larger batches take fewer in as many epochs"
        yield note("steps-not-marked", f"{told}, so it does not compare recipes")


CLEARLY = 0.02
"""Shares that differ by less explain nothing."""


def why(table: Table, measured: Sequence[RunSummary]) -> Headline:
    """Returns which model gains more from its best recipe, and why, as their rooflines tell it: one sentence.

    For each model the largest proven gain counts, at the largest batch at which any is proven: at a small one the host decides.
    """
    rows = {row.record_id: row for row in table.rows}
    of = {row.record_id: row for row in measured}
    proven = [row for row in rows.values() if row.get("verdict") == "faster" and row.get("numerics") == "passed"]
    if not proven:
        first = next((str(row["compared_with"]) for row in rows.values() if "compared_with" in row), "baseline")
        named = "the baseline" if first == "baseline" else first
        return Headline(template="No recipe is proven faster than {first} here.", figures={"first": named})
    batch = max(int(str(row.get("batch") or 0)) for row in proven)
    at_batch = [row for row in proven if int(str(row.get("batch") or 0)) == batch]
    best: dict[Fact, Row] = {}
    for row in sorted(at_batch, key=lambda row: -row.value("ratio")):
        best.setdefault(str(row["model"]), row)
    ordered = list(best.values())
    figures: dict[str, Metric | Fact] = {"batch": batch}
    parts = []
    for number, row in enumerate(ordered):
        figures |= {f"model{number}": str(row["model"]), f"ratio{number}": row["ratio"], f"recipe{number}": str(row["recipe"])}  # fmt: skip
        parts.append(f"{{model{number}}} gains {{ratio{number}}} with {{recipe{number}}}")
    told = f"At batch {{batch}} {', '.join(parts)}"
    if len(ordered) == 1:
        return Headline(template=f"{told}.", figures=figures)
    more, less = ordered[0].metric("ratio"), ordered[-1].metric("ratio")
    if more is None or less is None or (more.low or 0.0) <= (less.high or 0.0):
        return Headline(template=f"{told}; which of them gains most is not decided.", figures=figures)
    figures["reason"] = _reason(of[ordered[0].record_id], of[ordered[-1].record_id], measured)
    return Headline(template=f"{told} {{reason}}.", figures=figures)


def _reason(more: RunSummary, less: RunSummary, rows: Sequence[RunSummary]) -> str:
    """Returns what sets the two apart, the plainest first."""
    if less.bound.label == "host" and more.bound.label != "host":
        return f"because {less.model}'s fastest step still waits for the host, which no number format makes faster"
    before = [_first_of(row, rows) for row in (more, less)]
    limits = [row.roofline if row is not None else None for row in (*before, more, less)]
    known = [found for found in limits if found is not None and found.error is None and found.headroom is not None]
    if len(known) < len(limits):
        return "(their rooflines, which would say why, are not known: redline roofline)"
    products = [sum(part.attainable_s for part in found.classes if part.limited_by == "compute") / found.unfused_s if found.unfused_s else 0.0 for found in known[:2]]  # fmt: skip
    if products[0] > products[1] + CLEARLY and known[2].compute_s < known[0].compute_s:
        first = before[0].recipe if before[0] is not None else "baseline"
        under = "fp32 operators" if first == "baseline" else f"operators under {first}"
        return (
            f"because by their rooflines matrix products are {format_share(products[0])} of the least time of {more.model}'s "
            f"{under} and {format_share(products[1])} of {less.model}'s, and smaller formats speed up products far more "
            "than the memory traffic that is the rest"
        )
    left = [found.headroom or 0.0 for found in known]
    if left[0] > left[1] * (1 + CLEARLY):
        return f"because {more.model}'s baseline takes {left[0]:.1f} times its roofline and {less.model}'s {left[1]:.1f} times: it had more to gain"  # fmt: skip
    if left[3] > left[2] * (1 + CLEARLY):
        return f"because {more.model}'s fastest recipe comes within {left[2]:.1f} times its roofline and {less.model}'s within {left[3]:.1f} times"  # fmt: skip
    return "and their rooflines do not explain the difference"


def _first_of(row: RunSummary, rows: Sequence[RunSummary]) -> RunSummary | None:
    """Returns what it was set against."""
    same = (each for each in rows if each.model == row.model and each.batch == row.batch)
    return next((each for each in same if row.vs_first and each.recipe == row.vs_first.recipe), None)


# Reading the file


def _device_of(table: Mapping[str, Any]) -> str:
    """Returns the first device of a table of settings."""
    return str((listed(table.get("device")) or ["auto"])[0])


def _stages(tables: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Runs that can be planned together: one that asks for what others find begins a new stage."""
    stage: list[dict[str, Any]] = []
    for table in tables:
        if stage and (table.get("batch") == "best" or table.get("recipe") == "tune"):
            yield stage
            stage = []
        stage.append(table)
    yield stage


def _profile_of(record: RunRecord) -> Profile | None:
    if record.trace is None:
        return None
    try:
        return profile_of([read_trace(Path(record.trace.path))], record)
    except TraceError:
        return None  # a training without its top operator is still a row


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


def _check_about(about: Mapping[str, Any], where: str) -> None:
    for key in ("title", "question", "name"):
        if not isinstance(about.get(key, ""), str):
            raise SpecError(f"{where}: {key} must be a text, got {about[key]!r}")
    if not isinstance(about.get("explain", False), bool):
        raise SpecError(f"{where}: explain must be true or false, got {about['explain']!r}")
    jobs = about.get("jobs", 1)
    if jobs != "auto" and (not isinstance(jobs, int) or isinstance(jobs, bool) or jobs < 1):
        raise SpecError(f"{where}: jobs must be a number of workers or auto, got {jobs!r}")


def _name_of(path: Path, tables: Sequence[Mapping[str, Any]]) -> str:
    """The same study has the same name, so that a resume finds it."""
    digest = hashlib.sha256(msgspec.json.encode(tables, enc_hook=str)).hexdigest()[:8]
    stem = re.sub(r"[^\w.+-]+", "-", path.stem)
    return f"{stem}-{digest}"
