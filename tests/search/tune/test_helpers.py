"""Workers that help to compile a model block by block: how many, what they save and delay, and which of them stay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tuner_stub import after, switches

from redline.model.work import Facts, RepeatedBlock
from redline.search.tune.costs import Candidate, Costs, most_helpers
from redline.search.tune.opening import twins_for
from redline.search.tune.planner import prepare_race_beside
from redline.search.tune.space import BASELINE, Switches
from redline.search.tune.tuner import Tuner


def helped_tuner(launches: int = 1000, kinds: int | None = 8, **given: Any) -> Tuner:
    blocks = RepeatedBlock(class_name="Block", count=16, share=0.9, kinds=kinds) if kinds else None
    return after(facts=Facts(launches=launches, blocks=blocks), **{"budget_s": 60.0, "jobs": 8, **given})


def test_one_for_each_further_kind_on_half_of_the_processors() -> None:
    assert most_helpers(helped_tuner()) == 4
    assert most_helpers(helped_tuner(kinds=3)) == 2
    assert most_helpers(helped_tuner(jobs=4)) == 2


@pytest.mark.parametrize(
    "given", [{"kinds": 1}, {"kinds": None}, {"launches": 300}, {"budget_s": 300.0}, {"jobs": 1}, {"on_cpu": True}]
)
def test_none_where_there_is_nothing_to_share_or_time_to_compile_the_whole(given: dict[str, Any]) -> None:
    assert most_helpers(helped_tuner(**given)) == 0


def test_compiling_together_is_quicker_and_opening_it_again_takes_a_larger_share_of_that() -> None:
    by_block = switches("amp+compile:regional")
    helped, alone = Costs(helped_tuner()), Costs(helped_tuner(jobs=1))
    assert helped.expected_s(by_block) < 0.5 * alone.expected_s(by_block)
    assert helped.is_quicker_by_block
    shares = [costs.again_s(by_block) / costs.expected_s(by_block) for costs in (helped, alone)]
    assert shares[0] > shares[1]


def test_they_delay_what_is_prepared_beside_them() -> None:
    candidate = Candidate(switches("amp+compile:regional"), 0.1, 10.0, 40.0)
    assert Costs(helped_tuner()).delay_s(candidate) > Costs(helped_tuner(jobs=1)).delay_s(candidate)


@pytest.mark.parametrize(
    ("given", "count"), [({}, 2), ({"jobs": 4}, 2), ({"workers": 2}, 1), ({"kinds": 2}, 1), ({"workers": 1}, 0)]
)
def test_two_of_them_stay_for_the_race(given: dict[str, Any], count: int) -> None:
    tuner: Any = helped_tuner(**given)
    tuner.twins, tuner.left_s = [], 40.0
    tuner.spec_of = lambda recipe, *_: recipe
    by_block = switches("amp+compile:regional")
    assert twins_for(tuner, by_block, 0) == [by_block] * count
    assert len(twins_for(tuner, switches("amp+compile"), 0)) == min(count, 1), "nobody helps with the whole"


@pytest.mark.parametrize("leading", ["baseline", "amp"])
def test_the_baseline_has_as_many_processes_as_the_recipe_it_will_race(leading: str) -> None:
    by_block = switches("amp+compile:regional")
    tuner: Any = after(("baseline", 4.0), ("amp", 5.0), times_s={leading: 0.5}, jobs=8, budget_s=60.0)
    tuner.lent, tuner.twins_of = by_block, lambda recipe: 3 * (recipe == by_block)
    tuner.spec_of = lambda recipe, *_: recipe
    started: list[Switches] = []
    trials: Any = SimpleNamespace(
        in_flight=[by_block], has_room_for_twins=lambda count: True, start_twins=started.extend
    )
    prepare_race_beside(tuner, trials)
    assert started == [BASELINE] * 3 + [switches("amp")] * 2 * (leading == "amp")
