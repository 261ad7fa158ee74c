"""What costs time in a watched script, what to change about it, and the most that can bring.

Each rule looks at what the script was seen doing, never at how it is written, and bounds its gain by time that was
measured: what a change makes faster cannot save more than the time it took.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from redline.analyze.finding import LARGEST_GAIN
from redline.analyze.watch import Drift, Rates
from redline.model.units import counted, format_bytes, format_seconds, format_share
from redline.model.watching import WatchFinding

WORTH_TELLING = 0.02
"""Of the time: what costs less is not told."""
DATA_SHARE = 0.05
OPTIMIZER_SHARE = 0.05
ZERO_GRAD_SHARE = 0.005
OTHER_SHARE = 0.15
MODEL_SHARE = 0.3
"""Changes to the arithmetic are not proposed where the model takes less of the time."""

LISTENED_STEPS = 10
"""What makes the host wait is listened to in so many steps."""
TENSOR_CORES_GAIN = 16.0
"""Products in fp16 or bf16 over strict fp32: about the most that any data sheet says."""
TF32_GAIN = 8.0
LAYOUT_GAIN = 2.0
COMPILE_GAIN = 4.0
"""The most seen with graphs on models of small kernels; fusion alone brings less."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a watched process."""

    rates: Rates
    process: Mapping[str, Any] = {}
    models: Mapping[str, Any] = {}
    usage: Mapping[str, Any] = {}
    drift: Drift | None = None
    growth: tuple[float, float] | None = None
    out_of_memory: Mapping[str, Any] = {}

    def share(self, *phases: str) -> float:
        return sum(self.rates.shares.get(phase, 0.0) for phase in phases)

    def host_share(self, *phases: str) -> float:
        return sum(self.rates.host_shares.get(phase, 0.0) for phase in phases)

    def waited_share(self, seconds: float) -> float:
        """Of the host's time, what it waited in the few steps in which its waits were listened to."""
        middle = self.rates.median_step_s
        return min(seconds / LISTENED_STEPS / middle, 0.99) if middle else 0.0

    @property
    def on_gpu(self) -> bool:
        return self.process.get("device", {}).get("kind") in ("cuda", "rocm")

    @property
    def capability(self) -> float:
        """Of an NVIDIA GPU; 0 where there is none."""
        device = self.process.get("device", {})
        return float(device.get("capability") or 0) if device.get("kind") == "cuda" else 0.0

    @property
    def seconds(self) -> float:
        """Of all counted steps."""
        return self.rates.steps / self.rates.steps_per_s if self.rates.steps_per_s else 0.0

    def of_models(self, what: str) -> int:
        return sum(int(model.get(what) or 0) for model in self.models.get("models", []))

    @property
    def computes_in_fp32(self) -> bool:
        """Weights in fp32 and no autocast: what matrix products then run in is up to the TF32 flags."""
        dtypes = {name for model in self.models.get("models", []) for name in model.get("dtypes", {})}
        return self.usage.get("autocast") is None and dtypes == {"float32"}


def gain(share: float) -> float:
    """How many times faster without this share of the time."""
    return min(1 / (1 - share), LARGEST_GAIN) if share < 1 else LARGEST_GAIN


def partial_gain(share: float, times: float) -> float:
    """Where this share becomes `times` faster."""
    return gain(share * (1 - 1 / times))


def sync_gain(share: float) -> float:
    """Where the host waits for the device for this share of its time and would not have to.

    It still has to do the rest, and the device still has to do what it did meanwhile.
    """
    return min(1 / max(1 - share, share), LARGEST_GAIN)


def advice_of(evidence: Evidence) -> tuple[WatchFinding, ...]:
    """Whatever is worth changing, what can bring most first."""
    broke = [out_of_memory(evidence.out_of_memory)] if evidence.out_of_memory else []
    found = [*broke, *(advice for rule in RULES if evidence.rates.shares for advice in rule(evidence))]
    return tuple(sorted(found, key=lambda advice: (-advice.gain_bound, advice.code)))


