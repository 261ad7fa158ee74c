"""Everything Redline promises, one test per promise, from what a person types to what that person gets.

The rows are numbered as in the list of promises: benchmark 1 to 5, optimise 6 to 11, explain 12 to 20, scale 21 and 22,
show 23 to 28, beyond 29 to 31. Where hardware is missing, a fake bench with a known truth or a file recorded on the
hardware stands in for it. How well each part works is tested in the rooms; here nothing may get lost.
"""

from __future__ import annotations

import csv
import gzip
import json
import pickle
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torchvision
from brief import shorten_efforts
from invoking import invoke
from kineto import ADD, CONV, GEMM, NORM, REDUCE, TraceMaker
from reported import CEILINGS, TRACES, captured, fake_door, race_records, step_s
from torchvision.models import list_models
from typer.testing import Result

import redline
from redline.analyze.ranks import rank_peaks
from redline.bench.recipe.snippet import snippet_of
from redline.model.protocol import SwitchChoice
from redline.model.spec import Recipe, RunSpec, WorkloadSpec
from redline.search.vendors import TOOLS
from redline.store import History
from redline.testing.fake import FakeDoor
from redline.verbs import watch as watching
from redline.verbs import workspace

COMMANDS = {
    "run": "run",
    "grid": "run",
    "decide": "run --decide",
    "batch": "batch",
    "train": "train",
    "find workers": "train --find-workers",
    "load": "load",
    "scale": "scale",
    "study": "study precision --model",
    "ladder": "study ladder --model",
    "tune": "tune",
    "profile": "profile",
    "read trace": "profile",
    "read vendor": "profile --import",
    "ceilings": "roofline",
    "roofline": "roofline",
    "flops": "flops",
    "watch": "watch",
    "monitor": "monitor",
    "history": "history",
    "show": "history show",
    "compare": "compare",
    "gate": "gate",
    "report": "report",
    "doctor": "doctor",
    "models": "models",
    "workshop": "workshop",
}
"""How each ability is typed today. A command that is renamed changes here and nowhere else."""

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "micro_benchmarking_pytorch.py"
CPU = ("--device", "cpu", "--threads", "1")
PNG = b"\x89PNG"

OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.norm(self.conv(x)).relu().mean((2, 3)))

class Careful(Net):
    def forward(self, x):
        assert torch.is_inference_mode_enabled()
        return super().forward(x)

def make(batch=4):
    return Net(), torch.randn(batch, 3, 8, 8)

def careful(batch=4):
    return Careful(), torch.randn(batch, 3, 8, 8)

def linear(batch=4):
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(batch, 64)
"""


def ask(ability: str, *words: object) -> Result:
    return invoke(*COMMANDS[ability].split(), *map(str, words))


def told(ability: str, *words: object, code: int = 0) -> Any:
    result = ask(ability, *words, "--json")
    assert result.exit_code == code, result.output
    found = json.loads(result.stdout)
    assert found["schema"]
    return found


def figures(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a document with the plain value of each figure."""
    return {name: cell["value"] if isinstance(cell, dict) else cell for name, cell in row.items()}


def measured(ability: str, *words: object, code: int = 0) -> list[dict[str, Any]]:
    """The rows of a run with the plain value of each figure."""
    return [figures(row) for row in told(ability, *words, code=code)["tables"]["results"]]


@pytest.fixture(autouse=True)
def quick_and_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_efforts(monkeypatch.setattr)
    for name, value in {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def own(tmp_path: Path) -> str:
    """The file of a person's own models; ':NAME' behind it chooses one."""
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeDoor]:
    """Every bench from here on is a fake GPU with this truth."""

    def pretend(**truth: Any) -> FakeDoor:
        choices = [
            SwitchChoice(switch=name, family=family)
            for name, family in (
                ("fp16", "precision"),
                ("bf16", "precision"),
                ("amp", "precision"),
                ("channels-last", "layout"),
                ("compile", "compiler"),
            )
        ]
        door = fake_door(**{"ceilings": CEILINGS, "choices": choices, "cores": 8, **truth})
        monkeypatch.setattr(workspace, "open_door", lambda launch: door)
        return door

    return pretend


# Benchmark


def test_row_01_inference_has_throughput_latency_percentiles_and_memory(own: str) -> None:
    (row,) = measured("run", f"{own}:careful", "--tail", *CPU)
    assert 0 < row["latency_p50"] <= row["latency_p95"] <= row["latency_p99"]
    assert row["latency_mean"] > 0 < row["latency_std"]
    assert row["throughput"] * row["latency_p50"] == pytest.approx(4, rel=0.9)
    assert row["memory"] > 0
    assert row["first_call_time"] > 0
    with History.open() as history:
        record = history.load(row["record_id"])
        history.finish(recorded := captured())
        kept = history.load(recorded.id)
    assert record.prepared.warmup.samples, "steps before the timed ones"
    assert row["samples"] == sum(len(block.samples) for block in record.blocks), "and these are counted alone"
    assert {block.clock for block in kept.blocks} == {"device"}, "a GPU is timed by its own events"
    shown = told("show", recorded.id)
    assert shown["tables"]["record"][0]["memory"]["value"] > 0


