"""Training on data on the GPU at hand: accuracy over recipes and seeds, prefetching, the speed of the bare step, the ladder.

    python scripts/check_train_on_gpu.py [--seconds N] [--short] [--only accuracy hard speed prefetch ladder] [--out FOLDER]

- accuracy (about 130 s on an H200): `resnet18` on `synthetic-learnable` is above 60 % on held-out samples with every recipe
  and seed, and no recipe is further from fp32 than its seeds are apart.
- hard (about 180 s): the same on textures so faint that fp32 ends between 72 % and 92 %, searched first: where all reach 100 %,
  being within noise of each other says little.
- speed (about 20 s per recipe, 110 s for the compiled one): CIFAR-shaped `resnet18` at batch 256 trains at 90 % or more of the
  speed of its bare step in `run --task train`. The compiled recipe is the one that `tune` found to be best on an H200.
- prefetch (about 35 s): with a loader that costs as much as a step, an epoch takes at most 0.7 times what it takes without
  prefetching, and the losses are the same bit for bit.
- ladder (about 420 s): from one CPU thread to the best recipe in less than 8 minutes.

Every row is in the folder as soon as it is known. `--seconds N` leaves out each row that would not end within N seconds of
the start, and says so: `complete` is then false. `--short` takes about a minute and a half: one seed, nothing compiled, no ladder.
The whole takes about 900 s. In two calls of at most ten minutes: `--seconds 580 --only accuracy hard speed prefetch`, then
`--only ladder`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from raw_records import RawRecords

import redline
from redline.analyze.train import training_of
from redline.api.workspace import Workspace
from redline.launch import open_door
from redline.model.errors import RedlineError
from redline.model.record import RunRecord
from redline.model.spec import LaunchSpec
from redline.search.observer import Observer

COMPILED = "amp-bf16+channels-last+compile"
RECIPES = ("baseline", "amp", "amp-bf16", "amp-bf16+channels-last+graphs", COMPILED)
FAST = "amp-bf16+channels-last+fused-optimizer+graphs"
BEST = "amp-bf16+channels-last+compile+fused-optimizer+graphs+cudnn-benchmark"
LEAST_ACCURACY, MOST_OF_EPOCH, LEAST_OF_STEP, LADDER_S = 0.6, 0.7, 0.9, 480.0
MOST_TRIED = 6
SEED_NOISE = 0.03
"""Accuracy may differ by this much more than seeds do: 1 000 held-out samples have a standard error of 0.015."""
ROW_S = {"accuracy": 15.0, "compiled": 60.0, "speed": 25.0, "best": 130.0, "prefetch": 40.0, "ladder": 450.0}
"""Seconds that a row may take; the longest of the same kind counts where it took longer."""
SLOW_LOADERS = '''"""A loader that takes {load_s} s for each batch."""

import time

import torch


class Slow:
    def __init__(self, batches, seed):
        drawn = torch.Generator().manual_seed(seed)
        self.batches = [
            (torch.randn({batch}, 3, 32, 32, generator=drawn), torch.randint(10, ({batch},), generator=drawn))
            for _ in range(batches)
        ]

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for each in self.batches:
            time.sleep({load_s})
            yield each


def loaders():
    return Slow({steps}, 0), Slow(1, 1)
'''
FAINT_LOADERS = '''"""Textures with a standard deviation of {signal} under the usual noise."""

import torch

from redline.bench.data.sources import synthetic
from redline.model.spec import WorkloadSpec
from redline.model.training import DataSpec

synthetic.SIGNAL = {signal}


class Batches:
    def __init__(self, samples, shuffled):
        self.images, self.classes = samples.whole()
        self.images = (self.images.float() / 255 - 0.5) / 0.2
        self.shuffled = shuffled

    def __len__(self):
        return len(self.classes) // {batch}

    def __iter__(self):
        count = len(self) * {batch}
        order = torch.randperm(len(self.classes))[:count] if self.shuffled else torch.arange(count)
        for rows in order.split({batch}):
            yield self.images[rows], self.classes[rows]


def loaders():
    asked = DataSpec(name="synthetic-learnable", train_samples={train}, val_samples={held_out})
    data = synthetic.SyntheticLearnable().open(asked, WorkloadSpec(model="resnet18", task="train"))
    return Batches(data.train, True), Batches(data.validation, False)
'''
FAINTEST, USUAL = 0.005, 0.08
"""Signals between which one is searched that makes the task neither easy nor hopeless."""
HARD_ENOUGH, ACCEPTED = (0.72, 0.92), (0.65, 0.97)
"""Accuracies of fp32 at which the search ends, and between which the nearest is taken where it never got there."""
Found = dict[str, Any]
Check = Callable[[Workspace, argparse.Namespace], Iterator[Found]]
"""Gives what it has found after every row; `left_out` names the rows for which there was no time."""


class TimeLeft:
    """Whether another row of a kind still ends before the limit."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds
        self._longest = dict(ROW_S)

    def fits(self, kind: str) -> bool:
        return time.perf_counter() + self._longest[kind] <= self._end

    @contextlib.contextmanager
    def row(self, kind: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._longest[kind] = max(self._longest[kind], time.perf_counter() - started)


def accuracy(workspace: Workspace, given: argparse.Namespace) -> Iterator[Found]:
    """By recipe, the accuracy of each seed."""
    recipes = given.recipes or [each for each in RECIPES if not (given.short and "compile" in each)]

    def train(recipe: str, seed: int) -> Any:
        (row,) = redline.train(
            given.model, epochs=given.epochs, recipes=recipe, seed=seed, device=given.device, on_device=True,
            **given.sizes, workspace=workspace,
        )  # fmt: skip
        return row

    yield from _of_recipes("accuracy", given, recipes, 1 if given.short else 3, train)


def hard(workspace: Workspace, given: argparse.Namespace) -> Iterator[Found]:
    """The same on data that fp32 does not learn wholly."""
    tried: dict[float, float] = {}
    for _ in _searched(workspace, given, tried):
        yield {"fine": False, "tried": tried, "left_out": ["the recipes: no signal was found yet"]}
    nearest = min(tried, key=lambda signal: abs(tried[signal] - statistics.mean(HARD_ENOUGH)), default=None)
    if nearest is None or not (given.quick or ACCEPTED[0] <= tried[nearest] <= ACCEPTED[1]):
        return
    data = _faint(given, nearest)
    recipes = given.recipes or RECIPES
    for found in _of_recipes("hard", given, recipes, 3, lambda recipe, seed: _on(workspace, given, data, recipe, seed)):
        yield {"signal": nearest, **found}


def _searched(workspace: Workspace, given: argparse.Namespace, tried: dict[float, float]) -> Iterator[None]:
    """Halve the interval of signals, on a log scale, until fp32's accuracy is hard enough; `tried` has each of them."""
    low, high = FAINTEST, USUAL
    while given.left.fits("accuracy") and len(tried) < (1 if given.quick else MOST_TRIED):
        signal = (low * high) ** 0.5
        with given.left.row("accuracy"):
            row = _on(workspace, given, _faint(given, signal), "baseline", 0)
        if row.failure:
            raise RuntimeError(f"baseline at signal {signal:.4f}: {row.failure}")
        tried[signal] = row.accuracy
        print(f"hard: signal {signal:.4f}: {row.accuracy}", flush=True)
        yield
        if HARD_ENOUGH[0] <= row.accuracy <= HARD_ENOUGH[1]:
            return
        low, high = (low, signal) if row.accuracy > HARD_ENOUGH[1] else (signal, high)


def _of_recipes(
    name: str, given: argparse.Namespace, recipes: Sequence[str], seeds: int, train: Callable[[str, int], Any]
) -> Iterator[Found]:
    """What is known after each training: first one seed of all recipes, then the others."""
    reached: dict[str, list[float | None]] = {recipe: [] for recipe in recipes}
    failures: list[str] = []
    left_out: list[str] = []
    for seed, recipe in ((seed, recipe) for seed in range(seeds) for recipe in recipes):
        kind = "compiled" if "compile" in recipe else "accuracy"
        if not given.left.fits(kind):
            left_out.append(f"{recipe}, seed {seed}")
        else:
            with given.left.row(kind):
                row = train(recipe, seed)
            reached[recipe].append(None if row.failure else row.accuracy)
            failures += [f"{recipe}, seed {seed}: {row.failure}"] if row.failure else []
            print(f"{name}: {recipe}, seed {seed}: {row.failure or row.accuracy}", flush=True)
        yield _judged(reached, failures, left_out)


def _faint(given: argparse.Namespace, signal: float) -> str:
    file = given.scratch / f"faint_{round(signal * 1e6)}.py"
    train, held_out = given.sizes.get("train_samples", 10_240), given.sizes.get("val_samples", 2_048)
    file.write_text(
        FAINT_LOADERS.format(signal=signal, batch=32 if given.quick else 128, train=train, held_out=held_out)
    )
    return f"{file.absolute()}:loaders"


def _on(workspace: Workspace, given: argparse.Namespace, data: str, recipe: str, seed: int) -> Any:
    (row,) = redline.train(
        given.model, data=data, epochs=given.epochs, recipes=recipe, seed=seed, device=given.device, image_size=32,
        classes=10, workspace=workspace,
    )  # fmt: skip
    return row


def _judged(reached: dict[str, list[float | None]], failures: list[str], left_out: list[str]) -> Found:
    known = {recipe: [each or 0.0 for each in values] for recipe, values in reached.items() if values}
    if not known:
        return {"fine": False, "left_out": left_out}
    spread = max(max(values) - min(values) for values in known.values())
    middles = [statistics.mean(values) for values in known.values()]
    apart = max(middles) - min(middles)
    least = min(min(values) for values in known.values())
    fine = least > LEAST_ACCURACY and apart <= spread + SEED_NOISE
    return {"fine": fine, "accuracy": reached, "least": least, "apart": apart, "spread_of_seeds": spread,
            "failures": failures, "left_out": left_out}  # fmt: skip


def prefetch(workspace: Workspace, given: argparse.Namespace) -> Iterator[Found]:
    """Epoch times with and without prefetching, with a loader that takes as long as a step."""
    if not given.left.fits("prefetch"):
        yield {"fine": False, "left_out": ["prefetch"]}
        return
    step_s = _epochs(workspace, given, load_s=0.0, prefetch=True, steps=given.steps // 3)[1]["step_s"]
    load_s = max(round(step_s, 4), 0.002)
    found: Found = {"fine": False, "load_s": load_s, "step_s": step_s}
    alone = found["without"] = _epochs(workspace, given, load_s=load_s, prefetch=False, steps=given.steps)
    yield found
    ahead = found["with"] = _epochs(workspace, given, load_s=load_s, prefetch=True, steps=given.steps)
    ratio = ahead[1]["train_s"] / alone[1]["train_s"]
    same = [each["loss"] for each in alone] == [each["loss"] for each in ahead]
    yield found | {"fine": ratio <= MOST_OF_EPOCH and same, "ratio": ratio, "same_losses": same}


def _epochs(
    workspace: Workspace, given: argparse.Namespace, *, load_s: float, prefetch: bool, steps: int
) -> list[Found]:
    file = given.scratch / f"slow_loaders_{steps}_{round(load_s * 1e6)}.py"
    file.write_text(SLOW_LOADERS.format(load_s=load_s, batch=given.batch, steps=steps))
    (row,) = redline.train(
        given.model, data=f"{file.absolute()}:loaders", epochs=2, image_size=32, classes=10, prefetch=prefetch,
        deterministic=True, device=given.device, workspace=workspace,
    )  # fmt: skip
    if row.failure:
        raise RuntimeError(row.failure)
    return [
        {
            "loss": epoch.train_loss,
            "train_s": epoch.train_s,
            "step_s": sum(seconds for name, seconds in epoch.phases_s.items() if name != "data") / max(epoch.steps, 1),
        }
        for epoch in row.epochs
    ]


def speed(workspace: Workspace, given: argparse.Namespace) -> Iterator[Found]:
    """By recipe, samples per second of a training with the data on the device, over those of its bare step."""
    recipes = given.recipes or ([FAST] if given.short else [FAST, BEST])
    rows: dict[str, Found] = {}
    left_out: list[str] = []
    for recipe in recipes:
        kind = "best" if "compile" in recipe else "speed"
        if not given.left.fits(kind):
            left_out.append(recipe)
        else:
            with given.left.row(kind):
                rows[recipe] = _speed(workspace, given, recipe)
            print(f"speed: {recipe}: {rows[recipe]}", flush=True)
        shares = {recipe: row["share"] for recipe, row in rows.items()}
        fine = bool(shares) and min(shares.values()) >= LEAST_OF_STEP
        yield {"fine": fine, "least": min(shares.values(), default=0.0), "rows": rows, "left_out": left_out}


def _speed(workspace: Workspace, given: argparse.Namespace, recipe: str) -> Found:
    (bare,) = redline.run(
        given.model, task="train", batch=given.batch, image_size=32, classes=10, stem=given.stem, recipes=recipe,
        device=given.device, effort="quick", workspace=workspace,
    )  # fmt: skip
    (row,) = redline.train(
        given.model, epochs=3, batch=given.batch, recipes=recipe, device=given.device, on_device=True, augment="device",
        train_samples=given.batches * given.batch, val_samples=4 * given.batch, workspace=workspace,
    )  # fmt: skip
    return {"share": (row.samples_per_s or 0.0) / (bare.throughput_per_s or float("inf")),
            "bare_per_s": bare.throughput_per_s, "train_per_s": row.samples_per_s,
            "where_the_time_goes": row.phase_shares, "between_epochs": row.between_share,
            "failure": row.failure or bare.failure}  # fmt: skip


def ladder(workspace: Workspace, given: argparse.Namespace) -> Iterator[Found]:
    if not given.left.fits("ladder"):
        yield {"fine": False, "left_out": ["ladder"]}
        return
    yield {"fine": False, "left_out": ["the ladder was begun and not ended: its trainings are in trainings.jsonl"]}
    started = time.perf_counter()
    result = redline.ladder(
        given.model, device=given.device, quick=given.quick, workspace=workspace, **given.sizes if given.quick else {}
    )
    seconds = time.perf_counter() - started
    (given.out / "ladder.txt").write_text(str(result))
    result.plot(given.out / "ladder.png")
    print(result, flush=True)
    told = json.loads(str(result.to_json()))
    yield {"fine": seconds < LADDER_S and not result.failed, "seconds": seconds, "left_out": [], **told}


class WriteTrainings(Observer):
    """Writes one line per training that ended, so that a ladder that is killed has left its rungs."""

    def __init__(self, file: Path) -> None:
        self._file, self._started = file, time.perf_counter()

    def closed(self, record: RunRecord) -> None:
        if record.spec.train is None:
            return
        row = training_of(record)
        told = {"at_s": round(time.perf_counter() - self._started, 1), "device": row.device, "threads": row.threads,
                "batch": row.batch, "recipe": row.recipe, "data": row.data, "epochs": len(row.epochs),
                "epoch_s": row.epoch_s, "samples_per_s": row.samples_per_s, "accuracy": row.accuracy,
                "failure": row.failure}  # fmt: skip
        with self._file.open("a") as file:
            file.write(json.dumps(told) + "\n")


CHECKS: dict[str, Check] = {"accuracy": accuracy, "hard": hard, "speed": speed, "prefetch": prefetch, "ladder": ladder}


def main() -> int:
    given = _parsed()
    given.out.mkdir(parents=True, exist_ok=True)
    names = given.only or [name for name in CHECKS if not (given.short and name in ("hard", "ladder"))]
    fine = 0
    with (
        RawRecords(given.out) as raw,
        contextlib.closing(open_door(LaunchSpec())) as door,
        tempfile.TemporaryDirectory() as scratch,
    ):
        given.scratch = Path(scratch)
        observer = WriteTrainings(given.out / "trainings.jsonl")
        workspace = Workspace(door=door, history=raw.history("trainings"), observer=observer)
        for name in names:
            found = _checked(name, workspace, given)
            raw.write()
            fine += found["fine"] and found["complete"]
            told = {key: value for key, value in found.items() if isinstance(value, int | float | str)}
            print(f"{'ok ' if found['fine'] else 'NOT'} {name}: {told}", flush=True)
            for row in found.get("left_out", ()):
                print(f"    left out: {row}", flush=True)
    print(f"{fine} of {len(names)} fine and complete")
    return 0 if fine == len(names) else 1


def _checked(name: str, workspace: Workspace, given: argparse.Namespace) -> Found:
    """What the check found, written after each of its rows; what breaks ends this check and not the others."""
    started = time.perf_counter()
    found: Found = {"fine": False, "complete": False}

    def write() -> None:
        found["took_s"] = time.perf_counter() - started
        (given.out / f"{name}.json").write_text(json.dumps(found, indent=1))

    try:
        for each in CHECKS[name](workspace, given):
            found.update(each)
            write()
        found["complete"] = not found.get("left_out")
    except (RedlineError, RuntimeError) as error:
        found.update(fine=False, error=f"{type(error).__name__}: {error}")
    write()
    return found


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="leave out rows that would end later")
    parser.add_argument("--short", action="store_true", help="about a minute and a half, without the ladder")
    parser.add_argument("--only", nargs="+", choices=CHECKS, metavar="NAME", help=f"of {', '.join(CHECKS)}")
    parser.add_argument(
        "--recipes", nargs="+", metavar="RECIPE", help="of accuracy, hard and speed, instead of their own"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=256, help="of prefetch and speed")
    parser.add_argument("--out", type=Path, default=Path("train"))
    tiny = "a tiny model, few samples and the quick ladder: whether this script runs at all, on a CPU too"
    parser.add_argument("--tiny", action="store_true", help=tiny)
    given = parser.parse_args()
    given.left = TimeLeft(given.seconds)
    given.model, given.stem, given.epochs, given.quick = "resnet18", "cifar", 3, given.tiny
    given.sizes = {"train_samples": 5120, "val_samples": 1000} if given.short else {}
    given.steps, given.batches = 60, 100
    if given.tiny:
        given.model, given.stem, given.epochs, given.batch, given.steps, given.batches = "simple_cnn", None, 1, 16, 9, 8
        given.sizes = {"train_samples": 128, "val_samples": 32}
    return given


if __name__ == "__main__":
    sys.exit(main())
