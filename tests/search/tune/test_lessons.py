"""What failures teach: which part is to blame, as far as one can know, and what is never tried again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from redline.model.note import note
from redline.model.record import FailureScope
from redline.search.tune.lessons import Lessons
from redline.search.tune.record import Lesson
from redline.search.tune.space import BASELINE, Switches


def switches(text: str) -> Switches:
    return frozenset(text.split("+")) if text else BASELINE


def lesson(text: str, kind: str = "compile", suspects: str = "") -> Lesson:
    """What a recipe that broke teaches; one of a single switch names it."""
    part = switches(text)
    reason = note("failed", "it broke", about=kind)
    named = tuple(sorted(switches(suspects)))
    scope: FailureScope = "switch" if len(part) == 1 else "recipe"
    return Lesson(switches=tuple(sorted(part)), scope=scope, reason=reason, recipe=text, suspects=named)


def after(broken: Iterable[str], ran: Iterable[str] = (), **known: Any) -> Lessons:
    lessons = [each if isinstance(each, Lesson) else lesson(each) for each in broken]
    return Lessons(lessons, (), [BASELINE, *map(switches, ran)], **known)


SDPA = {f"sdpa:{name}": "sdpa:*" for name in ("flash", "math", "cudnn", "efficient")}


@pytest.mark.parametrize(
    ("broken", "ran", "asked", "low", "high"),
    [
        pytest.param([], ["fp16"], "fp16+compile", 1.0, 1.0, id="nothing broke, nobody is blamed"),
        pytest.param(
            ["fp16+graphs", "bf16+graphs", "compile+graphs"], [], "tf32+graphs", 0.0, 0.05, id="there each time"
        ),
        pytest.param(["fp16+graphs", "bf16+graphs", "compile+graphs"], [], "fp16+compile", 0.8, 1.0, id="there once"),
        pytest.param(
            ["fp16+compile+graphs"], ["fp16+compile", "graphs"], "fp16+compile+tf32", 1.0, 1.0, id="runs elsewhere"
        ),
        pytest.param(
            ["fp16+compile+graphs"], ["fp16+compile", "graphs"], "compile+graphs", 0.4, 0.6, id="one of two pairs"
        ),
        pytest.param([lesson("a+b+c", suspects="b")], [], "a+c", 1.0, 1.0, id="not who the bench names"),
        pytest.param([lesson("a+b+c", suspects="b")], [], "b", 0.0, 0.7, id="who the bench names"),
        pytest.param(["fp16+sdpa:flash"], ["fp16"], "bf16+sdpa:cudnn", 0.5, 0.99, id="one variant"),
        pytest.param(["fp16+sdpa:flash", "fp16+sdpa:math"], ["fp16"], "bf16+sdpa:cudnn", 0.0, 0.35, id="two variants"),
        pytest.param(
            ["fp16+sdpa:flash", "fp16+sdpa:math"],
            ["fp16", "sdpa:efficient"],
            "bf16+sdpa:cudnn",
            1.0,
            1.0,
            id="one runs",
        ),
        pytest.param(
            [f"{one}+graphs+d" for one in "abc"], ["graphs"], "tf32+graphs+d", 0.0, 0.05, id="d, alone or not"
        ),
        pytest.param(["a+b+c"], ["a+b", "b+c", "a+c"], "a+b+c+d", 0.0, 0.0, id="only the whole is left to blame"),
        pytest.param(["a+b+c"], ["a+b", "b+c", "a+c"], "a+b+d", 1.0, 1.0, id="no part of the whole"),
        pytest.param(
            ["fp16", "fp16+a", "fp16+b", "a+b"], [], "a", 0.3, 0.9, id="what explains a failure clears the others"
        ),
        pytest.param(["graphs"], [], "fp16+graphs", 0.0, 0.0, id="a switch wherever it stands"),
        pytest.param([lesson("compile", "oom")], [], "fp16+compile", 1.0, 1.0, id="memory may do with half precision"),
        pytest.param([lesson("compile", "oom")], [], "compile", 0.0, 0.0, id="but not as it was"),
        pytest.param([lesson("a+b", "late")], ["a"], "b+c", 0.0, 0.7, id="what hangs accuses its parts"),
    ],
)
def test_a_failure_accuses_what_no_sound_recipe_has_held(
    broken: list[Any], ran: list[str], asked: str, low: float, high: float
) -> None:
    assert low <= after(broken, ran, kin=SDPA).chance(switches(asked)) <= high


def test_what_the_facts_speak_against_is_doubted_until_it_runs() -> None:
    doubted = after([], doubted=["onnx"])
    assert doubted.chance(switches("fold-bn+onnx")) == pytest.approx(0.5)
    assert doubted.chance(switches("fold-bn")) == 1.0
    assert after([], ["onnx"], doubted=["onnx"]).chance(switches("fold-bn+onnx")) == 1.0


def test_a_longer_check_is_answered_by_recipes_that_were_checked_as_long() -> None:
    """A trial that went well looked at fewer steps: it clears nobody."""
    lost = msgspec.structs.replace(lesson("fp16+graphs", "numerics"), overrules_trials=True)
    short, long = (Lessons([lost], sound, [switches("fp16")]) for sound in ([], [switches("graphs")]))
    assert short.chance(switches("fp16+a")) > long.chance(switches("fp16+a"))
    assert long.chance(switches("graphs+a")) == 1.0