def test_row_02_a_training_step_is_split_and_fp16_scales_its_loss(own: str) -> None:
    rows = measured("run", f"{own}:make", "--task", "train", "-r", "baseline", "-r", "amp", *CPU)
    with History.open() as history:
        records = [history.load(row["record_id"]) for row in rows]
    for row, record in zip(rows, records, strict=True):
        assert all(row[phase] > 0 for phase in ("forward", "backward", "optimizer_step"))
        assert row["latency_p50"] > 0 < row["throughput"]
        losses = record.prepared.numerics.losses
        assert losses[-1] < losses[0]
    assert [record.prepared.capabilities.scales_loss for record in records] == [False, True]


def test_row_03_real_training_reads_cifar10_from_disk_and_overlaps_loading(
    on_gpu: Callable[..., FakeDoor], tmp_path: Path
) -> None:
    folder, random = tmp_path / "cifar-10-batches-py", np.random.default_rng(0)
    folder.mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        pictures = random.integers(0, 256, (16, 3072), dtype=np.uint8)
        content = {"batch_label": name, "labels": random.integers(0, 10, 16).tolist(), "data": pictures}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    words = ("--data", "cifar10", "--folder", tmp_path, "--epochs", 2, "--batch", 16, "--workers", 1, *CPU)
    found = told("train", "simple_cnn", *words)["tables"]
    (training,), epochs = found["trainings"], found["epochs"]
    assert (training["data"], training["workers"], [epoch["samples"] for epoch in epochs]) == ("cifar10", 1, [80, 80])
    for epoch in epochs:
        assert epoch["seconds"]["value"] > 0 < epoch["throughput"]["value"]
        assert 0 <= epoch["accuracy"]["value"] <= 1
        assert 0 <= epoch["data_wait"]["value"] <= 1
        assert epoch["memory"]["value"] > 0
    on_gpu(load_s=0.012)
    (found,) = told("find workers", "resnet18")["tables"]["loader"]
    assert found["without_prefetch"]["value"] < found["together"]["value"], "loaded while the step computes"


def test_row_04_threads_and_devices_are_climbed_step_by_step_in_one_table(on_gpu: Callable[..., FakeDoor]) -> None:
    on_gpu(step_s=lambda spec: 0.4 / (spec.threads or 8) if spec.device == "cpu" else 0.004)
    words = ("resnet18", "--effort", "quick")
    rungs = measured("ladder", *words, code=5)
    names = [rung["run"] for rung in rungs]
    for wanted in ("CPU, 1 thread", r"CPU, 8 threads and \d+ loader workers", "GPU, fp32", "GPU, AMP"):
        assert any(re.match(wanted, name) for name in names), wanted
    assert rungs[1]["gain"] == rungs[1]["gain_over_first"] == pytest.approx(8, rel=0.05)
    assert rungs[2]["gain_over_first"] == pytest.approx(100, rel=0.05)
    shown = ask("ladder", *words).stdout
    assert all(f"{name}: " in shown for name in names), "each with what limits it"
    on_gpu(load_s=0.01)
    (found,) = told("find workers", "resnet18")["tables"]["loader"]
    assert (found["verdict"], found["best_workers"] > 0) == ("data-bound", True)


def test_row_05_models_have_names_and_ones_own_come_as_file_or_object(own: str) -> None:
    rows = told("models")["tables"]["models"]
    names = {row["name"] for row in rows}
    of_torchvision = {*list_models(module=torchvision.models), *list_models(module=torchvision.models.segmentation)}
    assert len(of_torchvision) > 80
    assert names >= of_torchvision | {"simple_cnn", "transformer"}
    assert {name.partition(":")[0] for name in names if ":" in name} >= {"timm", "hf"}
    for name in ("lraspp_mobilenet_v3_large", "timm:resnet18", "transformer"):
        assert told("flops", name)["tables"]["step"][0]["flops"]["value"] > 0
    (row,) = redline.run(torch.nn.Linear(4, 3), torch.randn(2, 4), device="cpu", threads=1)
    assert row.value("throughput") > 0


# Optimise


def test_row_06_toggles_run_where_the_device_has_them_and_say_so_where_not(own: str) -> None:
    runs = ["baseline", "amp", "amp-bf16", "fp16", "bf16", "channels-last", "torchscript", "compile:backend=eager"]
    refused = ["tf32", "cudnn-benchmark"]
    words = [word for recipe in (*runs, *refused) for word in ("-r", recipe)]
    rows = {row["recipe"]: row for row in measured("run", f"{own}:make", *words, *CPU, code=5)}
    for recipe in runs:
        assert "failure" not in rows[recipe]
        assert rows[recipe]["throughput"] > 0
    assert rows["compile:backend=eager"]["compile_time"] > 0
    for recipe in refused:
        assert recipe in rows[recipe]["failure"]
    modes = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "max_autotune=true")
    words = [word for mode in modes for word in ("-r", f"compile:{mode}")]
    assert ask("grid", f"{own}:make", *words, *CPU, "--dry-run").exit_code == 0
    assert ask("grid", f"{own}:make", "-r", "compile:fastest", *CPU, "--dry-run").exit_code == 2


