"""`micro_benchmarking_pytorch.py`: every command of the workshop is accepted, and its printed lines are there."""

from __future__ import annotations

import csv
import json
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from redline.compat import micro
from redline.compat.micro import ALIASES, asked_for, main, parsed
from redline.launch.workers import reserved_port
from redline.model.spec import Recipe

SCRIPT = Path(__file__).parents[2] / "examples" / "micro_benchmarking_pytorch.py"
TINY = ("--image-size", "32", "--device", "cpu")

COMMANDS = """
--network resnet18 --batch-size 16 --iterations 5
--network resnet50
--network resnet50 --batch-size 8 --iterations 20
--network resnet50 --batch-size 16 --iterations 20
--network resnet50 --batch-size 32 --iterations 20
--network resnet50 --batch-size 32 --iterations 50
--network resnet50 --batch-size 64 --iterations 20
--network resnet50 --batch-size 128 --iterations 2
--network resnet50 --batch-size 128 --iterations 20
--network resnet50 --batch-size 256 --iterations 20
--network resnet18 --batch-size 64 --iterations 20
--network resnet18 --batch-size 128 --iterations 20
--network resnet152 --batch-size 64 --iterations 20
--network resnet152 --batch-size 128 --iterations 20
--network resnet50 --batch-size 32 --iterations 5 --fp16 0
--network resnet50 --batch-size 32 --iterations 5 --fp16 1
--network resnet50 --batch-size 32 --iterations 20 --fp16 0
--network resnet50 --batch-size 32 --iterations 20 --fp16 1
--network resnet50 --batch-size 64 --iterations 5 --fp16 0
--network resnet50 --batch-size 128 --iterations 5 --fp16 0
--network resnet50 --batch-size 256 --iterations 5 --fp16 0
--network resnet50 --batch-size 128 --iterations 5 --fp16 1
--network resnet50 --batch-size 256 --iterations 5 --fp16 1
--network resnet50 --batch-size 512 --iterations 5 --fp16 1
--network resnet50 --batch-size 64 --iterations 20 --fp16 0
--network resnet50 --batch-size 64 --iterations 20 --fp16 1
--network resnet50 --batch-size 32 --iterations 10 --autograd-profiler
--network resnet50 --batch-size 32 --iterations 10 --fp16 0 --autograd-profiler
--network resnet50 --batch-size 32 --iterations 10 --fp16 1 --autograd-profiler
--network resnet50 --batch-size 32 --iterations 10
--network resnet50 --batch-size 32 --iterations 10 --fp16 0
--network resnet50 --batch-size 32 --iterations 10 --fp16 1
--network resnet50 --batch-size 16 --iterations 20 --flops-prof-step 10
--network resnet50 --batch-size 32 --iterations 20 --flops-prof-step 10
--network resnet50 --batch-size 64 --iterations 20 --flops-prof-step 10
--network resnet50 --batch-size 128 --iterations 20 --flops-prof-step 10
--network resnet50 --batch-size 32 --iterations 20 --fp16 0 --flops-prof-step 10
--network resnet50 --batch-size 64 --iterations 20 --fp16 0 --flops-prof-step 10
--network resnet50 --batch-size 64 --iterations 20 --fp16 1 --flops-prof-step 10
--network resnet50 --batch-size 64 --iterations 20 --compile
--network resnet50 --batch-size 128 --iterations 20 --compile
--network resnet18 --batch-size 64 --iterations 20 --compile
--network resnet152 --batch-size 64 --iterations 20 --compile
--network efficientnet_b0 --batch-size 64 --iterations 20 --compile
--network resnet50 --batch-size 64 --iterations 20 --fp16 0 --compile
--network resnet50 --batch-size 64 --iterations 20 --fp16 1 --compile
--network resnet50 --batch-size 64 --iterations 20 --compile --compileContext "{'mode': 'reduce-overhead'}"
--network resnet50 --batch-size 64 --iterations 20 --compile --compileContext "{'mode': 'max-autotune'}"
--network resnet50 --batch-size 64 --iterations 20 --amp-opt-level 2
--network resnet50 --kineto --profiler-output trace
--network resnet50 --distributed_dataparallel --device_ids 0,1 --rank 0 --world-size 2
""".strip().splitlines()
"""What the workshop types behind the script's name; torchrun, rocprof and redirections stand around it there."""


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_of_the_workshop_is_accepted(line: str) -> None:
    words = shlex.split(line)
    asked = asked_for(parsed(words))
    for flag, value in (
        ("--network", asked.network),
        ("--batch-size", str(asked.spec.workload.batch)),
        ("--iterations", str(asked.iterations)),
    ):
        if flag in words:
            assert words[words.index(flag) + 1] == value
    assert ("compile" in str(asked.spec.recipe)) == ("--compile" in words)
    assert asked.precision == ("FP16" if "--fp16 1" in line else "AMP (FP16)" if "--amp" in line else "FP32")
    assert asked.training, "the public script trains unless told otherwise"


