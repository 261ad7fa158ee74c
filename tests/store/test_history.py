"""What goes in comes out, and is found again."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import text
from store_writer import make_block, make_prepared, make_record

from redline.model.errors import RecordError, StoreError, UsageError
from redline.model.fields import LAST_MOMENT
from redline.model.note import note
from redline.model.record import Closed, Failure, Memory, RunRecord, TelemetrySample, TraceRef
from redline.store import History, Row
from redline.store.archive import read_exported
from redline.store.schema import pack_head

HOSTILE = [
    'it\'s "quoted" `so`; DROP TABLE records; --',
    "two\nlines\r\nand\ttabs",
    "Ünïcödé 模型 🏎️ \u202eright to left",
    "=HYPERLINK(1)",
    "x" * 300,
    "%_?:name",
]


def replace(record: RunRecord, **changes: object) -> RunRecord:
    return msgspec.structs.replace(record, **changes)


def execute(history: History, statement: str, **values: object) -> None:
    history._database.write(lambda connection: connection.execute(text(statement), values))


def test_a_record_comes_back_whole(history: History) -> None:
    block = msgspec.structs.replace(
        make_block(samples=(1e-9, 0.1 + 0.2, 5e-324, 5e8)),
        settling=(0.5,),
        issue_s=(1e-6,),
        phases={"forward": (0.1, 0.2)},
        memory=Memory(peak_rss_bytes=2**40),
        telemetry=(TelemetrySample(at_s=0.1, power_w=300.0, throttle=("thermal",), foreign=("pid 7",)),),
    )
    record = make_record(key="k", group="g", position=3, notes=(note("note", "a note"),))
    history.begin(record)
    history.append(record.id, block)
    history.append(record.id, make_block(1))
    done = replace(
        record, prepared=make_prepared(), stopped="target", closed=Closed(memory=Memory(allocator_retries=2))
    )
    history.finish(done)
    assert history.load(record.id) == replace(done, blocks=(block, make_block(1)))


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"blocks": (make_block(samples=(0.1, 0.2, 0.3)),)}, [0.2]),
        ({"blocks": (make_block(samples=(0.0, 0.0, 1.0)),)}, []),
        ({"blocks": ()}, []),
        ({"failure": Failure(stage="measure", kind="user", message="no")}, []),
    ],
)
def test_a_point_of_the_trend_is_the_middle_of_what_was_timed(
    history: History, changes: dict[str, object], steps: list[float]
) -> None:
    history.finish(replace(make_record(prepared=make_prepared(), blocks=(make_block(),)), **changes))
    assert [point.step_s for seen in history.series() for point in history.points(seen.key)] == steps


@pytest.mark.parametrize("document", [{"results": []}, {"records": []}])
def test_a_document_without_raw_records_is_not_read(tmp_path: Path, document: dict[str, object]) -> None:
    path = tmp_path / "exported.json"
    path.write_bytes(msgspec.json.encode(document))
    with pytest.raises(UsageError, match="holds no records"):
        read_exported(path)
    path.write_bytes(msgspec.json.encode({"results": [], "records": []}))
    assert read_exported(path) == []


@pytest.mark.parametrize("sample", [math.nan, math.inf, -1.0, 1e308])
def test_what_no_machine_measured_makes_a_record_unreadable(history: History, sample: float) -> None:
    history.finish(make_record(id="b", blocks=(make_block(samples=(0.5, sample)),)))
    sound = make_record(id="a")
    history.finish(sound)
    with pytest.raises(RecordError, match="record b is damaged: Expected `float`"):
        history.load("b")
    told: list[str] = []
    assert history.find(on_unreadable=lambda record_id, error: told.append(record_id)) == [sound]
    assert told == ["b"]


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"created_at": 1e308}, r"\$.created_at"),
        ({"created_at": math.nan}, r"\$.created_at"),
        ({"position": 10**15}, r"\$.position"),
        ({"closed": Closed(memory=Memory(peak_rss_bytes=-1))}, r"\$.closed.memory.peak_rss_bytes"),
    ],
)
def test_so_do_numbers_elsewhere(history: History, changes: dict[str, object], where: str) -> None:
    record = make_record()
    history.finish(record)
    execute(history, "UPDATE records SET head = :head", head=pack_head(replace(record, **changes)))
    with pytest.raises(RecordError, match=where):
        history.load(record.id)


@pytest.mark.parametrize(
    ("stored", "shown"),
    [(1e308, LAST_MOMENT), (-5.0, 0.0), (math.inf, LAST_MOMENT), (0.5, 0.5), (LAST_MOMENT, LAST_MOMENT)],
)
def test_a_time_that_no_calendar_has_stops_no_listing(history: History, stored: float, shown: float) -> None:
    history.finish(make_record())
    execute(history, "UPDATE records SET created_at = :stored", stored=stored)
    assert [row.created_at for row in history.rows()] == [shown]


def test_a_number_that_no_database_takes_is_refused_in_one_line(history: History) -> None:
    with pytest.raises(StoreError, match="cannot write to the history"):
        history.finish(make_record(prepared=make_prepared(memory=Memory(peak_rss_bytes=10**30))))
    assert history.count() == 0


def test_blocks_are_there_before_the_record_is_finished(history: History, location: str) -> None:
    record = make_record()
    history.begin(record)
    history.append(record.id, make_block(7))
    with History.open(location) as other:
        assert other.load(record.id).blocks == (make_block(7),)
        assert other.rows()[0].status == "running"


def test_beginning_again_replaces_the_head_and_keeps_the_blocks(history: History) -> None:
    record = make_record()
    history.begin(record)
    history.append(record.id, make_block())
    history.begin(replace(record, key="now known", prepared=make_prepared()))
    assert history.count() == 1
    loaded = history.load(record.id)
    assert loaded.key == "now known"
    assert loaded.blocks == (make_block(),)


def test_finishing_adds_only_the_blocks_that_nobody_appended(history: History) -> None:
    record = make_record()
    history.begin(record)
    history.append(record.id, make_block(0))
    whole = replace(record, blocks=tuple(make_block(number) for number in range(3)), stopped="target")
    history.finish(whole)
    history.finish(whole)
    assert history.load(record.id) == whole


def test_appending_to_nothing_is_an_error(history: History) -> None:
    with pytest.raises(StoreError) as caught:
        history.append("nowhere", make_block())
    assert str(caught.value) == "no record 'nowhere': begin it before appending to it"
    assert history.count() == 0


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, "done"),
        ({"stopped": "target"}, "done"),
        ({"stopped": "ceiling"}, "done"),
        ({"stopped": "interrupted"}, "interrupted"),
        ({"stopped": "failed"}, "failed"),
        ({"failure": Failure(stage="build", kind="oom", message="no room")}, "failed"),
    ],
)
def test_status_says_how_it_ended(history: History, changes: dict[str, object], status: str) -> None:
    record = make_record()
    history.begin(record)
    assert [row.status for row in history.rows()] == ["running"]
    history.finish(replace(record, **changes))
    assert [row.status for row in history.rows()] == [status]


def test_a_row_has_what_a_listing_shows(history: History) -> None:
    record = make_record(model="vit_b_16", task="train", recipe="fp16+compile", key="k", group="g", position=2)
    history.begin(record)
    asked = Row(
        id=record.id,
        created_at=record.created_at,
        key="k",
        group="g",
        position=2,
        model="vit_b_16",
        task="train",
        recipe="fp16+compile",
        batch=8,
        device="cpu",
        device_name="",
        status="running",
        stopped=None,
        schema=2,
    )
    assert history.rows() == [asked]
    auto = msgspec.structs.replace(record.spec, device="auto")
    history.finish(replace(record, spec=auto, prepared=make_prepared(), stopped="target"))
    turned_out = {"device": "cuda:1", "device_name": "Test GPU", "batch": 16, "status": "done", "stopped": "target"}
    assert history.rows() == [msgspec.structs.replace(asked, **turned_out)]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_only_names(history: History, name: str) -> None:
    history.finish(make_record())
    failure = Failure(stage=name, kind="user", message=name)
    record = make_record(model=name, key=name, group=name, notes=(note("note", name),), failure=failure)
    history.finish(record)
    assert history.load(record.id) == record
    assert history.find(model=name) == history.find(key=name) == history.find(group=name) == [record]
    assert [row.model for row in history.rows(key=name)] == [name]
    assert history.load_with_groups([record.id]) == [record]
    assert history.find(model=name[:-1]) == []


def test_text_that_no_database_takes_is_kept_with_escapes(history: History) -> None:
    """A NUL, or the half of a surrogate pair that a file name which is not UTF-8 leaves."""
    failure = Failure(stage="build", kind="user", message="no file caf\udce9.py\0")
    record = make_record(failure=failure, stopped="failed")
    history.begin(record)
    history.sweep("a\0b").settle("k", record)
    (cell,) = history.sweep("a\0b").cells().values()
    assert cell.failure_message == "no file caf\\udce9.py\\x00"
    loaded = history.load(record.id)
    assert loaded.failure.message == "no file caf\\udce9.py\0"


class TestLookup:
    @pytest.fixture(autouse=True)
    def ids(self, history: History) -> None:
        for record_id in ("abc1", "abc2", "abd", "abd9", "b"):
            history.finish(make_record(id=record_id))

    @pytest.mark.parametrize(("prefix", "found"), [("abc1", "abc1"), ("abd9", "abd9"), ("b", "b"), ("abd", "abd")])
    def test_a_unique_prefix_or_the_whole_id_is_enough(self, history: History, prefix: str, found: str) -> None:
        assert history.load(prefix).id == found

    def test_an_ambiguous_prefix_names_some_that_fit(self, history: History) -> None:
        with pytest.raises(StoreError, match=r"'abc' fits several records \(abc1, abc2\): give more"):
            history.load("abc")
        with pytest.raises(StoreError, match=r"\(abc1, abc2, abd, …\)"):
            history.load("a")

    @pytest.mark.parametrize("prefix", ["zzz", "", "%", "_", "a%", "ABC1", "ä", "\n", "\x7f", "\U0010ffff", "'; --"])
    def test_what_fits_none_is_an_error_that_names_the_place(self, history: History, prefix: str) -> None:
        with pytest.raises(StoreError) as caught:
            history.load(prefix)
        assert str(caught.value) == f"no record {prefix!r} in {history.location}"


class TestSearch:
    @pytest.fixture(autouse=True)
    def records(self, history: History) -> None:
        for second, (record_id, model, task, recipe) in enumerate(
            [
                ("a", "resnet50", "infer", "baseline"),
                ("b", "resnet50", "train", "fp16"),
                ("c", "vit_b_16", "infer", "fp16"),
                ("d", "resnet50", "infer", "fp16+compile"),
            ]
        ):
            record = make_record(id=record_id, model=model, task=task, recipe=recipe, created_at=100.0 + second)
            history.begin(record)
            history.append(record_id, make_block(second))
            if record_id != "d":
                history.finish(replace(record, stopped="target"))

    @pytest.mark.parametrize(
        ("filters", "ids"),
        [
            ({}, "dcba"),
            ({"model": "resnet50"}, "dba"),
            ({"model": "resnet50", "task": "infer"}, "da"),
            ({"status": "done"}, "cba"),
            ({"status": "running"}, "d"),
            ({"since": 102.0}, "dc"),
            ({"limit": 2}, "dc"),
            ({"model": "resnet50", "limit": 1, "newest_first": False}, "a"),
            ({"limit": 0}, ""),
            ({"model": "resnet"}, ""),
        ],
    )
    def test_filters(self, history: History, filters: dict[str, object], ids: str) -> None:
        assert "".join(row.id for row in history.rows(**filters)) == ids
        found = history.find(**filters)
        assert "".join(record.id for record in found) == ids
        assert all(record.blocks == (make_block("abcd".index(record.id)),) for record in found)

    def test_a_filter_that_does_not_exist_is_refused(self, history: History) -> None:
        with pytest.raises(KeyError, match="modle"):
            history.rows(modle="resnet50")

    def test_records_of_one_instant_keep_their_order(self, history: History) -> None:
        for record_id in ("y", "x", "z"):
            history.finish(make_record(id=record_id, created_at=500.0))
        assert [row.id for row in history.rows(since=500.0)] == ["z", "y", "x"]


class TestGroups:
    def test_a_group_comes_in_its_own_order(self, history: History) -> None:
        for position in (2, 0, 1):
            history.finish(make_record(group="g", position=position, created_at=10.0 - position))
        history.finish(make_record(group="other", created_at=1.0))
        assert [record.position for record in history.latest_group()] == [0, 1, 2]
        assert history.load_with_groups([history.find(group="g")[2].id]) == history.latest_group()

    def test_named_records_bring_their_groups(self, history: History) -> None:
        for position in (1, 0):
            history.finish(make_record(id=f"grouped{position}", group="g", position=position))
        history.finish(make_record(id="alone1"))
        history.finish(make_record(id="elsewhere", group="other"))
        found = history.load_with_groups(["al", "grouped1", "grouped0"])
        assert [record.id for record in found] == ["alone1", "grouped0", "grouped1"]
        with pytest.raises(StoreError, match="no record 'gone'"):
            history.load_with_groups(["alone1", "gone"])

    def test_a_named_record_that_is_damaged_is_an_error_and_a_sibling_is_left_out(self, history: History) -> None:
        for name in ("first", "second"):
            history.finish(make_record(id=name, group="g"))
        execute(history, "UPDATE records SET head = :head WHERE id = 'second'", head=b"no record")
        assert [record.id for record in history.load_with_groups(["first"])] == ["first"]
        with pytest.raises(RecordError, match="second is damaged"):
            history.load_with_groups(["second"])


class TestTraces:
    """A record names a file to be opened; only one in the history's own folder is."""

    def trace(self, path: str) -> TraceRef:
        return TraceRef(path=path, steps=3, capture_s=0.1, bytes=10)

    def loaded(self, history: History, path: str) -> str:
        record = make_record(trace=self.trace(path))
        history.finish(record)
        (found,) = history.find()
        assert found == history.load(record.id)
        assert found.trace is not None
        return found.trace.path

    def test_one_in_its_folder_comes_back_whole(self, history: History) -> None:
        path = history.folder / "traces" / "x" / "worker.pt.trace.json.gz"
        assert self.loaded(history, str(path)) == str(path)

    def test_and_is_stored_without_the_folder(self, path: Path) -> None:
        record = make_record(trace=self.trace(str(path.parent / "traces" / "a.json")))
        with History.open(path) as history:
            history.finish(record)
        moved = path.parent.rename(path.parent.with_name("moved"))
        with History.open(moved / path.name) as history:
            assert history.load(record.id).trace == self.trace(str(moved / "traces" / "a.json"))

    @pytest.mark.parametrize(
        "named",
        ["/etc/passwd", "/dev/stdin", "../elsewhere", "traces/../../elsewhere", "a\0b", "/" + "x" * 10_000, "link/a"],
    )
    def test_any_other_is_not_opened(self, history: History, named: str) -> None:
        history.folder.mkdir(parents=True, exist_ok=True)
        (history.folder / "link").symlink_to("/etc")
        assert self.loaded(history, named) == ""


def test_an_archive_goes_from_database_to_database_bit_for_bit(history: History, tmp_path: Path) -> None:
    """From SQLite into this one, and on into another SQLite."""
    with History.open(tmp_path / "first.sqlite") as first:
        for number, name in enumerate(HOSTILE):
            record = make_record(
                id=f"id{number}", blocks=(make_block(number), make_block(number)), created_at=0.1 + number
            )
            first.finish(replace(record, group=name))
            first.mark(record.id, "tag", name, at=1.7e9 + number / 3)
        first.sweep("a\0b").settle("k", make_record(id="cell"))
        archives = [archived(first, tmp_path / "1")]
    assert history.add_file(tmp_path / "1").added == len(HOSTILE) + 1
    archives.append(archived(history, tmp_path / "2"))
    with History.open(tmp_path / "last.sqlite") as last:
        last.add_file(tmp_path / "2")
        archives.append(archived(last, tmp_path / "3"))
        assert last.find() == history.find()
    assert archives[0] == archives[1] == archives[2]
    assert history.add_file(tmp_path / "3").added == 0


def archived(history: History, path: Path) -> bytes:
    with path.open("wb") as out:
        history.export_archive(out)
    return path.read_bytes()
