"""The printed forms people's scripts read: the workshop's summary, the public script's lines, DeepSpeed's FLOPs profile."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from redline.model.fields import Frozen
from redline.model.units import printable
from redline.model.work import ModuleWork, WorkCount
from redline.show.export import json_document

if TYPE_CHECKING:
    from redline.bench.micro import Iteration, MicroBench
    from redline.bench.workload.ranks import Rank
    from redline.compat.micro import Asked


RULE = "=" * 40


class Figures(Frozen):
    """What one run measured."""

    network: str
    device: str
    device_name: str
    precision: str
    training: bool
    iterations: int
    local_batch: int
    global_batch: int
    world: int
    mean_s: float
    """The mean time of an iteration; of several ranks the slowest."""
    std_s: float
    peak_bytes: int | None
    compile_s: float | None
    phases: dict[str, float]
    losses: tuple[float, ...]
    times: tuple[float, ...]
    warmup_times: tuple[float, ...] = ()

    @property
    def per_s(self) -> float:
        return self.global_batch / self.mean_s


def echo(asked: Asked, local: int, bench: MicroBench, rank: Rank) -> Iterator[str]:
    """The settings, as they are about to be used."""
    device, batch = bench.device.info(), asked.spec.workload.batch
    yield f"Using network: {asked.network}"
    yield f"Mode: {'training' if asked.training else 'inference'}"
    yield f"Batch size: {local if rank.world == 1 else batch}"
    yield f"Iterations: {asked.iterations}"
    yield f"FP16: {asked.precision == 'FP16'}"
    yield f"Precision: {asked.precision}"
    yield f"Device: {device.kind}" if device.index is None else f"Device: {device.kind}:{device.index}"
    if rank.world > 1:
        yield f"Local batch size: {local}\nGlobal batch size: {batch}\nWorld size: {rank.world}"
    if asked.accumulation > 1:
        yield f"Optimizer step every {asked.accumulation} iterations"
    if asked.compile_mode is not None:
        yield f"PyTorch Compile: ENABLED (mode={asked.compile_mode})"
    yield from (f"Note: {note}" for note in asked.notes)


def summary_block(found: Figures) -> str:
    memory = "n/a" if found.peak_bytes is None else f"{found.peak_bytes / 1e6:.0f} MB"
    several, per_gpu, compiled = found.world > 1, "", ""
    batches = f"Batch size: {found.local_batch}"
    if found.compile_s is not None:
        compiled = f"\nCompilation time: {found.compile_s:.1f} seconds (first iteration)"
    if several:
        per_gpu = f"\nPer-GPU throughput: {found.per_s / found.world:.1f} samples/sec"
        batches = (
            f"Global batch size: {found.global_batch}\nLocal batch size: {found.local_batch}\nWorld size: {found.world}"
        )
    return f"""{RULE}
Performance Summary{" (GPU 0)" if several else ""}:
{RULE}
Network: {found.network}
{batches}
Iterations: {found.iterations} (excluding warmup)
Precision: {found.precision}

Average time per iteration: {found.mean_s:.6f} seconds
Standard deviation: {found.std_s:.6f} seconds
Throughput: {found.per_s:.1f} samples/sec{" (global)" if several else ""}{per_gpu}
{"Memory usage" if found.device == "cpu" else "GPU Memory Usage"}: {memory}{compiled}

Images per second: {found.per_s:.1f}
Milliseconds per batch: {found.mean_s * 1e3:.3f}
Microseconds per sample: {found.mean_s * 1e6 / found.global_batch:.1f}
{RULE}

--------------------SUMMARY--------------------------
Microbenchmark for network : {found.network}
Num devices: {found.world}
Dtype: {"FP16" if found.precision != "FP32" else "FP32"}
Mini batch size [img] : {found.global_batch}
Mini batch size [img/gpu] : {found.local_batch}
Throughput [img/sec] : {found.per_s}
Time per mini-batch : {found.mean_s}"""


def tables_form(tables: Mapping[str, str], *, on_device: bool) -> str:
    return f"""
{RULE}
PyTorch Profiler Results:
{RULE}

Top 10 operations by total CPU time:
{tables["cpu"]}
Top 10 operations by total {"CUDA" if on_device else "self CPU"} time:
{tables["device"]}
Memory Profiling:
{tables["memory"]}"""


def flops_form(found: Figures, work: WorkCount, seconds: Mapping[str, float], *, step: int) -> Iterator[str]:
    """The profile in the layout that people know from DeepSpeed."""
    forward_s = found.phases.get("forward", 0.0 if found.training else found.mean_s) or seconds.get("", 0.0)
    backward_s, step_s = found.phases.get("backward", 0.0), found.phases.get("optimizer", 0.0)
    flops, both, iteration_s = work.flops, work.flops + work.backward_flops, forward_s + backward_s + step_s
    facts = {
        "world size": str(found.world),
        "data parallel size": str(found.world),
        "model parallel size": "1",
        "batch size per GPU": str(found.local_batch),
        "params per GPU": _count(work.params),
        "params of model = params per GPU * mp_size": _count(work.params),
        "fwd MACs per GPU": _count(work.macs) + "MACs",
        "fwd FLOPs per GPU": _count(flops),
        "fwd FLOPs of model = fwd FLOPs per GPU * mp_size": _count(flops),
        "fwd latency": _time(forward_s),
        "fwd FLOPS per GPU = fwd FLOPs per GPU / fwd latency": _rate(flops, forward_s),
    }
    if found.training:
        facts |= {
            "bwd latency": _time(backward_s),
            "bwd FLOPS per GPU = bwd FLOPs per GPU / bwd latency": _rate(work.backward_flops, backward_s),
            "fwd+bwd FLOPS per GPU = fwd+bwd FLOPs per GPU / (fwd+bwd latency)": _rate(both, forward_s + backward_s),
            "step latency": _time(step_s),
            "iter latency": _time(iteration_s),
            "FLOPS per GPU = fwd+bwd FLOPs per GPU / iter latency": _rate(both, iteration_s),
            "samples/second": f"{found.local_batch / iteration_s:.2f}",
        }
    yield f"""
{RULE}
FLOPS Profiler Output:
{RULE}