def test_row_07_folding_and_other_runtimes_work_and_the_gpus_own_are_refused_with_the_reason(own: str) -> None:
    refused = {"graphs": "GPU", "fp8": "8.9", "tensorrt": "NVIDIA"}
    recipes = ["baseline", "fold-bn", "onnx", *refused]
    words = [word for recipe in recipes for word in ("-r", recipe)]
    rows = {row["recipe"]: row for row in measured("run", f"{own}:make", *words, *CPU, code=5)}
    for recipe in ("fold-bn", "onnx"):
        assert rows[recipe]["numerics"] == "passed"
        assert rows[recipe]["ratio"] > 0
    for recipe, reason in refused.items():
        assert reason in rows[recipe]["failure"]
    words = ("-r", "baseline", "-r", "fused-optimizer", "--task", "train", *CPU)
    assert not any("failure" in row for row in measured("run", f"{own}:make", *words))
    _, quantized = measured("run", f"{own}:linear", "-r", "baseline", "-r", "int8", *CPU)
    assert quantized["numerics"] == "quantized"


def test_row_08_a_recipe_with_wrong_numbers_is_never_recommended(on_gpu: Callable[..., FakeDoor]) -> None:
    on_gpu(step_s=lambda spec: 0.01 * {"bf16": 0.2, "fp16": 0.5}.get(str(spec.recipe), 1.0))
    result = ask("decide", "resnet50", "-r", "baseline", "-r", "fp16", "-r", "bf16")
    assert "✗" in result.stdout
    assert result.stdout.startswith("fp16 is 2.0")
    rows = {row["recipe"]: row for row in measured("run", "resnet50", "-r", "baseline", "-r", "bf16")}
    found = [rows["bf16"][name] for name in ("numerics", "signal_error", "tolerance")]
    assert found == ["wrong", 0.3, 0.02]
    found = told("tune", "resnet50", "--batch", 32, "--budget", "10m")
    (winner,) = [row["recipe"] for row in found["tables"]["ranking"] if row["verdict"] == "winner"]
    assert "bf16" not in winner.split("+")
    assert "above-tolerance" in {row["code"] for row in found["tables"]["rejected"]}


def test_row_09_a_grid_keeps_rows_resumes_and_has_oom_as_a_row(on_gpu: Callable[..., FakeDoor]) -> None:
    on_gpu()
    grid = ("resnet50", "vit_b_16", "-r", "baseline", "-r", "fp16", "-b", "128..256")
    found = told("grid", *grid)
    rows = found["tables"]["results"]
    assert [found["about"][name] for name in ("cells", "done", "failed")] == [8, 4, 4]
    assert len(rows) == 8
    assert {row["failure"].split()[0] for row in rows if row["batch"] == 256} == {"oom"}
    again = told("grid", *grid, "--resume")["tables"]["results"]
    assert [row["record_id"] for row in again] == [row["record_id"] for row in rows]
    with History.open() as history:
        assert len(history.rows()) == 8, "nothing is measured twice"


def test_row_10_the_batch_finder_knows_largest_knee_ratio_and_target(
    on_gpu: Callable[..., FakeDoor], tmp_path: Path
) -> None:
    def memory(spec: Any) -> int:
        return (300 + (10 if "fp16" in str(spec.recipe) else 20) * spec.workload.batch) * 2**20

    on_gpu(memory_bytes=memory)
    words = ("resnet50", "-r", "baseline", "-r", "fp16", "--slo-p95", "20ms")
    tables = told("batch", *words, "--plot", tmp_path / "batches.png")["tables"]
    plain, half = ({name: row[name]["value"] for name in row if "batch" in name} for row in tables["recipes"])
    for recipe, row, largest, most in (("baseline", plain, 185, 1 / 3e-4), ("fp16", half, 370, 2.5 / 3e-4)):
        assert row["largest_batch"] <= largest < 1.02 * row["largest_batch"] + 1
        trials = {trial["batch"]: trial for trial in tables["trials"] if trial["recipe"] == recipe}
        assert 0.88 < trials[row["knee_batch"]]["throughput"]["value"] / most < 0.95
        assert all(0 < trial["memory_share"]["value"] <= 1 for trial in trials.values())
    ratio = tables["recipes"][1]["largest_ratio"]["value"]
    assert ratio == pytest.approx(half["largest_batch"] / plain["largest_batch"])
    assert plain["batch_within_target"] == pytest.approx((0.02 - 0.002) / 3e-4, abs=2)
    assert (tmp_path / "batches.png").read_bytes().startswith(PNG)
    shown = ask("batch", *words).stdout
    assert all(word in shown for word in ("share", "largest", "knee"))


def test_row_11_the_tuner_proves_its_winner_says_each_gain_and_writes_code(
    on_gpu: Callable[..., FakeDoor], tmp_path: Path
) -> None:
    on_gpu()
    found = told("tune", "resnet50", "--batch", 32, "--budget", "30m", "--snippet", tmp_path / "fast.py")
    (winner,) = [row for row in found["tables"]["ranking"] if row["verdict"] == "winner"]
    assert winner["recipe"] == "fp16+compile"
    assert winner["vs_baseline"]["low"] <= 4.0 <= winner["vs_baseline"]["high"]
    gains = {row["switch"]: row["gain"] for row in found["tables"]["gains"]}
    assert gains["compile"]["low"] <= 1.6 <= gains["compile"]["high"]
    assert (tmp_path / "fast.py").read_text() == found["blocks"]["snippet"]
    recipe = Recipe.parse("bf16+channels-last")
    code = snippet_of(RunSpec(workload=WorkloadSpec(model="simple_cnn", batch=4), recipe=recipe, device="cpu"))
    compile(code, "snippet", "exec")
    assert "torch.bfloat16" in code, "a real bench writes plain PyTorch, which the tests of snippets run"
    assert "torch.channels_last" in code


