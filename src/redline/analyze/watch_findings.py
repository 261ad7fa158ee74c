"""The table of rules for a run without a trace says what costs time in a watched script, and what to change about it.

Each rule looks at what the script was seen doing, never at how it is written. Its gain is the run played again without what was
measured: a change cannot save more than the time that its cause took.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from redline.analyze.finding import Finding, Lanes, Removal, Rule, findings_of, words_of
from redline.analyze.ranks import LateRank
from redline.analyze.watch import Drift
from redline.model.record import Rates
from redline.model.units import counted, format_bytes, format_seconds, format_share
from redline.trace.selections import WORTH_A_LINE

LISTENED_STEPS = 10
"""The watch listens in so many steps to what makes the host wait."""
OPERATORS_OF_A_WEIGHT = 10
"""There are a few operators for each weight of a layer. Where a step calls more than this, a loop in Python repeats them."""
TINY = 10.0
"""An operator that takes less than so many times what calling one takes at the least, on one number and with warm caches."""
TENSOR_CORES, AMPERE = 7.0, 8.0
"""NVIDIA GPUs are faster in fp16 from the first of these capabilities on, and in TF32 and bf16 from the second."""
Removed = Removal | None


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The facts that are known of a watched process."""

    rates: Rates
    process: Mapping[str, Any] = field(default_factory=dict)
    usage: Mapping[str, Any] = field(default_factory=dict)
    starts_s: tuple[float, ...] = ()
    """Starting a loader's workers was so long each time, until the first batch."""
    ends_s: tuple[float, ...] = ()
    """These are the seconds that ending them took."""
    drift: Drift | None = None
    """It is a lasting rise of the step time."""
    growth: float | None = None
    """The memory held between steps grows by so many bytes per second. It is None without steady growth."""
    late_rank: LateRank | None = None
    """This is the rank that the others wait for."""
    wait_s: float = 0.0
    """They have to wait so long for it in a step, with the exchange of gradients."""
    of_run: bool = False
    """Gains are held against the whole run, not against the steps that count."""

    @property
    def whole_s(self) -> float:
        return sum(self.rates.run_s.values()) if self.of_run else self.rates.counted_s

    def words(self, gone: Removal) -> Mapping[str, str]:
        return words_of(gone) | {"share": format_share(gone.seconds / self.whole_s), "steps": str(self.rates.steps)}

    def seconds(self, *phases: str, of_host: bool = False) -> float:
        """Returns seconds of the steps by the device's clock where there is one, or by the host's; or seconds of the whole run."""
        shares = self.rates.host_shares if of_host else self.rates.shares
        spent = self.rates.run_s if self.of_run else {name: share * self.whole_s for name, share in shares.items()}
        return sum(spent.get(phase, 0.0) for phase in phases)

    def without(self, seconds: float, count: int = 0, what: str = "") -> Removal:
        """Returns the run without time in which nothing else was going on."""
        return Removal(saves_s=min(seconds, self.whole_s), seconds=seconds, count=count, what=what)

    def without_wait(self, seconds: float, count: int = 0, what: str = "") -> Removal:
        """Removes the host's waits for the device, which still has to do what it did meanwhile."""
        lanes = Lanes(step_s=self.whole_s, host_s=self.whole_s, device_s=seconds)
        return lanes.without(host_s=seconds, count=count, what=what)

    @property
    def device(self) -> Mapping[str, Any]:
        device: Mapping[str, Any] = self.process.get("device", {})
        return device

    @property
    def autocast(self) -> str | None:
        """Returns the number format of autocast, or None without it."""
        return self.usage.get("autocast")

    @property
    def on_gpu(self) -> bool:
        return self.device.get("kind") in ("cuda", "rocm")

    @property
    def capability(self) -> float:
        """The capability is that of an NVIDIA GPU; 0 where there is none."""
        return float(self.device.get("capability") or 0) if self.device.get("kind") == "cuda" else 0.0

    def of_models(self, what: str) -> int:
        return sum(int(model.get(what) or 0) for model in self.process.get("models", []))

    @property
    def computes_in_fp32(self) -> bool:
        """Returns whether weights are in fp32 without autocast: what matrix products then run in is up to the TF32 flags."""
        dtypes = {name for model in self.process.get("models", []) for name in model.get("dtypes", {})}
        return self.autocast is None and dtypes == {"float32"}

    @property
    def loader(self) -> Mapping[str, Any] | None:
        """Returns the loader that delivers most batches: one for validation may be gone through more often. A stream has no end."""

        def delivered(loader: Mapping[str, Any]) -> float:
            planned = loader.get("batches", 1)
            return math.inf if planned is None else loader.get("iterators", 0) * planned

        return max(self.usage.get("loaders", []), key=delivered, default=None)


