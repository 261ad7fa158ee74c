"""This is a training script with one fault planted, or none, to see what `redline watch` says of it and what mending it brings.

    redline watch --summary faulty.json -- python benchmarks/watch_faults.py --fault pageable
    redline watch --summary mended.json -- python benchmarks/watch_faults.py

It prints its own timers as JSON: rates over the later two thirds of its steps, the GPU waited for at both ends.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULTS = (
    "none", "no-workers", "pageable", "blocking", "item", "zero-grad", "no-autocast", "no-tf32", "channels-first",
    "not-compiled", "unfused", "scaler",
)  # fmt: skip


class Pictures(Dataset):
    """Random pictures that take about as long to fetch as a small JPEG takes to decode."""

    def __init__(self, count: int, size: int, work_s: float) -> None:
        self._count = count
        self._picture = torch.randn(3, size, size)
        self._work_s = work_s

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        ends = time.perf_counter() + self._work_s
        while time.perf_counter() < ends:
            pass
        return self._picture.clone(), index % 1000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=160)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--compile", action="store_true")
    asked = parser.parse_args()
    fault = asked.fault
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_strict = fault == "no-tf32"
    torch.set_float32_matmul_precision("highest" if is_strict else "high")
    torch.backends.cudnn.allow_tf32 = not is_strict

    from torchvision.models import resnet50

    model: nn.Module = resnet50().to(device)
    layout = torch.contiguous_format if fault == "channels-first" else torch.channels_last
    model = model.to(memory_format=layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fault != "unfused")
    if asked.compile and fault != "not-compiled":
        model = torch.compile(model)
    loader = DataLoader(
        Pictures(asked.batch * asked.steps, asked.size, 0.0004),
        batch_size=asked.batch,
        num_workers=0 if fault == "no-workers" else asked.workers,
        pin_memory=fault != "pageable",
        prefetch_factor=None if fault == "no-workers" else 4,
    )
    computes_low = fault not in ("no-autocast", "no-tf32")
    scaler = torch.amp.GradScaler(device.type, enabled=fault == "scaler")
    mark = time.perf_counter()
    waited = began = 0.0
    first, samples, total = asked.steps // 3, 0, 0.0
    for number, (images, targets) in enumerate(loader):
        if number == first:
            _wait(device)
            began, waited, samples = time.perf_counter(), 0.0, 0
        else:
            waited += time.perf_counter() - mark
        is_free = fault not in ("blocking", "pageable")
        images = images.to(device, non_blocking=is_free)
        images = images.contiguous(memory_format=layout)
        targets = targets.to(device, non_blocking=is_free)
        optimizer.zero_grad(set_to_none=fault != "zero-grad")
        with torch.autocast(device.type, torch.bfloat16, enabled=computes_low):
            loss = nn.functional.cross_entropy(model(images), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if fault == "item":
            total += loss.item()
            total += float((loss > 0).float().mean())
        samples += len(targets)
        mark = time.perf_counter()
    _wait(device)
    seconds = time.perf_counter() - began
    steps = asked.steps - first
    rates = {"steps_per_s": steps / seconds, "samples_per_s": samples / seconds, "data": waited / seconds}
    print(json.dumps({"fault": fault, "compile": asked.compile, "steps": asked.steps, **rates}))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
