"""What every check on a GPU needs: the question as it was asked, a workspace, fresh processes, and the time of a step."""

from __future__ import annotations

import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from records import RawRecords

import redline
from redline.analyze.measurement import over_processes

Figures = dict[str, Any]
Outcome = tuple[bool | None, Figures]
"""Whether the figures are as they should be (None where nothing is expected of them), and the figures."""

FRESH = multiprocessing.get_context("forkserver")
FRESH.set_forkserver_preload(["torch", "torchvision"])


@dataclass
class Ask:
    """One call of `check.py`. On a CPU the checks only show that they run: models and samples are tiny."""

    device: str
    out: Path
    budget: str
    raw: RawRecords
    chosen: tuple[str, ...] = ()
    """The rows of the present check that were asked for."""
    known: Mapping[str, Figures] = field(default_factory=dict)
    """The rows of the present check that are in the folder, with those of earlier calls."""

    @property
    def is_gpu(self) -> bool:
        return self.device != "cpu"

    def sized(self, on_gpu: Any, on_cpu: Any) -> Any:
        return on_gpu if self.is_gpu else on_cpu

    @contextmanager
    def workspace(self, history: str | None = None) -> Iterator[redline.Workspace]:
        """A workspace whose records are published. A search gets a history of its own, as it would use earlier ones."""
        kept = {"history": self.raw.history(history)} if history else {"journal": self.raw.journal}
        with redline.Workspace(**kept) as workspace:
            yield workspace

    def run(self, model: str, **settings: Any) -> Any:
        """What was measured of the only record of `redline.run`."""
        with self.workspace() as workspace:
            found = redline.run(model, device=self.device, effort="quick", workspace=workspace, **settings)
            (row,) = over_processes(found.records, workspace.ceilings_of(found.records))
        if row.failure is not None:
            raise RuntimeError(f"{model} {row.recipe}: {row.failure.message}")
        return row

    def write(self, name: str, text: str) -> None:
        (self.out / name).write_text(text)

    def document(self, result: Any, name: str) -> dict[str, Any]:
        """The JSON document of a result, which is also written, with what is printed beside it."""
        self.write(f"{name}.txt", str(result))
        self.write(f"{name}.json", text := str(result.to_json()))
        document: dict[str, Any] = json.loads(text)
        return document


def in_fresh_process(function: Callable[..., Any], *values: Any) -> Any:
    """The function's answer from a process that has imported torch and not touched the GPU."""
    with ProcessPoolExecutor(1, mp_context=FRESH) as pool:
        return pool.submit(function, *values).result()


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def step_seconds(step: Callable[[], Any], steps: int = 150) -> list[float]:
    """Seconds of each step of a plain loop, by device events where there is a GPU; the first tenth is left out."""
    import torch

    if not torch.cuda.is_available():
        marks = [time.perf_counter()]
        for _ in range(steps):
            step()
            marks.append(time.perf_counter())
        return [later - earlier for earlier, later in pairwise(marks)][steps // 10 :]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    for event in events[:-1]:
        event.record()
        step()
    events[-1].record()
    torch.cuda.synchronize()
    return [earlier.elapsed_time(later) / 1e3 for earlier, later in pairwise(events)][steps // 10 :]


def wall_seconds(work: Callable[[], Any], times: int = 5) -> float:
    """The median time of some work until the device has done it."""
    taken = []
    for _ in range(times):
        synchronize()
        started = time.perf_counter()
        work()
        synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def apart(figure: float | None, reference: float | None) -> float | None:
    """The relative difference."""
    return figure / reference - 1 if figure is not None and reference else None


def within(share: float | None, limit: float) -> bool:
    return share is not None and abs(share) <= limit