def findings(facts: RunFacts) -> tuple[Finding, ...]:
    """Whatever is worth changing, what would save the most first; after the causes what only shows, or makes the model itself faster."""
    timed = [*findings_of(STEP_RULES, facts), *findings_of(RUN_RULES, replace(facts, of_run=True))]
    causes = sorted(timed, key=lambda finding: (-finding.saves_s, finding.code))
    return (*remarks(facts), *causes, *findings_of(SYMPTOMS, facts), *findings_of(MODEL_RULES, facts))


def remarks(facts: RunFacts) -> Iterator[Finding]:
    """Yields what is about the result and not about time. Its gain is 1."""
    if facts.autocast == "torch.float16" and not facts.usage.get("scales"):
        yield Finding(
            code="no-grad-scaler",
            evidence="fp16 without GradScaler: small gradients become zero",
            next="scaler = torch.amp.GradScaler(), scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update(); or bf16",
            gain_bound=1.0,
        )
    if facts.growth is not None:
        yield Finding(
            code="memory-grows",
            evidence=f"the memory held between steps grows by {format_bytes(int(facts.growth * 60))} per minute",
            next="look for tensors that are kept with their graph: append loss.detach() or float(loss) instead of loss",
            gain_bound=1.0,
        )


# Each rule has a function here that says what it removes. A fact that is missing keeps it silent.


def phases(*names: str, only_if: Callable[[RunFacts], bool] = lambda _: True) -> Callable[[RunFacts], Removed]:
    return lambda facts: facts.without(facts.seconds(*names)) if only_if(facts) else None


def _restarts(facts: RunFacts) -> Removed:
    """Removes all waiting for data and the ends of the workers: workers that come and go do take processors from those that load."""
    starts_s, ends_s = facts.starts_s[1:], sum(facts.ends_s)
    if not starts_s:
        return None
    saves_s = max(sum(starts_s), facts.seconds("data")) + ends_s
    return Removal(saves_s=saves_s, seconds=sum(starts_s) + ends_s, count=len(starts_s))


def _pageable(facts: RunFacts) -> Removed:
    """Pageable batches also cost time where they are received and freed, between the steps.

    What the host does besides stays; so does what the device computes, less what it idles while the host catches up.
    """
    copies = facts.usage.get("copies", {})
    if not facts.on_gpu or copies.get("pageable", 0) <= copies.get("asked", 0) / 2:
        return None
    host_s = facts.whole_s - facts.seconds("copy", "data", "other", of_host=True)
    left_s = max(host_s, facts.seconds("forward", "backward", "optimizer") - host_s)
    copied_s = facts.seconds("copy")
    return Removal(
        saves_s=max(facts.whole_s - left_s, copied_s), seconds=max(copied_s, facts.seconds("copy", of_host=True))
    )


def _blocking(facts: RunFacts) -> Removed:
    copies = facts.usage.get("copies", {})
    asked = copies.get("asked", 0)
    if not facts.on_gpu or copies.get("pageable", 0) > asked / 2 or copies.get("blocking", 0) <= asked / 2:
        return None
    return facts.without_wait(facts.seconds("copy", of_host=True))


