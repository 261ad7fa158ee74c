"""A report as one result: its headline, its tables of metrics, its notes. Pages, Markdown, CSV and JSON print it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import chain

import msgspec

from redline.analyze.load import load_rows
from redline.analyze.profile import Profile
from redline.analyze.recommend.evidence import Curve
from redline.analyze.replicates import Line
from redline.analyze.rows import FIGURES, row_of
from redline.analyze.summary import RunSummary
from redline.analyze.train import TrainingSummary
from redline.model import figures
from redline.model.environment import Environment
from redline.model.identity import is_capture
from redline.model.metrics import Fact, Figure, Headline, Row, Table
from redline.model.record import RunRecord
from redline.model.units import format_bytes
from redline.search.tune.gains import GainPath, waterfall
from redline.show.contents import Contents
from redline.show.result import Result
from redline.show.tune import answer

RESULT_COLUMNS = (
    "recipe", "model", "task", "batch", "throughput", "ratio", "latency_p50", "latency_p95", "ttft", "tpot", "epoch_time",
    "accuracy", "sustainable_rate", "memory", "rel_error", "energy_per_item", "cost_per_million", "headroom", "bound", "trust",
    "setting", "device", "measured_at",
)  # fmt: skip
"""What a person reads of a row, the most important first; documents, CSV and the chooser of columns have the rest."""
KERNELS = 40
"""Of each profile, the longest."""

OF_ROWS = {figure.name: figure for figure, _ in FIGURES}

KNEE = Figure(name="knee_batch", header="knee", doc="The batch from which larger ones hardly bring more.")
OF_LIMIT = Figure(name="of_limit", unit="share", header="of the limit")
LIMIT = Figure(name="limit", unit="{item}/s", header="limit")
STEP = Figure(name="step", unit="s", header="time of a step", better="lower")
GAIN = Figure(name="gain", unit="x", header="at most", better="higher", doc="The speed-up without this cause.")
TOTAL = Figure(name="total", unit="s", better="lower")
SHARE = Figure(name="share", unit="share")
CALLS = Figure(name="calls")


def result_of(contents: Contents) -> Result:
    """Every figure of a report, as rows. Tables without a row are left out."""
    tables = (
        Table(name="results", title="Results", rows=_results(contents), columns=RESULT_COLUMNS),
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
    return Result(
        verb="report",
        headline=Headline(template="{headline}", figures={"headline": contents.headline}),
        tables=tuple(table for table in tables if table.rows),
        about={"title": contents.title, "records": len(contents.records)},
        notes=tuple(contents.notes),
        record_ids=tuple(record.id for record in contents.records),
    )


def _all(parts: Iterable[Iterable[Row]]) -> tuple[Row, ...]:
    return tuple(chain.from_iterable(parts))


def _results(contents: Contents) -> tuple[Row, ...]:
    return tuple(_of_line(line.row, line.record, line, len(line.rates), line.measured_at) for line in contents.lines)


def _of_line(row: RunSummary, record: RunRecord, line: Line, processes: int, at: float) -> Row:
    """A row with what tells it from those of other reports: the setting, when it was measured, and in how many processes."""
    made = row_of(row)
    more: dict[str, Fact] = {
        "setting": line.subject.setting or None,
        "device": line.subject.device,
        "kind": "profile" if is_capture(record) else "run",
        "processes": processes,
        "measured_at": datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M"),
    }
    return msgspec.structs.replace(made, facts={**made.facts, **more})


EPOCH_SECONDS = Figure(name="seconds", unit="s", better="lower", doc="The whole epoch, validation included.")


def epoch_rows(training: TrainingSummary) -> Iterator[Row]:
    """One row for each epoch."""
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
    """Every recipe that a search ranked, below the answer of its search."""
    for found in contents.searches:
        for ranked in found.ranking:
            numerics = ranked.numerics
            yield Row(
                facts={
                    "recipe": ranked.recipe,
                    "search": found.name,
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
    for bar in waterfall(path):
        facts: dict[str, Fact] = {"step": bar.label, "gain": bar.told, "kind": bar.kind, "path": path.title}
        yield Row(facts=facts, metrics=(STEP(bar.seconds),), record_id=path.record_id)


def _of(profile: Profile) -> tuple[str, str]:
    """What a profile is of, and its record."""
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
    """Where something was measured, without paths, which change no speed and may be private."""
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


def processes_of(contents: Contents) -> Iterator[Row]:
    """One row for each record, where several processes measured the same: what `records.csv` has."""
    for line in contents.lines:
        for record, row in line.processes:
            yield _of_line(row, record, line, 1, record.created_at)