def _data_wait(seen: Evidence) -> Iterator[WatchFinding]:
    share = seen.share("data")
    if share < DATA_SHARE:
        return
    loader = _training_loader(seen)
    workers = loader.get("num_workers") or 0
    if not workers:
        change = (
            "load in other processes: DataLoader(..., num_workers=N, persistent_workers=True), N up to the idle cores"
        )
    else:
        change = (
            f"more than {workers} workers, a larger prefetch_factor, or less work per sample: decode, resize and augment "
            "once and store the result, or augment on the device"
        )
    yield WatchFinding(
        code="data-wait",
        text=f"{format_share(share)} of the time the training waits for its next batch ({counted(workers, 'loader worker')})",
        change=change,
        gain_bound=gain(share),
    )


def _worker_restarts(seen: Evidence) -> Iterator[WatchFinding]:
    for loader in seen.usage.get("loaders", []):
        starts = loader.get("starts_s", [])[1:]
        if not loader.get("num_workers") or loader.get("persistent_workers") or not starts or not seen.seconds:
            continue
        share = min(sum(starts) / seen.seconds, 0.99)
        if share >= WORTH_TELLING:
            yield WatchFinding(
                code="worker-restarts",
                text=f"the loader's workers are restarted {len(starts)} times, {format_seconds(sum(starts) / len(starts))} each "
                f"until the first batch: {format_share(share)} of the time",
                change="DataLoader(..., persistent_workers=True)",
                gain_bound=gain(min(share, seen.share("data"))),
            )


def _pageable(seen: Evidence) -> Iterator[WatchFinding]:
    copies = seen.usage.get("copies", {})
    on_host = seen.host_share("copy")
    share = max(seen.share("copy"), on_host)
    asked = copies.get("asked", 0)
    if not seen.on_gpu or not asked or share < WORTH_TELLING:
        return
    if copies["pageable"] > asked / 2:
        yield WatchFinding(
            code="pageable-copies",
            text=f"batches are copied to the GPU from pageable memory, which takes {format_share(share)} of the time",
            change="DataLoader(..., pin_memory=True) and batch.to(device, non_blocking=True)",
            gain_bound=_pinning_gain(seen),
        )
    elif copies["blocking"] > asked / 2 and on_host >= WORTH_TELLING:
        yield WatchFinding(
            code="blocking-copies",
            text=f"the host waits for each copy to the GPU although the batches are pinned: {format_share(on_host)} of its "
            "time; it then cannot issue the next work ahead",
            change="batch.to(device, non_blocking=True)",
            gain_bound=sync_gain(on_host),
        )


def _pinning_gain(seen: Evidence) -> float:
    """Pageable batches also cost time where they are received and freed, which is between the steps.

    What the host does besides stays; so does what the device computes, less what it idles while the host catches up.
    """
    host = 1 - seen.host_share("copy", "data", "other")
    device = seen.share("forward", "backward", "optimizer") - host
    return max(gain(1 - max(host, device, 1e-3)), gain(seen.share("copy")))


def _waits(seen: Evidence) -> Iterator[WatchFinding]:
    waits = sorted(seen.usage.get("waits", []), key=lambda wait: -wait["seconds"])
    if not seen.on_gpu or not waits:
        return
    per_step = sum(wait["count"] for wait in waits) / LISTENED_STEPS
    share = seen.waited_share(sum(wait["seconds"] for wait in waits))
    if per_step < 0.5 or share < WORTH_TELLING:
        return
    # A host that waits nearly always has nothing else to do: the finding stands, and its bound says how little it brings.
    effect = (
        "it then cannot issue the next work ahead"
        if sync_gain(share) >= 1 + WORTH_TELLING
        else "the GPU is the limit meanwhile, so this costs little now; it will when the GPU's work becomes shorter"
    )
    places = ", ".join(f"{wait['what'].partition(' ')[2]} ({wait['what'].partition(' ')[0]})" for wait in waits[:3])
    yield WatchFinding(
        code="sync-in-loop",
        text=f"the host waits for the GPU {per_step:.0f}× per step, {format_share(share)} of its time, at {places}; {effect}",
        change="keep metrics on the GPU (total += loss.detach()) and read them every 50 steps or at the end of an epoch",
        gain_bound=sync_gain(share),
    )


