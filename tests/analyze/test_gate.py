"""What a gate looks at besides speed: each check fails on a planted change, and not on its opposite."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from redline.analyze.gate import CheckName, check, count_check, judge
from redline.analyze.statistics import PairedLog
from redline.environment import Memory
from redline.record import Numerics, RunRecord


@pytest.fixture
def side(make_record: Any, make_block: Any) -> Any:
    """Five processes of one side."""

    def processes(
        *, reserved: int = 1000, rel_l2: float = 1e-3, passed: bool = True, cold_start: Any = None
    ) -> list[RunRecord]:
        memory = Memory(peak_allocated_bytes=300, peak_reserved_bytes=reserved)
        found = []
        for number in range(5):
            record = make_record(blocks=(make_block(memory=memory),))
            assert record.prepared is not None
            changes = (cold_start or (lambda _: {}))(number)
            prepared = msgspec.structs.replace(
                record.prepared,
                numerics=Numerics(rel_l2=rel_l2, passed=passed, reason=None),
                cold_start=msgspec.structs.replace(record.prepared.cold_start, **changes),
            )
            found.append(msgspec.structs.replace(record, prepared=prepared))
        return found

    return processes


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("memory", {"reserved": 1000}, {"reserved": 1100}),
        ("numerics", {"rel_l2": 1e-3}, {"rel_l2": 2.5e-3}),
        ("numerics", {"passed": True}, {"passed": False}),
        ("compile", {"cold_start": lambda _: {"compile_s": 2.0}}, {"cold_start": lambda _: {"compile_s": 3.0}}),
        ("graph-breaks", {"cold_start": lambda _: {"graph_breaks": 0}}, {"cold_start": lambda _: {"graph_breaks": 1}}),
    ],
)
def test_a_check_fails_on_what_got_worse_and_not_on_what_got_better(
    side: Any, name: CheckName, before: dict[str, Any], after: dict[str, Any]
) -> None:
    assert check(name, side(**before), side(**after)).failed
    assert not check(name, side(**after), side(**before)).failed
    assert not check(name, side(**after), side(**after)).failed


def test_compile_times_are_compared_in_the_state_of_the_cache_that_both_were_in_most_often(side: Any) -> None:
    """The first process of each side fills the cache; one of the two happened to take long."""

    def filled_by_first(seconds: float) -> Any:
        return lambda number: {
            "compile_s": seconds if number == 0 else 0.5,
            "compile_cache": "warm" if number else "cold",
        }

    found = check("compile", side(cold_start=filled_by_first(20.0)), side(cold_start=filled_by_first(40.0)))
    assert (found.failed, found.baseline, found.candidate) == (False, 0.5, 0.5)


def test_a_compiler_without_a_cache_is_compared_too(side: Any) -> None:
    fast, slow = (
        side(cold_start=lambda _, s=seconds: {"compile_s": s, "compile_cache": None}) for seconds in (1.0, 2.0)
    )
    assert check("compile", fast, slow).failed


def test_counts_fail_on_any_more_and_say_when_there_are_none() -> None:
    assert [count_check("kernels", 100, each).failed for each in (101, 100, 99)] == [True, False, False]
    assert count_check("kernels", None, 3).said.code == "unknown"


@pytest.mark.parametrize(
    ("pairs", "verdict"),
    [
        ([-1.10, -1.05, -1.12, -1.08, -1.11], "slower"),  # three times slower, by 3 % more or less
        ([1.10, 1.05, 1.12, 1.08, 1.11], "faster"),
        ([-0.20, -0.25, -0.22, -0.18, -0.04], "inconclusive"),  # one of the five shows next to nothing
        ([-0.04, 0.0, -0.04, -0.04, 0.0], "inconclusive"),  # two modes, 4 % apart
        ([-0.15, -0.9, -0.12, -0.6, -0.2], "inconclusive"),  # all far, and nothing is known of how far
    ],
)
def test_five_pairs_that_scatter_decide_only_what_no_scatter_explains(pairs: list[float], verdict: str) -> None:
    found = judge([PairedLog(mean=mean, error=1e-4, rounds=8) for mean in pairs], threshold=0.03)
    assert found is not None
    assert found.verdict == verdict
