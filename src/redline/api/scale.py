"""`redline.scale`: the same model on 1, 2, 4 and more ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

import msgspec
from rich.console import RenderableType

from redline.analyze.blocks import device_kind
from redline.analyze.bound import bound
from redline.analyze.scale import Mode, ScaleFinding, ScalePoint, ScaleRun, diagnose_scale, points_of
from redline.api.settings import OtherSettings, specs_of, takes_settings
from redline.api.workspace import Workspace, use
from redline.model.errors import SpecError, UsageError
from redline.model.fields import MOST_RANKS, require_range
from redline.model.spec import RunSpec
from redline.search.grid import parse_numbers
from redline.search.scale import measure_scale
from redline.show.export import JsonDocument, json_document
from redline.show.notebook import Bars, Shown
from redline.show.scale import plot_scale, scale_report


class ScaleResult(Shown, Sequence[ScalePoint]):
    """The points, with the records they were derived from."""

    def __init__(self, runs: Sequence[ScaleRun], mode: Mode) -> None:
        self.records = [run.record for run in runs]
        self.mode = mode
        self.points = points_of(runs, mode)
        bounds = [bound(record) for record in self.records]
        self.findings: list[ScaleFinding] = diagnose_scale(self.points, bounds, list(map(device_kind, self.records)))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: Any) -> Any:
        return self.points[index]

    def report(self) -> RenderableType:
        return scale_report(self.points, self.findings, self.mode)

    def frame_rows(self) -> Sequence[Any]:
        return self.points

    def bars(self) -> Bars | None:
        timed = [(point, point.throughput_per_s) for point in self.points if point.throughput_per_s is not None]
        bars = [(f"{point.model} on {point.ranks} ranks", speed, None, None) for point, speed in timed]
        return Bars(f"{self.mode} scaling", "items per second", bars)

    @property
    def failed(self) -> bool:
        return any(point.throughput_per_s is None for point in self.points)

    def to_json(self) -> JsonDocument:
        return json_document("scale", {"mode": self.mode, "points": self.points, "findings": self.findings})

    def plot(self, path: str | Path | None = None) -> Any:
        """Throughput and efficiency against ranks, beside the ideal, in a file; without one, the bars as a figure."""
        return super().plot() if path is None else plot_scale(self.points, Path(path))


@takes_settings
def scale(
    model: Any,
    inputs: Any | None = None,
    *,
    ranks: str | Iterable[int] = "1,2",
    batch: int | None = None,
    batch_per_rank: str | Iterable[int] | int | None = None,
    threads: int | None = None,
    recipe: str = "baseline",
    loss: Any | None = None,
    workspace: Workspace | None = None,
    **settings: Unpack[OtherSettings],
) -> ScaleResult:
    """Measure a model, or several, on each number of ranks.

    Weak scaling keeps the batch per rank (`batch_per_rank`, one or several), strong scaling splits one global `batch`.
    On a CPU every rank gets the same number of threads, by default as many as let the largest number of ranks fill the machine.
    """
    counts = _numbers("ranks", ranks)
    require_range("ranks", max(counts), 1, MOST_RANKS)
    mode: Mode = "weak" if batch is None else "strong"
    if batch is not None and batch_per_rank is not None:
        raise UsageError(
            "strong scaling splits one batch, weak scaling keeps the batch per rank: give batch or batch_per_rank"
        )
    sizes: list[int | None] = [None] if batch_per_rank is None else [*_numbers("batch_per_rank", batch_per_rank)]
    with use(workspace) as opened:
        specs: list[RunSpec] = []
        for size in sizes:
            for count in counts:
                given = {"batch": batch} if mode == "strong" else {} if size is None else {"batch": size * count}
                found, working = specs_of(
                    opened, model, inputs, recipes=recipe, loss=loss, ranks=count, threads=threads, **given, **settings
                )
                specs += found
        specs = _with_threads(working.checked(list(map(_as_timed, specs))), max(counts))
        return ScaleResult(_measured(_by_model(specs), working), mode)


def _numbers(name: str, given: Any) -> list[int]:
    try:
        found = [given] if isinstance(given, int) else parse_numbers(given if isinstance(given, str) else list(given))
    except SpecError:
        raise SpecError(f"{name} must be numbers such as 1,2,4 or a range such as 1..8, got {given!r}") from None
    if not found:
        raise SpecError(f"{name} names no number")
    for number in found:
        require_range(name, number, 1, MOST_RANKS if name == "ranks" else 2**31 - 1)
    return sorted(set(found))


def _as_timed(spec: RunSpec) -> RunSpec:
    """Outputs are not compared here: `redline run` does that."""
    return msgspec.structs.replace(spec, measure=msgspec.structs.replace(spec.measure, check_numerics=False))


def _with_threads(specs: Sequence[RunSpec], most: int) -> list[RunSpec]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    each = max(1, cores // most)
    return [
        msgspec.structs.replace(spec, threads=each) if spec.device == "cpu" and spec.threads is None else spec
        for spec in specs
    ]


def _by_model(specs: Sequence[RunSpec]) -> list[RunSpec]:
    """All points of one model, then those of the next."""
    order = {spec.workload.model: number for number, spec in reversed(list(enumerate(specs)))}
    return sorted(specs, key=lambda spec: order[spec.workload.model])


def _measured(specs: Sequence[RunSpec], workspace: Workspace) -> list[ScaleRun]:
    runs: list[ScaleRun] = []
    with TemporaryDirectory(prefix="redline-scale-") as folder:
        for number, (ranks, some) in enumerate(groupby(specs, key=lambda spec: spec.ranks)):
            together = list(some)
            with workspace.lock(together[0].device, ranks if together[0].launch.rendezvous is None else 1):
                runs += measure_scale(
                    together,
                    lambda spec: workspace.door(spec.launch),
                    workspace.journal,
                    Path(folder) / str(number),
                    workspace.observer,
                )
    return runs