def _waits(facts: RunFacts) -> Removed:
    waits = sorted(facts.usage.get("waits", []), key=lambda wait: -wait["seconds"])
    count = sum(wait["count"] for wait in waits)
    # The host's waits are listened to in a few steps only, so they are scaled up to all steps.
    waited_s = sum(wait["seconds"] for wait in waits) / LISTENED_STEPS * facts.rates.steps
    if not facts.on_gpu or count < LISTENED_STEPS / 2 or waited_s < WORTH_A_LINE * facts.whole_s:
        return None
    places = ", ".join(f"{wait['where']} ({wait['how']})" for wait in waits[:3])
    return facts.without_wait(min(waited_s, 0.999 * facts.whole_s), round(count / LISTENED_STEPS), places)


def _kept_gradients(facts: RunFacts) -> Removed:
    """Gradients that stay are also added to where fresh ones would be written: the backward pass reads them once more."""
    calls = facts.usage.get("zero_grads", {})
    if not calls.get("count") or calls["kept"] <= calls["count"] / 2:
        return None
    return Removal(saves_s=min(2 * calls["seconds"], facts.whole_s), seconds=calls["seconds"])


def _scaler(facts: RunFacts) -> Removed:
    """Removes the waits of the scaler: it looks at all gradients, for which the host waits, and its calls lie between the steps."""
    if not facts.usage.get("scales") or facts.autocast == "torch.float16":
        return None
    around = ("optimizer", "other")
    return facts.without(max(facts.seconds(*around), facts.seconds(*around, of_host=True)))


def _drift(facts: RunFacts) -> Removed:
    if facts.drift is None:
        return None
    return facts.without(facts.whole_s * (1 - facts.drift.share_before) * (1 - 1 / facts.drift.ratio), facts.drift.step)


def _unfused(facts: RunFacts) -> Removed:
    plain = [one for one in facts.usage.get("optimizers", []) if one["can_fuse"] and not one["fused"]]
    names = " and ".join(dict.fromkeys(one["name"] for one in plain))
    return facts.without(facts.seconds("optimizer"), sum(one["tensors"] for one in plain), names) if plain else None


def _threads(facts: RunFacts) -> Removed:
    """Threads that wait for each other on too few cores may take any time: only what is not computed stays for sure."""
    threads, cores = facts.process.get("threads") or 0, facts.process.get("cores") or 0
    if facts.on_gpu or not cores or threads <= cores:
        return None
    return facts.without(facts.seconds("forward", "backward", "optimizer", "acting"), threads, counted(cores, "core"))


def _calls(facts: RunFacts) -> Removed:
    """Removes the passes if they are a loop in Python that calls small operators again and again with the same weights."""
    call_s, calls = facts.process.get("call_s"), facts.usage.get("operators")
    weights = sum(one["tensors"] for one in facts.usage.get("optimizers", []))
    if facts.on_gpu or not call_s or not calls or calls < OPERATORS_OF_A_WEIGHT * weights:
        return None
    passes_s = facts.seconds("forward", "backward")
    each_s = passes_s / facts.rates.steps / calls
    return facts.without(passes_s, round(calls), format_seconds(each_s)) if each_s < TINY * call_s else None


def _late_rank(facts: RunFacts) -> Removed:
    """Ranks that are in step may also exchange their gradients faster, so only what the others do by themselves stays for sure."""
    late = facts.late_rank
    return None if late is None else facts.without(facts.wait_s * facts.rates.steps, late.rank, late.phase)


def _outliers(facts: RunFacts) -> Removed:
    slow = facts.rates.outliers
    return facts.without((facts.rates.outlier_share or 0.0) * facts.whole_s, slow) if slow >= 2 else None


def _is_first_layout(facts: RunFacts) -> bool:
    """Convolutions on images in the channels-first layout. On a GPU fp32 convolutions gain nothing from another one."""
    images = any(shape.partition(" ")[0].count("×") == 3 for shape in facts.usage.get("inputs", []))
    is_low = not facts.on_gpu or not facts.computes_in_fp32
    return images and is_low and facts.of_models("convolutions") > 0 and not facts.of_models("channels_last")


