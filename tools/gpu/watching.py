"""Findings of `redline watch` on a training script with one planted fault, against the same script without it."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from asking import Ask, Figures, Outcome, apart, synchronize
from torch import nn
from torch.utils.data import DataLoader, Dataset

import redline
from redline.analyze.pairs import ratio_of
from redline.analyze.statistics import median_interval, paired_log
from redline.bench.watch.hooks import install

MARGIN, AGREEMENT, COST_S, STEP_S = 1.03, 0.02, 50e-6, 5e-3
ROUNDS = 5
"""Rounds of each script, in turns: fewer give no interval."""
STEADY_AFTER = 4
"""A gain is taken over the steps after these, as the first wait for data is the same for both scripts."""


@dataclass(frozen=True)
class Setup:
    """One training script; the defaults are the one without a fault."""

    steps: int = 24
    epochs: int = 1
    batch: int = 256
    size: int = 128
    workers: int = 12
    persistent: bool = True
    pinned: bool = True
    non_blocking: bool = True
    set_to_none: bool = True
    autocast: torch.dtype | None = torch.bfloat16
    tf32: bool = True
    channels_last: bool = True
    fused: bool = True
    scaler: bool = False
    reads_loss: bool = False
    logging_s: float = 0.0
    stall_s: float = 0.0
    is_chain: bool = False
    """A chain of small operators instead of ResNet-50."""
    compiled: bool = False


MENDED = Setup()
SHORT = replace(MENDED, steps=12, epochs=3)
FP32 = replace(MENDED, autocast=None, steps=16)
CHAIN = replace(MENDED, is_chain=True, batch=8192, size=16, workers=0, steps=120)
LOGGED = replace(CHAIN, batch=24576, steps=40, logging_s=0.006)
"""About 13 ms of few large kernels, and 6 ms in which the host does something else, beside them unless it has waited."""
FAULTS: dict[str, tuple[Setup, Setup]] = {
    "data-wait": (replace(MENDED, workers=0, steps=15), MENDED),
    "worker-restarts": (replace(SHORT, persistent=False), SHORT),
    "pageable-copies": (replace(MENDED, pinned=False, non_blocking=False), MENDED),
    "blocking-copies": (replace(MENDED, non_blocking=False), MENDED),
    "sync-in-loop": (replace(LOGGED, reads_loss=True), LOGGED),
    "zero-grad-fills": (replace(MENDED, set_to_none=False), MENDED),
    "unfused-optimizer": (replace(MENDED, fused=False), MENDED),
    "autocast-off": (FP32, MENDED),
    "tf32-off": (replace(FP32, tf32=False), FP32),
    "channels-first": (replace(MENDED, channels_last=False), MENDED),
    "needless-grad-scaler": (replace(MENDED, scaler=True), MENDED),
    "no-grad-scaler": (replace(MENDED, autocast=torch.float16), replace(MENDED, autocast=torch.float16, scaler=True)),
    "other-work": (replace(MENDED, reads_loss=True, logging_s=0.03), replace(MENDED, reads_loss=True)),
    "slow-steps": (replace(MENDED, stall_s=0.25), MENDED),
    "not-compiled": (CHAIN, replace(CHAIN, compiled=True)),
}


class Pictures(Dataset[Any]):
    """Random pictures that take about as long to fetch as a small JPEG takes to decode."""

    def __init__(self, count: int, size: int) -> None:
        self._count, self._picture = count, torch.randn(3, size, size)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        ends_at = time.perf_counter() + 0.0002
        while time.perf_counter() < ends_at:
            pass
        return self._picture, index % 1000


class Chain(nn.Module):
    """Thirty elementwise operators, which a compiler makes one kernel of."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3 * size * size, width), nn.Linear(width, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.first(images.flatten(1))
        for _ in range(10):
            hidden = torch.sigmoid(hidden) * hidden + 0.5
        return self.last(hidden)


