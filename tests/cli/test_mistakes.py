"""A mistake is one line on stderr and exit code 2, whichever command was typed, and nothing is measured before it."""

from __future__ import annotations

from pathlib import Path

import pytest
from invoking import invoke, refused

MISBEHAVING = Path(__file__).parents[1] / "models" / "misbehaving.py"

MISTAKES = {
    "run resnet5": "unknown model 'resnet5'; did you mean resnet50",
    "run simple_cnn -r compil": "unknown switch 'compil'; did you mean compile?",
    "run simple_cnn -r nosuch": "unknown switch 'nosuch' (there are amp, amp-bf16, ",
    "run simple_cnn -r fp16+amp": "recipe fp16+amp: amp and fp16 exclude each other",
    "run simple_cnn -r compile+torchscript": "compile and torchscript exclude each other",
    "run simple_cnn -r compile:fullgraph=3": "fullgraph must be true or false, got 3",
    "run simple_cnn -r torchscript --task train": "torchscript is for infer, not for train",
    "run simple_cnn -r fp16+": "recipe 'fp16+' has an empty switch",
    "run simple_cnn -r fp16+fp16": "names fp16 twice",
    "run simple_cnn --batch 0": "batch must be 1 or more, got 0",
    "run simple_cnn --batch -3": "batch must be 1 or more, got -3",
    "run simple_cnn --image-size 4": "image_size must be 8 or more for simple_cnn, got 4",
    "run simple_cnn --sequence-length 4": "sequence_length 4 cannot be honoured for simple_cnn",
    "run simple_cnn --threads 0": "threads must be 1 or more, got 0",
    "run simple_cnn --task dance": "task must be one of infer, train, step, generate, got 'dance'",
    "run simple_cnn --optimizer foo": "optimizer must be one of sgd, adam, adamw, got 'foo'",
    "run simple_cnn --batch 99999999999999999999": "batch must be 2147483647 or less",
    "run simple_cnn --seed 18446744073709551615": "seed must be 18446744073709551614 or less",
    "run simple_cnn --threads 99999999999": "threads must be 4096 or less, got 99999999999",
    "run simple_cnn -r compile:fullgraph=99999999999999999999": "fullgraph must be true or false, got '999",
    "run simple_cnn --effort heroic": "effort must be one of quick, normal, strict, got 'heroic'",
    "run simple_cnn --door trap": "door must be one of inline, fork, spawn, torchrun, fake, got 'trap'",
    "run absent.py:make": "no such file: absent.py",
    f"run {MISBEHAVING}:sounds": "has no sounds; did you mean sound?",
    f"run {MISBEHAVING}": "does not name a factory: write path/to/file.py:factory",
    "run no_such_package.module:make": "no module named 'no_such_package.module'",
    "run simple_cnn --device cuda": "run 'redline doctor', or use --device cpu",
    "run simple_cnn --device gpu": "unknown device 'gpu'",
    "run simple_cnn --device auto:1": "device auto takes no index",
    "run -f absent.toml": "no such file: absent.toml",
    "run": "name at least one model",
    "run simple_cnn --decide --replicates 99999999999999999999": "replicates must be 1000 or less",
    "tune simple_cnn --replicates 99999999999999999999": "replicates must be 1000 or less",
    "flops simple_cnn --depth 99999999999999999999": "depth must be 1000 or less",
    "profile simple_cnn --steps 99999999999999999999": "steps must be 1000000 or less",
    "flops resnet999": "unknown model 'resnet999'",
    "flops simple_cnn --depth -1": "depth must be 0 or more",
    "roofline -r fp16": "a recipe goes with a model",
    "roofline --batch 8": "batch goes with a model: name one",
    "roofline simple_cnn --last": "--last takes the last run",
    "roofline --last": "no counted work",
    "roofline simple_cnn --plot plot.txt": "plot must end in .png",
    "roofline --threads 0": "threads must be 1 or more",
    "roofline --device tpu": "unknown device 'tpu'",
    "scale simple_cnn --ranks 1,x": "ranks must be numbers",
    "scale simple_cnn --ranks 0": "ranks must be 1 or more",
    "scale simple_cnn --batch 8 --batch-per-rank 8": "give batch or batch_per_rank",
    "scale simple_cnn --batch 2 --ranks 4 --device cpu": "leaves nothing for 2 of 4 ranks",
    "run nosuch -b 1,2": "unknown model 'nosuch'",
    "run resnet50 -b many": "batch must be a number",
    "run resnet50 --threads 1..": "threads must be a number",
    "run resnet50 -b 0,1": "batch must be 1 or more",
    "run resnet50 -b 1,2 -r fp16++": "empty switch",
    "run resnet50 --task infer,fly": "fly",
    "run -f nowhere.toml": "no such file",
    "run resnet50 --name ' '": "name must be",
    "run resnet50 --name a,b": "name must not have a comma",
    "run resnet50 --max-memory some": "16GiB",
    "run resnet50 --effort heroic": "effort",
    "run resnet50 --launch ray --decide": "pairs are decided on one machine",
    "batch nosuch": "unknown model 'nosuch'",
    "batch resnet50 --max-memory lots": "16GiB",
    "batch resnet50 --slo-p95 soon": "20ms",
    "batch resnet50 --slo-p95 0": "slo_p95 must be above 0",
    "batch resnet50 --max-batch 0": "max_batch must be 1 or more",
    "batch resnet50 --door inline": "fresh process, which door 'inline' does not have: use fork or spawn",
    "batch resnet50 --task fly": "fly",
    "run --decide resnet50": "at least two recipes",
    "run --decide resnet50 -r fp16": "at least two recipes",
    "run --decide nosuch -r baseline -r fp16": "unknown model 'nosuch'",
    "run --decide resnet50 -r baseline -r fp16 --replicates 0": "replicates must be 1 or more",
    "tune nosuch": "unknown model 'nosuch'",
    "tune resnet50 --budget soon": "budget: expected a time such as 20ms, 3s or 10m",
    "tune resnet50 --objective beauty": "objective must be one of",
    "tune resnet50 --tolerance loose": "2x",
    "tune resnet50 --slo-p95 soon": "20ms",
    "tune resnet50 --max-memory lots": "16GiB",
    "tune resnet50 --switches fp61": "did you mean fp16",
    "tune resnet50 --without nosuch": "unknown switch 'nosuch'",
    "tune resnet50 -r fp16+bf16": "exclude",
    "tune resnet50 --resume": "to resume",
    "tune resnet50 --task fly": "fly",
    "train": "name at least one model",
    "train nosuch": "unknown model 'nosuch'",
    "train resnet18 --find-workers --schedule cosine": "trains nothing: leave out --schedule",
    "train resnet18 resnet50 --find-workers": "one model under one recipe",
    "train resnet18 --epochs 0": "epochs must be 1 or more",
    "train resnet18 --target-accuracy 90": "target_accuracy must be above 0 and at most 1, got 90",
    "train resnet18 --augment everywhere": "augment must be one of none, host, device",
    "train resnet18 --on-device --workers 2": "data on the device pass no loader",
    "train resnet18 --schedule steep": "schedule must be one of",
    "report --sweep nosuch": "no sweep 'nosuch'",
    "report --tune nosuch": "no tune 'nosuch'",
    "report --last --sweep x": "one of them",
    "report abcdef": "no record 'abcdef'",
    "history show --limit 0": "limit must be 1 or more, got 0",
    "history show --limit -3": "limit must be 1 or more, got -3",
    "history show --limit 99999999999999999999": "limit must be 1000000 or less",
    "history no-such-model": "nothing of 'no-such-model'",
    "history --since yesterday": "is no time",
    "history --limit 0": "limit must be 1 or more",
    "history --task fly": "task must be one of infer, train",
    "history --batch -1": "batch must be 1 or more",
    "history --plot .": "plot must end in",
    "history tag 0": "give at least one record and a tag",
    "history tag ffff v1": "no record 'ffff'",
    "history prune": "say what to prune",
    "history delete ffff": "no record 'ffff'",
    "history import no-such-file": "cannot read no-such-file",
    "history export --format archive": "name a file",
    "history export --format xml": "format must be one of csv, json, archive",
    "history show zzz": "no record 'zzz'",
    "compare nosuch nosuch": "nosuch",
    "compare abcdef0123 abcdef0123": "abcdef0123",
    "compare no/such/file.json no/such/file.json": "no/such/file.json",
    "demo --device cuda": "cuda",
    "demo --device tpu": "tpu",
    "models no-such-network": "no model matches 'no-such-network'",
    "models resnt --json": "no model matches 'resnt'; did you mean resnet",
    "study lader": "did you mean ladder",
    "study": "name an experiment: batch, example, ladder, precision",
    "batch resnet50 --plot x.nothing": "must end in",
    "watch --log paper -- sh -c 'exit 9'": "paper",
    "watch --alert ' ' -- sh -c 'exit 9'": "needs a command",
    "watch --alert true --alert-drop much -- sh -c 'exit 9'": "must be a share",
    "watch --alert-drop 10% -- sh -c 'exit 9'": "give --alert",
    "watch --summary . -- sh -c 'exit 9'": "it is a folder",
    "watch --proflie -- sh -c 'exit 9'": "no such option",
    "run simple_cnn -r baseline -r channel-last": "did you mean channels-last",
    f"run {'x' * 300}": "unknown model",
    "run [red]": "[red]",
    "run 'two\nlines.py:make'": "two",
    "run 'two\nlines'": "two",
    "run simple_cnn -r '[red]\n'": "[red]",
}

