"""What is committed can be read: every archive under docs/results, and histories of older Redlines."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from reported import fake_door

import redline
from redline.analyze.measurement import measurements
from redline.model.errors import RedlineError
from redline.verbs.report import choose
from redline.verbs.workspace import Workspace

RESULTS = Path(__file__).parents[2] / "docs" / "results"
HISTORIES = Path(__file__).parents[1] / "data" / "histories"
ROWS = ("run", "study", "export", "show")


def read_json(path: Path) -> Any:
    return json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())


def problems_in(folder: Path) -> list[str]:
    """Which archives cannot be read, and which figures of the documents do not come back from the records in them."""
    rows: dict[str, dict[str, Any]] = {}
    searches: dict[str, list[dict[str, Any]]] = {}
    for path in (path for path in sorted(folder.rglob("*.json*")) if path.suffix != ".jsonl"):
        plain = read_json(path)
        kind = plain.get("kind") if isinstance(plain, dict) else None
        if kind in ROWS:
            rows |= {row["record_id"]: row for row in plain["results"] if len(row.get("replicate_ids") or ()) < 2}
        if isinstance(plain, dict) and plain.get("verb") in ROWS:
            told = [row for row in plain["tables"]["results"] if row.get("processes", 1) < 2]
            rows |= {
                row["record_id"]: {
                    "throughput_per_s": row["throughput"]["value"],
                    "latency_s": {"p50": row["latency_p50"]["value"]},
                }
                for row in told
                if "throughput" in row
            }
        if kind == "tune":
            searches.setdefault(plain["name"], []).append(plain)
    archives = [*folder.rglob("*.redline"), *folder.rglob("*.redline.gz")]
    return [problem for path in archives for problem in archive_problems(path, rows, searches)]


def lost(source: Any, content: Any, rel: float) -> list[str]:
    """Numbers that are not the same. Means that are taken again on another machine may differ in their last bits (`rel`)."""
    back = dict(numbers(content))
    return [
        f"{'.'.join(path)} is {back.get(path)}, was {value}"
        for path, value in numbers(source)
        if not math.isclose(back.get(path, math.nan), value, rel_tol=rel)
    ]


def numbers(plain: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    if isinstance(plain, dict | list | tuple):
        parts = plain.items() if isinstance(plain, dict) else ((str(number), each) for number, each in enumerate(plain))
        for name, each in parts:
            yield from numbers(each, (*path, name))
    elif isinstance(plain, int | float) and not isinstance(plain, bool):
        yield path, plain


def archive_problems(
    path: Path, rows: dict[str, dict[str, Any]], searches: dict[str, list[dict[str, Any]]]
) -> list[str]:
    try:
        chosen = choose([str(path)])
    except RedlineError as error:
        return [str(error)]
    problems = [f"{path}: {each}" for each in chosen.notes] + ([] if chosen.records else [f"{path}: no record"])
    groups = {record.group or record.id for record in chosen.records if record.id in rows}
    records = [record for record in chosen.records if (record.group or record.id) in groups]
    for now in measurements(records):
        then = rows.get(now.record_id, {"throughput_per_s": now.throughput_per_s, "latency_s": None})
        medians = [(now.throughput_per_s, then["throughput_per_s"])]
        medians += [(now.latency_s.p50, then["latency_s"]["p50"])] if now.latency_s and then["latency_s"] else []
        problems += [f"{path}: {now.record_id}: {found} now, {was} then" for found, was in medians if found != was]
    for search in chosen.tunes:
        told = msgspec.to_builtins(search, enc_hook=lambda row: {"throughput_per_s": row.throughput_per_s})
        for then in searches.get(search.tune.name, ()):
            if set(then["record_ids"]) == set(told["record_ids"]):
                problems += [f"{path}: {search.tune.name}: {each}" for each in lost(then, told, rel=1e-12)]
    return problems


def test_the_figures_of_every_document_come_back_from_the_records_beside_it() -> None:
    assert problems_in(RESULTS) == []


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder of results: a run as JSON, and the records it was made of."""
    folder = tmp_path / "results"
    folder.mkdir()
    with Workspace(door=fake_door(), history=tmp_path / "history.sqlite") as workspace:
        found = redline.run(
            "resnet50",
            recipes=["baseline", "fp16"],
            batch=4,
            effort="quick",
            launch={"door": "fake"},
            workspace=workspace,
        )
        (folder / "run.json").write_text(found.to_json())
        with gzip.open(folder / "records.redline.gz", "wb") as file:
            workspace.history.export_archive(file)
    return folder


def test_a_figure_that_the_records_do_not_give_is_found(results: Path) -> None:
    assert problems_in(results) == []
    plain = json.loads((results / "run.json").read_text())
    row = plain["tables"]["results"][1]
    row["latency_p50"]["value"] *= 1 + 1e-12
    (results / "run.json").write_text(json.dumps(plain))
    (problem,) = problems_in(results)
    assert row["record_id"] in problem


def test_a_file_that_cannot_be_read_is_found(results: Path) -> None:
    whole = (results / "records.redline.gz").read_bytes()
    (results / "records.redline.gz").write_bytes(whole[:-40])
    (problem,) = problems_in(results)
    assert "is damaged" in problem


@pytest.mark.parametrize("name", ["schema1_layout1", "schema1_layout4", "schema2_layout5", "schema2_layout6"])
def test_what_older_redlines_stored_and_exported_still_gives_their_figures(name: str, tmp_path: Path) -> None:
    """Both were written by the code of then, with the figures that it computed."""
    history = HISTORIES / f"{name}.redline.gz"
    if not history.exists():  # there was no such file before layout 6
        history = tmp_path / "history.sqlite"
        history.write_bytes(gzip.decompress((HISTORIES / f"{name}.sqlite.gz").read_bytes()))
    exported = HISTORIES / f"{name}.json.gz"
    plain = read_json(exported)
    assert plain["records"]
    for path in (history, exported):
        chosen = choose([str(path)])
        assert [len(chosen.records), chosen.notes] == [len(plain["results"]), []]
        now = {row.record_id: row for row in measurements(chosen.records)}
        for then in plain["results"]:
            row = now[then["record_id"]]
            assert row.latency_s is not None
            if row.vs_first is None:  # a speed beside a ratio is that of the rounds that the ratio is of
                assert row.throughput_per_s == then["throughput_per_s"]
                assert row.latency_s.p50 == then["latency_s"]["p50"]
            else:
                assert row.vs_first.ratio == pytest.approx(then["vs_first"]["ratio"])
            assert (row.tpot_s and row.tpot_s.p50) == (then.get("tpot_s") and then["tpot_s"]["p50"])
    assert len(choose([str(history)]).tunes) == (name in ("schema1_layout4", "schema2_layout6"))
