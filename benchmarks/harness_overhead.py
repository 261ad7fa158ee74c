"""What a timed step of Redline costs beside the plain loop that a person would write, for every kind of step.

Each case builds a model twice from the same seed: once as Redline's step, and once as a loop written out here. Both run
in turns within one process, and the printed ratio is the speed of Redline's step over that of the loop: 1.00 is a plain
step, 0.90 is a step that Redline makes 10 % slower. The ratio of the shortest rounds stands beside the median of all
pairs, because other processes can only make a round longer. The third ratio is of processor time on a CPU, which the
other processes do not take: it is the one to look at on a busy machine. Last come the calls of Python and C functions in one
step of the loop and of Redline, which no load changes.

    python benchmarks/harness_overhead.py [--device cuda] [--rounds 200] [--only train]
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from redline.bench.device import open_device, resolve_device
from redline.bench.device.base import Device
from redline.bench.measure.blocks import measure_block
from redline.bench.recipe.compose import apply_recipe
from redline.bench.session import BenchSession
from redline.bench.workload.build import build_workload
from redline.bench.workload.called import OwnStep
from redline.bench.workload.handed import sort_out, workload_of, workload_of_step
from redline.bench.workload.step import make_step
from redline.bench.workload.workload import Workload
from redline.model.protocol import Close, EpochReply, Measure, Prepare, PreparedReply, TrainEpoch
from redline.model.spec import DataSpec, Recipe, RunSpec, TrainSpec, WorkloadSpec

ROUND_S = 0.005
"""Short, so that on a busy machine some rounds are not interrupted."""
LEAST_STEPS = 2
WARM_STEPS = 20
SETTLE = 0.25
"""Steps that run before each round, on either side, as a share of the round: caches are cold after a change of sides."""
AIM = (0.99, 1.01)
SEED = 0
EPOCHS, EPOCH_STEPS = "epochs on data", 2000
"""This case stands apart: its steps load, and note when the data came and what the loss was."""

Loop = Callable[[], Any]


class Case:
    """One kind of step: Redline's workload of it, and the plain loop over its own model."""

    def __init__(self, name: str, task: str, build: Callable[[torch.device], tuple[Any, Loop]], optimizer: str = "sgd"):
        self.name, self.task, self.build, self.optimizer = name, task, build, optimizer


def mlp(width: int, layers: int) -> nn.Module:
    torch.manual_seed(SEED)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts)


class ByName(nn.Module):
    """Takes keywords and answers with a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(64, 6)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.body(left + right)}


class OwnLoss(nn.Module):
    """Answers with its loss: under a name, as the second of a pair, or alone among others."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.body, self.form = mlp(64, 4), form

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.body(x)
        loss = F.cross_entropy(logits, labels)
        if self.form == "named":
            return {"loss": loss, "logits": logits}
        return (logits, loss) if self.form == "pair" else {"first": loss, "second": 0.1 * logits.square().mean()}


class Lightning(nn.Module):
    """Trains as Lightning's modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(64, 4)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, labels = batch
        return F.cross_entropy(self.body(x), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def draw(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(device)


def classes(count: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, 10, (count,), generator=torch.Generator().manual_seed(2)).to(device)


def inference(width: int, layers: int, batch: int, device: torch.device) -> tuple[Any, Loop]:
    plain, x = mlp(width, layers).to(device).eval(), draw(batch, width, device=device)
    return (mlp(width, layers), draw(batch, width, device=torch.device("cpu"))), lambda: plain(x)


def by_name(device: torch.device) -> tuple[Any, Loop]:
    plain, x = ByName().to(device).eval(), draw(8, 64, device=device)
    given = draw(8, 64, device=torch.device("cpu"))
    return (ByName(), {"left": given, "right": given.clone()}), lambda: plain(left=x, right=x)


def detector(device: torch.device) -> tuple[Any, Loop]:
    spec = WorkloadSpec(model="ssdlite320_mobilenet_v3_large", batch=1)
    plain = build_workload(spec, SEED).to(device)
    model, (images,) = plain.model, plain.args
    return build_workload(spec, SEED), lambda: model(images)


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name](model.parameters(), lr=0.001)


def training(
    form: str, device: torch.device, *, optimizer: str = "sgd", layers: int = 4, batch: int = 8
) -> tuple[Any, Loop]:
    """A model, its inputs and its loss in each form in which a loss is given, and the loop of a person who has it so."""
    cpu = torch.device("cpu")
    x, labels = draw(batch, 64, device=device), classes(batch, device)
    own_x, own_labels = draw(batch, 64, device=cpu), classes(batch, cpu)
    inputs: tuple[Any, ...] = (x,)
    handed: tuple[Any, ...]
    if form in ("named", "pair", "sum"):
        plain, given, inputs = OwnLoss(form).to(device), OwnLoss(form), (x, labels)
        handed = (given, (own_x, own_labels))
    elif form == "lightning":
        module = Lightning().to(device)
        plain, inputs, handed = module, (x, labels), (Lightning(), (own_x, own_labels))
    else:
        plain, given = mlp(64, layers).to(device), mlp(64, layers)
        handed = (given, (own_x,))
    cross_entropy = nn.CrossEntropyLoss()
    loss_of: dict[str, Callable[[Any], torch.Tensor]] = {
        "default": lambda output: F.cross_entropy(output, labels),
        "output": lambda output: output.square().mean(),
        "targets": lambda output: cross_entropy(output, labels),
        "random": lambda output: cross_entropy(output, labels),
        "named": lambda output: output["loss"],
        "pair": lambda output: output[1],
        "sum": lambda output: torch.stack(list(output.values())).sum(),
        "lightning": lambda output: output,
    }
    if form == "output":
        handed = (*handed, lambda output: output.square().mean())
    elif form == "random":
        handed = (*handed, nn.CrossEntropyLoss())
    elif form == "targets":
        handed = (*handed, nn.CrossEntropyLoss(), own_labels)
    loss, steps = loss_of[form], optimizer_of(optimizer, plain)

    def loop() -> None:
        output = plain.training_step(inputs, 0) if form == "lightning" else plain(*inputs)
        loss(output).backward()
        steps.step()
        steps.zero_grad()

    plain.train()
    return handed, loop


def own_step(device: torch.device) -> tuple[Any, Loop]:
    plain, x = mlp(64, 6).to(device), draw(8, 64, device=device)
    other, y = mlp(64, 6).to(device), draw(8, 64, device=device)

    def step() -> torch.Tensor:
        return other(y)

    return OwnStep(step, "step"), lambda: plain(x)


class Writer(nn.Module):
    """A causal model of one layer with a cache of its own, for the price of a token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.embed, self.mix, self.head = nn.Embedding(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, tokens: torch.Tensor, cache: Any = None) -> tuple[torch.Tensor, Any]:
        hidden = self.mix(self.embed(tokens))
        state = hidden.cumsum(1) if cache is None else cache + hidden.cumsum(1)
        return self.head(state), state[:, -1:]


