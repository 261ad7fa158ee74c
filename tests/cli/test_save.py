"""One file to keep and hand over: every verb that measures writes it, and every verb that asks for records takes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from invoking import Redline, refused
from reported import fake_door

from redline.model.protocol import SwitchChoice
from redline.store import History
from redline.store.archive import read_archive
from redline.testing.fake import FakeDoor

MEASURING = {
    "run": "run resnet50 -b 8 -r baseline -r fp16",
    "demo": "demo --device cuda:0",
    "batch": "batch resnet50 --max-memory 1GiB --max-batch 64",
    "load": "load resnet50 --rate 10,20 --effort quick",
    "scale": "scale resnet50 --ranks 1 --batch 8",
    "study": "study batch --model resnet50 --batch 1,8",
    "train": "train resnet50 --epochs 1 --batch 8",
    "tune": "tune resnet50 -b 8 --budget 2m",
}


@pytest.fixture
def door() -> FakeDoor:
    return fake_door(choices=(SwitchChoice(switch="fp16", family="precision"),))


@pytest.mark.parametrize("verb", MEASURING)
def test_every_measuring_verb_writes_its_records(
    verb: str, redline: Redline, own_history: Path, tmp_path: Path
) -> None:
    file = tmp_path / "kept.redline"
    done = redline(MEASURING[verb], "--save", file)
    assert file.exists(), done.output
    with History.open(own_history) as history:
        known = {record.id for record in history.find()}
    assert set(read_ids(file)) <= known
    assert read_ids(file)


def read_ids(file: Path) -> list[str]:
    return [str(row["id"]) for name, row in read_archive(file) if name == "records"]


def test_every_verb_that_takes_records_takes_the_file(redline: Redline, tmp_path: Path) -> None:
    before, after = (tmp_path / f"{name}.redline" for name in ("before", "after"))
    for file in (before, after):
        assert redline(MEASURING["run"], "--save", file).exit_code == 0
    assert "verdict of B" in redline("compare", before, after).stdout
    assert redline("report", before, "--out", tmp_path / "report").exit_code == 0
    assert redline("history import", before).exit_code == 0
    bench = tmp_path / "bench.toml"
    bench.write_text('device = "cuda:0"\n[[run]]\nname = "fast"\nmodel = "resnet50"\nbatch = 8\n')
    assert json.loads(redline("gate", bench, "--baseline", before, "--json").stdout)["tables"]["benchmarks"]


def test_what_json_prints_is_refused_and_the_message_names_save(redline: Redline, tmp_path: Path) -> None:
    base = tmp_path / "base.json"
    base.write_text(redline(MEASURING["run"], "--json").stdout)
    bench = tmp_path / "bench.toml"
    bench.write_text('device = "cuda:0"\n[[run]]\nname = "fast"\nmodel = "resnet50"\nbatch = 8\n')
    refused(redline("gate", bench, "--baseline", base), "--save")
    refused(redline("compare", base, base), "--save")
