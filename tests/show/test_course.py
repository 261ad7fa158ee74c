"""How far a measurement has come: done and left, with a clock of its own."""

from __future__ import annotations

import msgspec
from reported import race_records

from redline.cli.progress import LiveBatches, LiveObserver
from redline.model.protocol import Progress
from redline.show.course import Course, in_columns, replicate_words, stage_words

FIRST, SECOND, _ = race_records()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_replicate_more_than_was_planned_is_not_one_of_fewer() -> None:
    assert [replicate_words(number, 3) for number in (1, 3, 4)] == [
        "replicate 1 of 3",
        "replicate 3 of 3",
        "replicate 4",
    ]


def test_the_rest_is_told_from_what_has_passed() -> None:
    clock = Clock()
    course = Course(clock)
    assert course.told == ""
    course.planned(2)
    course.opened(FIRST)
    assert course.told == "0 of 2 done"
    clock.now += 20.0
    course.closed(FIRST)
    assert course.told == "1 of 2 done, about 20 s left"
    course.planned(-1)
    assert course.told == "1 of 1 done"


def test_what_is_asked_names_what_it_measures() -> None:
    assert stage_words(Progress(stage="ceilings", detail="fp16 matrix products")) == "measuring (fp16 matrix products)"


def test_a_line_keeps_its_numbers_at_80_columns() -> None:
    name = "timm:vit_base_patch16_224 fp16+channels-last+compile:reduce-overhead"
    words = "3\u2009200 img/s, leading, ±12\u2009% (target 3\u2009%), block 12 of at least 8"
    line = in_columns(name, words, 66)
    assert len(line) <= 66
    assert line.endswith(("block 12 of at least 8", "…"))
    assert "3\u2009200 img/s, leading, ±12\u2009%" in line
    assert line.startswith("timm:vit_b")


def test_in_a_pipe_each_event_is_one_line(capsys) -> None:  # type: ignore[no-untyped-def]
    with LiveObserver() as observer:
        observer.planned(2)
        observer.opened(FIRST)
        observer.progress(FIRST, Progress(stage="compile"))
        observer.asked(Progress(stage="ceilings", detail="copy bandwidth"))
        observer.closed(FIRST)
        observer.closed(msgspec.structs.replace(SECOND, blocks=(), stopped="interrupted"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "resnet50 baseline: opening a worker [0 of 2 done]"
    assert lines[1].startswith("resnet50 baseline: compiling [0 of 2 done")
    assert lines[2] == "measuring (copy bandwidth)"
    assert lines[3].startswith("resnet50 baseline: 2\u2009759 img/s [1 of 2 done")
    assert lines[4] == "resnet50 fp16: interrupted [2 of 2 done]"
    assert len(lines) == 5


def test_a_search_for_the_batch_says_how_many_trials_are_left_at_most(capsys) -> None:  # type: ignore[no-untyped-def]
    with LiveBatches() as observer:
        observer.planned(8)
        observer.trying(32, "knee")
        observer.opened(FIRST)
    assert "[trial 1 of at most 8] baseline at batch 32 for the knee: opening a worker" in capsys.readouterr().err
