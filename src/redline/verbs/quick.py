"""One call for a first look at a model in training: which batch, how fast, how good, where the time goes, what is in the way."""

from __future__ import annotations

import html
import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import RenderableType

from redline.analyze.batch import BatchSummary
from redline.analyze.finding import Finding
from redline.analyze.profile import Profile, profile_of
from redline.analyze.summary import CeilingsOf
from redline.analyze.train import TrainingSummary, training_of
from redline.api.settings import one_spec
from redline.api.workspace import Workspace, use
from redline.model.errors import BenchError, SpecError, UsageError
from redline.model.fields import MOST_ITEMS, require_range
from redline.model.protocol import Profile as ProfileRequest
from redline.model.record import RunRecord
from redline.model.spec import MeasureSpec, RunSpec
from redline.model.spec_table import training_table
from redline.search.batch import search_batch
from redline.search.observer import Observer
from redline.search.profile import trace_name
from redline.search.train import After
from redline.show.contents import Contents, contents_of
from redline.show.dashboard import dashboard
from redline.show.export import JsonDocument, json_document
from redline.show.notebook import Bars, Shown
from redline.show.plots import batch_figure, class_figure, epoch_figure, kernel_figure, phase_figure
from redline.show.quick import QuickResults, QuickSide, quick_headline, quick_report
from redline.show.report import ReportFiles, result_of, write_folder
from redline.trace.classes import library_of
from redline.trace.decode import read_trace
from redline.verbs.train import DEFAULT_DATA, OF_DATA, OF_MODEL, train_specs
from redline.verbs.verb import verb

ALIASES = {"cifar-10": "cifar10", "cifar": "cifar10"}
CAPTURED_STEPS = 5
"""Recorded after the last epoch; the epochs themselves run without the profiler."""
BEYOND = 16
"""The search tries batches up to this many times the one that was asked for."""
LONGEST_STEP_S = 2.0
"""And at none whose step would take longer: a CPU gains nothing from it."""
WORTH_IT = 1.03
"""A larger batch must be faster by this factor to be taken."""


class QuickProfile(Shown):
    """What `run_quick_profile` found; shows itself in a notebook."""

    def __init__(
        self,
        results: QuickResults,
        records: Sequence[RunRecord],
        batches: BatchSummary,
        training: TrainingSummary,
        profile: Profile,
        ceilings_of: CeilingsOf | None = None,
    ) -> None:
        self.results = results
        self.records = list(records)
        self.batches = batches
        self.training = training
        self.profile = profile
        self._ceilings_of = ceilings_of

    @property
    def findings(self) -> list[Finding]:
        """What is in the way, the largest possible gain first."""
        return list(self.profile.findings)

    @property
    def figures(self) -> dict[str, Any]:
        """plotly figures by name: those that have something to show."""
        made = {
            "epochs": epoch_figure(self.training),
            "batches": batch_figure(self.batches),
            "phases": phase_figure(self.profile),
            "kernel_classes": class_figure(self.profile),
            "kernels": kernel_figure(self.profile),
        }
        return {name: each for name, each in made.items() if each is not None}

    def save(self, folder: str | Path) -> ReportFiles:
        """Dashboard, Markdown, pictures, CSV, JSON, and the trace, for Perfetto or chrome://tracing."""
        files = write_folder(self._contents(), Path(folder))
        capture = self.profile.capture
        if capture is None or capture.trace is None or not Path(capture.trace).is_file():
            return files
        try:
            kept = shutil.copy(capture.trace, Path(folder) / Path(capture.trace).name)
        except OSError as error:
            raise SpecError(f"cannot write the trace to {folder}: {error.strerror}") from None
        return msgspec.structs.replace(files, trace=str(kept))

    def to_json(self) -> JsonDocument:
        return json_document("quick", self.results)

    def report(self) -> RenderableType:
        return quick_report(self.results, self.findings)

    def frame_rows(self) -> Sequence[Any]:
        """One for each epoch."""
        return self.training.epochs

    def bars(self) -> Bars | None:
        sides = (("before", self.results.before), ("after", self.results.after))
        timed = [(name, side.batch, side.samples_per_s) for name, side in sides if side.samples_per_s is not None]
        bars = [(f"{name}, batch {batch}", speed, None, None) for name, batch, speed in timed]
        return Bars(self.results.model, "samples per second", bars)

    @property
    def headline(self) -> str:
        return quick_headline(self.results)

    def _repr_html_(self) -> str:
        """The report, and the dashboard below in a frame of its own."""
        contents = self._contents()
        page = html.escape(dashboard(contents, result_of(contents)))
        frame = f'<iframe srcdoc="{page}" style="width:100%;height:900px;border:0"></iframe>'
        return super()._repr_html_() + frame

    def _contents(self) -> Contents:
        return contents_of(
            self.records,
            title=self.results.model,
            sentence=self.headline,
            profiles=[self.profile],
            ceilings_of=self._ceilings_of,
        )


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
        records = [before, *opened.history.load_many(trial.record_id for trial in found.trials).values(), after]
        known = opened.ceilings_of(records)
        profile = profile_of([read_trace(Path(after.trace.path))], after, ceilings=known(after))
    training = training_of(after, known(after))
    results = _results(training_of(before), training, found, profile)
    return QuickProfile(results, records, found, training, profile, known)


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
    """A training, with a trace of a few steps after its last epoch; what broke raises."""
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
    """Batches of the bare step, on what the data turned out to be."""
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


def _results(before: TrainingSummary, after: TrainingSummary, found: BatchSummary, profile: Profile) -> QuickResults:
    return QuickResults(
        model=after.model,
        dataset=after.data,
        device=after.device_name or after.device,
        item=after.item,
        before=_side(before),
        after=_side(after),
        changed=_changed(before, after),
        largest_batch=found.max_batch,
        knee_batch=found.knee_batch,
        epochs=tuple(msgspec.to_builtins(epoch) for epoch in after.epochs),
        train_loss=after.train_loss,
        val_loss=after.val_loss,
        accuracy=after.accuracy,
        best_accuracy=after.best_accuracy,
        phases=after.phase_shares,
        kernel_classes={each.name: each.share for each in profile.classes},
        kernel_libraries=_libraries(profile),
        peak_bytes=after.peak_bytes,
        data_wait_share=after.data_wait_share,
        utilisation=after.utilisation,
        stem=after.stem,
        bound=f"{profile.bound.label}: {profile.bound.evidence}",
    )


def _side(row: TrainingSummary) -> QuickSide:
    return QuickSide(
        batch=row.batch,
        samples_per_s=row.samples_per_s,
        peak_bytes=row.peak_bytes,
        epoch_s=row.epoch_s,
        accuracy=row.accuracy,
    )


def _changed(before: TrainingSummary, after: TrainingSummary) -> str:
    gain = after.samples_per_s / before.samples_per_s if before.samples_per_s and after.samples_per_s else None
    speed = f": {gain:.2f}× the samples per second" if gain else ""
    if before.batch == after.batch:
        return f"nothing: no larger batch is faster than {after.batch} by more than 3 %{speed}"
    return f"batch {before.batch} → {after.batch}, and the learning rate with it{speed}"


def _libraries(profile: Profile) -> dict[str, float]:
    times: defaultdict[str, float] = defaultdict(float)
    rows = [(row.name, row.total_s) for row in profile.kernels]
    rows = rows or [(row.name, row.cpu_self_s) for row in profile.operators]
    for name, seconds in rows:
        times[library_of(name)] += seconds
    whole = sum(times.values())
    return {name: times[name] / whole for name in sorted(times, key=lambda name: -times[name])} if whole else {}
