"""One call for a first look at a model in training: which batch, how fast, where the time goes, what is in the way."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

import msgspec
from rich.text import Text

from redline.analyze.batch import BatchFinding, BatchTrial, Purpose, step_s
from redline.analyze.diagnose import Finding
from redline.analyze.profile import Profile
from redline.analyze.summary import CeilingsOf, RunSummary, summarize
from redline.api.batch import find_batch_specs
from redline.api.profile import profile_spec
from redline.api.settings import Settings, specs_of, takes_settings
from redline.api.workspace import Workspace, use
from redline.errors import SpecError, UsageError
from redline.protocol import Profile as ProfileRequest
from redline.protocol import Progress
from redline.record import RunRecord
from redline.report.batch import trial_line
from redline.report.contents import Contents, contents_of
from redline.report.dashboard import dashboard
from redline.report.folder import ReportFiles, write_folder
from redline.report.plots import batch_figure, class_figure, kernel_figure, phase_figure
from redline.report.terminal import as_text, make_console, one_line
from redline.search.observer import Observer
from redline.spec import Frozen, RunSpec
from redline.spec_table import layered
from redline.units import format_bytes, format_seconds, format_share, significant

SYNTHETIC_ITEMS = 512
"""An epoch of the synthetic set."""
CAPTURED_STEPS = 5
"""The last steps of the training are recorded; the others run without the profiler."""
REAL_SETS = ("cifar10", "cifar-10", "imagenet")
SLOWEST = 20
"""A step under the profiler, or on a machine that got busy, may take this many times as long as in the search."""


class QuickResults(Frozen):
    """The figures of a quick profile. None is unknown, never a guess."""

    model: str
    dataset: str
    device: str
    batch: int
    largest_batch: int | None
    """The largest that was tried and fits; the search looks no further than what was asked for."""
    knee_batch: int | None
    throughput_per_s: float | None
    item: str | None
    step_s: float | None
    epochs: int
    steps: int
    """Training steps that were run."""
    epoch_s: float | None
    """One pass over the synthetic set, at the median step."""
    phases_s: dict[str, float]
    """Median seconds of a step."""
    kernel_classes: dict[str, float]
    """Shares of the busy time."""
    peak_bytes: int | None
    bound: str
    verdict: tuple[str, ...]


class QuickProfile:
    """What `run_quick_profile` found; shows itself in a notebook."""

    def __init__(
        self,
        results: QuickResults,
        records: Sequence[RunRecord],
        finding: BatchFinding,
        profile: Profile,
        ceilings_of: CeilingsOf | None = None,
    ) -> None:
        self.results = results
        self.records = list(records)
        self.batches = finding
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
            "batches": batch_figure(self.batches),
            "phases": phase_figure(self.profile),
            "kernel_classes": class_figure(self.profile),
            "kernels": kernel_figure(self.profile),
        }
        return {name: figure for name, figure in made.items() if figure is not None}

    @property
    def headline(self) -> str:
        results = self.results
        speed = "" if results.throughput_per_s is None else f" at {_rate(results)}"
        longest = max(results.phases_s, key=lambda name: results.phases_s[name], default=None)
        whole = sum(results.phases_s.values())
        phase = f"; {results.phases_s[longest] / whole:.0%} of a step is the {longest}" if longest and whole else ""
        return f"{results.model} trains{speed} with batch {results.batch} on {results.device}{phase}"

    def save(self, folder: str | Path) -> ReportFiles:
        """Dashboard, Markdown, pictures, CSV and JSON."""
        return write_folder(self._contents(), Path(folder))

    def __str__(self) -> str:
        lines = [self.headline, *(f"- {name}: {value}" for name, value in self._facts())]
        lines += [f"- {finding.code}: {finding.evidence}; next: {finding.next}" for finding in self.findings]
        return "\n".join(map(one_line, lines))

    def _repr_html_(self) -> str:
        """The figures as a list that shows anywhere, and the dashboard below in a frame of its own."""
        facts = "".join(f"<li>{html.escape(name)}: {html.escape(value)}</li>" for name, value in self._facts())
        found = "".join(
            f"<li><b>{html.escape(each.code)}</b>: {html.escape(each.evidence)}; next: {html.escape(each.next)}</li>"
            for each in self.findings
        )
        page = html.escape(dashboard(self._contents()))
        frame = f'<iframe srcdoc="{page}" style="width:100%;height:900px;border:0"></iframe>'
        return f"<h3>{html.escape(self.headline)}</h3><ul>{facts}{found}</ul>{frame}"

    def _contents(self) -> Contents:
        return contents_of(
            self.records,
            title=self.results.model,
            finding=self.headline,
            profiles=[self.profile],
            ceilings_of=self._ceilings_of,
        )

    def _facts(self) -> list[tuple[str, str]]:
        results = self.results
        whole = sum(results.phases_s.values())
        phases = ", ".join(f"{name} {format_share(each / whole)}" for name, each in results.phases_s.items() if whole)
        largest = sorted(results.kernel_classes.items(), key=lambda item: -item[1])[:4]
        classes = ", ".join(f"{name} {format_share(share)}" for name, share in largest)
        told = (
            ("batch", _batch_told(self.batches, results)),
            ("step", format_seconds(results.step_s)),
            ("epoch of the synthetic set", format_seconds(results.epoch_s)),
            ("memory", format_bytes(results.peak_bytes)),
            ("phases", phases),
            ("kernel classes", classes),
            ("bound", results.bound),
            ("verdict", ", ".join(results.verdict)),
        )
        return [(name, value) for name, value in told if value]


@takes_settings
def run_quick_profile(
    model_name: str = "resnet18",
    dataset: str = "synthetic",
    epochs: int = 1,
    batch_size: int = 64,
    *,
    recipe: str = "baseline",
    progress: bool = True,
    workspace: Workspace | None = None,
    **settings: Unpack[Settings],
) -> QuickProfile:
    """Search the batch (up to `batch_size`), train on the synthetic set with the last steps profiled, and explain it.

    Any name that `redline.run` takes. Where `batch_size` does not fit, the largest batch that does is used.
    """
    _check(model_name, dataset, epochs, batch_size)
    table = layered({"effort": "quick"}, settings, {"task": "train"})
    with use(workspace) as opened:
        collected = LineObserver() if progress else CollectingObserver()
        working = opened.derived(observer=collected)
        specs, _ = specs_of(working, model_name, recipes=recipe, **table)
        (found,) = find_batch_specs(specs, working, max_batch=batch_size)
        batch = _batch_of(found, batch_size)
        steps = epochs * math.ceil(SYNTHETIC_ITEMS / batch)
        captured = profile_spec(_training(specs[0], batch, steps, found), _request(steps), working)
        known = opened.ceilings_of(collected.records)
    assert captured.record is not None
    results = _results(captured.profile, captured.record, found, dataset, epochs, steps)
    return QuickProfile(results, collected.records, found, captured.profile, known)


def _check(model_name: str, dataset: str, epochs: int, batch_size: int) -> None:
    if not isinstance(model_name, str):
        raise UsageError(f"model_name is a name, got {type(model_name).__name__}: redline.profile takes live modules")
    if dataset.lower() in REAL_SETS:
        raise UsageError(f"dataset {dataset!r} is not there yet: real data sets come later; use 'synthetic'")
    if dataset != "synthetic":
        raise UsageError(f"dataset must be 'synthetic', got {dataset!r}")
    for name, value in (("epochs", epochs), ("batch_size", batch_size)):
        if value < 1:
            raise SpecError(f"{name} must be 1 or more, got {value}")


def _batch_of(found: BatchFinding, asked: int) -> int:
    if found.max_batch is None:
        failure = found.trials[-1].failure if found.trials else None
        raise UsageError(f"no batch of {found.model} could be trained: {failure.told if failure else 'nothing ran'}")
    return min(asked, found.max_batch)


def _training(spec: RunSpec, batch: int, steps: int, found: BatchFinding) -> RunSpec:
    """The spec at its batch, with time for all steps: the whole training is one answer of the worker."""
    longest_s = max((step_s(trial) for trial in found.trials if trial.fits), default=1.0)
    timeout_s = max(spec.launch.measure_timeout_s, SLOWEST * steps * longest_s)
    launch = msgspec.structs.replace(spec.launch, measure_timeout_s=timeout_s)
    return msgspec.structs.replace(spec, workload=msgspec.structs.replace(spec.workload, batch=batch), launch=launch)


def _request(steps: int) -> ProfileRequest:
    active = min(steps, CAPTURED_STEPS)
    warmup = min(steps - active, 2)
    return ProfileRequest(path="", wait=steps - active - warmup, warmup=warmup, active=active, shapes=True)


def _results(
    profile: Profile, record: RunRecord, found: BatchFinding, dataset: str, epochs: int, steps: int
) -> QuickResults:
    row: RunSummary = summarize([record])[0]
    assert row.batch is not None
    reserved = row.memory.peak_reserved_bytes if row.memory else None
    return QuickResults(
        model=row.model,
        dataset=dataset,
        device=row.device_name or row.device,
        batch=row.batch,
        largest_batch=found.max_batch,
        knee_batch=found.knee_batch,
        throughput_per_s=row.throughput_per_s,
        item=row.item,
        step_s=row.step_s,
        epochs=epochs,
        steps=steps,
        epoch_s=None if row.step_s is None else row.step_s * math.ceil(SYNTHETIC_ITEMS / row.batch),
        phases_s=row.phases_s or {},
        kernel_classes={each.name: each.share for each in profile.classes},
        peak_bytes=reserved if reserved is not None or row.memory is None else row.memory.peak_rss_bytes,
        bound=f"{profile.bound.label}: {profile.bound.evidence}",
        verdict=row.verdict.labels,
    )


def _batch_told(found: BatchFinding, results: QuickResults) -> str:
    knee = f"; {found.knee_batch} already has 90 % of the speed" if found.knee_batch else ""
    return f"{results.batch} ({len(found.trials)} tried, {found.ooms} did not fit{knee})"


def _rate(results: QuickResults) -> str:
    assert results.throughput_per_s is not None
    digits = max(3, len(str(round(results.throughput_per_s))))
    return f"{significant(results.throughput_per_s, digits)} {results.item or 'items'}/s"


class CollectingObserver(Observer):
    """Remembers every finished record."""

    def __init__(self) -> None:
        self.records: list[RunRecord] = []

    def closed(self, record: RunRecord) -> None:
        self.records.append(record)


class LineObserver(CollectingObserver):
    """A plain line per event on stderr, which a notebook shows as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self._console = make_console(stderr=True)

    def waiting(self, holder: str) -> None:
        self._say(f"waiting for the GPU: {holder} is using it")

    def trying(self, batch: int, purpose: Purpose) -> None:
        self._say(f"batch search: trying {batch}")

    def tried(self, trial: BatchTrial) -> None:
        self._say(as_text(trial_line(trial)).strip())

    def progress(self, record: RunRecord, progress: Progress) -> None:
        if progress.stage in ("timing", "profile"):
            words = {"timing": "timing the training step", "profile": "training with the last steps profiled"}
            self._say(words[progress.stage])

    def _say(self, line: str) -> None:
        self._console.print(Text(one_line(line)))