-------------------------- Flops Profiler --------------------------
Profile Summary at step {step}:
Notations: MACs are multiply-accumulate operations, FLOPs floating-point operations, FLOPS those per second;
fwd, bwd and step are the forward pass, the backward pass and the optimizer's step. All of the whole batch.
"""
    yield from (f"{name + ':':<72} {value}" for name, value in facts.items())
    yield "\n----------------------------- Aggregated Profile per GPU -----------------------------"
    yield "Top 3 modules in terms of params, MACs or fwd latency at different model depths:"
    yield from _aggregated(work, seconds)
    yield "\n------------------------------ Detailed Profile per GPU ------------------------------"
    yield "Each module profile is listed after its name in the following order:"
    yield "params, percentage of total params, MACs, percentage of total MACs, fwd latency, percentage of total fwd latency\n"
    yield from (_detailed(module, work, seconds) for module in work.modules)
    yield "-" * 78


def _aggregated(work: WorkCount, seconds: Mapping[str, float]) -> Iterator[str]:
    for depth in range(max((_depth(module) for module in work.modules), default=-1) + 1):
        yield f"depth {depth}:"
        for word, value, shown in (
            ("params", lambda module: module.params, _count),
            ("MACs", lambda module: module.flops // 2, _count),
            ("fwd latency", lambda module: seconds.get(module.path, 0.0), _time),
        ):
            totals: dict[str, float] = {}
            for module in work.modules:
                if _depth(module) == depth:
                    totals[module.type] = totals.get(module.type, 0) + value(module)
            top = sorted(totals, key=lambda kind: -totals[kind])[:3]
            yield f"    {word:<12} - { {kind: shown(totals[kind]) for kind in top} }"


def _detailed(module: ModuleWork, work: WorkCount, seconds: Mapping[str, float]) -> str:
    name = module.path.rpartition(".")[2] if module.path else module.type
    latency, macs = seconds.get(module.path), module.flops // 2
    took = "n/a, n/a" if latency is None else f"{_time(latency)}, {_share(latency, seconds.get('', 0.0))}"
    held = (
        f"{_count(module.params)}, {_share(module.params, work.params)}, {_count(macs)}MACs, {_share(macs, work.macs)}"
    )
    return f"{'  ' * _depth(module)}{name}: {f'{module.type} ' if module.path else ''}({held}, {took})"


def _depth(module: ModuleWork) -> int:
    return module.path.count(".") + 1 if module.path else 0


def _count(number: float) -> str:
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.2f} {unit}"
    return f"{number:.0f} "


def _rate(flops: float, seconds: float) -> str:
    return f"{_count(flops / seconds)}FLOPS" if seconds else "n/a"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.2f} us"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.2%}" if whole else "0.00%"


def write_csv(path: Path, found: Figures) -> None:
    """Write one row, under a header that is written once."""
    row = {
        "Name": found.network,
        "GPUs": found.world,
        "Mini batch size [img]": found.global_batch,
        "Mini batch size [img/gpu]": found.local_batch,
        "Throughput [img/sec]": found.per_s,
        "Time per mini-batch": found.mean_s,
    }
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, row)
        if not file.tell():
            writer.writeheader()
        writer.writerow(row)


def write_json(path: Path, found: Figures) -> None:
    fields = {**msgspec.to_builtins(found), "throughput_per_s": found.per_s}
    path.write_text(json_document("micro", fields), encoding="utf-8")


def iteration_line(word: str, one: Iteration) -> str:
    """Enough digits are printed to see three figures of a short iteration."""
    digits = 3 if one.seconds >= 0.1 else 4 if one.seconds >= 0.01 else 6
    return f"{word} {one.number}: Loss = {one.loss:.4f}, Time = {one.seconds:.{digits}f} seconds"


class Printer:
    """Lines on stdout, each named after its GPU if there are several."""

    def __init__(self, rank: Rank) -> None:
        self._prefix = f"[GPU {rank.number}] " if rank.world > 1 else ""

    def __call__(self, *texts: str) -> None:
        lines = [line for text in texts for line in text.split("\n")]
        self.plain(*(f"{self._prefix}{line}" if line and self._prefix else line for line in lines))

    def plain(self, *texts: str) -> None:
        # One write per call, because several ranks share the terminal.
        sys.stdout.write("".join(f"{printable(line)}\n" for text in texts for line in text.split("\n")))
        sys.stdout.flush()