def _is_strict(facts: RunFacts) -> bool:
    """Matrix products, or convolutions where the model has some, compute in fp32 without TF32."""
    flags = facts.process.get("flags", {})
    is_strict = facts.of_models("convolutions") > 0 and flags.get("cudnn_tf32") is False
    return facts.capability >= AMPERE and (is_strict or flags.get("matmul_precision") == "highest")


def _is_interpreted(facts: RunFacts) -> bool:
    return facts.on_gpu and not facts.of_models("compiled") and facts.usage.get("replays", 0) <= facts.rates.steps / 2


# What they say


def _drift_words(facts: RunFacts, removal: Removal) -> str:
    drift = facts.drift
    assert drift is not None
    after = format_seconds(drift.at_s)
    return f"from step {drift.step} on ({after} after the first) a step takes {drift.ratio:.2f} times as long as before"


def _wait(facts: RunFacts, removal: Removal) -> str:
    loader = facts.loader
    source = "" if loader is None else f" ({counted(loader.get('num_workers') or 0, 'loader worker')})"
    return f"{facts.words(removal)['share']} of the time the training waits for its next batch{source}"


def _load(facts: RunFacts, removal: Removal) -> str:
    if facts.loader is None:
        return "prepare the next batch in a thread while this step computes, or convert the data once before the loop"
    if not facts.loader.get("num_workers"):
        return (
            "load in other processes: DataLoader(..., num_workers=N, persistent_workers=True), N up to the idle cores"
        )
    return (
        f"more than {facts.loader['num_workers']} workers, a larger prefetch_factor, or less work per sample: decode, resize and "
        "augment once and store the result, or augment on the device"
    )


def _read(facts: RunFacts, removal: Removal) -> str:
    effect = (
        "it then cannot issue the next work ahead"
        if removal.saves_s >= WORTH_A_LINE * facts.whole_s
        else "the GPU is the limit meanwhile, so this costs little now; it will when the GPU's work becomes shorter"
    )
    return f"the host waits for the GPU {removal.count}× per step, {facts.words(removal)['share']} of its time, at {removal.what}; {effect}"


def _precision(facts: RunFacts, removal: Removal) -> str:
    low, scaler = ("torch.bfloat16", "") if facts.capability >= AMPERE else ("torch.float16", ", and GradScaler")
    return f'with torch.autocast("cuda", {low}): around forward pass and loss{scaler}'