FILES = {
    "run -f": {
        "model = ": "is not TOML",
        "run = 3": "write each run as a [[run]] table",
    },
    "gate --baseline main": {
        "[[run]]\nmodel = 'm'\nthreshold = '5'": "threshold",
        "[[run]]\nmodel = 'm'\nspeed = 1": "unknown setting 'speed'",
        "run = 3": "[[run]]",
        "title = 'x'\n[[run]]\nmodel = 'm'": "title is not a setting of a gate",
        "environment = 3\n[[run]]\nmodel = 'm'": "environment: must be a table, got 3",
        "[[run]]\nmodel = 'm'\nthreshold = nan": "threshold must be above 0 and below 1, got nan",
        "[[run]]\nmodel = 'm'\n[[run]]\nmodel = 'm'": "two benchmarks are called",
        "[environment]\nsetup = 3\n[[run]]\nmodel = 'm'": "environment: Expected `str`",
        "[[run]]\nmodel = 'm'\nthreshold = 5": "threshold must be above 0 and below 1, got 5",
        "[[run]]\nmodel = 'm'\n[[run]]\nmodel = 'n'\nbatch = 0": "bad.toml: [[run]] 2: batch must be 1 or more",
        '[[run]]\nmodel = "m"\nname = "a\\u0007b"\n': "printable characters",
        "[[run]]\nmodel = 'm'\nfail_on = ['speed']": "fail_on must be one of memory, numerics",
    },
    "study": {
        "columns = ['speed']": "unknown column 'speed'; there are throughput",
        "columns = 3": "columns must be a list of names",
        "title = 3": "title must be a text",
        "model = 'resnet50'\nquick = 3": "quick must be a table",
        "model = 'resnet50'\nbatch = 'best'": "batch must be a number",
        "modle = 'resnet50'": "unknown setting 'modle'",
    },
}
"""What a file holds and what is said of it, below the command that reads it."""


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_told_in_one_line_and_leaves_no_history(line: str, own_history: Path) -> None:
    refused(invoke(line), MISTAKES[line])
    if line.startswith("run"):
        assert not own_history.exists()


@pytest.mark.parametrize(("command", "text"), [(command, text) for command in FILES for text in FILES[command]])
def test_a_mistake_in_a_file_is_told_in_one_line(command: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    result = invoke(command, file)
    refused(result, FILES[command][text])
    assert command != "study" or str(file) in result.stderr