class Script:
    """A script as somebody may have written it, ready to train."""

    def __init__(self, setup: Setup, device: str) -> None:
        from torchvision.models import resnet50

        self.setup, self.device = setup, torch.device(device)
        self.set_flags()
        torch.manual_seed(0)
        self.layout: Any = torch.channels_last if setup.channels_last else torch.contiguous_format
        model = Chain(setup.size, 4096 if device != "cpu" else 32) if setup.is_chain else resnet50()
        model = model.to(self.device, memory_format=self.layout)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=setup.fused)
        self.model = torch.compile(model) if setup.compiled else model
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=setup.scaler)
        self.loader = self._loader()
        for images, targets in itertools.islice(self.loader, 5):  # kernels are chosen before anybody looks
            self.step(images, targets, 0)
        synchronize()

    def _loader(self) -> DataLoader[Any]:
        setup, pinned = self.setup, self.setup.pinned and self.device.type == "cuda"
        if setup.is_chain and not setup.workers:  # the same batch again and again takes no time
            images, targets = torch.randn(setup.batch, 3, setup.size, setup.size), torch.zeros(setup.batch).long()
            batch = (images.pin_memory(), targets.pin_memory()) if pinned else (images, targets)
            return DataLoader([batch] * setup.steps, batch_size=None)  # type: ignore[arg-type]
        return DataLoader(
            Pictures(setup.batch * setup.steps, setup.size), batch_size=setup.batch, num_workers=setup.workers,
            pin_memory=pinned, persistent_workers=setup.persistent and setup.workers > 0,
        )  # fmt: skip

    def set_flags(self) -> None:
        """The flags are the process's: set them as this script would."""
        torch.set_float32_matmul_precision("high" if self.setup.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = self.setup.tf32

    def step(self, images: torch.Tensor, targets: torch.Tensor, number: int) -> None:
        setup = self.setup
        images = images.to(self.device, non_blocking=setup.non_blocking)
        targets = targets.to(self.device, non_blocking=setup.non_blocking)
        if not setup.is_chain:
            images = images.contiguous(memory_format=self.layout)
        self.optimizer.zero_grad(set_to_none=setup.set_to_none)
        with torch.autocast(self.device.type, setup.autocast, enabled=setup.autocast is not None):
            loss = nn.functional.cross_entropy(self.model(images), targets)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if setup.reads_loss:
            loss.item()
        if setup.logging_s:
            time.sleep(setup.logging_s)
        if setup.stall_s and number % 10 == 5:
            synchronize()
            time.sleep(setup.stall_s)

    def train(self) -> tuple[float, float]:
        """Steps per second of all epochs by a timer of one's own; and of the steady steps, where there is one epoch."""
        setup, began = self.setup, time.perf_counter()
        steady = began
        for _ in range(setup.epochs):
            for number, (images, targets) in enumerate(self.loader):
                self.step(images, targets, number)
                if number + 1 == STEADY_AFTER and setup.epochs == 1:
                    synchronize()
                    steady = time.perf_counter()
        synchronize()
        ended = time.perf_counter()
        whole = setup.steps * setup.epochs / (ended - began)
        return whole, (setup.steps - STEADY_AFTER) / (ended - steady) if setup.epochs == 1 else whole


def script_of(ask: Ask, setup: Setup) -> Script:
    if not ask.is_gpu:
        small: dict[str, Any] = {"steps": 20, "batch": 4, "size": 16, "is_chain": True, "epochs": min(setup.epochs, 2)}
        setup = replace(setup, workers=min(setup.workers, 1), **small)
    return kept_script(ask.device) if setup == MENDED else Script(setup, ask.device)


@cache
def kept_script(device: str) -> Script:
    """The script that most faults are set against keeps its workers."""
    return Script(MENDED, device)


def fault(ask: Ask, code: str, scripts: tuple[Setup, Setup]) -> Outcome:
    """A planted fault is found in every round and its mended twin is free of it; mending gains no more than the bound.

    The watched steps per second agree with timers in the script within 2 %. Where the bound is 1, the finding is about
    correctness and has no gain to check. The row is undecided where only the interval of gain over bound reaches above 1.03.
    """
    twins = [script_of(ask, setup) for setup in scripts]
    for twin in twins:
        look(ask, twin)  # nobody uses the first round, which pays for imports and workers
    rounds: list[list[Figures]] = [[], []]
    for number in range(ROUNDS):
        for which in sorted((0, 1), reverse=bool(number % 2)):  # a drift of the machine hits both alike
            rounds[which].append(look(ask, twins[which]))
    bounds = {number: each["bounds"][code] for number, each in enumerate(rounds[0]) if code in each["bounds"]}
    still = sum(code in each["bounds"] for each in rounds[1])
    rate = "own" if code == "slow-steps" else "steady"
    took, takes = ({number: 1 / each[rate] for number, each in enumerate(twin)} for twin in rounds)
    gain = ratio_of(paired_log(took, takes))
    over = ratio_of(paired_log({number: took[number] / bound for number, bound in bounds.items()}, takes))
    off = max((statistics.median(each["off"] for each in twin) for twin in rounds), key=abs)
    bound = statistics.median(bounds.values()) if bounds else None
    figures = {"raised": len(bounds), "mended_raised": still, "bound": bound, "gain": gain and gain.ratio, "off": off}
    figures |= {
        "gain_over_bound": over and over.ratio,
        "also": sorted({name for each in rounds[0] for name in each["bounds"]}),
    }
    if len(bounds) < ROUNDS or 2 * still >= ROUNDS or abs(off) > AGREEMENT:
        return False, figures
    if bound == 1.0 or over is None or over.ratio <= MARGIN:
        return True, figures
    return False if over.low is not None and over.low > MARGIN else None, figures


def look(ask: Ask, script: Script) -> Figures:
    """What a script's own timer and Redline say of one round of it."""
    script.set_flags()
    with ask.workspace() as workspace, redline.watch(workspace=workspace) as watch:
        own, steady = script.train()
    assert watch.record is not None
    watched = watch.record.watched
    assert watched is not None
    bounds = {finding.code: finding.gain_bound for finding in watched.findings}
    return {"own": own, "steady": steady, "off": apart(watched.steps_per_s, own), "bounds": bounds}


class Layers:
    """A few wide layers whose batch is chosen so that a step takes 5 ms on the device."""

    def __init__(self, device: str, width: int) -> None:
        torch.set_float32_matmul_precision("high")
        self._device, self.batch = device, 64 if width < 1024 else 2048
        middle = (nn.Linear(width, width) for _ in range(8))
        self._model = nn.Sequential(nn.Linear(64, width), *middle, nn.Linear(width, 64)).to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=True)
        for _ in range(6 if device != "cpu" else 1):
            step_s = self.block(self.batches(10), 10)[0] / 10
            if device != "cpu" and not 0.95 * STEP_S < step_s < 1.1 * STEP_S:
                self.batch = max(int(self.batch * STEP_S / step_s) // 64 * 64, 64)

    def batches(self, steps: int) -> Iterator[torch.Tensor]:
        batch = torch.randn(self.batch, 64)
        batch = batch.pin_memory() if self._device != "cpu" else batch
        return iter(DataLoader([batch] * steps, batch_size=None))  # type: ignore[arg-type]

    def block(self, batches: Iterator[torch.Tensor], steps: int) -> tuple[float, float]:
        """Seconds until the device has done all steps, and seconds of this thread's processor time to issue them."""
        synchronize()
        began, own = time.perf_counter(), time.thread_time()
        for features in itertools.islice(batches, steps):
            self._optimizer.zero_grad()
            self._model(features.to(self._device, non_blocking=True)).sum().backward()
            self._optimizer.step()
        own = time.thread_time() - own  # waiting for the device below takes processor time too
        synchronize()
        return time.perf_counter() - began, own


def cost(ask: Ask, row: str, _: None) -> Outcome:
    """What watching costs per step of 5 ms, and of the host's own time, in short blocks in turns with unwatched ones: 50 µs."""
    steps, pairs = 10, ask.sized(120, 12)
    layers = Layers(ask.device, ask.sized(2048, 64))
    batches = layers.batches((2 * pairs + 5) * steps)  # one epoch: beginning and ending one are no part of a step
    taken: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        watch = install(folder, in_program=True)
        for _ in range(5):
            layers.block(batches, steps)  # the first looks at the model
        log = watch.log
        for number in range(pairs):
            for is_watched in sorted(taken, reverse=bool(number % 2)):
                watch.log = log if is_watched else None  # without it every call is let through
                taken[is_watched].append(layers.block(batches, steps))
        watch.log = log
        watch.remove()
    figures: Figures = {"step_ms": 1e3 * statistics.median(each[0] for each in taken[False]) / steps}
    for name, column in (("cost", 0), ("host", 1)):
        pairs_of = zip(taken[False], taken[True], strict=True)
        interval = median_interval([[(after[column] - before[column]) / steps] for before, after in pairs_of])
        assert interval is not None
        figures |= {
            f"{name}_us": 1e6 * interval.median,
            f"{name}_low_us": 1e6 * interval.low,
            f"{name}_high_us": 1e6 * interval.high,
        }
    highs, lows = ((figures[f"{name}_{side}_us"] for name in ("cost", "host")) for side in ("high", "low"))
    return True if max(highs) <= 1e6 * COST_S else False if max(lows) > 1e6 * COST_S else None, figures
