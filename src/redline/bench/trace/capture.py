"""A trace of a few steps, outside every timed block, and what capturing cost."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import torch

from redline.bench.device.base import Device
from redline.bench.workload.step import TimedStep
from redline.protocol import Profile
from redline.record import TraceRef


def capture(step: TimedStep, device: Device, request: Profile) -> TraceRef:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.is_accelerator:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    path = Path(request.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Profiler won't be using warmup" and its kin: the schedule is ours
        with (
            step.context(),
            torch.profiler.profile(
                activities=activities,
                schedule=torch.profiler.schedule(wait=request.wait, warmup=request.warmup, active=request.active),
                on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
                record_shapes=request.shapes,
                profile_memory=request.memory,
                with_stack=request.stacks,
            ) as profiler,
        ):
            for _ in range(request.wait + request.warmup + request.active):
                step()
                device.synchronize()
                profiler.step()
    return TraceRef(
        path=str(path), steps=request.active, capture_s=time.perf_counter() - started, bytes=path.stat().st_size
    )
