"""A command that a report suggests measures what its records did: typed in again, it gives the same spec."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import pytest
from invoking import invoke

from redline.analyze.command_line import command_line
from redline.api.workspace import Workspace
from redline.record import RunRecord
from redline.spec import RunSpec
from redline.spec_table import specs_from_table

EVERYTHING = {
    "task": "train",
    "image_size": 32,
    "classes": 10,
    "sequence_length": 128,
    "optimizer": "adamw",
    "device": "cpu",
    "threads": 2,
    "seed": 7,
    "max_memory": "1500MiB",
}


def spec_of(**table: Any) -> RunSpec:
    (spec,) = specs_from_table({"model": "simple_cnn", **table})
    return spec


def typed(monkeypatch: pytest.MonkeyPatch, line: str) -> list[RunSpec]:
    """What the command line makes of it, with nothing measured."""
    seen: list[RunSpec] = []

    def keep(specs: Sequence[RunSpec], workspace: Workspace, replicates: int = 1) -> list[RunRecord]:
        seen.extend(specs)
        return []

    monkeypatch.setattr("redline.api.run.measure_specs", keep)
    assert invoke(*shlex.split(line)[1:]).exit_code == 0
    return seen


@pytest.mark.parametrize(
    "table",
    [
        {},
        *({name: value} for name, value in EVERYTHING.items()),
        EVERYTHING,
        {"max_memory": 123456789},
        {"model": "my models/net.py:make", "recipe": "compile:max-autotune,fullgraph=true"},
    ],
    ids=str,
)
def test_what_is_suggested_measures_the_same_again(monkeypatch: pytest.MonkeyPatch, table: dict[str, Any]) -> None:
    spec = spec_of(batch=4, **table)
    line = command_line("run", spec, batch=4)
    assert line is not None
    assert typed(monkeypatch, line) == [spec]


def test_only_what_is_not_the_default_is_said_and_a_search_for_the_batch_is_given_none() -> None:
    assert command_line("batch", spec_of(batch=4, device="cuda:0")) == "redline batch simple_cnn -r baseline"
    line = command_line("run", spec_of(image_size=32, task="train"), batch=8, recipes=["baseline", "amp"])
    assert line == "redline run simple_cnn --task train --image-size 32 --batch 8 -r baseline -r amp"


def test_a_live_module_has_no_command_line() -> None:
    assert command_line("run", spec_of(model="live:Net", artifact="/somewhere/net.pkl"), batch=4) is None
