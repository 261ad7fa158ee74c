"""A comparison in its forms: they agree, and names do no harm."""

from __future__ import annotations

import json
import re

import pytest
from reported import race_records

from redline.analyze.compare import compare_records
from redline.show.page import written_page
from redline.show.result import markdown
from redline.verbs.compare import result_of


def test_terminal_markdown_page_and_document_agree() -> None:
    first, _, other = race_records()
    result = result_of(compare_records([first], [other]), "a", "b", ([first], [other]))
    (row,) = json.loads(result.to_json())["tables"]["benchmarks"]
    assert (result.about["verdict"], row["verdict"], row["basis"]) == ("faster", "faster", "interleaved")
    ratio = row["ratio"]
    for form in (str(result), markdown(result), written_page(result)):
        assert f"{ratio['value']:.2f}× ({ratio['low']:.2f}–{ratio['high']:.2f})" in form
        assert "faster" in form


@pytest.mark.parametrize("name", ["<script>|\n# x", "\x1b[31mred", "[a](http://b)", "y" * 300])
def test_names_do_no_harm(name: str) -> None:
    first, _, other = race_records(model=name)
    result = result_of(compare_records([first], [other]), name, name, ([first], [other]))
    text, page = markdown(result), written_page(result)
    assert "\x1b" not in str(result) + text + page
    assert "<script>" not in text + page
    assert not re.search(r"(?<!\\)\]\(http", text)
    header, row = (line for line in text.splitlines() if line.startswith("|") and "---" not in line)
    assert len(re.findall(r"(?<!\\)\|", header)) == len(re.findall(r"(?<!\\)\|", row))


def test_the_picture_is_of_what_the_verdict_was_made_from() -> None:
    first, _, other = race_records()
    (row,) = (result := result_of(compare_records([first], [other]), "a", "b", ([first], [other]))).rows
    ours, theirs = (line.get_xdata() for line in result.plot().axes[0].lines)
    middle = len(ours) // 2
    assert ours[middle] / theirs[middle] == pytest.approx(row.value("ratio"), rel=0.05)
