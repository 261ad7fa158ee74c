"""One call for a first look at a model in training: which batch, how fast, how good, where the time goes, what is in the way."""

from __future__ import annotations

import html
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from redline.analyze.batch import BatchSummary
from redline.analyze.profile import Profile, profile_of
from redline.analyze.summary import CeilingsOf, summarize
from redline.analyze.train import TrainingSummary, training_of
from redline.model.errors import BenchError, SpecError, UsageError
from redline.model.fields import MOST_ITEMS, require_range
from redline.model.metrics import Figure, Headline, Row, Table
from redline.model.note import Note, note
from redline.model.protocol import Profile as ProfileRequest
from redline.model.record import RunRecord
from redline.model.spec import MeasureSpec, RunSpec
from redline.model.spec_table import training_table
from redline.model.units import counted, format_ratio
from redline.search.batch import search_batch
from redline.search.observer import Observer
from redline.search.train import After
from redline.show import report
from redline.show.charts import bar_figure
from redline.show.contents import Contents, contents_of
from redline.show.dashboard import dashboard
from redline.show.report import ReportFiles, write_folder
from redline.show.result import Result
from redline.trace.decode import read_trace
from redline.trace.names import library_of
from redline.verbs import profile as profile_verb
from redline.verbs.capture import trace_name
from redline.verbs.train import DEFAULT_DATA, OF_DATA, OF_MODEL, train_specs, training_row
from redline.verbs.verb import verb
from redline.verbs.workspace import Workspace, one_spec, use

ALIASES = {"cifar-10": "cifar10", "cifar": "cifar10"}
CAPTURED_STEPS = 5
"""Recorded after the last epoch; the epochs themselves run without the profiler."""
BEYOND = 16
"""The search tries batches up to this many times the one that was asked for."""
LONGEST_STEP_S = 2.0
"""And at none whose step would take longer: a CPU gains nothing from it."""
WORTH_IT = 1.03
"""A larger batch must be faster by this factor to be taken."""


@dataclass(frozen=True, kw_only=True)
class QuickProfile(Result):
    """What `run_quick_profile` found. Its first table has both sides: the batch that was asked for, and the one that was found."""

    contents: Contents
    batches: BatchSummary
    training: TrainingSummary
    profile: Profile

    def save(self, folder: str | Path) -> ReportFiles:
        """Writes the dashboard, Markdown, pictures, CSV, JSON, and the trace, for Perfetto or chrome://tracing."""
        files = write_folder(self.contents, Path(folder))
        capture = self.profile.capture
        if capture is None or capture.trace is None or not Path(capture.trace).is_file():
            return files
        try:
            kept = shutil.copy(capture.trace, Path(folder) / Path(capture.trace).name)
        except OSError as error:
            raise SpecError(f"cannot write the trace to {folder}: {error.strerror}") from None
        return msgspec.structs.replace(files, trace=str(kept))

    def _repr_html_(self) -> str:
        """Returns the tables, and the dashboard below in a frame of its own."""
        page = html.escape(dashboard(self.contents, report.result_of(self.contents)))
        return f'{super()._repr_html_()}<iframe srcdoc="{page}" style="width:100%;height:900px;border:0"></iframe>'


