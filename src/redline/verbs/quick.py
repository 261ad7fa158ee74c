"""This module is one call for a first look at a model in training: how fast, how good, where the time goes, what is in the way."""

from __future__ import annotations

import html
import shutil
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from redline.analyze.measurement import CeilingsOf, measurements
from redline.analyze.profile import Profile, profile_of
from redline.analyze.train import TrainingSummary
from redline.model.errors import BenchError, SpecError, UsageError
from redline.model.fields import MOST_ITEMS, require_range
from redline.model.metrics import Figure, Headline, Row, Table
from redline.model.protocol import Profile as ProfileRequest
from redline.model.record import RunRecord
from redline.model.spec import RunSpec
from redline.model.spec_table import training_table
from redline.model.units import counted
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
"""This many steps are recorded after the last epoch; the epochs themselves run without the profiler."""


@dataclass(frozen=True, kw_only=True)
class QuickProfile(Result):
    """This is what `run_quick_profile` found."""

    contents: Contents
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
    """Train `epochs` with `batch_size`, capture a few steps after the last, and explain where the time goes.

    `dataset`: cifar10 (with `folder`, and `download=True` where there is a network), imagefolder, synthetic,
    synthetic-learnable, or `file.py:loaders`. Any model that `redline.train` takes by name.
    """
    dataset = ALIASES.get(dataset.lower(), dataset)
    _check(model_name, epochs, batch_size)
    with use(workspace) as opened:
        working = opened if progress else opened.derived(observer=Observer())
        table = training_table(dataset, {**settings, "epochs": epochs})
        asked, _ = one_spec(working, "a quick profile", model_name, None, recipes=recipe, **table, batch=batch_size)
        record = _trained(asked, working)
        assert record.trace is not None
        known = opened.ceilings_of([record])
        profile = profile_of([read_trace(Path(record.trace.path))], record, ceilings=known(record))
    return _result(record, profile, known)


def _check(model_name: str, epochs: int, batch_size: int) -> None:
    if not isinstance(model_name, str):
        raise UsageError(f"model_name is a name, got {type(model_name).__name__}: redline.train takes live modules")
    for name, value in (("epochs", epochs), ("batch_size", batch_size)):
        require_range(name, value, 1, MOST_ITEMS)


def _trained(spec: RunSpec, workspace: Workspace) -> RunRecord:
    """Returns the record of a training, with a trace of a few steps after its last epoch; what broke raises."""
    request = ProfileRequest(path=trace_name(spec), wait=0, warmup=2, active=CAPTURED_STEPS, shapes=True)
    after = After(profile=request, traces=workspace.traces)
    (record,) = train_specs([spec], workspace, after=after)
    failure = record.failure
    if failure is not None and failure.kind == "user":
        raise UsageError(failure.told)
    if failure is not None:
        raise BenchError(failure.kind, f"{failure.stage}: {failure.told}", failure.traceback)
    if record.trace is None:
        told = next((str(each) for each in record.notes if each.code == "no-trace"), "no trace was captured")
        raise BenchError("unsupported", f"profile: {told}")
    return record


def _result(record: RunRecord, profile: Profile, ceilings_of: CeilingsOf) -> QuickProfile:
    (found,) = measurements([record], ceilings_of)
    assert found.training is not None
    training, explained = found.training, profile_verb.result_of(profile, record)
    table = Table(
        name="training",
        rows=(training_row(found),),
        columns=("model", "batch", "throughput", "memory", "epoch_time", "accuracy"),
    )
    shares = [
        Table(name=name, title=title, rows=tuple(Row(facts={"of": part}, metrics=(SHARE(share),)) for part, share in parts.items()))
        for name, title, parts in (
            ("phases", "Where the time of the training goes", training.phase_shares),
            ("libraries", "Whose kernels they are", _libraries(profile)),
        )
    ]  # fmt: skip
    headline = _headline(table.rows[0], training)
    contents = contents_of(
        [record], title=training.model, sentence=str(headline), profiles=[profile], ceilings_of=ceilings_of
    )
    return QuickProfile(
        verb="quick",
        headline=headline,
        tables=(table, *shares, *(each.as_detail() if each.name != "findings" else each for each in explained.tables)),
        about={"model": training.model, "data": training.data, "device": training.device_name or training.device},
        notes=explained.notes,
        next=explained.next,
        records=(record,),
        record_ids=(record.id,),
        picture=lambda: bar_figure(table),
        contents=contents,
        training=training,
        profile=profile,
    )


SHARE = Figure(name="share", unit="share", doc="Of the training time, or of the busy time.")


def _headline(after: Row, training: TrainingSummary) -> Headline:
    shares = training.phase_shares
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


def _libraries(profile: Profile) -> dict[str, float]:
    times: defaultdict[str, float] = defaultdict(float)
    rows = [(row.name, row.total_s) for row in profile.kernels]
    rows = rows or [(row.name, row.cpu_self_s) for row in profile.operators]
    for name, seconds in rows:
        times[library_of(name)] += seconds
    whole = sum(times.values())
    return {name: times[name] / whole for name in sorted(times, key=lambda name: -times[name])} if whole else {}
