"""What is committed can be read: every document and archive under docs/results, and histories of older Redlines."""

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
from redline.analyze.summary import summarize
from redline.api.history import export_archive
from redline.api.report import choose, documents_in
from redline.api.workspace import Workspace
from redline.model.errors import RedlineError
from redline.store.codec import has_raw_records, read_json

RESULTS = Path(__file__).parents[2] / "docs" / "results"
HISTORIES = Path(__file__).parents[1] / "data" / "histories"
EARLY = ("roofline/ceilings.json", "generate/load_resnet50.json", "batch/batch_on_gpu.json")
"""Written by Redline before every document said so."""
DERIVED = ("knee_batch", "ratio", "seconds", "truth")
"""Of a batch search: made of other figures when the document is written, or added by the script."""
ROWS = ("run", "study", "export", "show")


def problems_in(folder: Path) -> list[str]:
    """What cannot be read of the files that claim to be Redline's, and which figures do not come back."""
    rows: dict[str, dict[str, Any]] = {}
    searches: dict[str, list[dict[str, Any]]] = {}
    problems = []
    for path in filter(is_claimed, sorted(folder.rglob("*.json*"))):
        try:
            documents = documents_in([str(path)])
        except RedlineError as error:
            problems.append(str(error))
            continue
        for document in documents:
            told = document.plain()
            problems += [f"{path}: {each}" for each in lost(source_of(path, told), told["content"])]
            problems += [] if str(document).strip() else [f"{path}: nothing is shown"]
            found = told["content"]["results"] if document.kind in ROWS else []
            rows |= {row["record_id"]: row for row in found if len(row.get("replicate_ids") or ()) < 2}
            if document.kind == "tune":
                searches.setdefault(told["content"]["name"], []).append(told["content"])
    for path in [*folder.rglob("*.redline"), *folder.rglob("*.redline.gz")]:
        problems += archive_problems(path, rows, searches)
    return problems


def is_claimed(path: Path) -> bool:
    if path.suffix == ".jsonl":
        return False
    plain = read_json(path)
    return (isinstance(plain, dict) and "schema" in plain) or str(path).endswith(EARLY)


def source_of(path: Path, told: dict[str, Any]) -> Any:
    """The part of the file that a document was read from, under the names it has today."""
    plain = read_json(path)
    plain = plain[told["name"]] if told["name"] else plain
    single = {"load": "loads", "train": "trainings"}.get(told["kind"])
    if single is None or (isinstance(plain, dict) and single in plain):
        return {name: each for name, each in plain.items() if name in told["content"]}
    return {single: plain if isinstance(plain, list) else [plain]}


def lost(source: Any, content: Any, rel: float = 0.0) -> list[str]:
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
            if name not in DERIVED:
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
    for now in summarize(records):
        then = rows.get(now.record_id, {"throughput_per_s": now.throughput_per_s, "latency_s": None})
        medians = [(now.throughput_per_s, then["throughput_per_s"])]
        medians += [(now.latency_s.p50, then["latency_s"]["p50"])] if now.latency_s and then["latency_s"] else []
        problems += [f"{path}: {now.record_id}: {found} now, {was} then" for found, was in medians if found != was]
    for search in chosen.tunes:
        told = msgspec.to_builtins(search)
        for then in searches.get(search.name, ()):
            if set(then["record_ids"]) == set(told["record_ids"]):
                problems += [f"{path}: {search.name}: {each}" for each in lost(then, told, rel=1e-12)]
    return problems


def test_every_document_and_archive_of_the_results_can_be_read_and_its_figures_come_back() -> None:
    assert problems_in(RESULTS) == []
    assert sum(map(is_claimed, RESULTS.rglob("*.json"))) >= 8


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
            export_archive(file, workspace=workspace)
    return folder


def test_a_figure_that_the_records_do_not_give_is_found(results: Path) -> None:
    assert problems_in(results) == []
    plain = json.loads((results / "run.json").read_text())
    plain["results"][1]["latency_s"]["p50"] *= 1 + 1e-12
    (results / "run.json").write_text(json.dumps(plain))
    (problem,) = problems_in(results)
    assert plain["results"][1]["record_id"] in problem


def test_a_file_that_cannot_be_read_is_found(results: Path) -> None:
    whole = (results / "records.redline.gz").read_bytes()
    (results / "records.redline.gz").write_bytes(whole[:-40])
    plain = json.loads((results / "run.json").read_text())
    del plain["results"][0]["recipe"]
    (results / "run.json").write_text(json.dumps(plain))
    first, second = problems_in(results)
    assert "missing required field `recipe`" in first
    assert "is damaged" in second


@pytest.mark.parametrize("name", ["schema1_layout1", "schema1_layout4", "schema2_layout5", "schema2_layout6"])
def test_what_older_redlines_stored_and_exported_still_gives_their_figures(name: str, tmp_path: Path) -> None:
    """Both were written by the code of then, with the figures that it computed."""
    history = HISTORIES / f"{name}.redline.gz"
    if not history.exists():  # there was no such file before layout 6
        history = tmp_path / "history.sqlite"
        history.write_bytes(gzip.decompress((HISTORIES / f"{name}.sqlite.gz").read_bytes()))
    exported = HISTORIES / f"{name}.json.gz"
    plain = read_json(exported)
    assert has_raw_records(plain)
    for path in (history, exported):
        chosen = choose([str(path)])
        assert [len(chosen.records), chosen.notes] == [len(plain["results"]), []]
        now = {row.record_id: row for row in summarize(chosen.records)}
        for then in plain["results"]:
            row = now[then["record_id"]]
            assert row.latency_s is not None
            assert row.throughput_per_s == then["throughput_per_s"]
            assert row.latency_s.p50 == then["latency_s"]["p50"]
            assert (row.tpot_s and row.tpot_s.p50) == (then.get("tpot_s") and then["tpot_s"]["p50"])
    assert len(choose([str(history)]).tunes) == (name in ("schema1_layout4", "schema2_layout6"))