CASES = [
    Case("inference, 2 layers", "infer", functools.partial(inference, 64, 2, 8)),
    Case("inference, 6 layers", "infer", functools.partial(inference, 64, 6, 8)),
    Case("inference, 24 layers", "infer", functools.partial(inference, 128, 24, 32)),
    Case("inference, keywords and a dict", "infer", by_name),
    Case("inference, a detector", "infer", detector),
    Case("training, default loss", "train", functools.partial(training, "default")),
    Case("training, default loss, adam", "train", functools.partial(training, "default", optimizer="adam"), "adam"),
    Case("training, default loss, adamw", "train", functools.partial(training, "default", optimizer="adamw"), "adamw"),
    Case("training, 16 layers, batch 64", "train", functools.partial(training, "default", layers=16, batch=64)),
    Case("training, loss(output)", "train", functools.partial(training, "output")),
    Case("training, loss(output, target)", "train", functools.partial(training, "targets")),
    Case("training, loss, random targets", "train", functools.partial(training, "random")),
    Case("training, output['loss']", "train", functools.partial(training, "named")),
    Case("training, (logits, loss)", "train", functools.partial(training, "pair")),
    Case("training, a dict of losses", "train", functools.partial(training, "sum")),
    Case("training, its own training_step", "train", functools.partial(training, "lightning")),
    Case("a step of one's own", "step", own_step),
]


def workload_from(handed: Any, spec: WorkloadSpec) -> Workload:
    if isinstance(handed, Workload):
        return handed
    known: dict[str, Any] = {"source": "live", "identity": "bench", "seed": SEED}
    if isinstance(handed, OwnStep):
        return workload_of_step(handed, spec, **known)
    return workload_of(sort_out(handed, "case"), spec, whose="case", notes=[], **known)


def calls_of(run: Loop) -> int:
    """How many functions one step calls, in Python and in C."""
    seen: list[str] = []
    sys.setprofile(lambda frame, event, argument: seen.append(event))
    run()
    sys.setprofile(None)
    return sum(event in ("call", "c_call") for event in seen)


def compare(case: Case, device: Device, rounds: int) -> tuple[float, float, float, float, str]:
    """The shortest seconds per step of the plain loop, the ratios (of the shortest, of all pairs, of processor time), and the calls."""
    handed, loop = case.build(device.torch_device)
    spec = WorkloadSpec(model="case", task=case.task, optimizer=case.optimizer)  # type: ignore[arg-type]
    workload = workload_from(handed, spec).to(device.torch_device)
    step = make_step(apply_recipe(Recipe(), workload, device), spec.optimizer)
    with context_of(case):
        for _ in range(WARM_STEPS):
            loop()
    with step.context():
        for _ in range(WARM_STEPS):
            step()
    gc.collect()
    gc.freeze()
    steps = max(LEAST_STEPS, round(ROUND_S / plain_seconds(loop, device, case, WARM_STEPS)))
    pairs = []
    for _ in range(rounds):
        plain_s = plain_seconds(loop, device, case, steps)
        request = Measure(kind="throughput", seconds=1e6, max_steps=steps, settle_seconds=SETTLE * steps * plain_s)
        block = measure_block(step, device, request, plain_s)
        pairs.append((plain_s, statistics.fmean(block.samples)))
    busy = []
    with step.context():
        run = step.plain()
        calls = calls_of(run)
    with context_of(case):
        both = f"{calls_of(loop)}/{calls}"
    for _ in range(rounds):
        with context_of(case):
            plain_busy_s = processor_seconds(loop, steps)
        with step.context():
            busy.append((plain_busy_s, processor_seconds(run, steps)))
    gc.unfreeze()
    plain_s, redline_s = (min(column) for column in zip(*pairs, strict=True))
    plain_busy_s, redline_busy_s = (statistics.quantiles(column, n=10)[0] for column in zip(*busy, strict=True))
    ratio = statistics.median(plain / own for plain, own in pairs)
    return plain_s, plain_s / redline_s, ratio, plain_busy_s / redline_busy_s, both


