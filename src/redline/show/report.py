"""A report is a folder: dashboard.html, report.md, pictures, results.csv and results.json are all made of the same tables of metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from redline import __version__
from redline.analyze.batch import Curve
from redline.analyze.load import load_rows
from redline.analyze.profile import Profile
from redline.analyze.rows import FIGURES, row_of
from redline.analyze.train import TrainingSummary
from redline.model import metrics as figures
from redline.model.errors import SpecError
from redline.model.fields import Frozen
from redline.model.metrics import Fact, Figure, Headline, Row, Table
from redline.model.note import Note
from redline.model.record import Environment
from redline.model.units import format_bytes
from redline.show.contents import METHOD, Contents, line_row
from redline.show.dashboard import dashboard
from redline.show.folder import check_folder
from redline.show.plots import draw_pictures
from redline.show.result import Result, comma_separated, markdown
from redline.show.searches import GainPath, answer
from redline.show.terminal import markdown_line

RESULT_COLUMNS = (
    "recipe", "model", "task", "batch", "throughput", "ratio", "latency_p50", "latency_p95", "ttft", "tpot", "epoch_time",
    "accuracy", "sustainable_rate", "memory", "rel_error", "energy_per_item", "cost_per_million", "headroom", "bound", "trust",
    "setting", "device", "measured_at",
)  # fmt: skip
"""A person reads these columns of a row, the most important first; documents and CSV have the rest."""
KERNELS = 40
"""This many of the longest kernels of each profile are listed."""


class ReportFiles(Frozen):
    """These files were written, and this is what they are about."""

    folder: str
    headline: str
    dashboard: str
    markdown: str
    csv: str
    json: str
    pictures: tuple[str, ...]
    records: int
    notes: tuple[Note, ...] = ()
    trace: str | None = None
    """This is the path of the trace, in the report of a quick profile."""


def write_folder(contents: Contents, folder: Path) -> ReportFiles:
    check_folder(folder)
    result = result_of(contents)
    try:
        pictures = draw_pictures(contents, folder)
        texts = {
            "dashboard.html": dashboard(contents, result),
            "report.md": report_text(contents, result, {title: path.name for title, path in pictures.items()}),
            "results.json": result.to_json(),
            "results.csv": comma_separated(all_rows(contents)),
        }
        if len(contents.lines) < len(contents.records):
            texts["records.csv"] = comma_separated(Table(name="records", rows=tuple(_process_rows(contents))))
        if contents.trainings:
            texts["epochs.csv"] = comma_separated(result.table("epochs"))
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(f"cannot write the report to {folder}: {error.strerror}") from None
    return ReportFiles(
        folder=str(folder),
        headline=contents.headline,
        dashboard=str(folder / "dashboard.html"),
        markdown=str(folder / "report.md"),
        csv=str(folder / "results.csv"),
        json=str(folder / "results.json"),
        pictures=tuple(str(path) for path in pictures.values()),
        records=len(contents.records),
        notes=tuple(contents.notes),
    )


def report_text(contents: Contents, result: Result, pictures: Mapping[str, str]) -> str:
    """Returns the report as Markdown: it has the answer, the sections with their sentences, the pictures, and how it was measured."""
    brief = replace(result, tables=tuple(table.only(table.columns) for table in result.tables))
    parts = [markdown_line("# {}", contents.title), markdown(brief).rstrip()]
    if pictures:
        parts += ["## Pictures", *(markdown_line("![{}]", title) + f"({path})" for title, path in pictures.items())]
    parts += ["## Method", "\n".join(f"- {line}" for line in METHOD)]
    parts += [
        f"---\n\nMade by Redline {__version__} from its records. `results.csv` and `results.json` hold every number."
    ]
    return "\n\n".join(parts) + "\n"


def all_rows(contents: Contents) -> Table:
    """Returns every row of the report in one table, which is results.csv and the table of the dashboard."""
    return Table(name="results", rows=tuple(map(line_row, contents.lines)), columns=RESULT_COLUMNS)


def result_of(contents: Contents) -> Result:
    """Returns every figure of a report as tables: there is one for each subject, and then what was learned beside them."""
    several = len(contents.sections) > 1
    sections = [
        Table(
            name=f"results-{number}" if number > 1 else "results",
            title=f"{section.subject}: {section.headline}" if several else str(section.subject),
            rows=section.table.rows,
            columns=section.table.columns,
        )
        for number, section in enumerate(contents.sections, 1)
    ]
    tables = (
        *sections,
        Table(name="epochs", title="Epochs", rows=_all(map(epoch_rows, contents.trainings))),
        Table(name="loads", title="Latency under load", rows=_all(map(load_rows, contents.loads))),
        Table(name="knees", title="Where larger batches stop paying", rows=_all(map(_knee_rows, contents.curves))),
        Table(name="searches", title="Searches for the fastest recipe", rows=_all([_search_rows(contents)])),
        Table(
            name="gains",
            title="From the baseline to the fastest recipe",
            rows=_all(map(_gain_rows, contents.gain_paths)),
        ),
        Table(name="findings", title="What is in the way", rows=_all(map(_finding_rows, contents.profiles))),
        Table(name="classes", title="Time by kernel class", rows=_all(map(_class_rows, contents.profiles))),
        Table(name="kernels", title="Longest kernels", rows=_all(map(_kernel_rows, contents.profiles)), is_detail=True),
        Table(name="machines", title="Environment", rows=_all([_machine_rows(contents)]), is_detail=True),
    )
    times = [record.created_at for record in contents.records]
    span = " to ".join(dict.fromkeys(_day(at) for at in (min(times), max(times)))) if times else ""
    about: dict[str, Fact] = {"title": contents.title, "records": len(contents.records), "measured": span}
    return Result(
        verb="report",
        headline=Headline(template="{headline}", figures={"headline": contents.headline}),
        tables=tuple(table for table in tables if table.rows),
        about=about,
        notes=tuple(contents.notes),
        record_ids=tuple(record.id for record in contents.records),
    )


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")


def _all(parts: Iterable[Iterable[Row]]) -> tuple[Row, ...]:
    return tuple(chain.from_iterable(parts))


OF_ROWS = {figure.name: figure for figure, _ in FIGURES}
KNEE = Figure(name="knee_batch", header="knee", doc="The batch from which larger ones hardly bring more.")
OF_LIMIT = Figure(name="of_limit", unit="share", header="of the limit")
LIMIT = Figure(name="limit", unit="{item}/s", header="limit")
STEP = Figure(name="step", unit="s", header="time of a step", better="lower")
GAIN = Figure(name="gain", unit="x", header="at most", better="higher", doc="The speed-up without this cause.")
TOTAL = Figure(name="total", unit="s", better="lower")
SHARE = Figure(name="share", unit="share")
CALLS = Figure(name="calls")
EPOCH_SECONDS = Figure(name="seconds", unit="s", better="lower", doc="The whole epoch, validation included.")


def epoch_rows(training: TrainingSummary) -> Iterator[Row]:
    """Yields one row for each epoch."""
    for epoch in training.epochs:
        metrics = (
            EPOCH_SECONDS(epoch.seconds),
            figures.THROUGHPUT(epoch.samples_per_s, item=training.item),
            OF_ROWS["train_loss"](epoch.train_loss),
            OF_ROWS["val_loss"](epoch.val_loss),
            OF_ROWS["accuracy"](epoch.val_accuracy),
            OF_ROWS["data_wait"](epoch.data_wait_share),
            figures.MEMORY(epoch.peak_bytes),
            OF_ROWS["utilisation"](epoch.utilisation),
        )
        phases = tuple(Figure(name=f"{name}_time", unit="s")(seconds) for name, seconds in epoch.phases_s.items())
        yield Row(
            facts={
                "recipe": training.recipe,
                "model": training.model,
                "batch": training.batch,
                "data": training.data,
                "epoch": epoch.number,
                "samples": epoch.samples,
                "is_cut": epoch.is_cut,
            },
            metrics=tuple(metric for metric in (*metrics, *phases) if metric.value is not None),
            record_id=training.record_id,
        )


def _knee_rows(curve: Curve) -> Iterator[Row]:
    if (knee := curve.knee) is not None:
        facts: dict[str, Fact] = {"subject": str(curve.subject), "recipe": curve.recipe}
        item = next((row.item for row in curve.rows if row.item), None)
        metrics = (
            KNEE(knee.batch),
            figures.THROUGHPUT(knee.throughput_per_s, item=item),
            OF_LIMIT(knee.share),
            LIMIT(knee.limit_per_s, item=item),
        )
        yield Row(facts=facts, metrics=metrics)


def _search_rows(contents: Contents) -> Iterator[Row]:
    """Yields every recipe that was ranked by a search, with the answer of that search."""
    for found in contents.searches:
        for ranked in found.ranking:
            numerics = ranked.row.numerics
            yield Row(
                facts={
                    "recipe": ranked.recipe,
                    "search": found.tune.name,
                    "answer": answer(found),
                    "verdict": ranked.verdict,
                    "remark": str(ranked.note) if ranked.note is not None else None,
                },
                metrics=(
                    figures.RATIO(ranked.ratio, ranked.low, ranked.high),
                    figures.COMPILE(ranked.compile_s),
                    *([OF_ROWS["signal_error"](numerics.rel_l2)] if numerics is not None else []),
                ),
            )


def _gain_rows(path: GainPath) -> Iterator[Row]:
    for bar in path.bars:
        facts: dict[str, Fact] = {"stage": bar.label, "gain": bar.told, "kind": bar.kind, "path": path.title}
        yield Row(facts=facts, metrics=(STEP(bar.seconds),), record_id=path.record_id)


def _of(profile: Profile) -> tuple[str, str]:
    """Returns what a profile is of, and the id of its record."""
    if (capture := profile.capture) is None:
        return "trace", ""
    batch = f"batch {capture.batch}" if capture.batch else ""
    return " · ".join(filter(None, (capture.model, capture.task, capture.recipe, batch))), capture.record_id


def _finding_rows(profile: Profile) -> Iterator[Row]:
    of, record_id = _of(profile)
    for finding in profile.findings:
        facts: dict[str, Fact] = {
            "finding": finding.code,
            "profile": of,
            "evidence": str(finding.evidence),
            "next": str(finding.next),
        }
        yield Row(facts=facts, metrics=(GAIN(finding.gain_bound),), record_id=record_id)


def _class_rows(profile: Profile) -> Iterator[Row]:
    of, record_id = _of(profile)
    for row in profile.classes:
        yield Row(
            facts={"class": row.name, "profile": of},
            metrics=(TOTAL(row.total_s), SHARE(row.share), CALLS(row.calls)),
            record_id=record_id,
        )


def _kernel_rows(profile: Profile) -> Iterator[Row]:
    of, record_id = _of(profile)
    steps = profile.steps_seen or 1
    for row in profile.kernels[:KERNELS]:
        yield Row(
            facts={"kernel": row.short_name, "class": row.kernel_class, "profile": of},
            metrics=(TOTAL(row.total_s), SHARE(row.share), CALLS(row.calls), STEP(row.total_s / steps)),
            record_id=record_id,
        )


def _machine_rows(contents: Contents) -> Iterator[Row]:
    counts: dict[tuple[tuple[str, Fact], ...], int] = {}
    for record in contents.records:
        if record.prepared is not None:
            machine = tuple(machine_facts(record.prepared.environment).items())
            counts[machine] = counts.get(machine, 0) + 1
    for machine, count in counts.items():
        yield Row(facts={**dict(machine), "records": count})


def machine_facts(environment: Environment) -> Mapping[str, Fact]:
    """Returns where something was measured. It leaves paths out: they change no speed and may be private."""
    device = environment.device
    memory = format_bytes(device.memory_bytes) if device.memory_bytes else ""
    limit = f"{device.power_limit_w:.0f} W" if device.power_limit_w else ""
    cores = f"{environment.logical_cores} logical cores" if environment.logical_cores else ""
    variables = sorted(environment.variables.items())
    commit = (environment.git_commit or "")[:12]
    facts = {
        "machine": device.name or device.kind,
        "device": ", ".join(filter(None, (device.kind, memory, limit))),
        "driver": device.driver,
        "CPU": ", ".join(filter(None, (environment.cpu, cores))),
        "threads": environment.threads,
        "platform": environment.platform,
        "Python": environment.python,
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(environment.versions.items())),
        "Redline": environment.redline,
        "variables": ", ".join(
            f"{name}={value}" for name, value in variables if not name.endswith(("_DIR", "_PATH", "_HOME"))
        ),
        "code": f"{commit} with local changes" if commit and environment.git_dirty else commit,
    }
    return {name: value for name, value in facts.items() if value}


def _process_rows(contents: Contents) -> Iterator[Row]:
    """Yields one row for each record, because some readers do want every process of a line."""
    for line in contents.lines:
        for _, row in line.processes:
            yield row_of(row)
