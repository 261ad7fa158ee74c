"""Trainings that take a moment: a tiny network on a few small pictures, on one thread, in this very process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redline.bench.session import BenchSession
from redline.model.protocol import Close, EpochReply, FailureReply, Prepare, PreparedReply, Progress, TrainEpoch
from redline.model.record import Epoch, Failure, Prepared
from redline.model.spec import DataSpec, Recipe, RunSpec, TrainSpec, WorkloadSpec

TINY = Path(__file__).parent / "models" / "tiny.py"
SMALL: dict[str, Any] = {"name": "synthetic-learnable", "train_samples": 512, "val_samples": 256}


def spec_of(
    model: str = f"{TINY}:make",
    *,
    recipe: str = "baseline",
    data: dict[str, Any] | None = None,
    workload: dict[str, Any] | None = None,
    seed: int = 0,
    **train: Any,
) -> RunSpec:
    settings = {"epochs": 1, "learning_rate": 0.01, **train}
    chosen = {**({} if ":" in str((data or {}).get("name")) else SMALL), **(data or {})}
    asked = {"batch": None if ":" in chosen["name"] else 16, "image_size": 16, "optimizer": "adamw", **(workload or {})}
    return RunSpec(
        workload=WorkloadSpec(model=model, task="train", **asked),
        recipe=Recipe.parse(recipe),
        device="cpu",
        threads=1,
        seed=seed,
        train=TrainSpec(data=DataSpec(**chosen), **settings),
    )


class Trained:
    """An open training."""

    def __init__(self, session: BenchSession, prepared: Prepared, spec: RunSpec) -> None:
        self.session, self.prepared, self._spec = session, prepared, spec

    def epoch(self, number: int) -> EpochReply:
        reply = self.session.handle(TrainEpoch(number=number))
        assert isinstance(reply, EpochReply), reply
        return reply

    def failure(self, number: int = 1) -> Failure:
        reply = self.session.handle(TrainEpoch(number=number))
        assert isinstance(reply, FailureReply), reply
        return reply.failure

    def all(self) -> list[Epoch]:
        assert self._spec.train is not None
        return [self.epoch(number).epoch for number in range(1, self._spec.train.epochs + 1)]


@contextmanager
def training(spec: RunSpec, told: list[Progress] | None = None) -> Iterator[Trained]:
    session = BenchSession(on_progress=lambda progress: told.append(progress) if told is not None else None)
    reply = session.handle(Prepare(spec=spec))
    try:
        assert isinstance(reply, PreparedReply), reply
        yield Trained(session, reply.prepared, spec)
    finally:
        session.handle(Close())


def refused(spec: RunSpec) -> Failure:
    """Why a training cannot be prepared."""
    session = BenchSession(on_progress=lambda progress: None)
    reply = session.handle(Prepare(spec=spec))
    session.handle(Close())
    assert isinstance(reply, FailureReply), reply
    return reply.failure


def losses(epochs: list[Epoch]) -> list[tuple[float | None, float | None, float | None]]:
    return [(epoch.train_loss, epoch.val_loss, epoch.val_accuracy) for epoch in epochs]
