"""Each finding of `redline watch` on the GPU at hand: planted, mended, and what mending brings against the stated bound.

    python scripts/check_watch_on_gpu.py [--out FOLDER] [--only CODE…] [--device cpu --small]

One process trains ResNet-50 on loaded pictures with one fault at a time and then without any, inside `redline.watch()`, with timers of
its own. For each fault: whether its finding is raised, whether the mended twin is free of it, the gain of mending over the bound
(it must not be above it by more than 3 %), and how far the watched steps/s are from the timers' (2 %). At the end what watching
costs: the mended script with and without it, in turns. About 100 s on an H200. Every line is written as it comes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import redline
from redline.api.workspace import Workspace

MARGIN, AGREEMENT = 1.03, 0.02


@dataclass(frozen=True)
class Setup:
    """One training script; the defaults are the mended one."""

    steps: int = 40
    epochs: int = 1
    batch: int = 384
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
SHORT = replace(MENDED, steps=12, epochs=4)
FP32 = replace(MENDED, autocast=None, steps=24)
CHAIN = replace(MENDED, is_chain=True, batch=4096, size=16, workers=2)
FAULTS: dict[str, tuple[Setup, Setup]] = {
    "data-wait": (replace(MENDED, workers=0, steps=24), MENDED),
    "worker-restarts": (replace(SHORT, persistent=False), SHORT),
    "pageable-copies": (replace(MENDED, pinned=False, non_blocking=False), MENDED),
    "blocking-copies": (replace(MENDED, non_blocking=False), MENDED),
    "sync-in-loop": (replace(MENDED, reads_loss=True), MENDED),
    "zero-grad-fills": (replace(MENDED, set_to_none=False), MENDED),
    "unfused-optimizer": (replace(MENDED, fused=False), MENDED),
    "autocast-off": (FP32, MENDED),
    "tf32-off": (replace(FP32, tf32=False), FP32),
    "channels-first": (replace(MENDED, channels_last=False), MENDED),
    "needless-grad-scaler": (replace(MENDED, scaler=True), MENDED),
    "no-grad-scaler": (replace(MENDED, autocast=torch.float16), replace(MENDED, autocast=torch.float16, scaler=True)),
    "other-work": (replace(MENDED, reads_loss=True, logging_s=0.03), replace(MENDED, reads_loss=True)),
    "slow-steps": (replace(MENDED, stall_s=0.4), MENDED),
    "not-compiled": (CHAIN, replace(CHAIN, compiled=True)),
}


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


class Chain(nn.Module):
    """Thirty elementwise operators, which a compiler makes one kernel of."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3 * size * size, 1024), nn.Linear(1024, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.first(images.flatten(1))
        for _ in range(10):
            hidden = torch.sigmoid(hidden) * hidden + 0.5
        return self.last(hidden)