@pytest.mark.parametrize(
    ("context", "recipe"),
    [
        ("{}", "compile"),
        ("{'mode': 'default'}", "compile"),
        ("{'mode': 'max-autotune', 'fullgraph': 'True'}", "compile:max-autotune,fullgraph=true"),
        ("{'dynamic': False, 'backend': 'eager'}", "compile:dynamic=false,backend=eager"),
        ("{'options': {'max_autotune': True}}", "compile:max_autotune=true"),
        ("{'disable': 'True'}", "baseline"),
        ("{'disable': 'False'}", "compile"),
    ],
)
def test_the_compile_context_is_read_as_torch_reads_it(context: str, recipe: str) -> None:
    asked = asked_for(parsed(["--network", "resnet18", "--compile", "--compileContext", context]))
    assert asked.spec.recipe == Recipe.parse(recipe)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--compile", "--compileContext", "{'mode': 'a', 'options': {'b': 1}}"],
            "mode and options exclude each other",
        ),
        (["--compile", "--compileContext", "{'modus': 'a'}"], "has no 'modus'"),
        (["--compile", "--compileContext", "nonsense("], "must be a dict"),
        (["--compileContext", "{'mode': 'max-autotune'}"], "goes with --compile"),
        (["--fp16", "1", "--amp"], "exclude each other"),
        (["--batch-size", "0"], "--batch-size must be 1 or more, got 0"),
        (["--iterations", "0"], "--iterations must be 1 or more"),
        (["--opt-step", "0"], "--opt-step must be 1 or more"),
        (["--distributed_dataparallel"], "needs --rank and --world-size"),
        (["--dataparallel"], "torchrun --nproc-per-node"),
        (["--device_ids", "0,1"], "--device_ids goes with --distributed_dataparallel"),
        (["--rank", "0"], "--rank goes with --distributed_dataparallel"),
        (["--batch-size", "x"], "invalid int value"),
        (["--nosuch"], "unrecognized arguments: --nosuch"),
        (["--output-dir", "/proc/nosuch"], "cannot make the folder /proc/nosuch"),
        (["--csv-file", "/nosuch/x.csv"], "cannot write /nosuch/x.csv"),
        (["--kineto", "--profiler-output", "/nosuch/trace"], "cannot write /nosuch/trace.json"),
        (["--distributed_dataparallel", "--rank", "2", "--world-size", "2"], "--rank must be from 0 to 1"),
        (["--distributed_dataparallel", "--rank", "0", "--world-size", "2", "--device_ids", "a"], "must be numbers"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["--network", "resnet18", *words])
    except SystemExit as ended:  # argparse has found it
        code = int(str(ended.code))
    assert code == 2
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1


def test_an_unknown_network_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--network", "resnet5O", *TINY]) == 2
    assert "did you mean resnet50" in capsys.readouterr().err


def test_old_names_lead_to_models_that_exist() -> None:
    from redline.bench.workload.build import check_model
    from redline.model.spec import WorkloadSpec

    for model in ALIASES.values():
        check_model(WorkloadSpec(model=model))
    assert "nosuch" not in ALIASES


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main([*words, *TINY]) == code
    return capsys.readouterr().out


def test_training_prints_every_line_that_scripts_look_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = run(capsys, "--network", "simple_cnn", "--batch-size", "4", "--iterations", "5", "--output-dir", str(tmp_path), "--output-file", "r.json")  # fmt: skip
    for line in (
        "Using network: simple_cnn",
        "Batch size: 4",
        "Iterations: 5",
        "FP16: False",
        "Warmup complete.",
        "Performance Summary:",
        "Precision: FP32",
        "Microbenchmark for network : simple_cnn",
        "Num devices: 1",
        "Dtype: FP32",
        "Mini batch size [img] : 4",
    ):
        assert line in out.splitlines()
    for start in ("Average time per iteration:", "Standard deviation:", "Throughput:", "Images per second:",
                  "Milliseconds per batch:", "Microseconds per sample:", "Throughput [img/sec] :", "Time per mini-batch :"):  # fmt: skip
        assert any(line.startswith(start) for line in out.splitlines()), start
    losses = [float(found) for found in re.findall(r"^Epoch \d: Loss = ([\d.]+), Time = [\d.]+ seconds$", out, re.M)]
    assert len(losses) == 5
    assert losses[-1] < losses[0], "the optimizer steps"
    assert len(re.findall(r"^Warmup iteration \d: Loss", out, re.M)) == 5
    (row,) = csv.DictReader((tmp_path / "benchmark_summary.csv").read_text().splitlines())
    assert tuple(row)[1:4] == ("GPUs", "Mini batch size [img]", "Mini batch size [img/gpu]")
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["throughput_per_s"] == pytest.approx(4 / document["mean_s"])
    assert float(row["Throughput [img/sec]"]) == pytest.approx(document["throughput_per_s"])
    assert document["mean_s"] == pytest.approx(sum(document["times"]) / 5)


