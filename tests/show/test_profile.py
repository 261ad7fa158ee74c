"""A profile as people see it: terminal, page, CSV."""

from __future__ import annotations

import csv
import io
from html.parser import HTMLParser
from pathlib import Path

import pytest
from kineto import ADD, GEMM, TraceMaker, training_trace
from rich.console import Console

from redline.analyze.profile import Profile, profile_of
from redline.api.profile import compare_profiles
from redline.show.profile import ProfileReport, Sort
from redline.show.profile_diff import DiffReport
from redline.show.profile_files import kernel_csv, profile_page
from redline.show.terminal import as_text
from redline.trace.decode import read_trace, read_traces
from redline.trace.links import Links
from redline.trace.timeline import device_views, strip_of

US = 1000
EVIL = "<script>alert(1)</script> [red]bold[/red] \x1b[31m"


@pytest.fixture
def training(tmp_path: Path) -> Profile:
    training_trace(tmp_path / "a.json", megabytes=4)
    return profile_of(read_traces([tmp_path / "a.json"]))


def evil(path: Path) -> Profile:
    maker = TraceMaker()
    operator = maker.operator(EVIL, 0, 50 * US, dims=[EVIL], types=[])
    maker.kernel(EVIL, 100 * US, 50 * US, launched=5 * US, operator=operator)
    maker.copy(EVIL, 200 * US, 50 * US, launched=10 * US)
    return profile_of([read_trace(maker.write(path))], by_shape=True)


def test_the_terminal_tells_bound_tables_findings_and_where_to_look_further(training: Profile) -> None:
    text = as_text(ProfileReport(training, rows=3))
    for words in ("bound", "host wait", "time by class", "kernels: ", "operators, by device time", "ui.perfetto.dev"):
        assert words in text
    assert "data-wait (" in text
    assert text.index("data-wait (") < text.index("time by class"), "findings come first"
    assert "next: more loader workers" in text
    assert "sm90_xmma_gemm" in text
    assert "and 2 more" in text


def test_a_damaged_file_is_told_first(tmp_path: Path, training: Profile) -> None:
    whole = (tmp_path / "a.json").read_bytes()
    (tmp_path / "cut.json").write_bytes(whole[: len(whole) // 2])
    text = as_text(ProfileReport(profile_of(read_traces([tmp_path / "cut.json"]))))
    assert text.index("lost") < text.index("bound")
    assert "ends early" in text


def test_names_are_not_markup_in_the_terminal(tmp_path: Path) -> None:
    text = as_text(ProfileReport(evil(tmp_path / "a.json")))
    assert "[red]bold[/red]" in text
    assert "\x1b" not in text  # nor does the terminal obey what they hold


@pytest.mark.parametrize(
    ("sort", "first"), [("host", "aten::slow_on_the_host"), ("memory", "aten::large"), ("calls", "aten::often")]
)
def test_operators_in_the_order_asked_for(tmp_path: Path, sort: Sort, first: str) -> None:
    maker = TraceMaker()
    maker.operator("aten::slow_on_the_host", 0, 900 * US)
    large = maker.operator("aten::large", 1000 * US, 10 * US)
    maker.memory(1005 * US, 4096)
    maker.kernel(GEMM, 1010 * US, 50 * US, launched=1006 * US, operator=large)
    for number in range(3):
        maker.operator("aten::often", (2000 + 10 * number) * US, US)
    console = Console(width=160, no_color=True, force_terminal=False)
    with console.capture() as captured:
        console.print(ProfileReport(profile_of([read_trace(maker.write(tmp_path / "a.json"))]), sort=sort))
    rows = captured.get().partition("operators, by")[2].splitlines()
    assert rows[3].startswith(first)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_needs_nothing_else_and_escapes_every_name(tmp_path: Path) -> None:
    profile = evil(tmp_path / "a.json")
    page = profile_page(profile)
    found = Tags()
    found.feed(page)
    assert "script" not in found.tags
    assert found.links == []
    assert "&lt;script&gt;alert(1)" in page
    assert {"svg", "table"} <= found.tags
    assert "Content-Security-Policy" in page


def test_the_page_of_a_real_run_shows_its_findings(tmp_path: Path, training: Profile) -> None:
    page = profile_page(training)
    assert "data-wait" in page
    assert "vectorized_layer_norm_kernel" in page
    assert page.count("<rect") > 100


def test_strips_add_up_to_the_busy_time(tmp_path: Path) -> None:
    truth = training_trace(tmp_path / "a.json", megabytes=2, seed=3).timeline()
    (view,) = device_views(Links(read_trace(tmp_path / "a.json")))
    strip = strip_of(view, (int(view.busy.start[0]), int(view.busy.end[-1])), stretches=97)
    width = strip.span_s / 97
    assert sum(strip.compute) * width == pytest.approx(truth["compute"] / 1e9, rel=1e-3)
    assert sum(strip.communication) * width == pytest.approx(truth["exposed_communication"] / 1e9, rel=1e-2)
    assert all(sum(parts) <= 1.001 for parts in zip(strip.compute, strip.communication, strip.copy, strict=True))


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


def test_a_comparison_in_the_terminal(tmp_path: Path, training: Profile) -> None:
    training_trace(tmp_path / "b.json", megabytes=4, seed=9)
    other = profile_of(read_traces([tmp_path / "b.json"]))
    console = Console(width=160, no_color=True, force_terminal=False)
    with console.capture() as captured:
        console.print(DiffReport(compare_profiles(training, other), rows=2))
    text = captured.get()
    assert "per step" in text
    assert "that changed less" in text


def test_the_page_draws_flames_memory_and_why_it_was_idle(tmp_path: Path, training: Profile) -> None:
    maker = TraceMaker()
    maker.frame("nn.Module: <b>Net</b>_0", 0, 100 * US)
    operator = maker.operator("aten::mm", 10 * US, 20 * US)
    maker.memory(12 * US, 4096)
    maker.memory(20 * US, 4096)
    maker.kernel(GEMM, 40 * US, 50 * US, launched=12 * US, operator=operator)
    maker.kernel(GEMM, 300 * US, 50 * US, launched=290 * US)
    page = profile_page(profile_of([read_trace(maker.write(tmp_path / "a.json"))]))
    assert "<h2>Where device time comes from</h2>" in page
    assert "&lt;b&gt;Net&lt;/b&gt;_0: 50.0 µs, 1 calls" in page
    assert 'class="idle-host"' in page
    assert "8.00 KiB in use" in page
