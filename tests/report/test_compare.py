"""A comparison as text: every form says the same, and no name can break one."""

from __future__ import annotations

import json
import re

import pytest
from reported import race_records

from redline.analyze.compare import compare_records
from redline.report.compare import compare_json, compare_markdown, compare_report
from redline.report.terminal import as_text


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