def _zero_grad(seen: Evidence) -> Iterator[WatchFinding]:
    calls = seen.usage.get("zero_grads", {})
    if not calls.get("count") or calls["kept"] <= calls["count"] / 2 or not seen.seconds:
        return
    share = min(calls["seconds"] / seen.seconds, 0.5)
    # Gradients that stay are also added to where fresh ones would be written: the backward pass reads them once more.
    bound = gain(min(2 * share, 0.5))
    if share >= ZERO_GRAD_SHARE:
        yield WatchFinding(
            code="zero-grad-fills",
            text=f"zero_grad(set_to_none=False) writes zeros over every gradient: {format_share(share)} of the time",
            change="optimizer.zero_grad(), whose default set_to_none=True frees them instead",
            gain_bound=bound,
        )


def _optimizer(seen: Evidence) -> Iterator[WatchFinding]:
    share = seen.share("optimizer")
    plain = [one for one in seen.usage.get("optimizers", []) if one["can_fuse"] and not one["fused"]]
    if share < OPTIMIZER_SHARE or not plain:
        return
    names = " and ".join(dict.fromkeys(one["name"] for one in plain))
    yield WatchFinding(
        code="unfused-optimizer",
        text=f"{names} takes {format_share(share)} of the time and updates its {sum(one['tensors'] for one in plain)} "
        "tensors in several passes",
        change=f"torch.optim.{plain[0]['name']}(..., fused=True)",
        gain_bound=gain(share),
    )


def _precision(seen: Evidence) -> Iterator[WatchFinding]:
    share = seen.share("forward", "backward")
    if seen.capability < 7.0 or share < MODEL_SHARE or not seen.computes_in_fp32:
        return
    yield WatchFinding(
        code="autocast-off",
        text=f"forward and backward pass, {format_share(share)} of the time, compute in fp32",
        change='with torch.autocast("cuda", torch.bfloat16): around forward pass and loss'
        + ("" if seen.capability >= 8.0 else " (this GPU: torch.float16 with torch.amp.GradScaler)"),
        gain_bound=partial_gain(share, TENSOR_CORES_GAIN),
    )
    flags = seen.models.get("flags", {})
    if seen.capability >= 8.0 and (flags.get("matmul_precision") == "highest" or flags.get("cudnn_tf32") is False):
        yield WatchFinding(
            code="tf32-off",
            text="products of fp32 matrices run in strict fp32, without TF32",
            change='torch.set_float32_matmul_precision("high") at the start'
            + ("" if flags.get("cudnn_tf32") is not False else " and torch.backends.cudnn.allow_tf32 = True"),
            gain_bound=partial_gain(share, TF32_GAIN),
        )


def _layout(seen: Evidence) -> Iterator[WatchFinding]:
    share = seen.share("forward", "backward")
    convolutions = seen.of_models("convolutions")
    feeds_images = any(len(shape.split(" ")[0].split("×")) == 4 for shape in seen.usage.get("inputs", []))
    if not convolutions or seen.of_models("channels_last") or not feeds_images or share < MODEL_SHARE:
        return
    if seen.on_gpu and seen.computes_in_fp32:
        return  # without tensor cores the layout brings nothing on a GPU
    yield WatchFinding(
        code="channels-first",
        text=f"{convolutions} convolutions run on tensors in the channels-first layout",
        change="model.to(memory_format=torch.channels_last), and the same for the batches",
        gain_bound=partial_gain(share, LAYOUT_GAIN),
    )


def _compile(seen: Evidence) -> Iterator[WatchFinding]:
    share = seen.share("forward", "backward")
    if not seen.on_gpu or share < MODEL_SHARE or any(one.get("compiled") for one in seen.models.get("models", [])):
        return
    if seen.usage.get("replays", 0) > seen.rates.steps / 2:
        return  # a recorded graph: nothing is issued operator by operator
    yield WatchFinding(
        code="not-compiled",
        text=f"forward and backward pass, {format_share(share)} of the time, run operator by operator",
        change="model = torch.compile(model)",
        gain_bound=partial_gain(share, COMPILE_GAIN),
    )


