"""One result through every printer: the same values everywhere, and no number that nobody can use."""

from __future__ import annotations

import json

from redline.model.metrics import Figure, Headline, Row, Table
from redline.model.note import note
from redline.show.result import Result, markdown, terminal, web
from redline.show.terminal import as_text

SPEED = Figure(name="throughput", unit="{item}/s", better="higher")
RATIO = Figure(name="ratio", unit="x", header="vs baseline", better="higher")
BUSY = note("others-at-work", "other processes kept 2 cores busy <b>")
ROWS = (
    Row(facts={"recipe": "baseline", "batch": 32}, metrics=(SPEED(2747, 2740, 2755, item="img"),)),
    Row(
        facts={"recipe": "fp16", "batch": 32},
        metrics=(SPEED(127, 60, 900, item="img", doubt=BUSY), RATIO(8.08, 8.05, 8.3)),
    ),
    Row(facts={"recipe": "int8"}, failure="oom at prepare"),
)
FOUND = Result(
    verb="run",
    headline=Headline(template="{recipe} is {ratio} as fast.", figures={"recipe": "fp16", "ratio": ROWS[1]["ratio"]}),
    tables=(Table(name="recipes", rows=ROWS, columns=("recipe", "throughput", "ratio")),),
    next="redline tune resnet50",
)


def test_every_printer_shows_the_same_figures() -> None:
    for text in (as_text(terminal(FOUND)), markdown(FOUND), web(FOUND)):
        for shown in (
            "2\u2009747",
            "8.08× (8.05–8.30)",
            "too noisy",
            "img/s",
            "oom at prepare",
            "redline tune resnet50",
        ):
            assert shown in text
        assert "127" not in text, "a figure that spans more than a factor of 4 has no number"
    rows = json.loads(FOUND.to_json())["tables"]["recipes"]
    assert rows[1]["throughput"]["value"] == 127, "programs get it, with the doubt"
    assert rows[1]["throughput"]["doubt"]["code"] == "others-at-work"


def test_what_disturbed_a_figure_is_said_and_escaped() -> None:
    assert "kept 2 cores busy <b>" in as_text(terminal(FOUND))
    assert "<b>" not in markdown(FOUND)
    assert "<b>" not in web(FOUND)


def test_quiet_is_the_answer_alone_and_verbose_has_every_column() -> None:
    assert as_text(terminal(FOUND, quiet=True)).strip() == "fp16 is 8.08× (8.05–8.30) as fast."
    assert "batch" not in as_text(terminal(FOUND))
    assert "batch" in as_text(terminal(FOUND, verbose=True))


def test_rows_that_are_details_come_with_verbose_and_are_counted_otherwise() -> None:
    rows = tuple(Row(facts={"kernel": f"kernel-{number}"}, is_detail=number > 1) for number in range(4))
    found = Result(verb="profile", tables=(Table(name="kernels", rows=rows),))
    shown = as_text(terminal(found))
    assert "kernel-1" in shown
    assert "kernel-2" not in shown
    assert "2 more rows with -v" in shown
    assert "kernel-3" in as_text(terminal(found, verbose=True))
    assert "kernel-3" in markdown(found)
