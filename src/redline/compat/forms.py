"""The printed forms people's scripts read: the workshop's summary, the public script's lines, DeepSpeed's FLOPs profile."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
CSV_COLUMNS = (
    "Name",
    "GPUs",
    "Mini batch size [img]",
    "Mini batch size [img/gpu]",
    "Throughput [img/sec]",
    "Time per mini-batch",
)


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
    """Mean time of an iteration; of several ranks the slowest."""
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


def echo(network: str, asked: Asked, local: int, bench: MicroBench, rank: Rank) -> list[str]:
    """The settings, as they are about to be used."""
    device = bench.device.info()
    lines = [
        f"Using network: {network}",
        f"Mode: {'training' if asked.training else 'inference'}",
        f"Batch size: {local if rank.world == 1 else asked.batch}",
        f"Iterations: {asked.iterations}",
        f"FP16: {asked.precision == 'FP16'}",
        f"Precision: {asked.precision}",
        f"Device: {device.kind}:{device.index}" if device.index is not None else f"Device: {device.kind}",
    ]
    if rank.world > 1:
        lines += [f"Local batch size: {local}", f"Global batch size: {asked.batch}", f"World size: {rank.world}"]
    if asked.accumulation > 1:
        lines.append(f"Optimizer step every {asked.accumulation} iterations")
    if asked.compile_mode is not None:
        lines.append(f"PyTorch Compile: ENABLED (mode={asked.compile_mode})")
    return [*lines, *(f"Note: {note}" for note in asked.notes)]


def summary_block(found: Figures) -> list[str]:
    several = found.world > 1
    lines = [RULE, "Performance Summary (GPU 0):" if several else "Performance Summary:", RULE]
    lines += [f"Network: {found.network}"]
    if several:
        lines += [
            f"Global batch size: {found.global_batch}",
            f"Local batch size: {found.local_batch}",
            f"World size: {found.world}",
        ]
    else:
        lines += [f"Batch size: {found.local_batch}"]
    lines += [f"Iterations: {found.iterations} (excluding warmup)", f"Precision: {found.precision}", ""]
    memory = "n/a" if found.peak_bytes is None else f"{found.peak_bytes / 1e6:.0f} MB"
    word = "Memory usage" if found.device == "cpu" else "GPU Memory Usage"
    lines += [
        f"Average time per iteration: {found.mean_s:.6f} seconds",
        f"Standard deviation: {found.std_s:.6f} seconds",
        f"Throughput: {found.per_s:.1f} samples/sec{' (global)' if several else ''}",
    ]
    if several:
        lines.append(f"Per-GPU throughput: {found.per_s / found.world:.1f} samples/sec")
    lines += [f"{word}: {memory}"]
    if found.compile_s is not None:
        lines.append(f"Compilation time: {found.compile_s:.1f} seconds (first iteration)")
    lines += [
        "",
        f"Images per second: {found.per_s:.1f}",
        f"Milliseconds per batch: {found.mean_s * 1e3:.3f}",
        f"Microseconds per sample: {found.mean_s * 1e6 / found.global_batch:.1f}",
        RULE,
    ]
    return lines


def public_lines(found: Figures) -> list[str]:
    """As the public script prints them."""
    return [
        "--------------------SUMMARY--------------------------",
        f"Microbenchmark for network : {found.network}",
        f"Num devices: {found.world}",
        f"Dtype: {'FP16' if found.precision != 'FP32' else 'FP32'}",
        f"Mini batch size [img] : {found.global_batch}",
        f"Mini batch size [img/gpu] : {found.local_batch}",
        f"Throughput [img/sec] : {found.per_s}",
        f"Time per mini-batch : {found.mean_s}",
    ]


def tables_form(tables: Mapping[str, str], *, on_device: bool) -> list[str]:
    device = "CUDA" if on_device else "self CPU"
    return [
        "",
        RULE,
        "PyTorch Profiler Results:",
        RULE,
        "",
        "Top 10 operations by total CPU time:",
        tables["cpu"],
        f"Top 10 operations by total {device} time:",
        tables["device"],
        "Memory Profiling:",
        tables["memory"],
    ]


def flops_form(found: Figures, work: WorkCount, seconds: Mapping[str, float], *, step: int) -> list[str]:
    """The profile in the layout that people know from DeepSpeed."""
    forward_s = found.phases.get("forward", found.mean_s if not found.training else 0.0) or seconds.get("", 0.0)
    backward_s, step_s = found.phases.get("backward"), found.phases.get("optimizer")
    flops, backward = work.flops, work.backward_flops
    lines = [
        "",
        RULE,
        "FLOPS Profiler Output:",
        RULE,
        "",
        "-------------------------- Flops Profiler --------------------------",
        f"Profile Summary at step {step}:",
        "Notations: MACs are multiply-accumulate operations, FLOPs floating-point operations, FLOPS those per second;",
        "fwd, bwd and step are the forward pass, the backward pass and the optimizer's step. All of the whole batch.",
        "",
        _fact("world size", str(found.world)),
        _fact("data parallel size", str(found.world)),
        _fact("model parallel size", "1"),
        _fact("batch size per GPU", str(found.local_batch)),
        _fact("params per GPU", _count(work.params)),
        _fact("params of model = params per GPU * mp_size", _count(work.params)),
        _fact("fwd MACs per GPU", _count(work.macs) + "MACs"),
        _fact("fwd FLOPs per GPU", _count(flops)),
        _fact("fwd FLOPs of model = fwd FLOPs per GPU * mp_size", _count(flops)),
        _fact("fwd latency", _time(forward_s)),
    ]
    if backward_s:
        lines.append(_fact("bwd latency", _time(backward_s)))
    lines.append(_fact("fwd FLOPS per GPU = fwd FLOPs per GPU / fwd latency", _rate(flops, forward_s)))
    if backward_s:
        lines.append(_fact("bwd FLOPS per GPU = bwd FLOPs per GPU / bwd latency", _rate(backward, backward_s)))
        both = forward_s + backward_s
        lines.append(
            _fact("fwd+bwd FLOPS per GPU = fwd+bwd FLOPs per GPU / (fwd+bwd latency)", _rate(flops + backward, both))
        )
    if step_s is not None:
        lines.append(_fact("step latency", _time(step_s)))
        iteration = forward_s + (backward_s or 0.0) + step_s
        lines.append(_fact("iter latency", _time(iteration)))
        lines.append(_fact("FLOPS per GPU = fwd+bwd FLOPs per GPU / iter latency", _rate(flops + backward, iteration)))
        lines.append(_fact("samples/second", f"{found.local_batch / iteration:.2f}"))
    lines += ["", *_aggregated(work, seconds), "", *_tree(work, seconds), "-" * 78]
    return lines


def _aggregated(work: WorkCount, seconds: Mapping[str, float]) -> Iterator[str]:
    yield "----------------------------- Aggregated Profile per GPU -----------------------------"
    yield "Top 3 modules in terms of params, MACs or fwd latency at different model depths:"
    by_depth: dict[int, list[ModuleWork]] = {}
    for module in work.modules:
        by_depth.setdefault(_depth(module), []).append(module)
    for depth, modules in sorted(by_depth.items()):
        yield f"depth {depth}:"
        kinds: dict[str, list[ModuleWork]] = {}
        for module in modules:
            kinds.setdefault(module.type, []).append(module)
        for word, value in (
            ("params", lambda each: sum(one.params for one in each)),
            ("MACs", lambda each: sum(one.flops // 2 for one in each)),
            ("fwd latency", lambda each: sum(seconds.get(one.path, 0.0) for one in each)),
        ):
            top = sorted(kinds.items(), key=lambda item: -value(item[1]))[:3]
            shown = {kind: _time(value(each)) if word == "fwd latency" else _count(value(each)) for kind, each in top}
            yield f"    {word:<12} - {shown}"


def _tree(work: WorkCount, seconds: Mapping[str, float]) -> Iterator[str]:
    yield "------------------------------ Detailed Profile per GPU ------------------------------"
    yield "Each module profile is listed after its name in the following order:"
    yield "params, percentage of total params, MACs, percentage of total MACs, fwd latency, percentage of total fwd latency"
    yield ""
    whole = seconds.get("", 0.0)
    for module in work.modules:
        name = module.path.rpartition(".")[2] if module.path else module.type
        latency = seconds.get(module.path)
        parts = [
            _count(module.params),
            _share(module.params, work.params),
            f"{_count(module.flops // 2)}MACs",
            _share(module.flops // 2, work.macs),
            "n/a" if latency is None else _time(latency),
            "n/a" if latency is None else _share(latency, whole),
        ]
        kind = f"{module.type} " if module.path else ""
        yield f"{'  ' * _depth(module)}{name}: {kind}({', '.join(parts)})"


def _depth(module: ModuleWork) -> int:
    return module.path.count(".") + 1 if module.path else 0


def _fact(name: str, value: str) -> str:
    return f"{name + ':':<72} {value}"


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
    """One row, under a header that is written once."""
    new = not path.exists() or path.stat().st_size == 0
    row: list[Any] = [
        found.network,
        found.world,
        found.global_batch,
        found.local_batch,
        found.per_s,
        found.mean_s,
    ]
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(CSV_COLUMNS)
        writer.writerow(row)


def write_json(path: Path, found: Figures) -> None:
    fields = {**msgspec.to_builtins(found), "throughput_per_s": found.per_s}
    path.write_text(json_document("micro", fields), encoding="utf-8")


def is_finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")


def iteration_line(word: str, each: Iteration) -> str:
    return f"{word} {each.number}: Loss = {each.loss:.4f}, Time = {each.seconds:.{_digits(each.seconds)}f} seconds"


def _digits(seconds: float) -> int:
    """Enough to see three figures of a short iteration."""
    return 3 if seconds >= 0.1 else 4 if seconds >= 0.01 else 6


class Printer:
    """Lines on stdout, each named after its GPU where there are several."""

    def __init__(self, rank: Rank) -> None:
        self._prefix = f"[GPU {rank.number}] " if rank.world > 1 else ""

    def __call__(self, *lines: str) -> None:
        self.plain(*(f"{self._prefix}{line}" if line and self._prefix else line for line in lines))

    def plain(self, *lines: str) -> None:
        # One write per call: several ranks share the terminal. A profiler's table is one text of many lines.
        sys.stdout.write("".join(f"{printable(line)}\n" for text in lines for line in text.split("\n")))
        sys.stdout.flush()
