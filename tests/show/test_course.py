"""How far a measurement has come: done, elapsed and left, with a clock of its own, and what a pipe shows of it."""

from __future__ import annotations

import msgspec
from reported import fake_door, race_records

from redline.analyze.statistics import Interval
from redline.cli.progress import LiveObserver
from redline.model.protocol import Progress
from redline.show.course import Course, ended_words, in_columns, interval_words, stage_words

FIRST, SECOND, _ = race_records()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_rest_is_told_from_what_has_passed_with_the_best_so_far() -> None:
    clock = Clock()
    course = Course(clock)
    assert course.told == ""
    course.planned(2)
    course.opened(FIRST)
    assert course.told == "0 of 2 done"
    clock.now += 20.0
    course.closed(FIRST)
    assert course.told == "1 of 2 done, 20 s elapsed, about 20 s left"
    course.closed(SECOND)
    assert course.told == "2 of 2 done, best so far: fp16, 2.50× (2.50–2.50) the first"
    course.ends_in(30.0)
    clock.now += 10.0
    assert "at most 20 s left" in course.told


def test_what_was_not_needed_is_taken_back() -> None:
    course = Course(Clock())
    course.planned(2)
    course.closed(FIRST)
    course.planned(-1)
    assert course.told == "1 of 1 done"


def test_a_result_with_wrong_outputs_is_not_the_best() -> None:
    course = Course(Clock())
    course.planned(2)
    for record in race_records(("baseline", "bf16")):
        course.closed(record)
    assert "best" not in course.told


def test_noise_is_no_number_and_nobody_is_the_best_by_it() -> None:
    course = Course(Clock())
    course.planned(2)
    for record in race_records(("baseline", "fp16"), fake_door(noise_sigma=3.0, step_s=lambda spec: 0.01)):
        assert ended_words(course.closed(record)).startswith("noisy")
    assert "best" not in course.told
    wide, narrow = (Interval(low=1 - half, median=1.0, high=1 + half) for half in (0.9, 0.2))
    assert interval_words(1, wide, 0.1) == "too noisy (target 10\u2009%), block 1"
    assert interval_words(1, narrow, 0.1).startswith("±20")


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


def test_in_a_pipe_each_result_is_one_line(capsys) -> None:  # type: ignore[no-untyped-def]
    with LiveObserver() as observer:
        observer.planned(2)
        observer.opened(FIRST)
        observer.progress(FIRST, Progress(stage="compile"))
        observer.asked(Progress(stage="ceilings", detail="copy bandwidth"))
        observer.closed(FIRST)
        observer.closed(msgspec.structs.replace(SECOND, blocks=(), stopped="interrupted"))
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("✓ resnet50 baseline: 2\u2009759 img/s [1 of 2 done")
    assert second == "✓ resnet50 fp16: interrupted [2 of 2 done]"


def test_replicates_are_counted_and_more_than_were_planned_are_not_of_fewer(capsys) -> None:  # type: ignore[no-untyped-def]
    with LiveObserver() as observer:
        for number in (1, 4):
            observer.replicate(number, 3, ["baseline"])
    assert capsys.readouterr().err.splitlines() == ["replicate 1 of 3", "replicate 4"]
