"""A report as a folder: what lies in it, and that it can be made anywhere, of anything a history holds."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import pytest
from reported import captured, everything, failed_record, race_records, sweep_records

from redline.model.errors import SpecError
from redline.model.note import note
from redline.model.record import RunRecord
from redline.model.units import significant
from redline.model.work import MemoryPoint, MemoryRow, MemoryUse
from redline.show.contents import Contents, contents_of
from redline.show.dashboard import dashboard, unbroken
from redline.show.export import json_document
from redline.show.payload import as_json, payload_of
from redline.show.report import ReportFiles, result_of, write_folder
from redline.store import History
from redline.verbs.capture import KEPT, keep_memory, kept_memories
from redline.verbs.report import choose, report, report_records
from redline.verbs.workspace import Workspace

HOSTILE = {
    "script": "<script>alert(1)</script>",
    "quotes": "a\"b'c`d",
    "pipes": "a|b||c",
    "newlines": "a\nb\r\n# c\n\n- d",
    "unicode": "模型\u2028🚀\u202e",
    "formula": "=HYPERLINK(1)",
    "plus": "+1+1",
    "at": "@SUM(A1)",
    "long": "x" * 300,
    "markdown": "**bold** [link](http://example.com) ![](x) `code` _u_ ~~s~~ <b>",
    "escape": "\x1b[31mred\x1b[0m\x07",
    "template": "{{ 7 * 7 }} {% raw %}",
}


def written(what: Any = (), folder: Any = "redline-report", **more: Any) -> ReportFiles:
    """The files of `redline.report`, of records that it chose."""
    about = report(what, out=folder, **more)
    facts = dict(about.about)
    return ReportFiles(
        folder=str(facts["folder"]),
        headline=str(about.headline),
        dashboard=str(facts["dashboard"]),
        markdown=str(facts["markdown"]),
        csv=str(facts["csv"]),
        json=str(facts["json"]),
        pictures=(),
        records=int(facts["records"] or 0),
        notes=about.notes,
    )


def page_of(contents: Contents) -> str:
    return dashboard(contents, result_of(contents))


def keep(records: list[RunRecord]) -> None:
    with History.open() as history:
        for record in records:
            history.finish(record)


def data_of(page: str) -> Any:
    """What the page draws."""
    return json.loads(page.partition('<script type="application/json" id="data">')[2].partition("</script>")[0])


def beside_history(record: RunRecord) -> RunRecord:
    """With its trace where a history keeps it."""
    assert record.trace is not None
    with History.open() as history:
        path = history.folder / "traces" / record.id / Path(record.trace.path).name
    path.parent.mkdir(parents=True)
    shutil.copyfile(record.trace.path, path)
    return msgspec.structs.replace(record, trace=msgspec.structs.replace(record.trace, path=str(path)))


def test_memory_that_was_looked_at_is_in_the_dashboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the whole history all of it, of chosen records what is about their models; a damaged file is named."""
    monkeypatch.setenv("REDLINE_STORE", str(tmp_path / "history.sqlite"))
    point = MemoryPoint(at=0.5, bytes=30, phase="backward", categories={"weights": 30}, reserved_bytes=40)
    use = MemoryUse(peak_bytes=30, peak_phase="backward", categories={"weights": 30}, timeline=(point,))
    rows = [
        MemoryRow(model=name, task="infer", recipe="baseline", batch=8, device="a GPU", use=use)
        for name in ("resnet50", "another")
    ]
    record = everything()[0]
    with Workspace() as workspace:
        workspace.history.finish(record)
        for row in (*rows, rows[0]):
            keep_memory(row, workspace)
        (workspace.traces / f"0{KEPT}").write_text("{")
        found, unreadable = kept_memories(workspace)
        assert sorted(row.model for row in found) == ["another", "resnet50"]
        assert [each.about for each in unreadable] == [f"0{KEPT}"]
        for chosen, shown in (((), 2), ((record.id,), 1)):
            files = written(chosen, tmp_path / "out", workspace=workspace)
            page = Path(files.dashboard).read_text()
            names = [row["name"] for row in data_of(page)["memories"]]
            assert len(names) == shown
            assert f"resnet50 · {record.spec.workload.task} · baseline · batch 8 · a GPU" in names
        contents = contents_of([record], memories=rows)
        told = payload_of(contents, result_of(contents))["memories"][0]
        assert (told["kinds"], told["reserved"]) == ({"weights": [30]}, [40])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[RunRecord], ReportFiles]:
    """Records of every kind, and the report of them; it takes a second or two, so tests that only read it share it."""
    records = everything()
    with Workspace(keep=False) as nowhere:
        return records, report_records(records, tmp_path_factory.mktemp("whole"), workspace=nowhere)