@verb(takes=(*OF_DATA, *OF_MODEL))
def run_quick_profile(
    model_name: str = "resnet18",
    dataset: str = DEFAULT_DATA,
    epochs: int = 1,
    batch_size: int = 64,
    *,
    recipe: str = "baseline",
    progress: bool = True,
    workspace: Workspace | None = None,
    **settings: Any,
) -> QuickProfile:
    """Train one epoch with `batch_size`, search for a faster batch beyond it, train `epochs` with that, and explain it.

    `dataset`: cifar10 (with `folder`, and `download=True` where there is a network), imagefolder, synthetic,
    synthetic-learnable, or `file.py:loaders`. Any model that `redline.train` takes by name.
    """
    dataset = ALIASES.get(dataset.lower(), dataset)
    _check(model_name, epochs, batch_size)
    with use(workspace) as opened:
        working = opened if progress else opened.derived(observer=Observer())
        table = training_table(dataset, {**settings, "epochs": epochs})
        asked, _ = one_spec(working, "a quick profile", model_name, None, recipes=recipe, **table, batch=batch_size)
        before = _trained(_sized(asked, batch_size, epochs=1), working)
        found = _searched(before, batch_size, working)
        batch = _best_batch(found, batch_size)
        after = _trained(_sized(asked, batch), working, profile=True)
        assert after.trace is not None
        records = [before, *opened.history.load_many(trial.row.record_id for trial in found.trials).values(), after]
        known = opened.ceilings_of(records)
        profile = profile_of([read_trace(Path(after.trace.path))], after, ceilings=known(after))
    return _result(before, after, found, profile, records, known)


def _check(model_name: str, epochs: int, batch_size: int) -> None:
    if not isinstance(model_name, str):
        raise UsageError(f"model_name is a name, got {type(model_name).__name__}: redline.train takes live modules")
    for name, value in (("epochs", epochs), ("batch_size", batch_size)):
        require_range(name, value, 1, MOST_ITEMS)


def _sized(spec: RunSpec, batch: int, epochs: int | None = None) -> RunSpec:
    assert spec.train is not None
    train = spec.train if epochs is None else msgspec.structs.replace(spec.train, epochs=epochs)
    return msgspec.structs.replace(spec, workload=msgspec.structs.replace(spec.workload, batch=batch), train=train)


def _trained(spec: RunSpec, workspace: Workspace, *, profile: bool = False) -> RunRecord:
    """Returns the record of a training, with a trace of a few steps after its last epoch; what broke raises."""
    request = ProfileRequest(path=trace_name(spec), wait=0, warmup=2, active=CAPTURED_STEPS, shapes=True)
    after = After(profile=request if profile else None, traces=workspace.traces)
    (record,) = train_specs([spec], workspace, after=after)
    failure = record.failure
    if failure is not None and failure.kind == "user":
        raise UsageError(failure.told)
    if failure is not None:
        raise BenchError(failure.kind, f"{failure.stage}: {failure.told}", failure.traceback)
    if profile and record.trace is None:
        told = next((str(each) for each in record.notes if each.code == "no-trace"), "no trace was captured")
        raise BenchError("unsupported", f"profile: {told}")
    return record


