"""`redline history`, `tag`, `import`, `delete`, `prune`: over a history that is there already."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from invoking import document, invoke, refused
from reported import race_records

from redline.model.record import Block, Environment, RunRecord, TraceRef
from redline.store import History

DAY_S = 86400.0


def made(number: int, *, factor: float = 1.0, commit: str = "a" * 40, **changes: Any) -> RunRecord:
    """A finished record of its own day."""
    base = race_records()[0]
    assert base.prepared is not None
    environment: Environment = msgspec.structs.replace(base.prepared.environment, git_commit=commit)
    blocks = tuple(_scaled(block, factor) for block in base.blocks if not block.solo)
    fields = {
        "id": f"{number:021x}",
        "created_at": 1.7e9 + number * DAY_S,
        "group": None,
        "stopped": "target",
        "prepared": msgspec.structs.replace(base.prepared, environment=environment),
        "blocks": blocks,
        **changes,
    }
    return msgspec.structs.replace(base, **fields)


def _scaled(block: Block, factor: float) -> Block:
    return msgspec.structs.replace(block, samples=tuple(factor * sample for sample in block.samples))


@pytest.fixture
def kept() -> list[RunRecord]:
    """Ten days as usual, then ten that are 10 % slower, from another commit on."""
    wobble = [1.0, 1.003, 0.998, 1.002, 0.997]
    records = [
        made(day, factor=wobble[day % 5] * (1.1 if day >= 10 else 1.0), commit=("b" if day >= 10 else "a") * 40)
        for day in range(20)
    ]
    with History.open() as history:
        for record in records:
            history.finish(record)
    return records


def test_a_step_is_told_with_when_how_much_and_how_sure(kept: list[RunRecord]) -> None:
    tables = document(invoke("history --json"))["tables"]
    assert len(tables["points"]) == 20
    (change,) = tables["changes"]
    assert change["at"] == kept[10].created_at
    assert change["change"]["low"] <= 0.1 <= change["change"]["high"]
    assert (change["commit_before"][0], change["commit"][0]) == ("a", "b")


def test_what_a_gate_measures_of_another_commit_stands_at_that_commit(own_history: Path) -> None:
    """A change that halved the speed, measured in turns with the commit before it: one change, where it was made."""
    spec = race_records()[0].spec
    elsewhere = msgspec.structs.replace(spec, launch=msgspec.structs.replace(spec.launch, folder="/checkout"))
    with History.open() as history:
        for number in range(12):
            is_old = number % 4 in (0, 3)
            record = made(20 + number, factor=1.0 if is_old else 2.0, commit=("a" if is_old else "b") * 40)
            environment = msgspec.structs.replace(record.prepared.environment, git_committed_at=1.7e9)
            prepared = msgspec.structs.replace(record.prepared, environment=environment)
            record = msgspec.structs.replace(record, spec=elsewhere if is_old else spec, prepared=prepared)
            history.finish(record)
        (seen,) = history.series()
        points = history.points(seen.key)
    assert "".join((point.git_commit or "?")[0] for point in points) == "aaaaaabbbbbb"
    (change,) = document(invoke("history --json"))["tables"]["changes"]
    assert (change["commit_before"][0], change["commit"][0]) == ("a", "b")
    assert change["change"]["value"] == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize(
    ("words", "points"),
    [
        (["--task", "train"], 0),
        (["--recipe", "baseline"], 20),
        (["--batch", "99"], 0),
        (["--device", "cuda"], 20),
        (["--device", "FAKE"], 20),
        (["--since", "2023-11-20"], 14),
    ],
)
def test_filters_choose_records(kept: list[RunRecord], words: list[str], points: int) -> None:
    assert len(document(invoke("history", *words, "--json"))["tables"]["points"]) == points


def test_a_tag_has_no_colon(kept: list[RunRecord]) -> None:
    refused(invoke("history tag", kept[3].id, "a:b"), "a tag has no colon")


@pytest.mark.parametrize(
    ("order", "trends"),
    [
        ("2.7 2.7 2.7 2.8 2.8", {"": 5}),  # an update
        ("2.7 2.8 2.7 2.8 2.7", {", torch 2.7, driver fake": 3, ", torch 2.8, driver fake": 2}),
        ("2.7 2.8 2.8 2.7", {", torch 2.7, driver fake": 2, ", torch 2.8, driver fake": 2}),  # taken back
    ],
)
def test_versions_of_torch_that_alternate_are_trends_of_their_own(order: str, trends: dict[str, int]) -> None:
    with History.open() as history:
        for number, version in enumerate(order.split()):
            record = made(number)
            environment = msgspec.structs.replace(record.prepared.environment, versions={"torch": version})
            prepared = msgspec.structs.replace(record.prepared, environment=environment)
            history.finish(msgspec.structs.replace(record, prepared=prepared))
    series = document(invoke("history --json"))["tables"]["series"]
    own = {each["benchmark"]: each["records"]["value"] for each in series}
    assert own == {f"{name_of(series)}{words}": number for words, number in trends.items()}


def name_of(series: list[dict[str, Any]]) -> str:
    return str(series[0]["benchmark"]).partition(", torch")[0]


def test_tags_and_notes_are_set_shown_and_taken_away(kept: list[RunRecord]) -> None:
    first, second = kept[0].id, kept[1].id
    assert invoke("history tag", first, second, "v1").exit_code == 0
    assert invoke("history tag --note", first, "after the update").exit_code == 0
    points = document(invoke("history --tag v1 --json"))["tables"]["points"]
    assert [(point["tags"], point["notes"]) for point in points] == [("v1", "after the update"), ("v1", None)]
    assert document(invoke("history tag --remove", first, "v1", "--json"))["record_ids"] == [first]
    assert [mark["words"] for mark in document(invoke("history tag --json"))["tables"]["marks"]] == [
        "v1",
        "after the update",
    ]


def test_a_back_up_comes_back_bit_for_bit(kept: list[RunRecord], tmp_path: Path, monkeypatch: Any) -> None:
    invoke("history tag", kept[0].id, "v1")
    assert invoke("history export --format archive -o", tmp_path / "one").exit_code == 0
    monkeypatch.setenv("REDLINE_STORE", str(tmp_path / "other.sqlite"))
    for added, known in ((20, 0), (0, 20)):
        about = document(invoke("history import", tmp_path / "one", "--json"))["about"]
        assert about == {"added": added, "known": known}
    assert invoke("history export --format archive -o", tmp_path / "two").exit_code == 0
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert invoke("history export --format archive -o", tmp_path / "two", "no-such-id").exit_code == 2
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes(), "what was there stays"
    assert sorted(each.name for each in tmp_path.iterdir() if "unfinished" in each.name) == []
    with History.open(only_to_read=True) as history:
        assert history.load(kept[3].id) == kept[3]
    assert len(document(invoke("history --json"))["tables"]["points"]) == 20


@pytest.mark.parametrize("damage", ["cut", "changed", "foreign"])
def test_a_damaged_back_up_adds_nothing(kept: list[RunRecord], tmp_path: Path, monkeypatch: Any, damage: str) -> None:
    out = io.BytesIO()
    with History.open(only_to_read=True) as history:
        history.export_archive(out)
    body = bytearray(out.getvalue())
    if damage == "changed":
        body[len(body) // 2] ^= 1
    bad = tmp_path / "bad"
    bad.write_bytes(
        bytes(body[:-50]) if damage == "cut" else b"x" + bytes(body) if damage == "foreign" else bytes(body)
    )
    monkeypatch.setenv("REDLINE_STORE", str(tmp_path / "other.sqlite"))
    result = invoke("history import", bad)
    assert result.exit_code == 2
    with History.open() as history:
        assert history.count() == 0


@pytest.mark.parametrize("is_history", [False, True])
def test_a_document_or_another_history_can_be_imported(
    kept: list[RunRecord], own_history: Path, monkeypatch: pytest.MonkeyPatch, is_history: bool
) -> None:
    invoke("history tag", kept[3].id, "v1")
    exported = own_history.with_name("records.json")
    invoke("history export --format json --raw -o", exported)
    monkeypatch.setenv("REDLINE_STORE", str(own_history.with_name("other.sqlite")))
    source = own_history if is_history else exported
    assert document(invoke("history import --json", source))["about"]["added"] == 20
    with History.open(only_to_read=True) as history:
        assert history.load(kept[3].id) == kept[3]
        assert history.tagged("v1") == ([kept[3].id] if is_history else [])


def test_what_is_deleted_is_gone_with_its_trace(kept: list[RunRecord], own_history: Path) -> None:
    trace = own_history.parent / "traces" / "t.json.gz"
    trace.parent.mkdir()
    trace.write_bytes(b"x")
    traced = made(50, trace=TraceRef(path=str(trace), steps=1, capture_s=0.1, bytes=1))
    with History.open() as history:
        history.finish(traced)
    assert invoke("history delete", traced.id, "--dry-run").exit_code == 0
    assert trace.exists()
    assert document(invoke("history delete", traced.id, kept[0].id, "--json"))["record_ids"] == [
        traced.id,
        kept[0].id,
    ]
    assert not trace.exists()
    with History.open(only_to_read=True) as history:
        assert history.count() == 19
        assert len(history.points(history.series()[0].key)) == 19


def test_pruning_spares_what_is_tagged_and_what_is_new(kept: list[RunRecord]) -> None:
    with History.open() as history:
        history.finish(made(60, created_at=time.time()))
    invoke("history tag", kept[0].id, "v1")
    assert len(document(invoke("history prune --older-than 30d --dry-run --json"))["record_ids"]) == 19
    assert len(document(invoke("history prune --older-than 30d --keep 5 --json"))["record_ids"]) == 15
    with History.open(only_to_read=True) as history:
        left = {row.id for row in history.rows()}
    assert kept[0].id in left
    assert len(left) == 6
    assert document(invoke("history prune --failed --json"))["record_ids"] == []
