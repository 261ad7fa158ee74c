"""The checklist ticks what the history holds, and only that."""

from __future__ import annotations

import pytest
import reported
from reported import fake_door, race_records

import redline
from redline.model.protocol import SwitchChoice
from redline.show.contents import contents_of
from redline.show.result import Result
from redline.store import History
from redline.verbs.workshop import checklist_of
from redline.verbs.workspace import Workspace


def ticked(found: Result) -> dict[str, bool]:
    return {str(row["check"])[4:]: bool(row["done"]) for row in found.rows}


def test_an_empty_history_ticks_nothing_and_creates_none() -> None:
    found = checklist_of("resnet50")
    assert not any(ticked(found).values())
    assert all(str(row["command"]).startswith("redline ") for row in found.rows)
    assert [*dict.fromkeys(row["stage"] for row in found.rows)] == [
        "measure",
        "analyse",
        "optimise",
        "validate",
        "scale",
    ]
    assert found.next == "redline run resnet50"


def test_what_was_measured_is_ticked_with_its_gain() -> None:
    records = race_records(recipes=("baseline", "fp16"))
    model = records[0].spec.workload.model
    with History.open("sqlite://") as history:
        for record in records:
            history.finish(record)
        found = checklist_of(model, Workspace(history=history))
        other = checklist_of("resnet18", Workspace(history=history))
    done = ticked(found)
    assert done["a baseline was measured"]
    assert done["other recipes were compared with the baseline"]
    assert done["a recipe is faster"]
    assert not done["a step was profiled"]
    assert not done["several ranks were measured"]
    (gain,) = found.table("gains").rows
    assert (gain["switch"], gain["ratio"].low <= gain.value("ratio")) == ("fp16", True)  # type: ignore[union-attr]
    assert not any(ticked(other).values())
    assert "[x] a baseline was measured" in str(found)


def test_what_a_search_has_proved_is_ticked(monkeypatch: pytest.MonkeyPatch) -> None:
    """`redline tune` told of a faster recipe, and the checklist did not know: both read the same history now."""
    choices = [SwitchChoice(switch="fp16", family="precision"), SwitchChoice(switch="compile", family="compiler")]
    with History.open("sqlite://") as history, Workspace(door=fake_door(choices=choices), history=history) as workspace:
        redline.tune("resnet50", batch=32, budget="10m", workspace=workspace)
        assert ticked(checklist_of("resnet50", workspace))["a recipe is faster"]


@pytest.mark.parametrize(("gain", "is_faster"), [(0.4, True), (0.99, False), (1.8, False)])
def test_a_recipe_is_faster_here_if_and_only_if_the_tables_say_so(
    gain: float, is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(reported.SPEEDS, "fp16", gain)
    records = race_records(recipes=("baseline", "fp16"))
    with History.open("sqlite://") as history:
        for record in records:
            history.finish(record)
        workspace = Workspace(history=history)
        done = ticked(checklist_of(records[0].spec.workload.model, workspace))
    rows = contents_of(records, profiles=()).sections[0].table.rows
    assert any(row.get("verdict") == "faster" for row in rows) is is_faster
    assert done["a recipe is faster"] is is_faster