def test_inference_has_the_same_loss_in_every_iteration(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--network", "simple_cnn", "--batch-size", "2", "--iterations", "4", "--mode", "inference")
    losses = re.findall(r"Loss = ([\d.]+)", out)
    assert len(losses) == 9
    assert len(set(losses)) == 1


def test_fp16_trains_and_its_optimizer_steps(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--network", "simple_cnn", "--batch-size", "4", "--iterations", "4", "--fp16", "1")
    losses = [float(found) for found in re.findall(r"Loss = ([\d.]+)", out)]
    assert losses[-1] < losses[0], losses
    assert "Precision: FP16" in out


def test_accumulation_steps_once_in_so_many_iterations(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    real = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, *a, **k: (steps.append(1), real(self, *a, **k))[1])
    run(capsys, "--network", "simple_cnn", "--batch-size", "2", "--iterations", "7", "--opt-step", "4")
    assert len(steps) == 3, "twelve iterations, warm-up included"


def test_the_flops_profile_has_the_lines_people_grep(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--network", "simple_cnn", "--batch-size", "2", "--iterations", "3", "--flops-prof-step", "10")
    for start in ("world size:", "data parallel size:", "model parallel size:", "params per GPU:", "fwd MACs per GPU:",
                  "fwd FLOPs per GPU:", "fwd latency:", "bwd latency:", "fwd FLOPS per GPU", "bwd FLOPS per GPU",
                  "fwd+bwd FLOPS per GPU", "step latency:", "iter latency:"):  # fmt: skip
        assert any(line.startswith(start) for line in out.splitlines()), start
    assert "Profile Summary at step 2:" in out, "clamped to the last iteration"
    assert re.search(r"^  \w+: Sequential \(.*%, .*MACs, .*%, .*%\)$", out, re.M)


def test_its_flops_are_those_of_redline_flops(capsys: pytest.CaptureFixture[str]) -> None:
    import redline
    from redline.compat.micro import _count

    out = run(capsys, "--network", "simple_cnn", "--batch-size", "2", "--iterations", "1", "--flops-prof-step", "1")
    assert "fwd FLOPs per GPU" in out
    (found,) = redline.flops("simple_cnn", batch=2, image_size=32, task="train").rows
    said = {line.partition(":")[0]: line.partition(":")[2].strip() for line in out.splitlines() if "per GPU" in line}
    assert said["fwd FLOPs per GPU"] == _count(found.value("flops")).strip()
    assert said["params per GPU"] == _count(found.value("params")).strip()


def test_the_profiler_prints_tables_and_writes_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    out = run(capsys, "--network", "simple_cnn", "--batch-size", "2", "--iterations", "2", "--kineto", "--profiler-output", str(trace))  # fmt: skip
    assert "Top 10 operations by total CPU time:" in out
    assert "Memory Profiling:" in out
    rows = {line.split()[0] for line in out.splitlines() if line.split()}
    # Which ten are shown depends on what else the machine does; that they are operators does not.
    assert sum(row.startswith("aten::") for row in rows) >= 5, "each operator has a line of its own"
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_segmentation_model_trains(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--network", "lraspp_mobilenet_v3_large", "--batch-size", "2", "--iterations", "1")
    assert "Throughput [img/sec]" in out


def test_what_breaks_is_one_line_and_exit_5(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from redline.bench.micro import MicroBench

    def out_of_memory(self: MicroBench) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(MicroBench, "prepare", out_of_memory)
    assert main(["--network", "simple_cnn", *TINY]) == 5
    assert "out of memory" in capsys.readouterr().err


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as held:
        yield held.getsockname()[1]


def test_a_rank_of_gloo_ends_at_once_and_others_in_good_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profilers write their files as an interpreter ends; a thread of gloo may abort it then."""
    joined, left = threading.Event(), []
    monkeypatch.setattr(micro, "main", lambda: 3)
    monkeypatch.setattr("redline.bench.workload.ranks.GLOO_JOINED", joined)
    monkeypatch.setattr(micro.os, "_exit", left.append)
    with pytest.raises(SystemExit) as ended:
        micro.script()
    assert (left, ended.value.code) == ([], 3)
    joined.set()
    with pytest.raises(SystemExit):
        micro.script()
    assert left == [3]


@pytest.mark.slow
def test_manual_ranks_meet_at_the_url(port: int) -> None:
    url = f"tcp://127.0.0.1:{port}"
    commands = [
        [sys.executable, str(SCRIPT), "--network", "simple_cnn", "--batch-size", "3", "--iterations", "2", *TINY,
         "--distributed_dataparallel", "--rank", str(rank), "--world-size", "2", "--dist-backend", "gloo", "--dist-url", url]
        for rank in range(2)
    ]  # fmt: skip
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    outputs = [each.communicate(timeout=900)[0] for each in running]
    assert [each.returncode for each in running] == [0, 0]
    assert "Global batch size: 6" in outputs[0], "in manual DDP the batch is of each process"
