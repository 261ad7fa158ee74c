"""`redline tune` of models nobody named, on this CPU: does it end in time, and is its answer true?

    python scripts/check_tune_on_cpu.py [--budget 40s] [--only NAME…] [--out FOLDER]

Each model of `own_models.py` is tuned. A winner's snippet is run in a plain process against the model as it is: outputs must
agree, and the plain ratio must not be below the interval by more than a tenth. Of the planted models nothing may win but
`keep-memory`. Takes about the budget and half a minute for each of the twenty-three; wants an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from own_models import MODELS

import redline
from redline.model.units import parse_seconds

HERE = Path(__file__).parent
TASKS = {
    "own_loss": ("train",),
    "own_function": ("infer", "train"),
    "recurrent": ("infer", "train"),
    "bags": ("infer", "train"),
}
PLANTED = ("slower_with_all", "breaks_with_all")
ALLOWED_OVER = 1.15
"""Of the budget."""
SLACK = 0.9
CLOSE = 0.1
"""Relative error of a snippet's outputs: half precision on random weights."""
PLAIN = """
import runpy, statistics, sys, time
import torch
from torch.utils._pytree import tree_leaves
sys.path.insert(0, {here!r})
import own_models
snippet = runpy.run_path({file!r})
model, inputs = own_models._built({name!r})
model.eval()

def flat(outputs):
    leaves = [vars(each) if hasattr(each, "__dataclass_fields__") else each for each in tree_leaves(outputs)]
    return torch.cat([each.detach().double().flatten() for each in tree_leaves(leaves)])

def seconds(call):
    taken = []
    until = time.perf_counter() + 2
    while time.perf_counter() < until:
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)

with torch.inference_mode():
    expected = flat(model(*inputs))
    plain = lambda: model(*inputs)
    before_s = seconds(plain)
fast = snippet["optimise"](model, *inputs)
args, kwargs = snippet["prepare_inputs"](*inputs)
error = float((flat(fast(*args, **kwargs)) - expected).norm() / expected.norm())
print(error, before_s / seconds(lambda: fast(*args, **kwargs)))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="40s")
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--out", type=Path, default=Path(tempfile.mkdtemp(prefix="tune-on-cpu-")))
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    os.environ["REDLINE_STORE"] = str(asked.out / "history.sqlite")
    wrong = 0
    for name in asked.only or MODELS:
        for task in TASKS.get(name, ("infer",)):
            complaints = checked(name, task, asked)
            wrong += bool(complaints)
    print(f"{wrong} of these are wrong; reports are in {asked.out}")
    return 1 if wrong else 0


def checked(name: str, task: str, asked: argparse.Namespace) -> list[str]:
    """What is wrong about one search; its answer is printed."""
    result = redline.tune(f"{HERE / 'own_models.py'}:{name}", task=task, budget=asked.budget, device="cpu")
    (asked.out / f"{name}_{task}.json").write_text(json.dumps(result.to_json()))
    (asked.out / f"{name}_{task}.txt").write_text(str(result))
    found, winner = result.summary, result.winner
    complaints = []
    if found.seconds > ALLOWED_OVER * parse_seconds(asked.budget):
        complaints.append(f"took {found.seconds:.0f} s")
    if winner is not None and name in PLANTED and winner.recipe != "keep-memory":
        complaints.append(f"{winner.recipe} cannot win here")
    ruled_out = [row.switch for row in found.rejected if row.scope == "switch"]
    complaints += [f"{switch} failed more than once" for switch in set(ruled_out) if ruled_out.count(switch) > 1]
    told = "no winner"
    if winner is not None:
        told = f"{winner.recipe} {winner.ratio:.2f} ({winner.low:.2f} to {winner.high:.2f})"
        if task == "infer":
            error, ratio = run_snippet(name, result.snippet or "", asked.out)
            told += f", its snippet {ratio:.2f} with error {error:.1e}"
            complaints += [f"the snippet's outputs are {error:.2g} off"] if error > CLOSE else []
            complaints += ["the snippet is slower than was said"] if ratio < SLACK * (winner.low or 0.0) else []
    print(
        f"{name:18} {task:5} {found.seconds:5.1f} s  {told}{''.join(f'  WRONG: {each}' for each in complaints)}",
        flush=True,
    )
    return complaints


def run_snippet(name: str, snippet: str, folder: Path) -> tuple[float, float]:
    """The relative error of its outputs, and the plain ratio; in a process of its own."""
    file = folder / f"{name}_snippet.py"
    file.write_text(snippet)
    code = PLAIN.format(here=str(HERE), file=str(file), name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr.splitlines()[-1] if done.stderr else "no message", file=sys.stderr)
        return float("inf"), 0.0
    error, ratio = map(float, done.stdout.splitlines()[-1].split())
    return error, ratio


if __name__ == "__main__":
    sys.exit(main())
