"""`redline.find_batch`: the largest batch that fits, the throughput knee, and the best batch under a latency target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Unpack

import msgspec
from rich.console import RenderableType

from redline.analyze.batch import SLO_TESTS, BatchSummary, SloTargets
from redline.api.settings import Settings, specs_of, takes_settings
from redline.api.workspace import Workspace, use
from redline.model.errors import DoorError, SpecError, UsageError
from redline.model.fields import Frozen, seconds_of
from redline.model.migrations import decode, encode
from redline.model.spec import RunSpec
from redline.model.spec_table import layered
from redline.report.batch import batch_json, batch_report, plot_batches
from redline.report.export import JsonDocument
from redline.report.notebook import Bars, Shown
from redline.search.batch import MAX_TRIALS, require_batches, search_batch
from redline.search.spread import Collected, on_cluster, require_cluster


class BatchResult(Shown, Sequence[BatchSummary]):
    """What was found, one entry per recipe."""

    def __init__(self, rows: Sequence[BatchSummary]) -> None:
        self.rows = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def report(self) -> RenderableType:
        return batch_report(self.rows)

    def frame_rows(self) -> Sequence[Any]:
        return [trial for found in self.rows for trial in found.trials]

    def bars(self) -> Bars | None:
        trials = [trial for trial in self.rows[0].trials if trial.throughput_per_s] if self.rows else []
        bars = [(f"batch {one.batch}", one.throughput_per_s or 0.0, None, None) for one in trials]
        return Bars(self.rows[0].model if self.rows else "", "items per second", bars)

    @property
    def max_batch(self) -> int | None:
        """Of the first recipe."""
        return self.rows[0].max_batch

    def to_json(self) -> JsonDocument:
        return batch_json(self.rows)

    def plot(self, path: str | Path | None = None) -> Any:
        """Throughput, latency and memory against the batch as a PNG where a path is given; else a figure of the first."""
        return super().plot() if path is None else plot_batches(self.rows, Path(path))


@takes_settings
def find_batch(
    model: Any,
    inputs: Any | None = None,
    *,
    recipes: str | Iterable[str] = "baseline",
    slo_p95: float | str | None = None,
    slo_ttft: float | str | None = None,
    slo_tpot: float | str | None = None,
    max_batch: int | None = None,
    ray: bool = False,
    address: str | None = None,
    loss: Any | None = None,
    workspace: Workspace | None = None,
    **settings: Unpack[Settings],
) -> BatchResult:
    """The largest batch that fits, the throughput knee, and the best batch whose p95 stays within `slo_p95`.

    Of a generation, the best batch whose first token comes within `slo_ttft` and each further one within `slo_tpot`.
    Targets are in seconds or texts such as "20ms". Several recipes are searched one after the other;
    with `ray` at the same time on the Ray cluster at `address` (`auto`: this machine's), each on a GPU of its own.
    """
    require_cluster(ray, address)
    table = layered({"effort": "quick"}, settings)
    given = {"p95": slo_p95, "ttft": slo_ttft, "tpot": slo_tpot}
    slo = SloTargets(
        **{f"{name}_s": seconds_of(f"slo_{name}", value) for name, value in given.items() if value is not None}
    )
    with use(workspace) as opened:
        specs, working = specs_of(opened, model, inputs, recipes=recipes, loss=loss, **table)
        if ray:
            return _on_cluster(specs, working, slo, max_batch, address)
        return find_batch_specs(specs, working, slo=slo, max_batch=max_batch)


def find_batch_specs(
    specs: Sequence[RunSpec], workspace: Workspace, *, slo: SloTargets | None = None, max_batch: int | None = None
) -> BatchResult:
    """One search per spec, in their order. The batch in a spec is ignored."""
    _require_sound(specs, slo, max_batch)
    rows = []
    checked = workspace.checked(specs)
    most = MAX_TRIALS + (SLO_TESTS if slo else 0)
    workspace.observer.planned(most * len(checked))
    for spec in checked:
        with workspace.lock(spec.device):
            door = workspace.door(spec.launch)
            found = search_batch(spec, door, workspace.journal, workspace.observer, most=max_batch, slo=slo)
        rows.append(found)
        workspace.observer.planned(len(found.trials) - most)  # what it did not need
    return BatchResult(rows)


def _require_sound(specs: Sequence[RunSpec], slo: SloTargets | None, max_batch: int | None) -> None:
    require_batches(specs)
    if slo is not None and (slo.ttft_s is not None or slo.tpot_s is not None):
        others = sorted({spec.workload.task for spec in specs} - {"generate"})
        if others:
            raise UsageError(f"slo_ttft and slo_tpot are for --task generate, not for {', '.join(others)}")
    if max_batch is not None and max_batch < 1:
        raise SpecError(f"max_batch must be 1 or more, got {max_batch}")


class _Search(Frozen):
    """What a machine of a cluster is asked."""

    spec: RunSpec
    slo: SloTargets
    max_batch: int | None


class _Found(Frozen):
    summary: BatchSummary
    records: tuple[bytes, ...]


def _on_cluster(
    specs: Sequence[RunSpec], workspace: Workspace, slo: SloTargets, max_batch: int | None, address: str | None
) -> BatchResult:
    """Each search whole on one machine. One that was lost is raised once the others are kept."""
    _require_sound(specs, slo, max_batch)
    payloads = [msgspec.msgpack.encode(_Search(spec=spec, slo=slo, max_batch=max_batch)) for spec in specs]
    summaries: dict[int, BatchSummary] = {}
    lost: list[DoorError] = []
    for number, answer in on_cluster(_search_there, payloads, [spec.device for spec in specs], address):
        if isinstance(answer, DoorError):
            lost.append(answer)
            continue
        found = msgspec.msgpack.decode(answer, type=_Found)
        for record in found.records:
            workspace.journal.finish(decode(record))
        for trial in found.summary.trials:
            workspace.observer.tried(trial)
        summaries[number] = found.summary
    if lost:
        raise lost[0]
    return BatchResult([summaries[number] for number in sorted(summaries)])


def _search_there(payload: bytes) -> bytes:
    asked = msgspec.msgpack.decode(payload, type=_Search)
    journal = Collected()
    with Workspace(journal=journal) as workspace:
        (summary,) = find_batch_specs([asked.spec], workspace, slo=asked.slo, max_batch=asked.max_batch)
    return msgspec.msgpack.encode(_Found(summary=summary, records=tuple(map(encode, journal.records))))
