"""`redline.study`: an experiment, which is a file with a question and the grid that answers it."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from redline.analyze.grid import LeftOut, grid_summary, rungs_of
from redline.analyze.profile import Profile, profile_of
from redline.analyze.summary import CeilingsOf
from redline.api.run import HowMeasured, RunResult, measure_tables
from redline.api.settings import specs_of
from redline.api.tune import tune
from redline.api.workspace import Workspace, use
from redline.model.errors import Interrupted, SpecError, TraceError, UnknownName, UsageError
from redline.model.note import note
from redline.model.protocol import Profile as ProfileRequest
from redline.model.record import RunRecord
from redline.model.spec import RunSpec
from redline.model.spec_table import read_runs
from redline.search.grid import listed
from redline.search.profile import trace_name
from redline.search.train import After
from redline.search.tune.tuner import usual_jobs
from redline.show.export import JsonDocument, export_csv, json_document
from redline.show.folder import check_folder, write_text
from redline.show.grid import check_columns
from redline.show.study import draw_study, study_markdown, why
from redline.trace.decode import read_trace

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
EXAMPLE = "example"
"""The experiment that `--new` copies: short, runnable, and with a comment for each thing that a file can say."""
MOST_WORKERS = 4
"""Loader workers that `workers = "auto"` takes at most; below that, one for every two processors."""
TUNE_SECONDS = 120.0
"""How long a run with `recipe = "tune"` searches, unless it says `tune_seconds`."""


def experiments() -> list[str]:
    """The names of the experiments that come with Redline."""
    return sorted(path.stem for path in EXPERIMENTS.glob("*.toml"))


def new_experiment(path: str | Path) -> Path:
    """Write a commented example, ready to run; a file that is there stays as it is."""
    path = Path(path)
    if path.exists():
        raise UsageError(f"{path} is there already: give the name of a new file")
    try:
        shutil.copyfile(EXPERIMENTS / f"{EXAMPLE}.toml", path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    return path


class StudyResult(RunResult):
    """The rows of an experiment, with its question and, where the file asks for it, why one model gains more."""

    def __init__(self, parts: Sequence[RunResult], about: Mapping[str, Any], name: str, left_out: Sequence[LeftOut], ceilings_of: CeilingsOf, profiles: Mapping[str, Profile], price: str | None) -> None:  # fmt: skip
        # Runs of one spec, such as the best of several batches and the run that takes it up, share a record.
        known = {record.id: record for part in parts for record in part.records}
        summaries = [part.summary for part in parts if part.summary is not None]
        cells = [cell for summary in summaries for cell in summary.cells]
        trained = [
            (cell, known[cell.record_id])
            for cell in cells
            if cell.record_id in known and known[cell.record_id].spec.train
        ]
        super().__init__(
            list(known.values()),
            ceilings_of,
            price,
            summary=grid_summary(
                name,
                cells,
                (*left_out, *(left for summary in summaries for left in summary.left_out)),
                [idle for summary in summaries for idle in summary.idle_exclusions],
            ),
            decided=[replicates for part in parts for replicates in part.decided],
            rungs=rungs_of(
                [(cell.run or f"{cell.recipe}, batch {cell.batch}", record) for cell, record in trained], profiles
            ),
            estimate=next((part.estimate for part in parts if part.estimate is not None), None),
            columns=about.get("columns", ()),
        )
        self.title, self.question = about.get("title", name), about.get("question", "")
        self.explains = bool(about.get("explain"))
        self.profiles = dict(profiles)

    @property
    def why(self) -> str:
        """Which model gains more from its best recipe, and why; empty where the file does not ask."""
        return why(self.rows) if self.explains and self.rows else ""

    @property
    def failed(self) -> bool:
        return any(record.failure is not None for record in self.records)

    def report(self) -> RenderableType:
        parts = [Text(self.title, style="bold"), Text(self.question, style="dim")]
        after = [Text(self.why, style="bold")] if self.why else []
        return Group(*(part for part in parts if part.plain), super().report(), *after)

    def to_json(self) -> JsonDocument:
        told = {"title": self.title, "question": self.question, "why": self.why, "columns": self.columns}
        return json_document("run", {**told, **self.fields()})

    def save(self, folder: str | Path) -> list[Path]:
        """README.md, pictures, results.csv and results.json in a folder."""
        folder = Path(folder)
        check_folder(folder)
        pictures = draw_study(self.rows, folder)
        if not pictures and self.figure() is not None:
            self.plot(folder / "speed.png")
            pictures = [folder / "speed.png"]
        assert self.summary is not None
        chosen = {record.id: record for record in self.records}
        rows = [chosen[row.record_id] for row in self.rows]
        sentences = [self.question, self.why]
        page = study_markdown(self.title, sentences, pictures, self.summary, self.rows, self.rungs, self.columns)
        write_text(folder / "README.md", page)
        write_text(folder / "results.csv", export_csv(rows, summarize=lambda _: self.rows))
        write_text(folder / "results.json", self.to_json())
        return [*pictures, *(folder / name for name in ("README.md", "results.csv", "results.json"))]


def study(
    experiment: str | Path = "precision",
    *,
    recipes: Any = None,
    trust: bool = False,
    name: str | None = None,
    decide: bool = False,
    replicates: int | None = None,
    resume: bool = False,
    retry_failed: bool = False,
    dry_run: bool = False,
    jobs: int | None = None,
    price: str | None = None,
    workspace: Workspace | None = None,
    **settings: Any,
) -> StudyResult:
    """Measure an experiment: one that comes with Redline (`precision`, `ladder`, `batch`), or a TOML file of your own.

    Settings are over those of the file: those of `run`, and of `train` for an experiment that trains on data.
    A run of the file that names a device stays on that kind of device, or is skipped where there is none.
    """
    path = _file_of(experiment)
    given = dict(settings) | ({"recipe": listed(recipes)} if recipes is not None else {})
    about, tables = read_runs(path, given, trust=trust)
    _check_about(about, str(path))
    name = name or about.get("name") or _name_of(path, tables)
    about = {**about, "columns": check_columns(about.get("columns", ()), str(path))}
    with use(workspace) as opened:
        how = HowMeasured(
            name=name,
            decide=decide,
            replicates=replicates,
            resume=resume or retry_failed,
            retry_failed=retry_failed,
            dry_run=dry_run,
            price=price,
        )
        return _Study(str(path), about, tables, how, jobs, opened).measure()


class _Skipped(Exception):
    """Why a run of an experiment is not measured here."""


class _Study:
    """An experiment on its way: its runs in stages, since some take their batch or recipe from those before them."""

    def __init__(self, where: str, about: Mapping[str, Any], tables: Sequence[dict[str, Any]], how: HowMeasured, jobs: int | None, workspace: Workspace) -> None:  # fmt: skip
        self._where, self._about, self._tables, self._how = where, about, tables, how
        self._jobs, self._workspace = jobs, workspace
        self._parts: list[RunResult] = []
        self._left_out: list[LeftOut] = []

    def measure(self) -> StudyResult:
        for stage in _stages(self._tables):
            ready = [resolved for table in stage if (resolved := self._resolved(table)) is not None]
            if not ready:
                continue
            how = msgspec.structs.replace(self._how, jobs=self._jobs_for(ready[0]))
            if self._parts:  # the first stage has made room; what it measured stays
                how = msgspec.structs.replace(how, resume=True)
            if self._about.get("explain") and self._workspace.keeps and not how.dry_run:
                self._workspace.device_ceilings(_device_of(ready[0]))
            try:
                part = measure_tables(
                    ready,
                    self._workspace,
                    how,
                    about={**self._about, "name": None},
                    where=self._where,
                    after=self._after,
                )
            except Interrupted as interrupted:
                if isinstance(interrupted.result, RunResult):
                    self._parts.append(interrupted.result)
                raise Interrupted(self._result()) from None
            except KeyboardInterrupt:
                if self._parts:
                    raise Interrupted(self._result()) from None
                raise
            self._parts.append(part)
        if not self._parts:
            reasons = "; ".join(dict.fromkeys(str(left.reason) for left in self._left_out))
            raise UsageError(f"{self._where}: nothing to measure: {reasons}")
        return self._result()

    def _result(self) -> StudyResult:
        records = [record for part in self._parts for record in part.records]
        profiles = {record.id: profile for record in records if (profile := _profile_of(record)) is not None}
        known = self._workspace.ceilings_of(records)
        name = self._how.name or ""
        return StudyResult(self._parts, self._about, name, self._left_out, known, profiles, self._how.price)

    def _jobs_for(self, table: Mapping[str, Any]) -> int:
        """Asked for, or as the file says: `auto` is as many as the machine has processors for."""
        jobs = self._jobs if self._jobs is not None else self._about.get("jobs", 1)
        if jobs != "auto":
            return int(jobs)
        (spec,) = self._workspace.checked(specs_of(self._workspace, "simple_cnn", device=_device_of(table))[0])
        usual = usual_jobs(spec)
        return usual if spec.device == "cpu" else 2 * usual  # on a GPU most of them wait

    def _resolved(self, table: Mapping[str, Any]) -> dict[str, Any] | None:
        """The table with numbers and names in place of words; None where it cannot be measured, which is noted."""
        try:
            return self._with_values(dict(table))
        except _Skipped as skipped:
            name = re.sub(r"\s*\(?\{\w+\}\)?", "", str(table.get("name", "")))
            recipes, models = listed(table.get("recipe")) or ["baseline"], listed(table.get("model")) or [""]
            self._left_out.append(
                LeftOut(
                    model=models[0],
                    task="train" if "data" in table else "infer",
                    recipe=recipes[0],
                    batch=None,
                    reason=note("unavailable", str(skipped)),
                    run=name,
                )
            )
            return None

    def _with_values(self, table: dict[str, Any]) -> dict[str, Any]:
        asked, *others = listed(table.pop("asked_device", "auto"))
        seconds = table.pop("tune_seconds", TUNE_SECONDS)
        if others:
            raise SpecError(f"{self._where}: its runs name their devices: give one device at most")
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
            (spec,) = self._workspace.checked(specs_of(self._workspace, "simple_cnn", device=asked)[0])
        except UsageError:
            if asked != "auto":
                raise
            raise _Skipped("there is no GPU here") from None
        if spec.device == "cpu":
            raise _Skipped("there is no GPU here")
        return spec.device

    def _processors(self) -> int:
        environment = self._workspace.environment("cpu")
        return len(environment.affinity) or environment.logical_cores or 1

    def _fastest(self, device: Any) -> RunRecord:
        """The record of the fastest run so far, on this device where one is named."""
        rows = [row for part in self._parts for row in part.rows]
        speeds = {row.record_id: row.throughput_per_s for row in rows if row.throughput_per_s}
        records = [record for part in self._parts for record in part.records if record.id in speeds]
        here = [record for record in records if not listed(device) or record.spec.device in listed(device)]
        if not here:
            raise _Skipped("no run before it on this device has a speed")
        return max(here, key=lambda record: speeds[record.id])

    def _tuned(self, fastest: RunRecord, batch: Any, seconds: float) -> str:
        """The best recipe for the bare step of the fastest run so far."""
        workload, info = fastest.spec.workload, fastest.prepared.data if fastest.prepared is not None else None
        shape: dict[str, Any] = {"image_size": workload.image_size, "classes": workload.classes, "stem": workload.stem}
        if info is not None:
            shape = {"image_size": info.shape[-1] if info.shape else None, "classes": info.classes, "stem": info.stem}
        name = self._how.name or ""
        is_begun = self._how.resume and self._workspace.history.tunes().load(name) is not None
        tuned = tune(
            workload.model,
            name=name,
            resume=is_begun,
            task=workload.task,
            batch=batch,
            optimizer=workload.optimizer,
            device=fastest.spec.device,
            budget=seconds,
            workspace=self._workspace,
            **shape,
        )
        if tuned.winner is None:
            raise _Skipped(f"no recipe was found in {seconds:g} s that may be recommended")
        return tuned.winner.recipe

    def _after(self, spec: RunSpec) -> After | None:
        if spec.train is None:
            return None
        request = ProfileRequest(path=trace_name(spec), wait=0, warmup=1, active=1 if spec.device == "cpu" else 3)
        return After(profile=request, traces=self._workspace.traces)


def _device_of(table: Mapping[str, Any]) -> str:
    """The first device of a table of settings."""
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
    if record.trace is None or record.spec.train is None:
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
