"""A comparison as text: every form says the same, and no name can break one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from reported import captured, race_records

from redline.analyze.compare import compare_records
from redline.analyze.profile import profile_of
from redline.analyze.profile_diff import diff_profiles
from redline.show.compare import compare_json, compare_markdown, compare_page, compare_report
from redline.show.terminal import as_text
from redline.trace.decode import read_trace


def test_all_forms_tell_ratio_interval_and_verdict() -> None:
    first, _, other = race_records()
    found = compare_records([first], [other])
    terminal, text = as_text(compare_report(found, "a", "b")), compare_markdown(found, "a", "b")
    document = json.loads(compare_json(found))
    (row,) = document["comparisons"]
    assert document["verdict"] == row["verdict"] == "faster"
    for form in (terminal, text):
        assert f"{row['ratio']:.3f}×" in form
        assert f"{row['low']:.3f}–{row['high']:.3f}" in form
        assert "faster" in form
        assert "interleaved" in form


@pytest.mark.parametrize("name", ["<script>|\n# x", "\x1b[31mred", "[a](http://b)", "y" * 300])
def test_names_do_no_harm(name: str) -> None:
    first, _, other = race_records(model=name)
    found = compare_records([first], [other])
    terminal, text = as_text(compare_report(found, name, name)), compare_markdown(found, name, name)
    assert "\x1b" not in terminal + text
    assert "<script>" not in text
    assert not re.search(r"(?<!\\)\]\(http", text)
    (row,) = [line for line in text.splitlines() if line.startswith("|") and "faster" in line]
    assert len(re.findall(r"(?<!\\)\|", row)) == 10


def test_the_page_has_both_distributions_and_the_kernels() -> None:
    first, other = race_records(("baseline", "fp16"))
    profiles = [captured(name) for name in ("h200_resnet50_fp32_b32", "h200_resnet50_fp16_b32")]
    diff = diff_profiles(*(profile_of([read_trace(Path(each.trace.path))], each) for each in profiles if each.trace))
    page = compare_page(compare_records([first], [other]), ("<b>", "other"), ([first], [other]), diff)
    assert page.count("<polyline") == 2
    assert "timed without the profiler" in page
    assert "&lt;b&gt;" in page
    assert "faster" in page
