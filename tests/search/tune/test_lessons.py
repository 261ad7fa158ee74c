"""What failures teach: the part that broke is found with few questions, and never tried again."""

from __future__ import annotations

import math
from itertools import combinations

import pytest

from redline.model.note import note
from redline.search.tune.lessons import Lessons, find_cause, scope_of
from redline.search.tune.record import Lesson
from redline.search.tune.space import BASELINE, Switches


def switches(text: str) -> Switches:
    return frozenset(text.split("+")) if text else BASELINE


def lesson(text: str, kind: str = "compile") -> Lesson:
    part = switches(text)
    reason = note("failed", "it broke", about=kind)
    return Lesson(switches=tuple(sorted(part)), scope=scope_of(part), reason=reason, recipe=text)


class TestSuspicion:
    def test_nothing_broken_nobody_blamed(self) -> None:
        assert Lessons([], [switches("fp16")]).chance(switches("fp16+compile")) == 1.0

    def test_who_was_there_each_time_is_the_one(self) -> None:
        broken = [switches("fp16+graphs"), switches("bf16+graphs"), switches("compile+graphs")]
        lessons = Lessons([], [BASELINE], [(each, BASELINE) for each in broken])
        assert lessons.chance(switches("tf32+graphs")) < 0.05
        assert lessons.chance(switches("fp16+compile")) > 0.8

    def test_what_works_elsewhere_is_cleared(self) -> None:
        sound = [switches("fp16+compile"), switches("graphs")]
        lessons = Lessons([], sound, [(switches("fp16+compile+graphs"), BASELINE)])
        assert lessons.chance(switches("fp16+compile+tf32")) == 1.0
        assert lessons.chance(switches("compile+graphs")) == pytest.approx(0.5)

    def test_falls_on_whom_the_bench_names(self) -> None:
        lessons = Lessons([], [BASELINE], [(switches("fp16+compile+graphs"), switches("compile"))])
        assert lessons.chance(switches("fp16+graphs")) == 1.0
        assert lessons.chance(switches("compile")) < 0.7

    def test_two_variants_that_break_accuse_the_others(self) -> None:
        variants = {f"sdpa:{name}": "sdpa:*" for name in ("flash", "math", "cudnn", "efficient")}
        broken = [(switches("fp16+sdpa:flash"), BASELINE), (switches("fp16+sdpa:math"), BASELINE)]
        sound = [switches("fp16")]
        one = Lessons([], sound, broken[:1], variants)
        assert 0.5 < one.chance(switches("bf16+sdpa:cudnn")) < 1.0
        both = Lessons([], sound, broken, variants)
        assert both.chance(switches("bf16+sdpa:cudnn")) < 0.35
        cleared = Lessons([], [*sound, switches("sdpa:efficient")], broken, variants)
        assert cleared.chance(switches("bf16+sdpa:cudnn")) == 1.0
        assert cleared.chance(switches("fp16+sdpa:cudnn")) < 0.5, "but beside fp16 none has run"

    def test_a_variant_that_was_ruled_out_casts_doubt_on_the_others(self) -> None:
        """Each was found to break by itself, so that no recipe is left unexplained."""
        variants = {f"sdpa:{name}": "sdpa:*" for name in ("flash", "math", "cudnn")}
        broken = [(switches("fp16+sdpa:flash"), BASELINE), (switches("fp16+sdpa:math"), BASELINE)]
        one = Lessons([lesson("sdpa:flash")], [switches("fp16")], broken[:1], variants)
        assert one.chance(switches("bf16+sdpa:cudnn")) == pytest.approx(2 / 3)
        assert one.chance(switches("bf16")) == 1.0
        both = Lessons([lesson("sdpa:flash"), lesson("sdpa:math")], [switches("fp16")], broken, variants)
        assert both.chance(switches("bf16+sdpa:cudnn")) < 0.1

    def test_explanations_of_one_failure_add_up(self) -> None:
        """`d` or `d` with `graphs`, whatever it was: what holds both breaks again."""
        broken = [switches(f"{other}+graphs+d") for other in ("fp16", "bf16", "amp")]
        lessons = Lessons([], [switches("graphs")], [(each, BASELINE) for each in broken])
        assert lessons.chance(switches("tf32+graphs+d")) < 0.05

    def test_what_breaks_the_plain_switch_breaks_its_variants(self) -> None:
        variants = dict.fromkeys(("compile", "compile:freeze", "compile:reduce-overhead"), "compile:*")
        sound = [switches("amp+channels-last"), switches("amp-bf16")]
        plain = Lessons([], sound, [(switches("amp+channels-last+compile"), BASELINE)], variants)
        assert plain.chance(switches("amp-bf16+compile:freeze")) < 0.5
        variant = Lessons([], sound, [(switches("amp+channels-last+compile:freeze"), BASELINE)], variants)
        assert variant.chance(switches("amp-bf16+compile")) > 0.5

    def test_the_whole_is_to_blame_where_all_of_its_parts_run_elsewhere(self) -> None:
        sound = [switches("a+b"), switches("b+c"), switches("a+c")]
        lessons = Lessons([], sound, [(switches("a+b+c"), BASELINE)])
        assert lessons.chance(switches("a+b+c+d")) == 0.0
        assert lessons.chance(switches("a+b+d")) == 1.0

    def test_a_compiler_that_broke_with_one_switch_may_break_with_another(self) -> None:
        sound = [switches("amp+graphs"), switches("amp+compile"), switches("tf32+graphs")]
        lessons = Lessons([], sound, [(switches("graphs+compile"), BASELINE)], compilers=["compile"])
        assert lessons.chance_of_new_pairs(switches("amp+compile")) == 1.0, "seen together"
        assert lessons.chance_of_new_pairs(switches("channels-last+graphs")) == 1.0, "no compiler"
        assert 0.7 < lessons.chance_of_new_pairs(switches("tf32+compile")) < 1.0

    def test_what_the_facts_speak_against_is_doubted_until_it_runs(self) -> None:
        doubted = Lessons([], [BASELINE], doubted=[switches("onnx")])
        assert doubted.chance(switches("fold-bn+onnx")) == pytest.approx(0.5)
        assert doubted.chance(switches("fold-bn")) == 1.0
        assert Lessons([], [switches("onnx")], doubted=[switches("onnx")]).chance(switches("fold-bn+onnx")) == 1.0