def _searched(before: RunRecord, batch_size: int, workspace: Workspace) -> BatchSummary:
    """Returns batches of the bare step, on what the data turned out to be."""
    assert before.prepared is not None
    info, row = before.prepared.data, training_of(before)
    assert info is not None
    by_time = int((row.samples_per_s or 0.0) * LONGEST_STEP_S)
    most = max(batch_size, min(BEYOND * batch_size, by_time, info.train_samples // 2 or batch_size))
    is_image = len(info.shape) == 3 and before.prepared.workload.source not in ("user", "live")
    changes = {"image_size": info.shape[-1], "classes": info.classes, "stem": info.stem} if is_image else {}
    workload = msgspec.structs.replace(before.spec.workload, **changes)
    measure = MeasureSpec.for_effort("quick")
    spec = msgspec.structs.replace(before.spec, workload=workload, train=None, measure=measure)
    (checked,) = workspace.checked([spec])
    with workspace.lock(checked.device):
        door = workspace.door(checked.launch)
        return search_batch(checked, door, workspace.journal, workspace.observer, most=most)


def _best_batch(found: BatchSummary, asked: int) -> int:
    """The fastest that fits, where it is faster than the one that was asked for by more than a trifle."""
    speeds = {trial.batch: trial.throughput_per_s for trial in found.trials if trial.fits and trial.throughput_per_s}
    if not speeds:
        return asked
    # The smallest of those that are as fast as the fastest: memory and the number of steps per epoch matter too.
    fastest = max(speeds.values())
    best = min(batch for batch, speed in speeds.items() if speed * WORTH_IT >= fastest)
    known = max((batch for batch in speeds if batch <= asked), default=None)
    if best <= asked or (known is not None and speeds[best] < WORTH_IT * speeds[known]):
        return asked
    return best


def _result(
    before: RunRecord,
    after: RunRecord,
    found: BatchSummary,
    profile: Profile,
    records: Sequence[RunRecord],
    ceilings_of: CeilingsOf,
) -> QuickProfile:
    sides = [training_row(summary) for summary in summarize([before, after], ceilings_of)]
    rows = [
        msgspec.structs.replace(row, facts={"side": side, **row.facts})
        for side, row in zip(("before", "after"), sides, strict=True)
    ]
    table = Table(
        name="sides", rows=tuple(rows), columns=("side", "batch", "throughput", "memory", "epoch_time", "accuracy")
    )
    training = training_of(after, ceilings_of(after))
    shares = [
        Table(name=name, title=title, rows=tuple(Row(facts={"of": part}, metrics=(SHARE(share),)) for part, share in parts.items()))
        for name, title, parts in (
            ("phases", "Where the time of the training goes", training.phase_shares),
            ("libraries", "Whose kernels they are", _libraries(profile)),
        )
    ]  # fmt: skip
    explained = profile_verb.result_of(profile, after)
    headline = _headline(rows, training, explained)
    contents = contents_of(
        records, title=training.model, sentence=str(headline), profiles=[profile], ceilings_of=ceilings_of
    )
    return QuickProfile(
        verb="quick",
        headline=headline,
        tables=(table, *shares, *(each.as_detail() if each.name != "findings" else each for each in explained.tables)),
        about={"model": training.model, "data": training.data, "device": training.device_name or training.device},
        notes=(_changed(found, *rows), *explained.notes),
        next=explained.next,
        records=records,
        record_ids=tuple(record.id for record in records),
        picture=lambda: bar_figure(table),
        contents=contents,
        batches=found,
        training=training,
        profile=profile,
    )


SHARE = Figure(name="share", unit="share", doc="Of the training time, or of the busy time.")


def _headline(rows: Sequence[Row], training: TrainingSummary, explained: Result) -> Headline:
    after, shares = rows[-1], training.phase_shares
    longest = max(shares, key=lambda name: shares[name], default="")
    figures: dict[str, Any] = {
        "model": training.model,
        "speed": after.get("throughput"),
        "batch": training.batch,
        "accuracy": after.get("accuracy"),
        "epochs": counted(len(training.epochs), "epoch"),
        "phase": longest,
        "share": SHARE(shares[longest]) if longest else None,
    }
    text = "{model} trains at {speed} with batch {batch}"
    text += ", to an accuracy of {accuracy} in {epochs}" if "accuracy" in after else ""
    return Headline(template=f"{text}{'; {share} of the time is the {phase}' if longest else ''}.", figures=figures)


def _changed(found: BatchSummary, before: Row, after: Row) -> Note:
    if before["batch"] == after["batch"]:
        told = f"no batch up to {found.max_batch} is faster than {after['batch']} by more than {WORTH_IT - 1:.0%}"
        return note("no-batch", f"nothing was changed: {told}")
    ratio = after.value("throughput") / (before.value("throughput") or after.value("throughput"))
    return note("changed-batch", f"batch {before['batch']} became {after['batch']}, and the learning rate with it: {format_ratio(ratio)} the samples per second")  # fmt: skip


def _libraries(profile: Profile) -> dict[str, float]:
    times: defaultdict[str, float] = defaultdict(float)
    rows = [(row.name, row.total_s) for row in profile.kernels]
    rows = rows or [(row.name, row.cpu_self_s) for row in profile.operators]
    for name, seconds in rows:
        times[library_of(name)] += seconds
    whole = sum(times.values())
    return {name: times[name] / whole for name in sorted(times, key=lambda name: -times[name])} if whole else {}