STEP_RULES: tuple[Rule[RunFacts], ...] = (
    Rule(code="data-wait", removes=phases("data"), says=_wait, change=_load, least_share=0.05),
    Rule(
        code="worker-restarts",
        removes=_restarts,
        says="the loader's workers are restarted {count} times, until the first batch and at their end {mean} each: {share} of the time",
        change="DataLoader(..., persistent_workers=True)",
    ),
    Rule(
        code="pageable-copies",
        removes=_pageable,
        says="batches are copied to the GPU from pageable memory, which takes {share} of the time",
        change="DataLoader(..., pin_memory=True) and batch.to(device, non_blocking=True)",
    ),
    Rule(
        code="blocking-copies",
        removes=_blocking,
        says="the host waits for each copy to the GPU although the batches are pinned: {share} of its time; it then cannot issue the "
        "next work ahead",
        change="batch.to(device, non_blocking=True)",
    ),
    Rule(
        code="sync-in-loop",
        removes=_waits,
        says=_read,
        change="keep metrics on the GPU (total += loss.detach()) and read them every 50 steps or at the end of an epoch",
        least_share=0.0,
    ),
    Rule(
        code="zero-grad-fills",
        removes=_kept_gradients,
        says="zero_grad(set_to_none=False) writes zeros over every gradient: {share} of the time",
        change="optimizer.zero_grad(), whose default set_to_none=True frees them instead",
        least_share=0.01,
    ),
    Rule(
        code="needless-grad-scaler",
        removes=_scaler,
        says="GradScaler scales the loss and checks every gradient, but the model does not compute in fp16",
        change="call loss.backward() and optimizer.step() without GradScaler",
        least_share=0.0,
    ),
    Rule(
        code="unfused-optimizer",
        removes=_unfused,
        says="{what} takes {share} of the time and updates its {count} tensors in several passes",
        change="torch.optim.{first}(..., fused=True)",
        least_share=0.05,
    ),
    Rule(
        code="slow-rank",
        removes=_late_rank,
        says="rank {count} takes longer than the others in its {what} phase, and they wait for it: {share} of the time",
        change="look at what only that rank does, reads or shares its processor or device with; give each rank as much work",
        least_share=0.05,
    ),
    Rule(
        code="oversubscribed-threads",
        removes=_threads,
        says="{count} threads compute on {what} and wait for each other: forward and backward pass and optimizer take {share} of the "
        "time",
        change="torch.set_num_threads({first}), or OMP_NUM_THREADS",
    ),
    Rule(
        code="tiny-operators",
        removes=_calls,
        says="a step calls {count} operators that take {what} each, many times with the same weights: a loop in Python. Forward and "
        "backward pass take {share} of the time",
        change="compute more with each call: one layer for a whole sequence (torch.nn.GRU, not a cell in a Python loop), a larger "
        "batch, or torch.compile(model)",
        least_share=0.3,
    ),
    Rule(
        code="acting",
        removes=phases("acting"),
        says="acting in the environment, without gradients, takes {share} of the time",
        change="step many environments at once, so that the model decides for all of them in one call, or in processes of their own",
        least_share=0.2,
    ),
    Rule(
        code="other-work",
        removes=lambda facts: facts.without(max(facts.seconds("other") - sum(facts.ends_s), 0.0)),
        says="{share} of the time is neither data nor model nor optimizer, such as logging or metrics",
        change="look at what the loop does between its steps; log less often, or in a thread",
        least_share=0.15,
    ),
)
"""Rules about the steps: their gain is that of the steps that count."""
RUN_RULES: tuple[Rule[RunFacts], ...] = (
    Rule(
        code="validation",
        removes=phases("validation"),
        says="validation takes {share} of the run",
        change="validate every N steps, or on fewer batches",
        least_share=0.2,
    ),
    Rule(
        code="saving",
        removes=phases("saving"),
        says="saving checkpoints takes {share} of the run",
        change="save less often, save only what is needed to go on, or in a thread (torch.distributed.checkpoint.async_save)",
        least_share=0.05,
    ),
)
"""Rules about the whole run: their gain is that of the run."""
SYMPTOMS: tuple[Rule[RunFacts], ...] = (
    Rule(
        code="slow-steps",
        removes=_outliers,
        says="{count} of {steps} steps take more than twice the median and cost {share} of the time",
        change="find out what happens in them: checkpoints, logging, a loader that runs dry, garbage collection, other programs",
        least_share=0.05,
    ),
    Rule(
        code="slowdown",
        removes=_drift,
        says=_drift_words,
        change="compare what changed then: data, sequence length, clocks (redline monitor), other jobs on the machine",
    ),
)
"""Rules that see that something is slow, and not what it is: told after the causes that are known."""
MODEL_RULES: tuple[Rule[RunFacts], ...] = tuple(
    Rule(
        code=code,
        removes=phases("forward", "backward", only_if=condition),
        says=f"forward and backward pass, {{share}} of the time, {does}",
        change=change,
        least_share=0.3,
    )
    for code, condition, does, change in (
        ("autocast-off", lambda facts: facts.capability >= TENSOR_CORES and facts.computes_in_fp32, "compute in fp32", _precision),
        ("tf32-off", lambda facts: facts.computes_in_fp32 and _is_strict(facts), "compute in strict fp32, without TF32",
         'torch.set_float32_matmul_precision("high") and torch.backends.cudnn.allow_tf32 = True'),
        ("channels-first", _is_first_layout, "run convolutions in the channels-first layout",
         "model.to(memory_format=torch.channels_last) and the same for its inputs"),
        ("not-compiled", _is_interpreted, "run operator by operator", "model = torch.compile(model)"),
    )
)  # fmt: skip
"""Rules that make the model's own work faster, which is never all of it that they bound: told last."""
