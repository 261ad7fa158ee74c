"""`redline profile` from its words to its output and exit code."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from invoking import invoke
from kineto import ADD, GEMM, TraceMaker, training_trace
from typer.testing import Result

US = 1000
MISBEHAVING = Path(__file__).parents[1] / "models" / "misbehaving.py"


def redline(*words: str | Path) -> Result:
    return invoke("profile", *words)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    training_trace(tmp_path / "a.json.gz", megabytes=4)
    return tmp_path / "a.json.gz"


class TestTraces:
    def test_a_table_for_people(self, trace: Path) -> None:
        result = redline(trace)
        assert result.exit_code == 0
        assert "data-wait" in result.stdout
        assert "kernels: " in result.stdout

    def test_one_document_and_nothing_else(self, trace: Path) -> None:
        document = json.loads(redline(trace, "--json").stdout)
        assert document["timeline"]["busy_s"] > 0
        assert document["findings"][0]["code"] == "data-wait"
        assert document["lost"] is None

    def test_several_files_are_ranks(self, tmp_path: Path) -> None:
        for rank in range(3):
            training_trace(tmp_path / f"{rank}.json", megabytes=0.3, seed=rank, rank=rank)
        files = [tmp_path / f"{rank}.json" for rank in range(3)]
        document = json.loads(redline(*files, "--json").stdout)
        assert [rank["rank"] for rank in document["ranks"]] == [0, 1, 2]

    def test_the_kernel_table_as_csv_and_the_page(self, trace: Path, tmp_path: Path) -> None:
        result = redline(trace, "--csv", tmp_path / "k.csv", "--html", tmp_path / "p.html", "--json")
        assert result.exit_code == 0
        json.loads(result.stdout)
        assert (tmp_path / "k.csv").read_text().startswith('"Name","Calls"')
        assert "<svg" in (tmp_path / "p.html").read_text()

    def test_open_writes_a_page_by_itself(self, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        result = redline(trace, "--open")
        assert result.exit_code == 0
        assert (tmp_path / "a.profile.html").exists()
        assert "a.profile.html" in result.stderr

    def test_operators_by_shape(self, trace: Path) -> None:
        operators = json.loads(redline(trace, "--by-shape", "--json").stdout)["operators"]
        assert len({row["dims"] for row in operators if row["name"] == "aten::linear_inner"}) == 2

    def test_a_truncated_file_is_read_and_told(self, trace: Path) -> None:
        trace.write_bytes(trace.read_bytes()[:-5000])
        result = redline(trace, "--json")
        assert result.exit_code == 0
        assert json.loads(result.stdout)["lost"]["truncated"] is True

    @pytest.mark.parametrize("text", ["", "<html>", '{"traceEvents": []}', "[" * 100_000])
    def test_what_is_no_trace_is_one_line_and_exit_2(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "bad.json").write_text(text)
        result = redline(tmp_path / "bad.json")
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.startswith("redline: ")
        assert result.stderr.count("\n") == 1


class TestUsage:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ([], "name one model"),
            (["resnet18", "resnet50"], "name one model"),
            (["nowhere.json"], "no such file"),
            (["--diff", "a.json", "b.json", "resnet50"], "takes two profiles"),
            (["--diff", "a.json", "b.json", "--import", "c.csv"], "takes two profiles"),
            (["--diff", "a.json", "b.json", "--csv", "c.csv"], "prints a comparison"),
            (["--diff", "nowhere.json", "neither.json"], "no such file"),
            (["a.json", "resnet18"], "a.json is a trace and resnet18 a model"),
            (["a.json", "--report", "folder"], "--report needs records"),
            (["resnet18", "-r", "fp16", "-r", "bf16"], "a profile is of one recipe"),
            (["resnet18", "--plot", "m.png"], "give --memory as well"),
            (["--memory"], "name a model"),
            (["resnet18", "--memory", "--steps", "2"], "traces nothing: leave out steps"),
            (["a.json", "--memory"], "traces nothing: leave out trace"),
            (["resnet18", "--memory", "--csv", "c.csv"], "traces nothing: leave out csv"),
            (["--import", "c.csv", "--by-shape"], "--by-shape is of operators"),
            (["--diff", "abcdef123456", "abcdef123456"], "no record"),
            (["resnet18", "--steps", "0", "--device", "cpu"], "steps must be 1 or more"),
            (["resnet18", "--tool", "ncuu", "--device", "cpu"], "unknown profiler"),
        ],
    )
    def test_a_mistake_is_one_line_and_exit_2(self, words: list[str], message: str) -> None:
        result = redline(*words)
        assert result.exit_code == 2
        assert message in result.stderr


def two_kernels(path: Path, gemm_us: int) -> Path:
    maker = TraceMaker()
    maker.annotation("ProfilerStep#0", 0, 500 * US)
    maker.kernel(GEMM, 100 * US, gemm_us * US, launched=US)
    maker.kernel(ADD, 300 * US, 10 * US, launched=2 * US)
    return maker.write(path)


def test_two_traces_side_by_side(tmp_path: Path) -> None:
    before, after = two_kernels(tmp_path / "a.json", 100), two_kernels(tmp_path / "b.json", 50)
    result = redline("--diff", before, after)
    assert result.exit_code == 0
    assert "2.00×" in result.stdout
    document = json.loads(redline("--diff", before, after, "--json").stdout)
    assert {row["name"]: row["change"] for row in document["kernels"]} == {GEMM: "faster", ADD: "same"}


@pytest.mark.usefixtures("brief")
def test_a_model_is_timed_captured_explained_and_found_again(tmp_path: Path) -> None:
    model = f"{MISBEHAVING}:sound"
    result = redline(model, "--device", "cpu", "--task", "train", "--steps", "2", "--out", tmp_path / "tb", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    (trace,) = (tmp_path / "tb").iterdir()
    assert trace.name.endswith(".pt.trace.json.gz")
    assert document["capture"]["trace"] == str(trace)
    assert document["capture"]["step_s"] > 0
    assert document["capture"]["capture_s"] > 0
    assert set(document["phases_s"]) == {"forward", "backward", "optimizer"}
    assert document["steps"]["count"] == 2
    assert document["operators"]
    again = json.loads(redline(document["capture"]["record_id"], "--json").stdout)
    (kept,) = again.pop("sources")  # the history's own copy
    assert Path(kept).read_bytes() == trace.read_bytes()
    assert again["capture"].pop("trace") == kept
    del document["sources"], document["capture"]["trace"]
    assert again == document
    same = json.loads(redline("--diff", document["capture"]["record_id"], trace, "--json").stdout)
    assert {row["change"] for row in same["operators"]} == {"same"}


def test_a_model_that_breaks_is_one_line_and_exit_5() -> None:
    result = redline(f"{MISBEHAVING}:raises", "--device", "cpu")
    assert result.exit_code == 5
    assert "this forward" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("words", "option"),
    [(["--batch", "8"], "--batch"), (["-r", "fp16"], "--recipe"), (["--steps", "2"], "--steps")],
)  # fmt: skip
def test_what_was_captured_cannot_be_captured_differently(trace: Path, words: list[str], option: str) -> None:
    for reads in ([trace], ["--diff", trace, trace]):
        result = redline(*reads, *words)
        assert result.exit_code == 2
        assert f"{option} is about capturing a model, and {reads[0]} reads what was captured" in result.stderr


def test_on_a_cpu_the_csv_holds_the_operators(tmp_path: Path) -> None:
    maker = TraceMaker()
    maker.operator("aten::mm", 0, 30 * US)
    maker.operator("aten::add", 100 * US, 10 * US)
    assert redline(maker.write(tmp_path / "a.json"), "--csv", tmp_path / "o.csv").exit_code == 0
    lines = (tmp_path / "o.csv").read_text().splitlines()
    assert lines[1:] == ['"aten::mm",1,30000,30000,75.0', '"aten::add",1,10000,10000,25.0']


def test_a_pipe_is_a_trace_too(tmp_path: Path) -> None:
    two_kernels(tmp_path / "a.json", 100)
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes((tmp_path / "a.json").read_bytes()))
    writer.start()
    result = redline(tmp_path / "pipe", "--json")
    writer.join()
    assert result.exit_code == 0, result.stderr
    assert len(json.loads(result.stdout)["kernels"]) == 2
