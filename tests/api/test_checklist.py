"""The checklist ticks what the history holds, and only that."""

from __future__ import annotations

import json

import msgspec
import pytest
from reported import race_records

from redline.analyze.summary import summarize
from redline.analyze.trust import Verdict
from redline.api.workshop import _optimised, checklist
from redline.api.workspace import Workspace
from redline.model.errors import UnknownName
from redline.report.workshop import Checklist, Technique
from redline.store import History


def test_an_empty_history_ticks_nothing_and_creates_none() -> None:
    found = checklist("resnet50")
    assert not any(line.done for line in found.lines)
    assert all(line.command.startswith("redline ") for line in found.lines)
    assert {line.stage for line in found.lines} == {"measure", "analyse", "optimise", "validate", "scale"}


def test_a_name_that_no_model_has_is_refused() -> None:
    with pytest.raises(UnknownName, match="resnet5000"):
        checklist("resnet5000")


def test_an_interval_that_leaves_everything_open_is_told_so() -> None:
    wide = Technique(switch="compile", task="infer", batch=4, ratio=3.0, low=0.0, high=2364.0, effort="", when="")
    told = str(Checklist(model="m", records=1, lines=(), techniques=(wide,)))
    assert "3.00× (<0.01–>100)" in told


def test_what_was_measured_is_ticked_with_its_gain() -> None:
    records = race_records(recipes=("baseline", "fp16"))
    model = records[0].spec.workload.model
    with History.open("sqlite://") as history:
        for record in records:
            history.finish(record)
        found = checklist(model, workspace=Workspace(history=history))
        other = checklist("resnet18", workspace=Workspace(history=history))
    done = {line.text: line.done for line in found.lines}
    assert done["a baseline was measured"]
    assert done["other recipes were compared with the baseline"]
    assert done["a recipe is surely faster"]
    assert not done["a step was profiled"]
    assert not done["several ranks were measured"]
    (technique,) = found.techniques
    assert (technique.switch, technique.low <= technique.ratio) == ("fp16", True)
    assert not any(line.done for line in other.lines)
    document = json.loads(found.to_json())
    assert (document["kind"], document["model"]) == ("checklist", model)
    assert "[x] a baseline was measured" in str(found)


def test_a_gain_counts_as_it_was_measured_last_and_only_where_it_may_be_trusted() -> None:
    first, faster = summarize(race_records(recipes=("baseline", "fp16")))
    assert faster.vs_first is not None
    undecided = msgspec.structs.replace(faster, vs_first=msgspec.structs.replace(faster.vs_first, low=0.9))
    doubtful = msgspec.structs.replace(faster, verdict=Verdict(labels=("noisy",)))

    def is_ticked(*rows: object) -> bool:
        return {line.text: line.done for line in _optimised("m", [first, *rows], [])}["a recipe is surely faster"]

    assert is_ticked(undecided, faster)
    assert not is_ticked(faster, undecided)
    assert not is_ticked(doubtful)
