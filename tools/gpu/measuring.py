"""Times, batches, energy and memory that Redline reports, against plain loops, nvidia-smi and the allocator."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean, median

from asking import Ask, Outcome, apart, in_fresh_process, step_seconds, within

import redline
from redline.launch import Session, open_door
from redline.model.protocol import BlockReply, Measure, Prepare, PreparedReply
from redline.model.spec import RunSpec
from redline.model.spec_table import specs_from_table
from redline.system.telemetry.nvml import open_cards

ROOT = Path(__file__).parents[2]
WITHIN, NEAR, SMI_WITHIN = 0.02, 0.97, 0.05
FAST = "fp16+channels-last+graphs"
LOOPS = dict.fromkeys(("baseline", "amp+channels-last+compile", "fp16+channels-last+compile:reduce-overhead"))
MICRO = {
    f"{mode} {precision}": (mode, task, "01"[precision == "fp16"], recipe)
    for mode, task in (("training", "train"), ("inference", "infer"))
    for precision, recipe in (("fp32", "baseline"), ("fp16", "fp16"))
}
DOORS = dict.fromkeys(("baseline", FAST))
NEIGHBOURED = dict.fromkeys(("baseline", "fp16+channels-last", FAST, "fp16+channels-last+compile+graphs"))
BATCHES: dict[str, tuple[str, str, str]] = {
    "resnet50-train": ("resnet50", "train", "amp"),
    "transformer-train": ("transformer", "train", "amp-bf16"),
    "vit_b_16-infer": ("vit_b_16", "infer", "fp16"),
    "resnet50-infer": ("resnet50", "infer", "fp16"),
}
CAP_BYTES = 16 * 2**30
METERED = {f"{model} {recipe}": (model, recipe) for model in ("resnet50", "vit_b_16") for recipe in ("baseline", FAST)}
REMEMBERED = {f"{model} {task}": (model, task) for model in ("resnet50", "vit_b_16") for task in ("infer", "train")}


def against_plain_loop(ask: Ask, recipe: str, _: None) -> Outcome:
    """A step by `redline run`, by its blocks, and by a bare loop over the same model: within 2 %, unless the host limits it."""
    model, batch = ask.sized(("resnet50", 32), ("simple_cnn", 4))
    row = ask.run(model, batch=batch, recipes=recipe)
    block_s, plain_s = in_fresh_process(block_and_loop, model, batch, recipe, ask.device)
    run_s = row.batch / row.throughput_per_s
    off = max((run_s / plain_s - 1, block_s / plain_s - 1), key=abs)
    figures = {"run_ms": run_s * 1e3, "block_ms": block_s * 1e3, "plain_ms": plain_s * 1e3, "bound": row.bound.label}
    return within(off, WITHIN) or row.bound.label == "host", {**figures, "off": off}


def block_and_loop(model: str, batch: int, recipe: str, device: str) -> tuple[float, float]:
    """Median seconds of a step of both, over one model object, in turns."""
    import torch

    from redline.bench.session import BenchSession

    bench = BenchSession(on_progress=lambda progress: None, isolated=False)
    prepared = bench.handle(Prepare(spec=spec_of(model, batch, recipe, device)))
    assert isinstance(prepared, PreparedReply), prepared
    setup = bench._bench.step._setup

    def step() -> None:
        autocast = torch.autocast(device, setup.autocast_dtype or torch.float16, enabled=bool(setup.autocast_dtype))
        with torch.inference_mode(), autocast:
            setup.model(setup.args[0])

    blocks, plain = [], []
    for _ in range(6):
        reply = bench.handle(Measure(kind="throughput", seconds=0.3))
        assert isinstance(reply, BlockReply), reply
        blocks += reply.block.samples
        plain += step_seconds(step)
    return median(blocks), median(plain)


def against_micro_script(ask: Ask, row: str, case: tuple[str, str, str, str]) -> Outcome:
    """`micro_benchmarking_pytorch.py` against `redline run` of the same thing: within 2 %."""
    mode, task, is_half, recipe = case
    model, batch = ask.sized(("resnet50", 64), ("simple_cnn", 4))
    file = ask.out / f"micro_{mode}_{is_half}.json"
    command = [sys.executable, "micro_benchmarking_pytorch.py", "--network", model, "--mode", mode, "--fp16", is_half]
    command += ["--batch-size", str(batch), "--iterations", "100", "--device", ask.device, "--output-file", str(file)]
    subprocess.run(command, cwd=ROOT / "examples", check=True, stdout=subprocess.DEVNULL)
    script = float(json.loads(file.read_text())["throughput_per_s"])
    run = ask.run(model, task=task, batch=batch, recipes=recipe).throughput_per_s
    return within(apart(script, run), WITHIN), {"script_per_s": script, "run_per_s": run, "off": apart(script, run)}


def spec_of(model: str, batch: int, recipe: str, device: str, door: str = "fork") -> RunSpec:
    table = {"model": model, "batch": batch, "recipe": recipe, "effort": "quick", "device": device, "no_check": True}
    (spec,) = specs_from_table({**table, "launch": {"door": door}})
    return spec


def opened(stack: ExitStack, spec: RunSpec, *, prepare: bool = True) -> Session:
    door = open_door(spec.launch)
    stack.callback(door.close)
    session = door.open(spec)
    stack.callback(session.close)
    if prepare:
        reply = session.ask(Prepare(spec=spec))
        assert isinstance(reply, PreparedReply), reply
    return session


def block_of(session: Session, seconds: float) -> float:
    reply = session.ask(Measure(kind="throughput", seconds=seconds))
    assert isinstance(reply, BlockReply), reply
    return median(reply.block.samples)


def against_torchrun(ask: Ask, recipe: str, _: None) -> Outcome:
    """One rank of torchrun against the fork door, block by block in turns: less than 2 % slower."""
    model, batch = ask.sized(("resnet50", 32), ("simple_cnn", 4))
    blocks: dict[str, list[float]] = {"fork": [], "torchrun": []}
    with ExitStack() as stack:
        sessions = {door: opened(stack, spec_of(model, batch, recipe, ask.device, door)) for door in blocks}
        for turn in range(12):
            for door in sorted(blocks, reverse=bool(turn % 2)):
                blocks[door].append(block_of(sessions[door], 0.3))
    fork_s, torchrun_s = map(median, blocks.values())
    return torchrun_s / fork_s < 1 + WITHIN, {"fork_ms": fork_s * 1e3, "torchrun_ms": torchrun_s * 1e3}


def beside_neighbours(ask: Ask, recipe: str, _: None) -> Outcome:
    """Prepared neighbours that stand still change a step by less than 0.5 %, on which `tune --jobs` rests."""
    model, batch = ask.sized(("resnet50", 32), ("simple_cnn", 4))
    spec, other = (spec_of(model, batch, each, ask.device) for each in (recipe, "baseline"))
    with ExitStack() as stack:
        session = opened(stack, spec)
        alone_s = median(block_of(session, 0.2) for _ in range(12))
        with ExitStack() as beside:
            neighbours = [opened(beside, other) for _ in range(4)]
            for neighbour in neighbours:
                neighbour.pause()
            waiting_s = median(block_of(session, 0.2) for _ in range(12))
            for neighbour in neighbours:
                neighbour.kill()
        gone_s = median(block_of(session, 0.2) for _ in range(12))
    off = apart(waiting_s, alone_s)
    return within(off, 0.005), {"alone_ms": alone_s * 1e3, "off": off, "off_when_gone": apart(gone_s, alone_s)}


def largest_batch(ask: Ask, row: str, case: tuple[str, str, str]) -> Outcome:
    """The batch finder under 16 GiB against plain loops in fresh processes: 97 % of the truth, 8 trials, one OOM at most."""
    model, task, recipe = case
    with ask.workspace() as workspace:
        result = redline.batch(model, task=task, recipes=recipe, max_memory=CAP_BYTES, workspace=workspace)
    ask.document(result, f"batch_{row}")
    (answer,) = result.rows
    found, below, knee = (answer[name].value for name in ("largest_batch", "largest_is_below", "knee_batch"))
    trials, failed = (answer[name].value for name in ("trials", "trials_that_failed"))
    low, step = int(found), int(found) // 30 + 1
    high = int(below or low + step)
    while not (fits := in_fresh_process(runs_at, model, task, low)):
        low, high = low - step, low
    while fits and in_fresh_process(runs_at, model, task, high):
        low, high = high, high + step
    while high - low > max(1, low // 200):
        middle = (low + high) // 2
        low, high = (middle, high) if in_fresh_process(runs_at, model, task, middle) else (low, middle)
    share = found / low
    figures = {"found": found, "true": low, "share": share, "trials": trials, "ooms": failed, "knee": knee}
    return share >= NEAR and trials <= 8 and failed <= 1, figures


def runs_at(name: str, task: str, batch: int) -> bool:
    """Whether five steps of a plain loop fit."""
    import torch
    import torchvision

    from redline.bench.device.failure import is_out_of_memory
    from redline.bench.workload.sources.builtin import Transformer

    torch.cuda.set_per_process_memory_fraction(CAP_BYTES / torch.cuda.mem_get_info()[1])
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.device("cuda"):
            if name == "transformer":
                model, inputs = Transformer(), torch.randint(0, 8192, (batch, 128))
                targets = torch.randint(0, 8192, (batch, 128))
            else:
                model, inputs = torchvision.models.get_model(name), torch.randn(batch, 3, 224, 224)
                targets = torch.randint(0, 1000, (batch,))
        if task == "infer":
            model, inputs = model.eval().half(), inputs.half()
            with torch.inference_mode():
                for _ in range(5):
                    model(inputs)
        else:
            dtype = torch.float16 if name == "resnet50" else torch.bfloat16
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
            for _ in range(5):
                with torch.autocast("cuda", dtype=dtype):
                    # The output stays in no variable, which would keep it alive through the backward pass.
                    loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                del loss
        torch.cuda.synchronize()
    except Exception as error:
        if is_out_of_memory(error):
            return False
        raise
    return True


def energy(ask: Ask, row: str, case: tuple[str, str]) -> Outcome:
    """Joules per image, power and utilisation of two models at batch 32."""
    measure = {"check_numerics": False, "block_seconds": 0.4, "min_rounds": 6}
    found = ask.run(case[0], batch=32, recipes=case[1], measure=measure)
    figures = {"images_per_s": found.throughput_per_s, "joules_per_image": found.energy_per_item_j}
    figures |= {"power_w": found.power_w, "utilisation": found.utilisation}
    return found.energy_per_item_j is not None, figures


@contextmanager
def busy_process(seconds: float) -> Iterator[subprocess.Popen[str]]:
    """A process that multiplies matrices on the GPU."""
    code = f"import measuring; measuring.multiply({seconds})"
    folder = Path(__file__).parent
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()


def multiply(seconds: float) -> None:
    import torch

    left = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    print("ready", flush=True)
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        for _ in range(20):
            left @ left
        torch.cuda.synchronize()


def against_nvidia_smi(ask: Ask, row: str, _: None) -> Outcome:
    """`redline monitor` and nvidia-smi side by side while a process computes: within 5 %."""
    looked: list[list[str]] = []
    with busy_process(20):
        time.sleep(3)  # clocks and the driver's running mean settle
        query = ["nvidia-smi", "--query-gpu=power.draw,clocks.sm,utilization.gpu", "--format=csv,noheader,nounits"]
        smi = subprocess.Popen([*query, "-lms", "200", "-i", "0"], stdout=subprocess.PIPE, text=True)
        reader = threading.Thread(target=lambda: looked.extend(csv.reader(smi.stdout or ())))
        reader.start()
        total = next(each for each in redline.monitor(seconds=12, interval_s=0.2).totals if each.device == "gpu0")
        smi.terminate()
        reader.join(10)
    power, clock, used = (fmean(float(line[column]) for line in looked if len(line) == 3) for column in range(3))
    off = {
        "power_off": apart(total.mean_power_w, power),
        "clock_off": apart(total.mean_clock_hz, clock * 1e6),
        "utilisation_off": apart(total.mean_utilisation, used / 100),
        "energy_off": apart(total.energy_j, power * total.seconds),
    }
    return all(within(share, SMI_WITHIN) for share in off.values()), {**off, "looks": total.looks}


def company_on_the_card(ask: Ask, row: str, has_company: bool) -> Outcome:
    """A second process on the card turns the verdict into `shared-gpu`, and without it there is none."""
    with ExitStack() as stack:
        neighbour = stack.enter_context(busy_process(30)).pid if has_company else None
        found = ask.run("resnet18", batch=32, no_check=True)
        running = [sorted(card.processes() or ()) for card in open_cards()]
    labels = list(found.verdict.labels)
    figures = {"labels": " ".join(labels), "neighbour": neighbour, "driver_says": running}
    return ("shared-gpu" in labels) == has_company, figures


def memory_by_kind(ask: Ask, row: str, case: tuple[str, str]) -> Outcome:
    """The kinds of `redline profile --memory` add up to the allocator's peak within 2 %."""
    model, task = ask.sized(case, ("simple_cnn", case[1]))
    with ask.workspace() as workspace:
        (found,) = redline.profile(
            model, memory=True, task=task, batch=32, device=ask.device, workspace=workspace
        ).memory
    use = found.use
    whole = sum(use.categories.values())
    known = use.reserved_bytes is not None and use.fragments_bytes is not None
    off = apart(whole, use.reserved_bytes - use.fragments_bytes) if known else None
    figures = {"bytes": whole, "off": off, "workspace_share": use.categories.get("workspace", 0) / whole}
    return within(off, WITHIN) if known else None, {**figures, "categories": dict(use.categories)}
