"""The checklist ticks what the history holds, and only that."""

from __future__ import annotations

import msgspec
import pytest
from reported import fake_door, race_records

import redline
from redline.analyze.summary import lines_of, summarize
from redline.analyze.trust import Verdict
from redline.model.errors import UnknownName
from redline.model.protocol import SwitchChoice
from redline.show.result import Result
from redline.store import History
from redline.verbs.workshop import checklist_of, is_any_faster
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


def test_a_name_that_no_model_has_is_refused() -> None:
    with pytest.raises(UnknownName, match="resnet5000"):
        checklist_of("resnet5000")


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
    assert (gain["switch"], gain["gain"].low <= gain.value("gain")) == ("fp16", True)  # type: ignore[union-attr]
    assert not any(ticked(other).values())
    assert "[x] a baseline was measured" in str(found)


def test_what_a_search_has_proved_is_ticked(monkeypatch: pytest.MonkeyPatch) -> None:
    """`redline tune` told of a faster recipe, and the checklist did not know: both read the same history now."""
    choices = [SwitchChoice(switch="fp16", family="precision"), SwitchChoice(switch="compile", family="compiler")]
    with History.open("sqlite://") as history, Workspace(door=fake_door(choices=choices), history=history) as workspace:
        monkeypatch.setattr("redline.verbs.workspace.refuse_impossible_name", lambda workload: None)
        redline.tune("resnet50", batch=32, budget="10m", workspace=workspace)
        assert ticked(checklist_of("resnet50", workspace))["a recipe is faster"]


def test_a_gain_counts_as_it_was_measured_last_and_only_where_it_may_be_trusted() -> None:
    records = race_records(recipes=("baseline", "fp16"))
    first, faster = lines_of(records, summarize(records))
    assert faster.row.vs_first is not None

    def with_row(**changes: object) -> object:
        return msgspec.structs.replace(faster.row, **changes)

    undecided = with_row(vs_first=msgspec.structs.replace(faster.row.vs_first, low=0.9))
    doubtful = with_row(verdict=Verdict(labels=("noisy",)))

    def is_ticked(*rows: object, processes: int = 1) -> bool:
        lines = [msgspec_line(faster, row, processes) for row in rows]
        return is_any_faster([first, *lines], [])

    assert is_ticked(undecided, faster.row)
    assert not is_ticked(faster.row, undecided)
    assert not is_ticked(doubtful)
    assert is_ticked(doubtful, processes=3), "an interval over several processes decides, however noisy each is"


def msgspec_line(line: object, row: object, processes: int) -> object:
    import dataclasses

    return dataclasses.replace(line, row=row, processes=line.processes[:1] * processes)  # type: ignore[attr-defined, type-var]