# Explain


def test_row_12_the_profiler_writes_traces_and_sorts_operators(own: str, tmp_path: Path) -> None:
    found = told("profile", f"{own}:make", "--task", "train", "--out", tmp_path / "tb", "--steps", 2, *CPU)
    (trace,) = (tmp_path / "tb").iterdir()
    assert trace.name.endswith(".pt.trace.json.gz"), "what TensorBoard looks for"
    assert found["about"]["trace"] == str(trace)
    operators = list(map(figures, told("read trace", trace)["tables"]["operators"]))
    assert {"calls", "cpu_self_s", "cpu_total_s", "device_self_s", "cpu_allocated_bytes"} <= set(operators[0])
    for order, column in (("host", "cpu_self_s"), ("memory", "cpu_allocated_bytes"), ("calls", "calls")):
        shown = ask("read trace", trace, "--sort", order).stdout
        first = max(operators, key=lambda row, column=column: row[column])["name"]
        listed = [
            line.split()[0] for line in shown.splitlines() if line.startswith(("aten::", "Optimizer", "autograd"))
        ]
        assert listed.index(first) < 3, order
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"], "a Chrome trace"


KERNELS = {
    "convolution": CONV,
    "matmul": GEMM,
    "norm": NORM,
    "elementwise": ADD,
    "attention": "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Flash_fwd_params)",
    "reduction": "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float>>>()",
    "communication": REDUCE,
}


def test_row_13_kernels_are_tabulated_as_rocprof_does_and_classed(tmp_path: Path) -> None:
    maker = TraceMaker()
    for number, name in enumerate([*KERNELS.values(), GEMM]):
        maker.kernel(name, 100_000 * number, 1000 * (number + 1))
    maker.copy("Memcpy HtoD (Pageable -> Device)", 900_000, 5000)
    found = told("read trace", maker.write(tmp_path / "trace.json"), "--csv", tmp_path / "kernels.csv")
    assert {row["of"] for row in found["tables"]["classes"]} == {*KERNELS, "copy"}
    header, first, *_ = csv.reader((tmp_path / "kernels.csv").read_text().splitlines())
    assert header == ["Name", "Calls", "TotalDurationNs", "AverageNs", "Percentage"]
    whole = sum(1000 * (number + 1) for number in range(8)) + 5000
    assert first[:4] == [GEMM, "2", "10000", "5000"]
    assert float(first[4]) == pytest.approx(100 * 10_000 / whole, rel=0.2)


def test_row_14_the_timeline_says_why_the_device_idles(tmp_path: Path) -> None:
    found = told("read trace", TRACES / "h200_resnet50_fp16_b32.json.gz")
    parts = timeline_of(found)
    assert parts["busy"] + parts["idle"] == pytest.approx(parts["span"])
    assert sum(seconds for name, seconds in parts.items() if name in IDLE) == pytest.approx(parts["idle"])
    assert {"host wait", "launch gap", "sync"} <= set(parts)
    known = {row["of"]: row["value"]["value"] for row in found["tables"]["figures"]}
    assert known["launch: host"] > 0
    assert known["host over device"] > 1
    maker = TraceMaker()
    maker.kernel(GEMM, 0, 6000)
    maker.copy("Memcpy HtoD (Pageable -> Device)", 8000, 2000)
    parts = timeline_of(told("read trace", maker.write(tmp_path / "trace.json")))
    assert [parts[name] for name in ("span", "idle", "copy")] == pytest.approx([10e-6, 2e-6, 2e-6])


IDLE = ("host wait", "launch gap", "data wait", "sync", "allocator", "warm up", "latency", "dependency", "unknown")


def timeline_of(found: dict[str, Any]) -> dict[str, float]:
    return {row["part"]: row["seconds"]["value"] for row in found["tables"]["timeline"]}


def test_row_15_phases_and_which_of_them_is_the_bottleneck(on_gpu: Callable[..., FakeDoor]) -> None:
    found = told("read trace", TRACES / "cpu_simple_cnn_train.json.gz")
    needs = {row["phase"]: row["host_s"]["value"] for row in found["tables"]["phases"]}
    assert set(needs) == {"forward", "backward", "optimizer"}
    assert found["about"]["bottleneck"] == max(needs, key=lambda name: needs[name])
    on_gpu(load_s=0.1)
    found = told("train", "resnet18", "--epochs", 1)
    (training,) = found["tables"]["trainings"]
    shares = {name: training[f"{name}_share"]["value"] for name in ("data", "forward", "backward", "optimizer")}
    assert sum(shares.values()) == pytest.approx(1)
    assert (training["bound"], shares["data"] > 0.5) == ("data", True)