def _scaler(seen: Evidence) -> Iterator[WatchFinding]:
    scaler, autocast = seen.usage.get("scaler"), seen.usage.get("autocast")
    is_on = bool(scaler and scaler["enabled"])
    if is_on and autocast != "torch.float16":
        formats = "bf16, which has the range of fp32" if autocast == "torch.bfloat16" else "fp32"
        yield WatchFinding(
            code="needless-grad-scaler",
            text=f"GradScaler scales the loss and checks every gradient, but the model computes in {formats}",
            change="call loss.backward() and optimizer.step() without GradScaler",
            gain_bound=gain(min(seen.share("optimizer", "other"), 0.5))
            * sync_gain(seen.waited_share(seen.usage.get("optimizer_wait_s", 0.0))),
        )
    if autocast == "torch.float16" and not is_on and seen.rates.steps:
        yield WatchFinding(
            code="no-grad-scaler",
            text="fp16 without GradScaler: small gradients become zero",
            change="scaler = torch.amp.GradScaler(), scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update(); "
            "or bf16",
            gain_bound=1.0,
        )


def out_of_memory(told: Mapping[str, Any]) -> WatchFinding:
    held = sorted(told["held"].items(), key=lambda part: -part[1])
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in held if size)
    largest = held[0][0] if held and held[0][1] else "unknown"
    change = {
        "weights": "fewer bytes per weight (bf16), or shard the model (FSDP)",
        "gradients": "a smaller model per device: shard it (FSDP)",
        "optimizer state": "an optimizer with less state, or shard it (ZeroRedundancyOptimizer, FSDP)",
    }.get(largest, "a smaller batch with gradient accumulation, autocast, or torch.utils.checkpoint around the blocks")
    kept = (
        f"; the allocator's snapshot is {told['snapshot']} (https://pytorch.org/memory_viz)"
        if told.get("snapshot")
        else ""
    )
    return WatchFinding(
        code="out-of-memory",
        text=f"memory ran out in the {told['phase']} pass after step {told['step']}, at {told['where']}: "
        f"{parts or 'nothing of it is known'}{kept}",
        change=change,
        gain_bound=1.0,
    )


def _other(seen: Evidence) -> Iterator[WatchFinding]:
    share = seen.share("other")
    if share >= OTHER_SHARE:
        yield WatchFinding(
            code="other-work",
            text=f"{format_share(share)} of the time is neither data nor model nor optimizer: logging, metrics, checkpoints",
            change="look at what the loop does between its steps; log and save less often, or in a thread",
            gain_bound=gain(share),
        )


def _course(seen: Evidence) -> Iterator[WatchFinding]:
    """How the run went: slow steps, drift, memory that grows."""
    if seen.rates.outlier_share is not None and seen.rates.outlier_share >= DATA_SHARE and seen.rates.outliers >= 2:
        yield WatchFinding(
            code="slow-steps",
            text=f"{seen.rates.outliers} of {seen.rates.steps} steps take more than twice the median and cost "
            f"{format_share(seen.rates.outlier_share)} of the time",
            change="find out what happens in them: checkpoints, logging, a loader that runs dry, garbage collection, other programs",
            gain_bound=gain(seen.rates.outlier_share),
        )
    if seen.drift is not None:
        yield WatchFinding(
            code="slowdown",
            text=f"from step {seen.drift.step} on ({format_seconds(seen.drift.at_s)} after the first) a step takes "
            f"{seen.drift.ratio:.2f} times as long as before",
            change="compare what changed then: data, sequence length, clocks (redline monitor), other jobs on the machine",
            gain_bound=min(seen.drift.ratio, LARGEST_GAIN),
        )
    if seen.growth is not None:
        yield WatchFinding(
            code="memory-grows",
            text=f"the memory held between steps grows by {format_bytes(int(seen.growth[1] * 60))} per minute",
            change="look for tensors that are kept with their graph: append loss.detach() or float(loss) instead of loss",
            gain_bound=1.0,
        )


RULES: tuple[Callable[[Evidence], Iterator[WatchFinding]], ...] = (
    _data_wait,
    _worker_restarts,
    _pageable,
    _waits,
    _zero_grad,
    _optimizer,
    _precision,
    _layout,
    _compile,
    _scaler,
    _other,
    _course,
)


def _training_loader(seen: Evidence) -> dict[str, Any]:
    """The one that delivers most batches: one for validation may be gone through more often. A stream has no end."""

    def batches(loader: dict[str, Any]) -> float:
        planned = loader.get("batches", 1)
        return math.inf if planned is None else loader.get("iterators", 0) * planned

    return max(seen.usage.get("loaders", []), key=batches, default={})