def context_of(case: Case) -> Any:
    return torch.inference_mode() if case.task == "infer" else torch.enable_grad()


def processor_seconds(run: Loop, steps: int) -> float:
    for _ in range(math.ceil(SETTLE * steps)):
        run()
    gc.disable()
    started = time.thread_time()
    for _ in range(steps):
        run()
    ended = time.thread_time()
    gc.enable()
    return (ended - started) / steps


def plain_seconds(loop: Loop, device: Device, case: Case, steps: int) -> float:
    with context_of(case):
        for _ in range(math.ceil(SETTLE * steps)):
            loop()
        device.synchronize()
        gc.disable()
        started = time.perf_counter()
        for _ in range(steps):
            loop()
        device.synchronize()
        ended = time.perf_counter()
        gc.enable()
    return (ended - started) / steps


def data_model() -> nn.Module:
    return mlp(64, 4)


def data_loaders() -> tuple[Any, None]:
    cpu = torch.device("cpu")
    return [(draw(8, 64, device=cpu), classes(8, cpu))] * EPOCH_STEPS, None


def compare_epochs(device: str, rounds: int) -> tuple[float, float, float, float]:
    """The same figures for `redline train`: a step of an epoch on batches that lie in a list."""
    spec = RunSpec(
        workload=WorkloadSpec(model=f"{__file__}:data_model", task="train"),
        device=device,
        train=TrainSpec(data=DataSpec(name=f"{__file__}:data_loaders"), epochs=rounds + 1, weight_decay=0.0),
    )
    where, (batches, _) = torch.device(device), data_loaders()
    plain = data_model().to(where)
    optimizer = optimizer_of("sgd", plain)

    def epoch() -> float:
        started = time.perf_counter()
        for x, labels in batches:
            F.cross_entropy(plain(x.to(where)), labels.to(where)).backward()
            optimizer.step()
            optimizer.zero_grad()
        open_device(device).synchronize()
        return time.perf_counter() - started

    session = BenchSession(lambda progress: None)
    prepared = session.handle(Prepare(spec=spec))
    assert isinstance(prepared, PreparedReply), prepared
    pairs, busy = [], []
    epoch()
    for number in range(1, rounds + 1):
        before = time.thread_time()
        plain_s = epoch()
        between = time.thread_time()
        reply = session.handle(TrainEpoch(number=number))
        assert isinstance(reply, EpochReply), reply
        pairs.append((plain_s / EPOCH_STEPS, reply.epoch.train_s / EPOCH_STEPS))
        busy.append((between - before, time.thread_time() - between))
    session.handle(Close())
    plain_s, redline_s = (min(column) for column in zip(*pairs, strict=True))
    plain_busy_s, redline_busy_s = (min(column) for column in zip(*busy, strict=True))
    ratio = statistics.median(plain / own for plain, own in pairs)
    return plain_s, plain_s / redline_s, ratio, plain_busy_s / redline_busy_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--only", default="", help="only cases with this in their name")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    device = open_device(resolve_device(arguments.device))
    print(f"{'':34} {'plain loop':>12} {'shortest':>9} {'median':>7} {'processor':>10} {'calls':>9}")
    ratios = []
    for case in CASES:
        if arguments.only not in case.name:
            continue
        plain_s, shortest, middle, busy, calls = compare(case, device, arguments.rounds)
        ratios.append(busy if arguments.device == "cpu" else shortest)
        print(
            f"{case.name:34} {plain_s * 1e6:9.1f} µs {shortest:9.3f} {middle:7.3f} {busy:10.3f} {calls:>9}", flush=True
        )
    if arguments.only in EPOCHS:
        plain_s, shortest, middle, busy = compare_epochs(arguments.device, max(2, arguments.rounds // 20))
        print(f"{EPOCHS:34} {plain_s * 1e6:9.1f} µs {shortest:9.3f} {middle:7.3f} {busy:10.3f}", flush=True)
    if not ratios:
        return
    within = sum(AIM[0] <= ratio <= AIM[1] for ratio in ratios)
    print(f"\n{within} of {len(ratios)} between {AIM[0]} and {AIM[1]}; the least is {min(ratios):.3f}")


if __name__ == "__main__":
    main()