def test_row_16_flops_are_counted_per_module_and_set_against_the_clock() -> None:
    known = figures(told("flops", "resnet18")["tables"]["step"][0])
    assert known["params"] == 11_689_512
    assert known["macs"] == pytest.approx(1.814e9, rel=1e-3)
    assert known["flops"] == 2 * known["macs"]
    found = told("flops", "simple_cnn", "-b", 2, "--task", "train", "--latency", *CPU)["tables"]["modules"]
    whole, *parts = map(figures, found)
    assert whole["backward_flops"] == pytest.approx(2 * whole["flops"], rel=0.05)
    assert sum(part["macs"] for part in parts if part["depth"] == 1) == whole["macs"]
    assert 0 < sum(part.get("time_share", 0) for part in parts if part["depth"] == 1) <= 1.001
    assert whole["achieved"] == pytest.approx((whole["flops"] + whole["backward_flops"]) / whole["latency"], rel=0.02)


def test_row_17_the_roofline_gives_intensity_headroom_and_a_picture(
    on_gpu: Callable[..., FakeDoor], tmp_path: Path
) -> None:
    on_gpu()
    told("ceilings")
    (row,) = measured("run", "resnet50", "--batch", 32)
    (under,) = told("roofline", "--last", "--plot", tmp_path / "roof.png")["tables"]["recipes"]
    found = figures(under)
    assert (tmp_path / "roof.png").read_bytes().startswith(PNG)
    assert found["intensity"] == pytest.approx(32 * 8e9 / 1e8)
    assert found["roofline"] == pytest.approx(32 * 8e9 / CEILINGS.flops_per_s["fp32"])
    assert found["headroom"] == pytest.approx(found["measured"] / found["roofline"])
    assert row["of_peak"] == pytest.approx(1 / found["headroom"])
    assert found["bound"] == "compute"
    maker = TraceMaker()
    maker.kernel(GEMM, 10_000, 500_000, launched=0)
    maker.kernel(REDUCE, 310_000, 400_000, launched=5000, stream=20)
    bounds = {
        told("read trace", trace)["about"]["bound"]
        for trace in (maker.write(tmp_path / "ranks.json"), TRACES / "h200_resnet50_fp16_b32.json.gz")
    }
    assert bounds == {"communication", "host"}


VENDORS = {
    "nsys": "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name\n"
    "100.0,3000,3,1000.0,1000.0,900,1100,100.0,gemm\n",
    "ncu": '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
    '"0","9","gemm","gpu__time_duration.sum","us","3"\n'
    '"0","9","gemm","dram__throughput.avg.pct_of_peak_sustained_elapsed","%","90"\n'
    '"0","9","gemm","sm__warps_active.avg.pct_of_peak_sustained_active","%","20"\n'
    '"0","9","gemm","lts__t_sector_hit_rate.pct","%","60"\n',
    "rocprof": '"Name","Calls","TotalDurationNs","AverageNs","Percentage"\n"gemm",3,3000,1000,100.0\n',
    "rocprofv2": "Dispatch_ID,GPU_ID,Kernel_Name,Start_Timestamp,End_Timestamp\n1,0,gemm,0,3000\n",
    "rocprofv3": '"Dispatch_Id","Kernel_Name","Counter_Name","Counter_Value","Start_Timestamp","End_Timestamp"\n'
    '1,"gemm","OccupancyPercent",20.0,0,3000\n1,"gemm","MemUnitBusy",90.0,0,3000\n1,"gemm","L2CacheHit",60.0,0,3000\n',
}
FAKE_NCU = """#!{python}
import subprocess, sys
status = subprocess.call(sys.argv[sys.argv.index("--metrics") + 2:])
with open(sys.argv[sys.argv.index("--log-file") + 1], "w") as file:
    file.write('''{table}''')
sys.exit(status)
"""


