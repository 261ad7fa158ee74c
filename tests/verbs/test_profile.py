"""`redline profile`: from its words and arguments to its rows, its files and its exit code."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from invoking import invoke
from kineto import ADD, GEMM, TraceMaker, training_trace
from typer.testing import Result as Ran

import redline
from redline.analyze.profile import profile_of
from redline.model.errors import BenchError, Exit
from redline.model.spec import LaunchSpec, RunSpec
from redline.model.work import MemoryUse
from redline.show.profile import kernel_csv
from redline.trace.decode import read_trace
from redline.verbs.profile import ProfileResult, result_of
from redline.verbs.workspace import Workspace

US = 1000
MISBEHAVING = Path(__file__).parents[1] / "models" / "misbehaving.py"
EVIL = "<script>alert(1)</script> [red]bold[/red] \x1b[31m"


def run(*words: str | Path) -> Ran:
    return invoke("profile", *words)


def document(*words: str | Path) -> Any:
    ran = run(*words, "--json")
    assert ran.exit_code == 0, ran.stderr
    return json.loads(ran.stdout)


def values(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: cell["value"] if isinstance(cell, dict) else cell for name, cell in row.items()} for row in rows]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    training_trace(tmp_path / "a.json.gz", megabytes=4)
    return tmp_path / "a.json.gz"


def shown(maker: TraceMaker, path: Path, **how: Any) -> ProfileResult:
    return result_of(profile_of([read_trace(maker.write(path))]), **how)


def evil(path: Path) -> ProfileResult:
    maker = TraceMaker()
    operator = maker.operator(EVIL, 0, 50 * US, dims=[EVIL], types=[])
    maker.kernel(EVIL, 100 * US, 50 * US, launched=5 * US, operator=operator)
    maker.copy(EVIL, 200 * US, 50 * US, launched=10 * US)
    return shown(maker, path)


# What a trace shows


def test_the_findings_come_first_and_then_the_tables(trace: Path) -> None:
    ran = run(trace)
    assert ran.exit_code == 0
    text = ran.stdout
    assert text.startswith("data-wait costs ")
    order = [
        "1. data-wait (",
        "change: more loader workers",
        "where the time goes",
        "kernels: ",
        "more tables with -v: ",
    ]
    assert [text.index(words) for words in order] == sorted(text.index(words) for words in order)
    assert "time by class" not in text
    assert "time by class" in run(trace, "-v").stdout
    assert "operators, by calls" in run(trace, "--sort", "calls").stdout, "asked for, they are shown"
    assert "sm90_xmma_gemm" in text
    assert "ui.perfetto.dev" in text
    assert run(trace, "-q").stdout.count("\n") <= 2, "the answer alone"


def test_the_document_has_what_the_tables_show(trace: Path) -> None:
    found = document(trace)
    timeline = {row["part"]: row["seconds"]["value"] for row in found["tables"]["timeline"]}
    assert timeline["busy"] > 0
    assert values(found["tables"]["findings"])[0]["finding"] == "data-wait"
    assert "lost" not in [each["code"] for each in found["notes"]]


def test_a_file_that_was_cut_is_read_and_says_so(trace: Path) -> None:
    trace.write_bytes(trace.read_bytes()[:-5000])
    (lost,) = [each["text"] for each in document(trace)["notes"] if each["code"] == "lost"][:1]
    assert "end early" in lost


@pytest.mark.parametrize(
    ("sort", "first"), [("host", "aten::slow_on_the_host"), ("memory", "aten::large"), ("calls", "aten::often")]
)
def test_operators_stand_in_the_order_asked_for(tmp_path: Path, sort: Any, first: str) -> None:
    maker = TraceMaker()
    maker.operator("aten::slow_on_the_host", 0, 900 * US)
    large = maker.operator("aten::large", 1000 * US, 10 * US)
    maker.memory(1005 * US, 4096)
    maker.kernel(GEMM, 1010 * US, 50 * US, launched=1006 * US, operator=large)
    for number in range(3):
        maker.operator("aten::often", (2000 + 10 * number) * US, US)
    assert shown(maker, tmp_path / "a.json", sort=sort).table("operators").rows[0]["name"] == first


def test_names_are_markup_nowhere(tmp_path: Path) -> None:
    text = str(evil(tmp_path / "a.json"))
    assert "[red]bold[/red]" in text
    assert "\x1b" not in text  # nor does the terminal obey what they hold


@pytest.mark.parametrize("text", ["", "<html>", '{"traceEvents": []}', "[" * 100_000])
def test_what_is_no_trace_is_one_line_and_exit_2(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    ran = run(tmp_path / "bad.json")
    assert (ran.exit_code, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert ran.stderr.startswith("redline: ")


# Files


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_needs_nothing_else_and_escapes_every_name(tmp_path: Path) -> None:
    result = evil(tmp_path / "a.json")
    (tmp_path / "a.json").unlink()  # so that the page has no script of its own
    page, found = result.to_html(), Tags()
    found.feed(page)
    assert ("script" in found.tags, found.links) == (False, [])
    assert {"svg", "table"} <= found.tags
    assert "&lt;script&gt;alert(1)" in page
    assert "Content-Security-Policy" in page


def test_the_page_draws_flames(tmp_path: Path) -> None:
    maker = TraceMaker()
    maker.frame("nn.Module: <b>Net</b>_0", 0, 100 * US)
    operator = maker.operator("aten::mm", 10 * US, 20 * US)
    maker.kernel(GEMM, 40 * US, 50 * US, launched=12 * US, operator=operator)
    result = shown(maker, tmp_path / "a.json")
    page = result.to_html()
    assert "<h2>Where device time comes from</h2>" in page
    assert "&lt;b&gt;Net&lt;/b&gt;_0: 50.0 µs, 1 calls" in page
    result.plot(tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 1000


def test_the_kernel_table_as_csv_and_the_page(trace: Path, tmp_path: Path) -> None:
    assert document(trace, "--csv", tmp_path / "k.csv", "--html", tmp_path / "p.html")
    assert (tmp_path / "k.csv").read_text().startswith('"Name","Calls"')
    page = (tmp_path / "p.html").read_text()
    assert "data-wait" in page
    assert page.count("<rect") > 5


def test_csv_has_the_layout_of_rocprof(tmp_path: Path) -> None:
    maker = TraceMaker()
    maker.kernel(GEMM, 0, 30_001)
    maker.kernel(GEMM, 100_000, 30_000)
    maker.kernel(ADD, 200_000, 20_000)
    maker.kernel("=cmd|' /C calc'!A0", 300_000, 1)
    text = kernel_csv(profile_of([read_trace(maker.write(tmp_path / "a.json"))]))
    lines = list(csv.reader(io.StringIO(text)))
    assert text.splitlines()[0] == '"Name","Calls","TotalDurationNs","AverageNs","Percentage"'
    assert lines[1][:4] == [GEMM, "2", "60001", "30000"]
    assert float(lines[1][4]) == pytest.approx(100 * 60001 / 80002, abs=1e-5)
    assert lines[2][:4] == [ADD, "1", "20000", "20000"]
    assert lines[3][0].startswith("'=")  # no spreadsheet takes it for a formula


def test_on_a_cpu_the_csv_holds_the_operators(tmp_path: Path) -> None:
    maker = TraceMaker()
    maker.operator("aten::mm", 0, 30 * US)
    maker.operator("aten::add", 100 * US, 10 * US)
    assert run(maker.write(tmp_path / "a.json"), "--csv", tmp_path / "o.csv").exit_code == 0
    lines = (tmp_path / "o.csv").read_text().splitlines()
    assert lines[1:] == ['"aten::mm",1,30000,30000,75.0', '"aten::add",1,10000,10000,25.0']


# Two profiles


def two_kernels(path: Path, gemm_us: int) -> Path:
    maker = TraceMaker()
    maker.annotation("ProfilerStep#0", 0, 500 * US)
    maker.kernel(GEMM, 100 * US, gemm_us * US, launched=US)
    maker.kernel(ADD, 300 * US, 10 * US, launched=2 * US)
    return maker.write(path)


def test_two_traces_side_by_side(tmp_path: Path) -> None:
    before, after = two_kernels(tmp_path / "a.json", 100), two_kernels(tmp_path / "b.json", 50)
    ran = run("--diff", before, after)
    assert ran.exit_code == 0
    assert "2.00×" in ran.stdout
    assert "per step" in ran.stdout
    found = document("--diff", before, after)["tables"]
    assert {row["name"]: row["change"] for row in found["kernels"]} == {GEMM: "faster", ADD: "same"}
    profiles = [profile_of([read_trace(path)]) for path in (before, after)]
    assert redline.profile(diff=profiles).table("kernels").rows[0]["change"] == "faster"


# A model


@pytest.mark.usefixtures("brief")
def test_a_model_is_timed_captured_explained_and_found_again(tmp_path: Path) -> None:
    model = f"{MISBEHAVING}:sound"
    found = document(model, "--device", "cpu", "--task", "train", "--steps", "2", "--out", tmp_path / "tb")
    (trace,) = (tmp_path / "tb").iterdir()
    assert trace.name.endswith(".pt.trace.json.gz")
    assert found["about"]["trace"] == str(trace)
    known = {row["of"]: row["value"]["value"] for row in found["tables"]["figures"]}
    assert known["step without the profiler"] > 0
    assert known["capture"] > 0
    assert known["step: count"] == 2
    assert {row["phase"] for row in found["tables"]["phases"]} == {"forward", "backward", "optimizer"}
    (record,) = found["record_ids"]
    again = document(record)
    kept = again["about"].pop("trace")  # the history's own copy
    assert Path(kept).read_bytes() == trace.read_bytes()
    del found["about"]["trace"]
    assert {**again, "next": "", "record_ids": []} == {**found, "next": "", "record_ids": []}
    same = document("--diff", record, trace)["tables"]["operators"]
    assert {row["change"] for row in same} == {"same"}


def test_a_model_that_breaks_is_one_line_and_exit_5() -> None:
    ran = run(f"{MISBEHAVING}:raises", "--device", "cpu")
    assert (ran.exit_code, ran.stdout) == (5, "")
    assert "this forward" in ran.stderr


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
        (["--diff", "abcdef123456", "abcdef123456"], "no record"),
        (["--diff", "a.json", "b.json", "--batch", "8"], "--diff reads what was captured: leave out --batch"),
        (["a.json", "resnet18"], "a.json is a trace and resnet18 a model"),
        (["a.json", "-r", "fp16"], "a.json reads what was captured: leave out --recipe"),
        (["a.json", "--steps", "2"], "a.json reads what was captured: leave out --steps"),
        (["resnet18", "-r", "fp16", "-r", "bf16"], "a profile is of one recipe"),
        (["--memory"], "name a model"),
        (["resnet18", "--memory", "--steps", "2"], "traces nothing: leave out --steps"),
        (["a.json", "--memory"], "traces nothing: leave out --trace"),
        (["resnet18", "--memory", "--csv", "c.csv"], "traces nothing: leave out --csv"),
        (["resnet18", "--steps", "0", "--device", "cpu"], "steps must be 1 or more"),
        (["resnet18", "--tool", "ncuu", "--device", "cpu"], "unknown profiler"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(words: list[str], message: str) -> None:
    ran = run(*words)
    assert (ran.exit_code, ran.stderr.count("\n")) == (2, 1)
    assert message in ran.stderr


# Memory

PEAKS = {("simple_cnn", "baseline"): 100, ("simple_cnn", "bf16"): 60, ("transformer", "baseline"): 1000}


class Answering(Workspace):
    """Its bench knows some peaks, and no others."""

    def checked(self, specs: Sequence[RunSpec]) -> list[RunSpec]:
        return list(specs)

    def ask(self, question: Any, answer: Any, launch: LaunchSpec | None = None) -> Any:
        spec = question.spec
        peak = PEAKS.get((spec.workload.model, str(spec.recipe)))
        if peak is None:
            raise BenchError("unsupported", f"nothing is known of {spec.recipe}")
        use = MemoryUse(peak_bytes=peak, peak_phase="forward", categories={"weights": peak}, holders=(), timeline=())
        device = SimpleNamespace(name="a CPU")
        return SimpleNamespace(use=use, workload=SimpleNamespace(batch=2), environment=SimpleNamespace(device=device))


def held(*models: str, recipes: Sequence[str]) -> ProfileResult:
    with Answering(keep=False) as workspace:
        return redline.profile(list(models), memory=True, recipes=recipes, device="cpu", workspace=workspace)


def test_a_recipe_saves_memory_against_the_first_of_its_own_model(tmp_path: Path) -> None:
    found = held("simple_cnn", "transformer", recipes=["baseline", "bf16"])
    assert {(row.model, row.recipe): row.saved_bytes for row in found.memory} == {
        ("simple_cnn", "baseline"): None,
        ("simple_cnn", "bf16"): 40,
        ("transformer", "baseline"): None,
    }
    assert found.exit_code == Exit.FAILED_ROW
    failed = [row for row in found.rows if row.failure]
    assert [(row["recipe"], row.failure) for row in failed] == [
        ("transformer bf16", "failed: nothing is known of bf16")
    ]
    assert found.next == "redline batch simple_cnn --device cpu -r baseline"
    found.plot(tmp_path / "memory.png")


def test_where_every_look_at_memory_fails_the_first_failure_is_raised() -> None:
    with pytest.raises(BenchError, match="nothing is known of fp16"):
        held("simple_cnn", recipes=["fp16", "amp-bf16"])
