"""What a gate looks at besides speed: each check fails on a planted change, and not on its opposite."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from by_hand import make_block, make_record

from redline.analyze.checks import CheckName, check
from redline.analyze.gate import judge
from redline.analyze.statistics import PairedLog
from redline.bench.recipe.difference import answer_of, sketch_of
from redline.model.record import Memory, Numerics, RunRecord


def side(
    *,
    reserved: int = 1000,
    rel_l2: float = 1e-3,
    passed: bool = True,
    cold_start: Any = None,
    numerics: Any = lambda number: Numerics(),
) -> list[RunRecord]:
    """Five processes of one side."""
    memory = Memory(peak_allocated_bytes=300, peak_reserved_bytes=reserved)
    found = []
    for number in range(5):
        record = make_record(blocks=(make_block(memory=memory),))
        changes = (cold_start or (lambda _: {}))(number)
        prepared = msgspec.structs.replace(
            record.prepared,
            numerics=msgspec.structs.replace(numerics(number), rel_l2=rel_l2, passed=passed, reason=None),
            cold_start=msgspec.structs.replace(record.prepared.cold_start, **changes),
        )
        found.append(msgspec.structs.replace(record, prepared=prepared))
    return found


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("memory", {"reserved": 1000}, {"reserved": 1100}),
        ("numerics", {"rel_l2": 1e-3}, {"rel_l2": 2.5e-3}),
        ("numerics", {"passed": True}, {"passed": False}),
        ("compile", {"cold_start": lambda _: {"compile_s": 2.0}}, {"cold_start": lambda _: {"compile_s": 3.0}}),
        (
            "compile",
            {"cold_start": lambda _: {"compile_s": 1.0, "compile_cache": None}},
            {"cold_start": lambda _: {"compile_s": 2.0, "compile_cache": None}},
        ),
        ("graph-breaks", {"cold_start": lambda _: {"graph_breaks": 0}}, {"cold_start": lambda _: {"graph_breaks": 1}}),
    ],
)
def test_a_check_fails_on_what_got_worse_and_not_on_what_got_better(
    name: CheckName, before: dict[str, Any], after: dict[str, Any]
) -> None:
    assert check(name, side(**before), side(**after)).failed
    assert not check(name, side(**after), side(**before)).failed
    assert not check(name, side(**after), side(**after)).failed


def outputs(values: Any, **others: Any) -> Any:
    """Numerics with a sketch of these outputs, of each process in turn."""

    def of(number: int) -> Numerics:
        sketch, signal = sketch_of(answer_of(torch.as_tensor(values(number))))
        return Numerics(method="unchecked", finite=bool(sketch), sketch=sketch, sketch_signal=signal, **others)

    return of


def test_outputs_of_two_commits_are_compared_whatever_they_are_made_of() -> None:
    truth = torch.linspace(-1, 1, 1000) + 1e3
    said = {}
    for name, values in {
        "same": lambda _: truth,
        "rounded": lambda _: truth + 1e-6 * torch.sin(torch.arange(1000)),
        "scaled": lambda _: 1e3 + (truth - 1e3) * 1.01,
        "one of them": lambda _: torch.where(torch.arange(1000) == 700, truth + 1, truth),
        "shorter": lambda _: truth[:-1],
        "nan": lambda _: truth * torch.nan,
    }.items():
        found = check("numerics", side(numerics=outputs(lambda _: truth)), side(numerics=outputs(values)))
        said[name] = (found.said.code, found.failed)
    assert said == {
        "same": ("compared", False),
        "rounded": ("compared", False),
        "scaled": ("other-outputs", True),
        "one of them": ("other-outputs", True),
        "shorter": ("other-outputs", True),
        "nan": ("not-finite", True),
    }


def test_outputs_that_vary_from_process_to_process_are_not_compared() -> None:
    noisy = outputs(lambda number: torch.arange(100.0) + number)
    later = outputs(lambda number: torch.arange(100.0) + 2 - number)
    for other in (noisy, later):
        found = check("numerics", side(numerics=noisy), side(numerics=other))
        assert (found.failed, found.said.code) == (False, "outputs-vary")


def test_losses_of_two_commits_are_compared() -> None:
    def path(end: float) -> Any:
        return lambda number: Numerics(method="reference", reference_losses=(2.3, 2.2, end))

    assert check("numerics", side(numerics=path(2.1)), side(numerics=path(2.15))).failed
    assert not check("numerics", side(numerics=path(2.1)), side(numerics=path(2.1001))).failed


def test_compile_times_are_compared_in_the_state_of_the_cache_that_both_were_in_most_often() -> None:
    """The first process of each side fills the cache; one of the two happened to take long."""

    def filled_by_first(seconds: float) -> Any:
        return lambda number: {
            "compile_s": seconds if number == 0 else 0.5,
            "compile_cache": "warm" if number else "cold",
        }

    found = check("compile", side(cold_start=filled_by_first(20.0)), side(cold_start=filled_by_first(40.0)))
    assert (found.failed, found.baseline, found.candidate) == (False, 0.5, 0.5)


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
    assert found.verdict == verdict


TWICE_AS_FAST = [0.70, 0.68, 0.69, 0.71, 0.69]


def test_what_other_processes_may_have_taken_is_in_the_interval() -> None:
    """The baseline waited for a processor for up to half of its time: it may be the one that is faster."""
    logs = [PairedLog(mean=mean, error=1e-4, rounds=8, below=0.75) for mean in TWICE_AS_FAST]
    found = judge(logs, threshold=0.03)
    assert (found.verdict, found.low < 1, found.disturbed) == ("inconclusive", True, 5)


def test_pairs_that_nobody_disturbed_decide_once_there_are_enough() -> None:
    quiet = [PairedLog(mean=mean, error=1e-4, rounds=8) for mean in (0.001, -0.001, 0.0, 0.001, -0.001)]
    disturbed = [PairedLog(mean=mean, error=1e-4, rounds=8, below=0.75) for mean in TWICE_AS_FAST]
    found = judge([*disturbed, *quiet], threshold=0.03)
    assert (found.verdict, found.ratio, found.disturbed) == ("same", pytest.approx(1, abs=0.001), 0)
    early = judge([*disturbed, *quiet[:4]], threshold=0.03)
    assert early.verdict == "inconclusive"