def test_the_folder_has_everything_and_the_page_is_small(whole: tuple[list[RunRecord], ReportFiles]) -> None:
    _, files = whole
    made = {path.name for path in Path(files.folder).iterdir()}
    pictures = {"throughput.png", "latency.png", "recipes.png", "step.png", "step-2.png"}
    assert made == {"dashboard.html", "report.md", "results.csv", "results.json"} | pictures
    assert {Path(picture).name for picture in files.pictures} == pictures
    for picture in files.pictures:
        assert Path(picture).read_bytes().startswith(b"\x89PNG")
    assert Path(files.dashboard).stat().st_size < 6_000_000
    rows = list(csv.DictReader(io.StringIO(Path(files.csv).read_text())))
    assert len(rows) == files.records
    tables = json.loads(Path(files.json).read_text())["tables"]
    assert sum(len(rows) for name, rows in tables.items() if "results" in name) == files.records


def test_the_markdown_tells_findings_tables_environment_and_method(
    whole: tuple[list[RunRecord], ReportFiles],
) -> None:
    text = Path(whole[1].markdown).read_text()
    assert text.startswith("# ")
    for part in (
        "### What is in the way",
        "### Where larger batches stop paying",
        "### Environment",
        "## Method",
        "![Throughput against batch]",
    ):
        assert part in text
    assert "fp16+compile is 4.0" in text.replace("\\", "")
    assert "interleaved" in text
    assert "out of memory" in text
    assert "wrong outputs" in text
    for place in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text):
        assert (Path(whole[1].folder) / place).exists()


def test_the_same_records_make_the_same_report(whole: tuple[list[RunRecord], ReportFiles], tmp_path: Path) -> None:
    records, first = whole
    again = report_records(records, tmp_path / "b")
    for name in ("dashboard", "markdown", "csv", "json"):
        assert Path(getattr(first, name)).read_bytes() == Path(getattr(again, name)).read_bytes()


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    """From the history alone, in a process in which torch cannot be imported."""
    keep([beside_history(record) if record.trace else record for record in everything()])
    code = (
        "import sys\n"
        "for name in ('torch', 'torchvision'): sys.modules[name] = None\n"
        "from redline.cli.main import main\n"
        "sys.argv = ['redline', 'report', '--out', sys.argv[1]]\n"
        "main()\n"
    )
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    with History.open() as history:
        here = report_records(history.find(newest_first=False), tmp_path / "here")
    assert (out / "dashboard.html").read_bytes() == Path(here.dashboard).read_bytes()
    assert "Time by kernel class" in (out / "dashboard.html").read_text()


def in_other_words(record: RunRecord, name: str) -> RunRecord:
    """As another program may write it: free texts that Redline itself draws from a few words."""
    numerics = msgspec.structs.replace(record.prepared.numerics, method="reference", number_format=name)
    workload = msgspec.structs.replace(record.prepared.workload, item=name, optimizer=name, loss=name)
    prepared = msgspec.structs.replace(record.prepared, numerics=numerics, workload=workload)
    return msgspec.structs.replace(record, prepared=prepared, notes=(note("note", name),))


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
def test_hostile_names_are_harmless(name: str, tmp_path: Path) -> None:
    records = [*race_records(model=name), *sweep_records(model=[name]), failed_record(message=name, model=name)]
    records = [in_other_words(record, name) if record.prepared else record for record in records]
    contents = contents_of(records, title=name, notes=[note("note", name)])
    files = write_folder(contents, tmp_path)
    _check_html(Path(files.dashboard).read_text(), name)
    _check_markdown(Path(files.markdown).read_text(), name)
    _check_csv(Path(files.csv).read_bytes().decode(), len(contents.lines))
    first = json.loads(Path(files.json).read_text())["tables"]["results"][0]
    assert first["model"] == name


