"""Each finding of `redline watch` on the GPU at hand: planted, mended, and what mending brings against the stated bound.

    python scripts/check_watch_on_gpu.py [--out FOLDER] [--only CODE…] [--seconds 170] [--device cpu --small]

One process trains ResNet-50 on loaded pictures with one fault at a time and without any, in turns, inside `redline.watch()`, with
timers of its own; a run that nobody looks at comes first. For each fault: whether its finding is raised, whether the mended twin
is free of it, the gain of mending over the bound of the same round, and how far the watched steps/s are from the timers' (2 %).
A bound is too low where the interval of gain over bound lies above 1.03; where only its middle does, the check is undecided. A finding
about correctness has the bound 1 and no gain to check.
At the end what watching costs per step of 5 ms on the device (`cost`) and of the host's own time (`cost-host`), in short blocks that
take turns with unwatched ones; at most 50 µs, which is 1 %. On an H200 a fault takes 8 to 12 s and the cost 20 s:
`--only sync-in-loop zero-grad-fills no-grad-scaler slow-steps cost` about 80 s, everything about 200 s. Every line is written as it
comes, and what does not fit into `--seconds` is named.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from raw_records import RawRecords
from torch import nn
from torch.utils.data import DataLoader, Dataset

import redline
from redline.analyze.statistics import median_interval, paired_ratio
from redline.api.workspace import Workspace
from redline.bench.watch.hooks import install

MARGIN, AGREEMENT, COST_S = 1.03, 0.02, 50e-6
STEP_S = 5e-3
ROUNDS = 5
"""Of each twin, in turns: the fewest that an interval can be had of."""
STEADY_AFTER = 4
"""Gains are taken over the steps after these, where an epoch is long: its first wait for data is the same for both twins."""


@dataclass(frozen=True)
class Setup:
    """One training script; the defaults are the mended one."""

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
    width: int = 4096
    compiled: bool = False


MENDED = Setup()
SHORT = replace(MENDED, steps=12, epochs=3)
FP32 = replace(MENDED, autocast=None, steps=16)
CHAIN = replace(MENDED, is_chain=True, batch=8192, size=16, workers=0, steps=120)
LOGGED = replace(CHAIN, batch=24576, steps=40, logging_s=0.006)
"""About 13 ms of few large kernels, and 6 ms in which the host does something else: it can do so meanwhile, unless it has waited."""
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
OF_ALL_STEPS = frozenset({"slow-steps"})
"""Their gain is taken over all steps, as the bound is: of those after the first ones, the planted stalls are a larger share."""


class Pictures(Dataset[Any]):
    """Random pictures that take about as long to fetch as a small JPEG takes to decode."""

    def __init__(self, count: int, size: int, work_s: float) -> None:
        self._count, self._work_s = count, work_s
        self._picture = torch.randn(3, size, size)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        ends = time.perf_counter() + self._work_s
        while time.perf_counter() < ends:
            pass
        return self._picture, index % 1000


class WholeBatches(Dataset[Any]):
    """The same batch again and again, in pinned memory: a loader that takes no time."""

    def __init__(self, count: int, batch: int, size: int, pinned: bool) -> None:
        images, targets = torch.randn(batch, 3, size, size), torch.zeros(batch, dtype=torch.long)
        self._count = count
        self._batch = (images.pin_memory(), targets.pin_memory()) if pinned else (images, targets)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._batch


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

    def __init__(self, setup: Setup, device: torch.device) -> None:
        self.setup, self.device = setup, device
        self.made_current()
        torch.manual_seed(0)
        self.layout = torch.channels_last if setup.channels_last else torch.contiguous_format
        if setup.is_chain:
            model: nn.Module = Chain(setup.size, setup.width).to(device)
        else:
            from torchvision.models import resnet50

            model = resnet50().to(device).to(memory_format=self.layout)  # type: ignore[call-overload]
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=setup.fused)
        self.model = torch.compile(model) if setup.compiled else model
        self.scaler = torch.amp.GradScaler(device.type, enabled=setup.scaler)
        self.loader = self._loader()
        images = torch.randn(setup.batch, 3, setup.size, setup.size)
        for _ in range(5):  # kernels are chosen and memory is fetched before anybody looks
            self.step(images, torch.zeros(setup.batch, dtype=torch.long), 0)
        self.wait()

    def _loader(self) -> DataLoader[Any]:
        setup, pinned = self.setup, self.setup.pinned and self.device.type == "cuda"
        if setup.is_chain and not setup.workers:
            return DataLoader(WholeBatches(setup.steps, setup.batch, setup.size, pinned), batch_size=None)
        return DataLoader(
            Pictures(setup.batch * setup.steps, setup.size, 0.0002),
            batch_size=setup.batch,
            num_workers=setup.workers,
            pin_memory=pinned,
            persistent_workers=setup.persistent and setup.workers > 0,
            prefetch_factor=2 if setup.workers else None,
        )

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
            self.wait()
            time.sleep(setup.stall_s)

    def train(self) -> tuple[float, float]:
        """Steps per second of all epochs by a timer of one's own; and of the steady steps, where there is one epoch."""
        setup = self.setup
        began = steady = time.perf_counter()
        for _ in range(setup.epochs):
            for number, (images, targets) in enumerate(self.loader):
                self.step(images, targets, number)
                if number + 1 == STEADY_AFTER and setup.epochs == 1:
                    self.wait()
                    steady = time.perf_counter()
        self.wait()
        ended = time.perf_counter()
        whole = setup.steps * setup.epochs / (ended - began)
        return whole, (setup.steps - STEADY_AFTER) / (ended - steady) if setup.epochs == 1 else whole

    def start_workers(self) -> None:
        next(iter(self.loader))

    def made_current(self) -> Script:
        """The flags are the process's: set them as this script would."""
        torch.set_float32_matmul_precision("high" if self.setup.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = self.setup.tf32
        return self

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Checks:
    def __init__(self, device: torch.device, small: bool, out: Path | None, raw: RawRecords) -> None:
        self._device, self._small, self._out, self._raw = device, small, out, raw
        self._kept: dict[Setup, Script] = {}
        self.lines: list[dict[str, Any]] = []

    def _smaller(self, setup: Setup) -> Setup:
        small = {
            "steps": 20,
            "batch": 4,
            "size": 16,
            "workers": min(setup.workers, 1),
            "epochs": min(setup.epochs, 2),
            "is_chain": True,
            "width": 32,
        }
        return replace(setup, **small) if self._small else setup

    def warm_up(self) -> None:
        """Nobody looks at the first run, which pays for kernels, workers and imports."""
        script = self._script(MENDED)
        for _ in range(2):
            self.look(script)

    def _script(self, setup: Setup) -> Script:
        """The mended one serves as twin again and again, and keeps its workers."""
        setup = self._smaller(setup)
        if setup in self._kept:
            return self._kept[setup].made_current()
        script = Script(setup, self._device)
        if setup == self._smaller(MENDED):
            self._kept[setup] = script
        script.start_workers()
        return script

    def look(self, script: Script) -> dict[str, Any]:
        """What a script's own timer and Redline say of one round of it."""
        with Workspace(journal=self._raw.journal) as kept, redline.watch(workspace=kept) as watch:
            own, steady = script.train()
        assert watch.result is not None
        told = watch.result.summary
        bounds = {each["code"]: each["gain_bound"] for each in told["findings"]}
        return {
            "own": own,
            "steady": steady,
            "watched": told["steps_per_s"],
            "bounds": bounds,
            "shares": told["shares"],
        }

    def fault(self, code: str, faulty: Setup, mended: Setup) -> None:
        scripts = (self._script(faulty), self._script(mended))
        before, after = self._rounds(scripts)
        del scripts
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        bounds = {number: each["bounds"][code] for number, each in enumerate(before) if code in each["bounds"]}
        rate = "own" if code in OF_ALL_STEPS else "steady"
        took, takes = ({number: 1 / each[rate] for number, each in enumerate(twin)} for twin in (before, after))
        gain = paired_ratio(took, takes)
        over = paired_ratio({number: took[number] / bound for number, bound in bounds.items()}, takes)
        agreements = [[each["watched"] / each["own"] - 1 for each in twin] for twin in (before, after)]
        still = sum(code in each["bounds"] for each in after)
        bound = statistics.median(bounds.values()) if bounds else None
        line = {
            "code": code,
            "raised": len(bounds),
            "mended_raised": still,
            "rounds": ROUNDS,
            "steps_per_s": statistics.median(each[rate] for each in before),
            "mended_steps_per_s": statistics.median(each[rate] for each in after),
            "gain": [gain.ratio, gain.low, gain.high] if gain else None,
            "bound": bound,
            "gain_over_bound": [over.ratio, over.low, over.high] if over else None,
            "agreement": list(map(statistics.median, agreements)),
            "agreements": agreements,
            "shares": before[-1]["shares"],
            "mended_shares": after[-1]["shares"],
            "also_raised": sorted({name for each in before for name in each["bounds"]} - {code}),
        }
        is_told = len(bounds) == ROUNDS and 2 * still < ROUNDS
        agrees = max(map(abs, line["agreement"])) <= AGREEMENT
        within = "good" if bound == 1.0 or over is None else _below(over.low, over.ratio, over.ratio, MARGIN)
        self.tell(line, within if is_told and agrees else "bad")

    def _rounds(self, scripts: tuple[Script, Script]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Of both twins; who comes first changes from round to round, so that a drift hits both alike."""
        found: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
        for number in range(ROUNDS):
            for twin in (0, 1) if number % 2 == 0 else (1, 0):
                found[twin].append(self.look(scripts[twin].made_current()))
        return found

    def cost(self, pairs: int = 120, steps: int = 10) -> None:
        """Per step of 5 ms on the device, which the host runs ahead of; blocks are so short that its queue never fills."""
        layers = Layers(self._device, width=64 if self._small else 2048)
        batches = layers.batches(
            (2 * pairs + 5) * steps
        )  # one epoch: the beginning and end of one are no part of a step
        with tempfile.TemporaryDirectory() as folder:
            watch = install(folder, "", in_program=True)
            for _ in range(5):
                layers.block(batches, steps)  # its first looks at the model
            clock = watch.clock
            found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
            for number in range(pairs):
                for is_watched in (True, False) if number % 2 else (False, True):
                    watch.clock = clock if is_watched else None  # without it every call is let through
                    found[is_watched].append(layers.block(batches, steps))
            watch.clock = clock
            watch.remove()
        for code, column in (("cost", 0), ("cost-host", 1)):
            plain, watched = ([each[column] / steps for each in found[is_watched]] for is_watched in (False, True))
            differences = [after - before for before, after in zip(plain, watched, strict=True)]
            interval = median_interval([[each] for each in differences])
            assert interval is not None
            line = {
                "code": code,
                "step_ms": 1e3 * statistics.median(plain),
                "watched_step_ms": 1e3 * statistics.median(watched),
                "cost_us": [1e6 * each for each in (interval.median, interval.low, interval.high)],
                "of_5_ms": interval.median / STEP_S,
                "pairs": pairs,
                "batch": layers.batch,
                "differences_us": [round(1e6 * each, 1) for each in differences],
            }
            self.tell(line, _below(interval.low, interval.median, interval.high, COST_S))

    def tell(self, line: dict[str, Any], verdict: str) -> None:
        line["verdict"] = verdict
        self.lines.append(line)
        shown = {
            key: _rounded(value)
            for key, value in line.items()
            if key not in ("shares", "mended_shares", "agreements", "differences_us")
        }
        text = f"{SIGNS[verdict]} {json.dumps(shown)}"
        print(text, flush=True)
        if self._out is not None:
            with (self._out / "watch.txt").open("a") as file:
                file.write(text + "\n")
            (self._out / "watch.json").write_text(json.dumps(self.lines, indent=1))


SIGNS = {"good": "ok  ", "undecided": "?   ", "bad": "MISS"}


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


def _below(low: float, middle: float, high: float, limit: float) -> str:
    """Whether a figure is below a limit: bad where its whole interval is above, undecided where the limit is inside.

    Give the middle as `high` where a middle below the limit will do.
    """
    if low > limit:
        return "bad"
    return "good" if max(middle, high) <= limit else "undecided"


class Layers:
    """A few wide layers whose batch is chosen so that a step takes 5 ms on the device."""

    def __init__(self, device: torch.device, width: int) -> None:
        torch.set_float32_matmul_precision("high")
        self._device, self.batch = device, 64 if width < 1024 else 2048
        middle = (nn.Linear(width, width) for _ in range(8))
        self._model = nn.Sequential(nn.Linear(64, width), *middle, nn.Linear(width, 64)).to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=True)
        self.block(self.batches(5), 5)
        for _ in range(6 if device.type == "cuda" else 0):
            step_s = self.block(self.batches(10), 10)[0] / 10
            if 0.95 * STEP_S < step_s < 1.1 * STEP_S:
                break
            self.batch = max(int(self.batch * STEP_S / step_s) // 64 * 64, 64)

    def batches(self, steps: int) -> Iterator[torch.Tensor]:
        batch = torch.randn(self.batch, 64)
        batch = batch.pin_memory() if self._device.type == "cuda" else batch
        return iter(DataLoader([batch] * steps, batch_size=None))  # type: ignore[arg-type]

    def block(self, batches: Iterator[torch.Tensor], steps: int) -> tuple[float, float]:
        """Seconds until the device has done all steps, and seconds of this thread's processor time to issue them."""
        self._wait()
        began, own = time.perf_counter(), time.thread_time()
        for features in itertools.islice(batches, steps):
            self._optimizer.zero_grad()
            self._model(features.to(self._device, non_blocking=True)).sum().backward()
            self._optimizer.step()
        own = time.thread_time() - own  # waiting for the device below takes processor time too
        self._wait()
        return time.perf_counter() - began, own

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", choices=[*FAULTS, "cost"], default=[*FAULTS, "cost"])
    parser.add_argument("--seconds", type=float, default=170.0, help="What has not begun by then is left out.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="To see that this script itself works.")
    asked = parser.parse_args()
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
    if asked.device == "cpu":
        torch.set_num_threads(1)
    with RawRecords(asked.out) as raw:
        check(asked, Checks(torch.device(asked.device), asked.small, asked.out, raw))


def check(asked: argparse.Namespace, checks: Checks) -> None:
    began = time.monotonic()
    if asked.only != ["cost"]:
        checks.warm_up()
    left_out = []
    for code in asked.only:
        if time.monotonic() - began > asked.seconds:
            left_out.append(code)
            continue
        with _surviving(code):
            checks.cost() if code == "cost" else checks.fault(code, *FAULTS[code])
    good = sum(line["verdict"] == "good" for line in checks.lines)
    print(
        f"{good} of {len(checks.lines)} as they should be, {time.monotonic() - began:.0f} s{'; left out: ' * bool(left_out)}{', '.join(left_out)}"
    )


@contextlib.contextmanager
def _surviving(code: str) -> Iterator[None]:
    """One check that fails does not take the others with it."""
    try:
        yield
    except Exception as error:
        print(f"MISS {code}: {error!r}", flush=True)


if __name__ == "__main__":
    main()