class TestRuledOut:
    def test_a_switch_wherever_it_stands(self) -> None:
        lessons = Lessons([lesson("graphs")], [])
        assert lessons.chance(switches("fp16+graphs")) == 0.0
        assert lessons.chance(switches("fp16")) == 1.0

    def test_a_pair_but_neither_of_the_two(self) -> None:
        lessons = Lessons([lesson("fp16+graphs")], [])
        assert lessons.rules_out(switches("fp16+graphs+compile"))
        assert not lessons.rules_out(switches("fp16+compile"))

    def test_what_ran_out_of_memory_or_time_only_as_it_was(self) -> None:
        """With half precision beside it, it may fit."""
        for kind in ("oom", "timeout"):
            lessons = Lessons([lesson("compile", kind)], [])
            assert lessons.rules_out(switches("compile"))
            assert not lessons.rules_out(switches("fp16+compile"))


class TestTheCause:
    NAMES = tuple("abcdefg")

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_is_found_by_leaving_out_halves(self, size: int) -> None:
        recipe = frozenset(self.NAMES)
        for guilty in map(frozenset, combinations(self.NAMES, size)):
            asked: list[Switches] = []

            def runs(part: Switches, guilty: Switches = guilty, asked: list[Switches] = asked) -> bool:
                asked.append(part)
                return not guilty <= part

            assert find_cause(recipe, runs, self.NAMES) == guilty
            assert len(asked) <= size * (math.ceil(math.log2(len(recipe))) + 1)

    def test_is_the_smallest_part_seen_to_break_where_asking_ends(self) -> None:
        left = [1]

        def runs(part: Switches) -> bool | None:
            left[0] -= 1
            return None if left[0] < 0 else not {"a"} <= part

        assert find_cause(frozenset("abcd"), runs, "abcd") == frozenset("ab")

    def test_is_the_recipe_itself_where_nothing_can_be_asked(self) -> None:
        assert find_cause(frozenset("abc"), lambda part: None, "abc") == frozenset("abc")

    def test_what_is_known_costs_no_question(self) -> None:
        """All but the last are known to run: the last is asked alone first."""
        asked: list[Switches] = []

        def runs(part: Switches) -> bool:
            if part <= frozenset("abc"):
                return True
            asked.append(part)
            return "d" not in part

        assert find_cause(frozenset("abcd"), runs, "abcd") == frozenset("d")
        assert asked == [frozenset("d")]

    @pytest.mark.parametrize(("text", "scope"), [("a", "switch"), ("a+b", "pair"), ("a+b+c", "recipe")])
    def test_says_what_is_ruled_out(self, text: str, scope: str) -> None:
        assert scope_of(switches(text)) == scope