class Script:
    """A script as somebody may have written it, ready to train."""

    def __init__(self, setup: Setup, device: torch.device) -> None:
        torch.set_float32_matmul_precision("high" if setup.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = setup.tf32
        torch.manual_seed(0)
        self.setup, self.device = setup, device
        self.layout = torch.channels_last if setup.channels_last else torch.contiguous_format
        if setup.is_chain:
            model: nn.Module = Chain(setup.size).to(device)
        else:
            from torchvision.models import resnet50

            model = resnet50().to(device).to(memory_format=self.layout)  # type: ignore[call-overload]
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=setup.fused)
        self.model = torch.compile(model) if setup.compiled else model
        self.scaler = torch.amp.GradScaler(device.type, enabled=setup.scaler)
        per_epoch = setup.batch * setup.steps
        self.loader = DataLoader(
            Pictures(per_epoch, setup.size, 0.0 if setup.is_chain else 0.0002),
            batch_size=setup.batch,
            num_workers=setup.workers,
            pin_memory=setup.pinned and device.type == "cuda",
            persistent_workers=setup.persistent and setup.workers > 0,
            prefetch_factor=2 if setup.workers else None,
        )
        images = torch.randn(setup.batch, 3, setup.size, setup.size)
        for _ in range(5):  # kernels are chosen and memory is fetched before anybody looks
            self.step(images, torch.zeros(setup.batch, dtype=torch.long), 0)
        self.wait()

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
        if setup.stall_s and number % 10 == 9:
            self.wait()
            time.sleep(setup.stall_s)

    def train(self) -> float:
        """Seconds that all epochs take, by a timer of one's own."""
        began = time.perf_counter()
        for _ in range(self.setup.epochs):
            for number, (images, targets) in enumerate(self.loader):
                self.step(images, targets, number)
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Checks:
    def __init__(self, device: torch.device, small: bool, out: Path | None) -> None:
        self._device, self._small, self._out = device, small, out
        self._seen: dict[Setup, dict[str, Any]] = {}
        self.lines: list[dict[str, Any]] = []

    def _smaller(self, setup: Setup) -> Setup:
        small = {
            "steps": 20,
            "batch": 4,
            "size": 16,
            "workers": min(setup.workers, 1),
            "epochs": min(setup.epochs, 2),
            "is_chain": True,
        }
        return replace(setup, **small) if self._small else setup

    def look(self, setup: Setup) -> dict[str, Any]:
        """What a script's own timer and Redline say of it; asked once."""
        setup = self._smaller(setup)
        if setup not in self._seen:
            script = Script(setup, self._device)
            with Workspace(keep=False) as nowhere, redline.watch(workspace=nowhere) as watch:
                seconds = script.train()
            assert watch.result is not None
            told = watch.result.summary
            own = setup.steps * setup.epochs / seconds
            bounds = {each["code"]: each["gain_bound"] for each in told["findings"]}
            self._seen[setup] = {"own": own, "watched": told["steps_per_s"], "bounds": bounds, "shares": told["shares"]}
            del script
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
        return self._seen[setup]

    def fault(self, code: str, faulty: Setup, mended: Setup) -> None:
        before, after = self.look(faulty), self.look(mended)
        gain, bound = after["own"] / before["own"], before["bounds"].get(code)
        off = [each["watched"] / each["own"] - 1 for each in (before, after)]
        line = {
            "code": code,
            "raised": bound is not None,
            "mended_raised": code in after["bounds"],
            "steps_per_s": before["own"],
            "mended_steps_per_s": after["own"],
            "gain": gain,
            "bound": bound,
            "within_bound": bound is not None and gain <= bound * MARGIN,
            "agreement": off,
            "shares": before["shares"],
            "also_raised": sorted(before["bounds"].keys() - {code}),
        }
        self.tell(
            line,
            line["raised"] and not line["mended_raised"] and line["within_bound"] and max(map(abs, off)) <= AGREEMENT,
        )

    def cost(self) -> None:
        """The mended script with and without watching, in turns."""
        script = Script(self._smaller(MENDED), self._device)
        ratios = []
        for number in range(4):
            plain = script.train()
            with Workspace(keep=False) as nowhere, redline.watch(workspace=nowhere):
                watched = script.train()
            if number:
                ratios.append(watched / plain)
        step_s = plain / script.setup.steps
        self.tell({"code": "cost", "step_ms": 1e3 * step_s, "ratio": statistics.median(ratios), "ratios": ratios}, True)

    def tell(self, line: dict[str, Any], is_good: bool) -> None:
        line["good"] = bool(is_good)
        self.lines.append(line)
        shown = {
            key: round(value, 3) if isinstance(value, float) else value
            for key, value in line.items()
            if key != "shares"
        }
        text = f"{'ok  ' if is_good else 'MISS'} {json.dumps(shown)}"
        print(text, flush=True)
        if self._out is not None:
            with (self._out / "watch.txt").open("a") as file:
                file.write(text + "\n")
            (self._out / "watch.json").write_text(json.dumps(self.lines, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", choices=[*FAULTS, "cost"], default=[*FAULTS, "cost"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="To see that this script itself works.")
    asked = parser.parse_args()
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    checks = Checks(torch.device(asked.device), asked.small, asked.out)
    for code in asked.only:
        with _surviving(code):
            checks.cost() if code == "cost" else checks.fault(code, *FAULTS[code])
    good = sum(line["good"] for line in checks.lines)
    print(f"{good} of {len(checks.lines)} as they should be, {time.monotonic() - began:.0f} s")


@contextlib.contextmanager
def _surviving(code: str) -> Iterator[None]:
    """One check that fails does not take the others with it."""
    try:
        yield
    except Exception as error:
        print(f"MISS {code}: {error!r}", flush=True)


if __name__ == "__main__":
    main()