def test_row_18_vendor_profilers_are_driven_read_and_named_where_absent(
    own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for vendor, text in VENDORS.items():
        (tmp_path / "file.csv").write_text(text)
        found = told("read vendor", tmp_path / "file.csv")
        kernels = list(map(figures, found["tables"]["kernels"]))
        assert [(row["name"], row["total_s"]) for row in kernels] == [("gemm", pytest.approx(3e-6))], vendor
        if vendor in ("ncu", "rocprofv3"):
            counters = {row["name"]: figures(row) for row in found["tables"]["counters"] if row["kernel"] == "all"}
            assert {name: row["value"] for name, row in counters.items()} == pytest.approx(
                {"bandwidth": 0.9, "occupancy": 0.2, "l2_hits": 0.6}
            )
            assert all(row["meaning"] for row in counters.values())
    monkeypatch.setenv("PATH", str(tmp_path))
    for absent in ("nsys", "ncu", "rocprof", "rocprofv2", "rocprofv3", "rocprof-compute"):
        result = ask("profile", f"{own}:make", "--tool", absent, "--device", "cpu")
        assert (result.exit_code, f"{absent} is not installed" in result.stderr) == (2, True)
    (tmp_path / "ncu").write_text(FAKE_NCU.format(python=sys.executable, table=VENDORS["ncu"]))
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setitem(TOOLS._entries, "ncu", replace(TOOLS.get("ncu"), devices=("cpu",)))
    found = told("profile", f"{own}:make", "--tool", "ncu", *CPU)
    assert [row["name"] for row in found["tables"]["kernels"]] == ["gemm"]


def test_row_19_the_machine_is_watched_and_energy_and_money_are_told_per_item(
    on_gpu: Callable[..., FakeDoor], tmp_path: Path
) -> None:
    found = told("monitor", "--duration", "0.1s", "--interval", 0.05, "--csv", tmp_path / "log.csv")
    wanted = {"utilisation", "memory_used_bytes", "power_w", "temperature_c", "clock_hz", "throttle", "energy_j"}
    assert wanted <= set(found["tables"]["looks"][0])
    assert wanted <= set((tmp_path / "log.csv").read_text().splitlines()[0].split(","))
    assert figures(found["tables"]["devices"][0])["peak_memory_bytes"] > 0
    on_gpu(step_s=0.5, power_w=300.0)
    (row,) = measured("run", "resnet50", "--batch", 32, "--price", "3.6/h")
    assert row["power"] == pytest.approx(300)
    assert row["energy_per_item"] == pytest.approx(300 / row["throughput"], rel=0.01)
    assert row["cost_per_million"] == pytest.approx(3.6 / 3600 / row["throughput"] * 1e6)


def test_row_20_findings_have_evidence_a_gain_and_what_to_try() -> None:
    trace = TRACES / "h200_resnet50_fp16_b32.json.gz"
    first, *_ = map(figures, told("read trace", trace)["tables"]["findings"])
    assert first["finding"] == "host-bound"
    assert re.search(r"waits for the host .*7\d%", first["evidence"])
    assert "torch.compile" in first["change"]
    assert first["gain_bound"] > 2
    assert first["evidence"] in " ".join(ask("read trace", trace).stdout.split())


# Scale


def test_row_21_ranks_have_batches_efficiency_and_stragglers(on_gpu: Callable[..., FakeDoor]) -> None:
    ranks = f"{ROOT}/tests/models/ranks.py:sound"
    words = ("--task", "train", "--ranks", "1,2", *CPU, "--effort", "quick", "--door", "fork")
    found = told("scale", ranks, *words, "--batch-per-rank", 4)["tables"]
    one, two = found["points"]
    assert (one["global_batch"], two["global_batch"], two["batch_per_rank"]) == (4, 8, 4)
    assert two["efficiency"]["value"] == pytest.approx(two["throughput"]["value"] / two["ideal"]["value"])
    assert (two["gradients"]["value"] > 0, "straggler" in two) == (True, True)
    for rank in found["ranks"]:
        assert rank["memory"]["value"] > 0 < rank["throughput"]["value"]
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    on_gpu()
    found = told("scale", "resnet50", "--task", "train", "--ranks", "1,2,4", "--batch", 16)
    points = found["tables"]["points"]
    assert (found["about"]["mode"], [point["batch_per_rank"] for point in points]) == ("strong", [16, 8, 4])
    assert {point["global_batch"] for point in points} == {16}
    assert points[0]["efficiency"]["value"] == 1.0
    assert "efficiency" in ask("scale", "resnet50", "--task", "train", "--ranks", "1,2", "--batch-per-rank", 8).stdout


def test_row_22_ranks_of_other_machines_join_and_a_cluster_measures_a_grid(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from redline.launch.workers import reserved_port

    monkeypatch.setenv("REDLINE_TOKEN", "a word of ours")
    with reserved_port() as held:
        place = f"127.0.0.1:{held.getsockname()[1]}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    agent = subprocess.Popen(
        [*command, "-m", "redline.bench.worker", f"ranks:tcp:{place}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        words = ("--task", "train", "--ranks", 2, "--batch", 8, "--rendezvous", place, *CPU)
        (row,) = measured("run", f"{own}:make", *words)
    finally:
        agent.terminate()
        agent.wait(60)
    with History.open() as history:
        record = history.load(row["record_id"])
    assert (record.spec.ranks, len(rank_peaks(record.blocks)), "failure" in row) == (2, 2, False)

    calls: dict[int, Callable[[], bytes]] = {}

    def remote(**_: Any) -> Callable[[Callable[..., bytes]], Any]:
        def call(function: Callable[..., bytes], *given: Any) -> int:
            calls[len(calls)] = lambda: function(*given)
            return len(calls) - 1

        return lambda function: SimpleNamespace(remote=lambda *given: call(function, *given))

    ray = SimpleNamespace(
        init=lambda **_: None,
        shutdown=lambda: None,
        nodes=lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}],
        remote=remote,
        wait=lambda waiting, num_returns: ([waiting[-1]], list(waiting[:-1])),
        get=lambda number: calls[number](),
        exceptions=SimpleNamespace(RayError=OSError),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    found = told("grid", f"{own}:make", "--batch", "1,2", "--launch", "ray", *CPU)
    assert (len(calls), found["about"]["done"]) == (2, 2)


# Show


def test_row_23_a_report_has_every_form_and_the_dashboard_is_one_file(
    on_gpu: Callable[..., FakeDoor], tmp_path: Path
) -> None:
    on_gpu()
    told("grid", "resnet50", "-r", "baseline", "-r", "fp16", "-b", "1..64")
    told("run", "resnet50", "--batch", 32, "-r", "baseline", "-r", "fp16")
    found = told("report", "-o", tmp_path / "report")["about"]
    pictures = [Path(str(path)) for path in found.values() if str(path).endswith(".png")]
    assert {"throughput.png", "latency.png", "recipes.png"} <= {path.name for path in pictures}
    assert all(path.read_bytes().startswith(PNG) for path in pictures)
    rows = list(csv.DictReader(Path(found["csv"]).read_text().splitlines()))
    assert {(row["recipe"], row["batch"]) for row in rows} == {
        (recipe, str(2**power)) for recipe in ("baseline", "fp16") for power in range(7)
    }
    assert len(json.loads(Path(found["json"]).read_text())["tables"]["results"]) == len(rows)
    text = Path(found["markdown"]).read_text()
    assert all(f"]({name})" in text for name in ("throughput.png", "recipes.png"))
    page = Path(found["dashboard"]).read_text()
    assert "Plotly" in page
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=.https?:", page), "works offline"
    told("study", "resnet50", "--batch", "1,8", "--out", tmp_path / "study")
    assert {"throughput.png", "latency.png", "results.csv"} <= {path.name for path in (tmp_path / "study").iterdir()}


def test_row_24_history_shows_changes_compares_any_two_and_gates(
    on_gpu: Callable[..., FakeDoor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = race_records()[0]
    with History.open() as history:
        for day in range(20):
            factor = (1.3 if day >= 10 else 1.0) * (1 + 0.002 * (day % 3))
            blocks = [
                msgspec.structs.replace(block, samples=tuple(factor * sample for sample in block.samples))
                for block in base.blocks
            ]
            changes = {"id": f"{day:021x}", "created_at": 1.7e9 + day * 86400, "group": None, "stopped": "target"}
            history.finish(msgspec.structs.replace(base, blocks=tuple(blocks), **changes))
    tables = told("history", "--plot", tmp_path / "trend.png")["tables"]
    assert len(tables["points"]) == 20, "every run is kept"
    (change,) = (row["change"] for row in tables["changes"])
    assert change["low"] <= 0.3 <= change["high"]
    assert (tmp_path / "trend.png").read_bytes().startswith(PNG)
    first, last = (tables["points"][number]["record_id"] for number in (0, -1))
    assert [row["verdict"] for row in told("compare", first, last, code=1)["tables"]["benchmarks"]] == ["slower"]

    monkeypatch.chdir(tmp_path)
    (tmp_path / "bench.toml").write_text('device = "cuda:0"\n[[run]]\nname = "one"\nmodel = "m"\nbatch = 8\n')
    git = ["git", "-c", "user.email=a@example.org", "-c", "user.name=a"]
    for words in (["init", "-q", "-b", "main"], ["add", "bench.toml"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    for slowdown, code in ((1.0, 0), (1.1, 1)):
        on_gpu(step_s=lambda spec, slowdown=slowdown: 0.01 if spec.launch.folder else 0.01 * slowdown)
        assert told("gate", "bench.toml", "--baseline", "main", code=code)["about"]["failed"] == bool(code)


def test_row_24_a_watched_training_that_gets_slower_raises_an_alert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "STATUS_S", 0.4)
    (tmp_path / "train.py").write_text(
        "import time, torch\nmodel = torch.nn.Linear(4, 4)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(450):\n    optimizer.zero_grad()\n    model(torch.randn(8, 4)).sum().backward()\n"
        "    optimizer.step()\n    time.sleep(0.002 if step < 300 else 0.01)\n"
    )
    alert = f"cat > {tmp_path}/alert.json"
    words = ("--alert", alert, "--alert-drop", "50%", "--", sys.executable, tmp_path / "train.py")
    assert ask("watch", *words).exit_code == 0
    alerted = json.loads((tmp_path / "alert.json").read_text())
    assert alerted["steps_per_s"] < 0.5 * alerted["best_steps_per_s"]


def test_row_25_doctor_says_what_is_wrong_and_how_to_mend_it() -> None:
    found = told("doctor")
    facts = {row["item"]: row for row in found["tables"]["facts"]}
    assert torch.__version__ in facts["torch"]["seen"]
    assert {"Python", "torch", "history"} <= set(facts)
    assert all(row["fix"] for row in facts.values() if row["state"] == "broken")


def test_row_26_one_call_profiles_a_training_and_the_notebook_uses_it(tmp_path: Path) -> None:
    """The notebook is run top to bottom by `test_notebook.py`."""
    quick = redline.run_quick_profile(
        model_name="simple_cnn", dataset="synthetic-learnable", epochs=1, batch_size=8, train_samples=32, val_samples=16,
        device="cpu", threads=1, progress=False,
    )  # fmt: skip
    assert quick[0].value("throughput") > 0
    assert {"forward", "backward", "optimizer", "data"} <= {row["of"] for row in quick.table("phases").rows}
    assert sum(row.value("share") for row in quick.table("classes").rows) == pytest.approx(1)
    files = quick.save(tmp_path)
    assert all(Path(path).stat().st_size > 0 for path in (files.dashboard, files.trace))
    cells = json.loads((ROOT / "notebooks" / "quickstart.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert "run_quick_profile(" in code


WORKSHOP = {
    "--network resnet50 --batch-size 32 --iterations 50": ("Average time per iteration:", "Images per second:"),
    "--network resnet50 --batch-size 64 --iterations 20 --fp16 1": ("Precision: FP16", "Dtype: FP16"),
    "--network resnet50 --batch-size 32 --iterations 10 --autograd-profiler": (
        "Top 10 operations by total CPU time:",
        "Memory Profiling:",
    ),
    "--network resnet50 --batch-size 32 --iterations 20 --flops-prof-step 10": ("fwd MACs per GPU:", "fwd latency:"),
    "--network resnet50 --batch-size 64 --iterations 20 --compile --compileContext \"{'mode': 'reduce-overhead'}\"": (),
}
"""What stands behind the script's name in the workshop, and some of what it prints there."""
SMALL = "--network simple_cnn --batch-size 2 --iterations 2 --image-size 32 --device cpu"
"""Written behind a line of the workshop, this makes it take a moment."""


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_row_27_the_workshops_lines_run_verbatim_also_under_torchrun(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from redline.compat.micro import main

    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    for line, prints in WORKSHOP.items():
        assert main(shlex.split(f"{line} {SMALL}")) == 0
        printed = capsys.readouterr().out.splitlines()
        for start in ("Throughput:", "Standard deviation:", "Throughput [img/sec] :", "Time per mini-batch :", *prints):
            assert any(row.startswith(start) for row in printed), (line, start)
    line = f"--nproc-per-node 2 {SCRIPT} --network resnet50 --batch-size 128 --iterations 2 {SMALL} --batch-size 5"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *shlex.split(line)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert {"Global batch size: 5", "Local batch size: 3", "World size: 2", "Num devices: 2"} <= set(printed)
    assert any("[GPU 1] Local batch size: 2" in row for row in printed), "a batch that two ranks cannot share equally"
    for start in ("**** Launching with torchrun ****", "[GPU 0] Epoch 1: Loss = ", "[GPU 1] Epoch 1: Loss = "):
        assert any(row.startswith(start) for row in printed), start


def test_row_28_the_workshop_fills_in_its_results_and_checks_itself(tmp_path: Path) -> None:
    words = [word for number in (1, 3, 5, 7) for word in ("--exercise", number)]
    assert ask("workshop", *words, "--quick", "--device", "cpu", "-o", tmp_path).exit_code == 0
    text = (tmp_path / "my_workshop_results.txt").read_text()
    assert "throughput " in text
    assert "[x] the loss is the same in every iteration" in text
    exercises = json.loads((tmp_path / "my_workshop_results.json").read_text())["walk"]["exercises"]
    assert [found["number"] for found in exercises] == [1, 3, 5, 7]
    assert [bool(found["skipped"]) for found in exercises] == [False, False, True, True], "two need GPUs"
    assert all(found["checks"] and found["answers"] for found in exercises[:2])
    refused = ask("workshop", "--exercise", 8)
    assert (refused.exit_code, "from 1 to 7" in refused.stderr) == (2, True)


# Beyond


def test_row_29_an_unchanged_script_is_watched_and_told_what_to_change(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import time, torch\n"
        "class Slow(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 160\n"
        "    def __getitem__(self, index):\n        time.sleep(0.002)\n        return torch.randn(4), index % 2\n"
        "model = torch.nn.Linear(4, 2)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for x, y in torch.utils.data.DataLoader(Slow(), batch_size=8):\n    optimizer.zero_grad()\n"
        "    torch.nn.functional.cross_entropy(model(x), y).backward()\n    optimizer.step()\n"
    )
    result = ask("watch", "--summary", tmp_path / "told.json", "--", sys.executable, tmp_path / "train.py")
    found = json.loads((tmp_path / "told.json").read_text())
    run = figures(found["tables"]["run"][0])
    assert (result.exit_code, found["about"]["exit_code"], run["steps"]) == (0, 0, 20)
    assert run["throughput"] == pytest.approx(8 * run["steps_per_s"])
    phases = {row["phase"]: figures(row) for row in found["tables"]["phases"]}
    assert phases["data"]["share"] > 0.5
    assert "workers" in next(row["change"] for row in found["tables"]["findings"] if row["code"] == "data-wait")


def test_row_30_generation_has_prefill_and_decode_apart(on_gpu: Callable[..., FakeDoor]) -> None:
    on_gpu(step_s=0.1, ttft_s=0.04, weight_bytes=10**9, copy_bytes_per_s=1e12)
    (row,) = measured("run", "hf:gpt2", "--task", "generate", "--prompt", 128, "--new-tokens", 31, "-b", 1)
    assert row["prefill"] > 0 < row["decode"]
    assert row["ttft"] == pytest.approx(0.04, rel=0.05)
    assert row["tpot"] == pytest.approx(0.06 / 30, rel=0.05)
    assert row["prefill_rate"] == pytest.approx(128 / 0.04, rel=0.05)
    assert row["bandwidth_share"] == pytest.approx(1e9 / 1e12 / 0.002, rel=0.05)


def test_row_31_load_finds_the_highest_rate_that_keeps_a_latency(on_gpu: Callable[..., FakeDoor]) -> None:
    on_gpu()
    found = told("load", "resnet50", "--rate", "50..8000", "--slo-p99", "50ms")
    most = 32 / step_s(SimpleNamespace(workload=SimpleNamespace(batch=32), recipe="baseline"))  # type: ignore[arg-type]
    sustained = figures(found["tables"]["recipes"][0])["sustainable_rate"]
    assert 0.85 * most < sustained < most
    rates = [figures(row) for row in found["tables"]["rates"]]
    kept = [row for row in rates if row["keeps_target"]]
    assert max(row["rate"] for row in kept) == sustained
    assert all(row["latency_p99"] <= 0.05 for row in kept)
    assert (rates[-1]["verdict"], rates[-1]["mean_batch"] > 30) == ("falls behind", True)
