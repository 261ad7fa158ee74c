"""`redline.ladder`: from one CPU thread to the best recipe on a GPU, rung by rung, on the same data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

import msgspec
from rich.console import RenderableType

from redline.analyze.ladder import Rung, rung_of, with_gains
from redline.analyze.profile import Profile, profile_of
from redline.api.profile import trace_name
from redline.api.settings import one_spec, takes_settings
from redline.api.train import DEFAULT_DATA, DataSettings, train_specs, training_table
from redline.api.tune import tune
from redline.api.workspace import Workspace, use
from redline.model.errors import BenchError, TraceError, UsageError
from redline.model.fields import Frozen
from redline.model.protocol import Profile as ProfileRequest
from redline.model.record import RunRecord
from redline.model.spec import Recipe, RunSpec
from redline.model.units import counted
from redline.report.export import JsonDocument, json_document
from redline.report.ladder import draw_ladder, ladder_report
from redline.report.notebook import Bars, Shown
from redline.search.train import After
from redline.trace.decode import read_trace

AMP = "amp"
SWEEP_EPOCHS = 2
"""Of the batches that are tried: the first epoch pays for start-ups, the second is what counts."""
MOST_WORKERS = 4


class LadderPlan(Frozen):
    """How long to stay on each rung."""

    train_samples: int = 5_000
    val_samples: int = 1_000
    epochs: int = 3
    rung_seconds: float = 60.0
    """Training on a rung stops after this many seconds; its epoch time is then extrapolated."""
    batches: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    tune_seconds: float = 120.0


QUICK = LadderPlan(
    train_samples=512, val_samples=128, epochs=1, rung_seconds=25.0, batches=(16, 64, 256), tune_seconds=60.0
)


class LadderSettings(DataSettings, total=False):
    """What all rungs have in common."""

    image_size: int | None
    stem: Literal["imagenet", "cifar"] | None
    optimizer: Literal["sgd", "adam", "adamw"]
    seed: int


class LadderResult(Shown, Sequence[Rung]):
    """The rungs, with the records and profiles of those that were trained."""

    def __init__(self, rungs: Sequence[Rung], records: Sequence[RunRecord], profiles: Sequence[Profile]) -> None:
        self.rungs = with_gains(rungs)
        self.records = list(records)
        self.profiles = list(profiles)

    def __len__(self) -> int:
        return len(self.rungs)

    def __getitem__(self, index: Any) -> Any:
        return self.rungs[index]

    def report(self) -> RenderableType:
        return ladder_report(self.rungs)

    def frame_rows(self) -> Sequence[Any]:
        return self.rungs

    def bars(self) -> Bars | None:
        bars = [(rung.name, rung.samples_per_s, None, None) for rung in self.rungs if rung.samples_per_s]
        return Bars("the ladder", "samples per second", bars)

    @property
    def failed(self) -> bool:
        return any(rung.failure for rung in self.rungs)

    def to_json(self) -> JsonDocument:
        return json_document("ladder", {"rungs": self.rungs})

    def plot(self, path: str | Path | None = None) -> Any:
        """Samples per second and epoch time of each rung: as a PNG where a path is given, else as a figure."""
        return super().plot() if path is None else draw_ladder(self.rungs, Path(path))


@takes_settings
def ladder(
    model: str = "resnet18",
    *,
    data: str = DEFAULT_DATA,
    quick: bool = False,
    epochs: int | None = None,
    device: str = "auto",
    batch: int = 64,
    workspace: Workspace | None = None,
    **settings: Unpack[LadderSettings],
) -> LadderResult:
    """Train the same model on the same data: on one CPU thread, on all of them with loader workers, on the GPU in fp32, with
    AMP over batches, at the best of them, and with the best recipe that a short search finds.

    `quick` stays on each rung for less. Rungs whose device is not here are skipped and say so.
    """
    plan = QUICK if quick else LadderPlan()
    plan = msgspec.structs.replace(plan, **({"epochs": epochs} if epochs is not None else {}))
    sizes = {"train_samples": plan.train_samples, "val_samples": plan.val_samples}
    with use(workspace) as opened:
        table = training_table(data, {**(sizes if ":" not in data else {}), **settings, "epochs": plan.epochs})
        spec, working = one_spec(opened, "a ladder", model, None, **table, batch=batch, device=device)
        return _Climb(spec, plan, working).climb()


class _Climb:
    """A ladder on its way."""

    def __init__(self, spec: RunSpec, plan: LadderPlan, workspace: Workspace) -> None:
        self._spec, self._plan, self._workspace = spec, plan, workspace
        self._rungs: list[Rung] = []
        self._records: list[RunRecord] = []
        self._profiles: list[Profile] = []

    def climb(self) -> LadderResult:
        cores = self._cores()
        workers = min(MOST_WORKERS, max(1, cores // 2))
        self._train("CPU, 1 thread", self._on_cpu(threads=1, workers=0))
        both = f"{counted(cores, 'thread')} and {counted(workers, 'loader worker')}"
        self._train(f"CPU, {both}", self._on_cpu(threads=cores, workers=workers))
        gpu = self._gpu()
        if gpu is None:
            for name in ("GPU, fp32", "GPU, AMP over batches", "GPU, AMP at the best batch", "GPU, best recipe"):
                self._rungs.append(Rung(name=name, device="gpu", skipped=self._why_no_gpu()))
            return self._result()
        fed = self._fed(self._spec, workers=workers)
        on_gpu = msgspec.structs.replace(fed, device=gpu)
        self._train("GPU, fp32", on_gpu)
        best = self._sweep(on_gpu)
        with_amp = _with(on_gpu, recipe=Recipe.parse(AMP), batch=best)
        amp = self._train(f"GPU, AMP at the best batch ({best})", with_amp)
        self._best_recipe(with_amp, amp)
        return self._result()

    def _result(self) -> LadderResult:
        return LadderResult(self._rungs, self._records, self._profiles)

    def _sweep(self, on_gpu: RunSpec) -> int:
        """AMP at each batch; the one with the most samples per second."""
        speeds: dict[int, float] = {}
        for batch in self._batches():
            spec = _with(on_gpu, recipe=Recipe.parse(AMP), batch=batch, epochs=min(SWEEP_EPOCHS, 1 + self._plan.epochs))
            rung = self._train(f"GPU, AMP, batch {batch}", spec, profile=False)
            if rung.samples_per_s:
                speeds[batch] = rung.samples_per_s
        return max(speeds, key=lambda batch: speeds[batch]) if speeds else self._spec.workload.batch or 64

    def _batches(self) -> Iterator[int]:
        assert self._spec.train is not None
        samples = self._spec.train.data.train_samples
        return (batch for batch in self._plan.batches if samples is None or batch <= samples)

    def _best_recipe(self, spec: RunSpec, amp: Rung) -> None:
        """Search for a while for the fastest recipe of the bare step, and train with it on data that are on the device."""
        name = "GPU, best recipe"
        record = next((each for each in self._records if each.id == amp.record_id), None)
        info = record.prepared.data if record is not None and record.prepared is not None else None
        if record is None or info is None or amp.failure:
            self._rungs.append(
                Rung(name=name, device=spec.device, skipped="AMP did not train, so nothing is to be tuned")
            )
            return
        assert spec.train is not None
        workload = spec.workload
        found = tune(
            workload.model,
            task="train",
            batch=workload.batch,
            image_size=info.shape[-1] if info.shape else None,
            classes=info.classes,
            stem=info.stem,
            optimizer=workload.optimizer,
            device=spec.device,
            budget=self._plan.tune_seconds,
            workspace=self._workspace,
        )
        if found.winner is None:
            why = f"no recipe was found in {self._plan.tune_seconds:.0f} s that may be recommended"
            self._rungs.append(Rung(name=name, device=spec.device, skipped=why))
            return
        data = msgspec.structs.replace(spec.train.data, workers=0, on_device=":" not in spec.train.data.name)
        if data.augment == "host":
            data = msgspec.structs.replace(data, augment="device")
        train = msgspec.structs.replace(spec.train, data=data)
        best = msgspec.structs.replace(spec, recipe=Recipe.parse(found.winner.recipe), train=train)
        self._train(f"{name}, data on the GPU", best)

    def _train(self, name: str, spec: RunSpec, *, profile: bool = True) -> Rung:
        request = ProfileRequest(path=trace_name(spec), wait=0, warmup=1, active=1 if spec.device == "cpu" else 3)
        after = After(profile=request if profile else None, traces=self._workspace.traces)
        (record,) = train_specs([spec], self._workspace, after=after)
        seen = self._profile(record)
        rung = rung_of(name, record, seen)
        self._rungs.append(rung)
        self._records.append(record)
        return rung

    def _profile(self, record: RunRecord) -> Profile | None:
        if record.trace is None:
            return None
        try:
            profile = profile_of([read_trace(Path(record.trace.path))], record)
        except TraceError:
            return None  # a rung without its top operator is still a rung
        self._profiles.append(profile)
        return profile

    def _on_cpu(self, *, threads: int, workers: int) -> RunSpec:
        spec = self._fed(self._spec, workers=workers, prefetch=workers > 0)
        return msgspec.structs.replace(spec, device="cpu", threads=threads)

    def _fed(self, spec: RunSpec, *, workers: int, prefetch: bool = True) -> RunSpec:
        assert spec.train is not None
        data = spec.train.data
        if ":" not in data.name:  # the user's own loaders decide it
            data = msgspec.structs.replace(data, workers=workers)
        data = msgspec.structs.replace(data, prefetch=prefetch)
        train = msgspec.structs.replace(spec.train, data=data, max_seconds=self._plan.rung_seconds)
        return msgspec.structs.replace(spec, train=train)

    def _cores(self) -> int:
        environment = self._workspace.environment("cpu")
        return len(environment.affinity) or environment.logical_cores or 1

    def _why_no_gpu(self) -> str:
        return "only the CPU was asked for" if self._spec.device == "cpu" else "there is no GPU here"

    def _gpu(self) -> str | None:
        if self._spec.device == "cpu":
            return None
        try:
            (resolved,) = self._workspace.checked([self._spec])
        except UsageError:
            if self._spec.device != "auto":
                raise
            return None
        except BenchError:
            return None
        return None if resolved.device == "cpu" else resolved.device


def _with(spec: RunSpec, *, recipe: Recipe, batch: int, epochs: int | None = None) -> RunSpec:
    assert spec.train is not None
    train = spec.train if epochs is None else msgspec.structs.replace(spec.train, epochs=epochs)
    workload = msgspec.structs.replace(spec.workload, batch=batch)
    return msgspec.structs.replace(spec, workload=workload, recipe=recipe, train=train)
