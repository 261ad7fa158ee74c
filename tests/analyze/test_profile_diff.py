"""Two profiles side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
from kineto import ADD, GEMM, NORM, TraceMaker

from redline.analyze.profile import Profile
from redline.analyze.profile_diff import diff_profiles

US = 1000


def profile(path: Path, kernels: dict[str, int], steps: int, *, marked: bool = True) -> Profile:
    maker = TraceMaker()
    at = 100 * US
    for number in range(steps):
        begin = at - 10 * US
        for name, microseconds in kernels.items():
            operator = maker.operator(f"aten::{name[:6]}", at - 5 * US, 4 * US)
            maker.kernel(name, at, microseconds * US, launched=at - 4 * US, call_ns=100, operator=operator)
            at += (microseconds + 5) * US
        if marked:
            maker.annotation(f"ProfilerStep#{number}", begin, at - 10 * US - begin)
    return maker.profile()


def test_per_step_whatever_the_number_of_steps(tmp_path: Path) -> None:
    before = profile(tmp_path / "a.json", {GEMM: 100, ADD: 50, NORM: 10}, steps=2)
    after = profile(tmp_path / "b.json", {GEMM: 40, ADD: 51, "new_kernel": 5}, steps=5)
    diff = diff_profiles(before, after)
    changes = {row.name: row for row in diff.kernels}
    assert diff.unit == "step"
    assert {name: row.change for name, row in changes.items()} == {
        GEMM: "faster",
        ADD: "same",
        NORM: "vanished",
        "new_kernel": "appeared",
    }
    assert changes[GEMM].before_s == pytest.approx(100e-6)
    assert changes[GEMM].ratio == pytest.approx(2.5)
    assert (changes[GEMM].calls_before, changes[GEMM].calls_after) == (1, 1)
    assert changes[NORM].ratio is None
    assert diff.kernels[0].name == GEMM  # the largest change first
    assert diff.busy.before_s == pytest.approx(160e-6)
    assert {row.name for row in diff.operators} >= {f"aten::{GEMM[:6]}", "aten::new_ke"}


def test_without_steps_the_whole_traces_are_compared_and_it_says_so(tmp_path: Path) -> None:
    before = profile(tmp_path / "a.json", {GEMM: 100}, steps=2, marked=False)
    after = profile(tmp_path / "b.json", {GEMM: 100}, steps=2)
    diff = diff_profiles(before, after)
    assert (diff.unit, len(diff.notes)) == ("trace", 1)
    assert diff.kernels[0].before_s == pytest.approx(200e-6)


def test_what_is_no_longer_in_the_way(tmp_path: Path) -> None:
    before = profile(tmp_path / "a.json", {GEMM: 50, ADD: 50}, steps=2)
    after = profile(tmp_path / "b.json", {GEMM: 50, "triton_poi_fused_add_0": 20}, steps=2)
    diff = diff_profiles(before, after)
    assert "elementwise" in diff.findings_gone
    assert diff.findings_new == ()


def test_a_profile_against_itself_changes_nothing(tmp_path: Path) -> None:
    same = profile(tmp_path / "a.json", {GEMM: 50, ADD: 50}, steps=2)
    diff = diff_profiles(same, same)
    assert {row.change for row in (*diff.kernels, *diff.operators, *diff.classes, diff.step, diff.busy)} == {"same"}