def _check_html(page: str, name: str) -> None:
    """Only the markup of the template: three scripts of ours, and the data no engine takes for markup."""
    assert re.findall(r"<script[^>]*>", page) == [
        '<script type="application/json" id="data">',
        '<script type="text/plain" id="library">',
        "<script>",
    ]
    data = page.partition('id="data">')[2].partition("</script>")[0]
    assert not re.search("[<>&\u2028\u2029]", data)
    assert name in json.loads(data)["columns"]["model"]["texts"]
    markup = page.partition("<style>")[0] + page.partition("</style>")[2].partition("<script")[0]
    assert "<b>" not in markup
    assert "49" not in markup.partition("<title>")[2].partition("</title>")[0] or "{{" not in name


def _check_markdown(text: str, name: str) -> None:
    assert "<script>" not in text
    assert "<b>" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    # A table keeps its columns, whatever a name holds.
    tables = [
        list(lines) for is_table, lines in groupby(text.splitlines(), lambda line: line.startswith("|")) if is_table
    ]
    assert tables
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
    assert not re.search(r"^(- d|# c)$", text, re.MULTILINE)
    assert not re.search(r"(?<!\\)\]\(http", text)


def _check_csv(text: str, count: int) -> None:
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == count
    assert len(text.splitlines()) == count + 1
    for row in rows:
        for cell in (row["model"], row["failure"]):
            assert not cell.lstrip().startswith(("=", "+", "-", "@"))


def test_data_in_the_page_reads_back_as_it_was() -> None:
    contents = contents_of(sweep_records(model=["</script>&\u2028"]))
    payload = payload_of(contents, result_of(contents))
    assert json.loads(as_json(payload)) == json.loads(json.dumps(payload))


def test_no_line_ends_inside_a_number_or_an_interval() -> None:
    told = unbroken(f"a faster one {significant(10335, 5)} <img>/s, 4.08× (3.15–5.28)")
    assert (
        told
        == 'a faster one <span class="nb">10\u2009335</span> &lt;img&gt;/s, 4.08× <span class="nb">(3.15–5.28)</span>'
    )


def test_nothing_to_report_is_a_page_and_a_line(tmp_path: Path) -> None:
    files = written(folder=tmp_path / "out")
    assert files.records == 0
    assert files.headline == "There is nothing to report yet."
    assert "No record was found" in Path(files.dashboard).read_text()
    assert Path(files.csv).read_text().strip() == "failure,record_id"


def test_one_failed_record_alone_says_what_failed(tmp_path: Path) -> None:
    files = report_records([failed_record()], tmp_path)
    assert files.headline.endswith(": Nothing could be measured.")
    assert files.pictures == ()
    assert "this factory raised" in Path(files.markdown).read_text()


def test_records_that_cannot_be_read_are_left_out_and_told_of(tmp_path: Path, own_history: Path) -> None:
    keep(race_records())
    with sqlite3.connect(own_history) as database:
        (spoilt,) = database.execute("select id from records order by id limit 1").fetchone()
        database.execute("update records set head = x'00' where id = ?", (spoilt,))
    files = written(folder=tmp_path / "out")
    assert files.records == 2
    assert any(spoilt in str(each) for each in files.notes)
    assert spoilt in Path(files.dashboard).read_text()
    assert spoilt in Path(files.markdown).read_text()


