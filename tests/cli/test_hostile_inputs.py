"""Hostile inputs are refused in one line; `tests/fuzz_inputs.py` as a program tries thousands of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz_inputs import Playground, playground

from redline.model.errors import Exit


@pytest.fixture(scope="module")
def ground() -> Iterator[Playground]:
    with playground(seed=0) as made:
        yield made


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_no_hostile_input_is_a_traceback_or_a_wrong_exit_code(ground: Playground, first: int) -> None:
    trials = [trial for number in range(first, first + 20) for trial in ground.attempt(number)]
    assert [str(trial) for trial in trials if trial.wrong] == []
    assert {trial.code for trial in trials} >= {None, Exit.USAGE}, "some are refused and some are not"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("run --file zero", "zero holds more than 16 MiB"),
        ("run --file pipe", "name at least one model"),
        ("history import zero", "zero holds more than 1024 MiB"),
        ("report bomb.json.gz", "bomb.json.gz holds more than 1024 MiB"),
        ("report sparse", "sparse holds more than 1024 MiB"),
        ("history import pipe", "Input data was truncated"),
        ("run --file nested.toml", "nested.toml nests tables or lists more than 100 deep"),
        ("run --file tables.toml", "task takes texts, numbers, true or false, or a list of them, got {'a': 1}"),
        ("run --file lists.toml", "seed takes texts, numbers, true or false, or a list of them, got [1]"),
        ("run --file wide.toml", "the grid has 30000 cells; it may have 20000 at most"),
        ("gate wide.toml --baseline records.json", "30000 things to measure are more than 20000"),
        ("gate twice.toml --baseline records.json", "two benchmarks are called 'resnet18 infer baseline'"),
        (f"run resnet18 --report {'x' * 5000}", "File name too long"),
        ("run resnet18 --device tpu", "unknown device 'tpu'"),
        ("run resnet18 --device cuda:x", "device cuda takes a number behind the colon, such as cuda:0, got 'cuda:x'"),
        (f"run resnet18 --device cuda:{'9' * 5000}", "device cuda takes a number behind the colon"),
        ("monitor --interval 9223372036854775808", "interval must be 10000000 seconds or less"),
        ("monitor --interval nan", "expected a time such as 20ms"),
        ("serve --host -5..5", "cannot listen on -5..5"),
    ],
)  # fmt: skip
def test_what_is_refused_says_why(ground: Playground, words: str, complaint: str) -> None:
    ground.fresh(10**6)
    Path("nested.toml").write_text(f"model = 'resnet18'\na{'.a' * 3000} = 1\n")
    Path("tables.toml").write_text("model = 'resnet18'\ntask = {a = 1}\n")
    Path("lists.toml").write_text("model = 'resnet18'\nseed = [[1], 2]\n")
    Path("twice.toml").write_text("[[run]]\nmodel = 'resnet18'\n" * 2)
    try:
        trial, told = ground.tried(10**6, words.split())
    finally:
        ground.leave()
    assert (trial.code, trial.wrong) == (Exit.USAGE, "")
    assert complaint in told
    assert len(told.splitlines()) == 1
    assert len(told) < 2200
