"""`redline report`, `redline compare` and `--report` from the outside: files, documents, one-line mistakes, exit codes."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import msgspec
import pytest
from invoking import Redline, document
from reported import fake_door, race_records, step_s, sweep_records

from redline.model.record import Block, RunRecord
from redline.show.export import json_document
from redline.store import History
from redline.testing.fake import FakeDoor


@pytest.fixture
def door() -> FakeDoor:
    return fake_door()


def keep(records: list[RunRecord]) -> list[RunRecord]:
    with History.open() as history:
        for record in records:
            history.finish(record)
    return records


def placed(records: list[RunRecord], at: float) -> list[RunRecord]:
    """As if they had been measured in no time, so many seconds after noon."""
    noon = 1.75e9

    def block_at(block: Block) -> Block:
        return msgspec.structs.replace(block, started_at=noon + at - block.wall_s)

    return [
        msgspec.structs.replace(record, created_at=noon + at, blocks=tuple(block_at(block) for block in record.blocks))
        for record in records
    ]


def reported(redline: Redline, what: str | Path) -> Any:
    """What `redline report` says of the folder it wrote."""
    return document(redline(f"report {what} --out out --json"))["about"]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class TestReport:
    def test_writes_the_folder_and_says_where(self, redline: Redline, tmp_path: Path) -> None:
        keep(race_records())
        result = redline("report --out", "out")
        assert result.exit_code == 0
        assert "fp16+compile is 4.0" in result.stdout
        assert (tmp_path / "out" / "dashboard.html").exists()

    def test_json_is_alone_on_stdout(self, redline: Redline, tmp_path: Path) -> None:
        keep(race_records())
        told = reported(redline, "--last")
        assert told["records"] == 3
        assert Path(told["dashboard"]).exists()

    @pytest.mark.parametrize(("pause_s", "before"), [(1.0, 3), (60.0, 0)])
    @pytest.mark.parametrize("recipes", [("baseline", "fp16"), ("baseline",)])
    def test_the_last_has_the_replicates_just_before_it(
        self, redline: Redline, tmp_path: Path, pause_s: float, before: int, recipes: tuple[str, ...]
    ) -> None:
        """A race goes on without those who fell behind; a minute-old one of the same recipes is another measurement."""
        keep(placed(race_records(("baseline", "fp16", "fp16+compile")), 0.0))
        keep(placed(race_records(recipes), pause_s))
        told = reported(redline, "--last")
        assert told["records"] == before + len(recipes)

    def test_the_last_is_without_another_measurement_just_before_it(self, redline: Redline, tmp_path: Path) -> None:
        keep(placed(race_records(("baseline", "fp16")), 0.0))
        keep(placed(race_records(("baseline", "bf16")), 1.0))
        told = reported(redline, "--last")
        assert told["records"] == 2

    def test_of_a_sweep_by_name(self, redline: Redline, tmp_path: Path) -> None:
        keep(race_records(model="another"))
        assert redline("run resnet50 -b 1,8 --name mine --effort quick").exit_code == 0
        told = reported(redline, "--sweep mine")
        assert told["records"] == 2
        assert "# sweep mine" in Path(told["markdown"]).read_text()

    def test_a_folder_that_cannot_be_is_one_line(self, redline: Redline, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        result = redline("report --out", str(tmp_path / "file" / "out"))
        assert result.exit_code == 2
        assert "cannot write the report" in result.stderr

    def test_of_an_exported_file(self, redline: Redline, tmp_path: Path) -> None:
        exported = tmp_path / "records.json"
        exported.write_text(json_document("export", {"results": [], "records": race_records()}))
        told = reported(redline, exported)
        assert told["records"] == 3

    def test_what_json_printed_is_not_read_back(self, redline: Redline, tmp_path: Path) -> None:
        rows = tmp_path / "rows.json"
        rows.write_text(json_document("export", {"results": []}))
        for words in (["report", rows], ["compare", rows, rows], ["history", "import", rows]):
            result = redline(*map(str, words))
            assert result.exit_code == 2
            assert "--save FILE.redline writes the records" in result.stderr
            assert len(result.stderr.strip().splitlines()) == 1

    @pytest.mark.parametrize("name", ["backup.redline", "backup.redline.gz", "records.json.gz"])
    def test_of_a_back_up(self, redline: Redline, tmp_path: Path, name: str) -> None:
        ids = [record.id for record in keep(race_records())]
        words = ("--format", "json", "--raw") if "json" in name else ("--format", "archive")
        assert redline("history export", *words, "-o", str(tmp_path / name)).exit_code == 0
        assert (tmp_path / name).read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")
        assert redline("history delete", *ids).exit_code == 0
        told = reported(redline, tmp_path / name)
        assert told["records"] == 3

    def test_a_history_is_reported_with_its_searches_and_not_with_this_users(
        self, redline: Redline, tmp_path: Path
    ) -> None:
        packed = Path(__file__).parents[1] / "data" / "histories" / "schema1_layout4.sqlite.gz"
        (tmp_path / "old.sqlite").write_bytes(gzip.decompress(packed.read_bytes()))
        keep(race_records())
        told = reported(redline, tmp_path / "old.sqlite")
        assert told["records"] == 3
        text = Path(told["markdown"]).read_text().replace("\\", "")
        assert "simple_cnn" in text
        assert "resnet50" not in text
        assert "### Searches" in text

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"results": []}', '{"results": [], "records": [1]}', "\x00\xff"])
    def test_other_files_are_one_line(self, redline: Redline, tmp_path: Path, text: str) -> None:
        other = tmp_path / "other.json"
        other.write_text(text)
        result = redline("report", str(other), "--out", "out")
        assert result.exit_code == 2
        assert len(result.stderr.strip().splitlines()) == 1

    @pytest.mark.parametrize("name", ["<script>|\n# x", "\x1b[31mred\x1b[0m", "=1+1", "[bold]x[/bold]", "z" * 300])
    def test_a_hostile_name_does_nothing_to_the_terminal(self, redline: Redline, tmp_path: Path, name: str) -> None:
        keep(race_records(model=name))
        result = redline("report --out", "out")
        assert result.exit_code == 0
        assert "\x1b" not in result.stdout
        assert "".join(name.split())[:20].replace("\x1b", "\ufffd") in "".join(result.stdout.split())


class TestBeside:
    def test_run(self, redline: Redline, tmp_path: Path) -> None:
        out = "out"
        result = redline("run resnet50 -r baseline -r fp16 -b 8 --effort quick --json --report", out)
        assert result.exit_code == 0
        assert len(document(result)["tables"]["results"]) == 2
        assert "dashboard.html" in result.stderr
        assert (tmp_path / "out" / "recipes.png").exists()

    def test_sweep(self, redline: Redline, tmp_path: Path) -> None:
        out = tmp_path / "out"
        result = redline("run resnet50 -b 1,8,64 --effort quick --report", str(out))
        assert result.exit_code == 0
        assert (out / "throughput.png").exists()

    def test_a_dry_run_has_nothing_to_report(self, redline: Redline, tmp_path: Path) -> None:
        result = redline("run resnet50 -b 1 --dry-run --report", "out")
        assert result.exit_code == 2
        assert "leave out --report" in result.stderr

    def test_the_folder_is_looked_at_before_anything_is_measured(
        self, redline: Redline, tmp_path: Path, door: FakeDoor
    ) -> None:
        (tmp_path / "file").write_text("")
        result = redline("run resnet50 --report", str(tmp_path / "file" / "out"))
        assert result.exit_code == 2
        assert door.opened == 0

    def test_a_trace_from_elsewhere_has_no_record(self, redline: Redline, tmp_path: Path) -> None:
        result = redline(
            "profile",
            str(Path(__file__).parents[1] / "data" / "traces" / "h200_resnet50_fp16_b32.json.gz"),
            "--report",
            "out",
        )
        assert result.exit_code == 2
        assert "leave out --report" in result.stderr


class TestCompare:
    def test_exit_codes_follow_the_verdict(self, redline: Redline) -> None:
        baseline, fast, same = keep(race_records(["baseline", "fp16", "amp"]))
        assert redline("compare", baseline.id, fast.id).exit_code == 0
        assert redline("compare", fast.id, baseline.id).exit_code == 1
        assert redline("compare", baseline.id, same.id).exit_code == 0
        (other,) = keep(sweep_records(model="vit_b_16", recipe="baseline", batches=[32]))
        assert redline("compare", baseline.id, other.id).exit_code == 3
        (alone,) = keep(sweep_records(recipe="baseline", batches=[32]))
        assert redline("compare", baseline.id, alone.id).exit_code == 0
        assert redline("compare", baseline.id, alone.id, "--fail-inconclusive").exit_code == 4
        (slow,) = keep(
            sweep_records(fake_door(step_s=lambda spec: 2.2 * step_s(spec)), recipe="baseline", batches=[32])
        )
        assert redline("compare", alone.id, slow.id).exit_code == 1, "2.2 times slower, one run a side"
        (broken,) = keep(sweep_records(recipe="baseline", batches=[256]))
        assert redline("compare", broken.id, alone.id).exit_code == 5

    def test_json_markdown_and_terminal(self, redline: Redline, tmp_path: Path) -> None:
        baseline, fast, _ = keep(race_records())
        told = document(redline("compare", baseline.id, fast.id, "--json"))
        assert told["about"]["verdict"] == "faster"
        assert told["tables"]["benchmarks"][0]["ratio"]["value"] == pytest.approx(2.5, rel=0.05)
        assert "verdict of B: faster" in redline("compare", baseline.id, fast.id, "--summary", tmp_path / "s.md").stdout
        assert (tmp_path / "s.md").read_text().startswith("**verdict of B: faster")

    def test_sweeps_files_and_lists_of_ids(self, redline: Redline, tmp_path: Path) -> None:
        for name in ("one", "two"):
            redline("run resnet50 -b 1,8 --name", name, "--effort", "quick")
        told = document(redline("compare one two --json"))
        assert {each["verdict"] for each in told["tables"]["benchmarks"]} == {"inconclusive"}
        door = fake_door()
        sides = [
            [record for _ in range(3) for record in sweep_records(door, recipe=recipe, batches=[32])]
            for recipe in ("baseline", "fp16")
        ]
        ids = [",".join(record.id for record in keep(side)) for side in sides]
        assert document(redline("compare", *ids, "--json"))["about"]["verdict"] == "faster"
        files = [tmp_path / "a.json", tmp_path / "b.json"]
        for file, side in zip(files, sides, strict=True):
            file.write_text(json_document("export", {"results": [], "records": side}))
        assert document(redline("compare", *map(str, files), "--json"))["about"]["verdict"] == "faster"