def test_records_of_an_older_schema_are_led_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record as an older Redline wrote it: one field less, under another schema."""
    from redline.model import migrations

    document = json.loads(msgspec.json.encode({"schema": 1, "results": [], "records": race_records()}).decode())
    for old in document["records"]:
        old["schema"] = 0
        old["marked"] = old.pop("notes")
    path = tmp_path / "old.json"
    path.write_text(json.dumps(document))
    with pytest.raises(Exception, match="cannot update a record from schema 0 to 1"):
        choose([str(path)])
    monkeypatch.setitem(
        migrations.MIGRATIONS,
        0,
        lambda plain: {**{k: v for k, v in plain.items() if k != "marked"}, "notes": plain["marked"]},
    )
    assert written([str(path)], tmp_path / "out").records == 3


def test_a_trace_that_is_gone_costs_the_kernels_only(tmp_path: Path) -> None:
    record = captured()
    assert record.trace is not None
    gone = msgspec.structs.replace(
        record, trace=msgspec.structs.replace(record.trace, path=str(tmp_path / "gone.json"))
    )
    contents = contents_of([gone])
    assert contents.profiles == []
    assert [each.code for each in contents.notes] == ["trace-gone"]
    assert "chart-kernels" not in page_of(contents)
    assert "chart-kernels" in page_of(contents_of([record]))


@pytest.mark.parametrize("path", ["/etc/passwd", "/dev/stdin", "/proc/self/environ"])
def test_somebody_elses_record_opens_no_file_of_this_machine(tmp_path: Path, path: str) -> None:
    """Neither through a history nor through an exported document."""
    record = captured()
    assert record.trace is not None
    hostile = msgspec.structs.replace(record, trace=msgspec.structs.replace(record.trace, path=path))
    keep([hostile])
    exported = tmp_path / "theirs.json"
    exported.write_text(json_document("export", {"results": [], "records": [hostile]}))
    for what in ([], [str(exported)]):
        files = written(what, tmp_path / "report")
        assert [note.code for note in files.notes] == ["trace-gone"]
        assert record.id[:13] in str(files.notes[0])


def test_a_pipe_in_the_folder_of_the_history_is_not_waited_for(tmp_path: Path) -> None:
    record = captured()
    assert record.trace is not None
    pipe = tmp_path / "trace.json.gz"
    os.mkfifo(pipe)
    keep([msgspec.structs.replace(record, trace=msgspec.structs.replace(record.trace, path=str(pipe)))])
    files = written((), tmp_path / "report")
    assert list(map(str, files.notes)) == [f"no kernels of record {record.id}: {pipe} is not a regular file"]


def test_a_title_names_models_and_devices() -> None:
    assert contents_of(race_records()).title == "resnet50 on fake cuda device"
    assert contents_of([]).title == "nothing measured yet"


def test_what_to_report_on_is_chosen_in_one_way(tmp_path: Path) -> None:
    first, second = race_records(), race_records(model="vit_b_16")
    keep([*first, *second])
    with pytest.raises(SpecError, match="cannot write the report"):
        written(folder=Path(__file__) / "below-a-file")
    assert {record.spec.workload.model for record in choose(last=True).records} == {"vit_b_16"}
    # The siblings come along: ratios are against the first of the group.
    assert [record.id for record in choose([first[1].id]).records] == [record.id for record in first]
    assert len(choose().records) == 6


def test_the_same_measured_again_is_one_line() -> None:
    records = sweep_records(recipe="baseline", batches=[8]) + sweep_records(recipe="baseline", batches=[8])
    records += [failed_record("boom", "resnet50")]
    contents = contents_of(records)
    processes = [len(line.processes) for line in contents.lines if line.row.recipe == "baseline"]
    assert processes == [2, 1], "what failed stays apart"


def test_a_picture_of_odd_names_is_drawn(tmp_path: Path) -> None:
    odd = sweep_records(model=["$\\alpha$ 模型 %s"], recipe=["baseline"])
    assert len(report_records(odd, tmp_path).pictures) == 3
