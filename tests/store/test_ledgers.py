"""Sweeps, searches and ceilings: a record and the cell it settles are there together or not at all, and one process holds each."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import select, update
from store_writer import make_block, make_record

from redline.model.errors import StoreError, UsageError
from redline.model.identity import device_key, device_key_of_ceilings
from redline.model.record import DeviceInfo, Environment, Failure
from redline.model.work import Ceilings
from redline.store import History, SettledCell, TuneRow, ledgers
from redline.store.schema import holders

NO_ROOM = Failure(stage="compile", kind="oom", message="no room")


def test_cells_are_settled_by_the_newest_record(history: History) -> None:
    ledger = history.sweep("study")
    done = make_record(stopped="target", blocks=(make_block(),))
    failed = make_record(failure=NO_ROOM, stopped="failed")
    ledger.settle("a", make_record(stopped="target"))
    ledger.settle("a", done)
    ledger.settle("b", failed)
    fields = SettledCell.__struct_fields__
    said = {"a": ("a", "done", done.id, None, None, None), "b": ("b", "failed", failed.id, "oom", "compile", "no room")}
    assert ledger.cells() == {key: SettledCell(**dict(zip(fields, own, strict=True))) for key, own in said.items()}
    assert history.load_many([done.id, failed.id, "nowhere"]) == {done.id: done, failed.id: failed}
    assert history.sweep("another").cells() == {}
    assert history.count() == 3


def test_forgetting_keeps_the_records_and_other_sweeps(history: History) -> None:
    for name in ("study", "another"):
        history.sweep(name).settle("a", make_record())
    history.sweep("study").forget()
    assert (len(history.sweep("study").cells()), len(history.sweep("another").cells()), history.count()) == (0, 1, 2)


def test_a_record_without_its_cell_is_never_seen(history: History) -> None:
    history._database.write(lambda connection: connection.exec_driver_sql("DROP TABLE sweep_cells"))
    with pytest.raises(StoreError):
        history.sweep("study").settle("a", make_record())
    assert history.count() == 0


def test_those_who_look_on_see_how_far_it_is(history: History) -> None:
    ledger = history.sweep("study")
    ledger.tell(3, 4, "nobody holds it")
    assert history.activities() == []
    with ledger.held():
        (said,) = history.activities()
        assert (said.name, said.done, said.done_before, said.total, said.is_over) == ("study", 3, 0, 4, False)
        ledger.tell(4, 4, "resnet", done_before=2)
        (said,) = history.activities()
        assert (said.done, said.total, said.now, said.done_before) == (4, 4, "resnet", 2)
    assert history.activities() == []


def test_several_may_watch_scripts_of_one_name(history: History) -> None:
    with history.hold("watch", "train.py").held(), history.hold("watch", "train.py").held():
        assert [said.name for said in history.activities()] == ["train.py"] * 2


def held_by(history: History, process: str, until: float) -> None:
    """Let another process have what is held."""
    other = {"token": "x", "process": process, "until": until}
    history._database.write(lambda connection: connection.execute(update(holders).values(**other)))


class TestHolding:
    def test_holding_is_by_kind_by_name_and_by_history(self, location: str, tmp_path: Path) -> None:
        with (
            History.open(location) as one,
            History.open(location) as same,
            History.open(tmp_path / "other.sqlite") as other,
        ):
            with one.sweep("study").held(), one.tunes().held("study"):
                with same.sweep("another").held(), same.tunes().held("another"), other.sweep("study").held():
                    pass
                with pytest.raises(UsageError, match="sweep 'study' is being run by pro"), same.sweep("study").held():
                    pass
                with pytest.raises(UsageError, match="tune 'study' is being run by pro"), same.tunes().held("study"):
                    pass
            with same.sweep("study").held(), same.tunes().held("study"):
                pass

    def test_a_hold_of_another_process_is_seen_until_that_ends(self, location: str, tmp_path: Path) -> None:
        program = (
            "import os, sys\nfrom redline.store import History\n"
            "with History.open(sys.argv[1]).sweep('study').held():\n"
            "    print('held', flush=True)\n    sys.stdin.read()\n    os._exit(0)\n"
        )
        other = subprocess.Popen(
            [sys.executable, "-c", program, location],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        assert other.stdout.readline().strip() == "held"
        with History.open(location) as history:
            refused = pytest.raises(UsageError, match=f"sweep 'study' is being run by process {other.pid}")
            with refused, history.sweep("study").held():
                pass
            other.communicate("")
            assert [said.is_over for said in history.activities()] == [True]
            with history.sweep("study").held():
                pass

    def test_what_failed_leaves_the_ledger_usable(self, history: History) -> None:
        ledger = history.sweep("study")
        with pytest.raises(RuntimeError, match="broke"), ledger.held():
            raise RuntimeError("broke")
        ledger.settle("a", make_record())
        with ledger.held():
            ledger.settle("b", make_record())
        assert sorted(ledger.cells()) == ["a", "b"]

    def test_a_process_elsewhere_has_it_until_its_time_is_over(
        self, location: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ledgers, "LEASE_S", 0.5)
        with History.open(location) as one, History.open(location) as other, one.sweep("study").held():
            time.sleep(0.6)  # a server that was just started lets nobody in for as long as a hold lasts
            held_by(one, "elsewhere//pid 7 1.00", time.time() + 3600)
            with pytest.raises(UsageError, match="process 7 on elsewhere"), other.sweep("study").held():
                pass
            held_by(one, "elsewhere//pid 7 1.00", time.time() - 3600)
            assert [said.is_over for said in other.activities()] == [True]
            with other.sweep("study").held():
                pass

    def test_one_who_was_overtaken_writes_no_more(self, history: History) -> None:
        ledger, tunes = history.sweep("study"), history.tunes()
        with tunes.held("study"), ledger.held():
            ledger.settle("its own", make_record())
            held_by(history, "b//p 1 1.00", 9e9)
            with pytest.raises(StoreError, match="another process has taken over sweep 'study'"):
                ledger.settle("k", make_record())
            with pytest.raises(StoreError, match="another process has taken over tune 'study'"):
                tunes.save(row("study"), b"one")
        assert history.count() == 1
        with history._database.reading() as connection:
            tokens = connection.execute(select(holders.c.token)).scalars().all()
        assert tokens == ["x", "x"], "what another one holds is not given back"

    def test_a_hold_is_renewed_while_it_lasts(self, history: History, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ledgers, "LEASE_S", 0.3)
        with history.sweep("study").held():
            untils = set()
            deadline = time.monotonic() + 30
            while len(untils) < 3 and time.monotonic() < deadline:
                with history._database.reading() as connection:
                    untils.add(connection.scalar(select(holders.c.until)))
            assert len(untils) == 3


def row(name: str, state: str = "running", created_at: float = 1.0) -> TuneRow:
    return TuneRow(name=name, created_at=created_at, model="resnet18", task="infer", state=state)


def test_a_search_is_rewritten_as_more_is_known(history: History) -> None:
    ledger = history.tunes()
    assert ledger.load("study") is None
    ledger.save(row("study"), b"one")
    ledger.save(row("study", "done"), b"two")
    ledger.save(row("newer", created_at=2.0), b"three")
    assert ledger.load("study") == b"two"
    assert [(one.name, one.state) for one in ledger.rows()] == [("newer", "running"), ("study", "done")]


CEILINGS = Ceilings(
    kind="cuda",
    name="Some GPU",
    driver="570.1",
    torch="2.9.0",
    threads=None,
    flops_per_s={"bf16": 7.9e14},
    copy_bytes_per_s=4.3e12,
    launch_s=4e-6,
    measured_at=1.7e9,
)


def key(kind: str = "cuda", threads: int = 8, **device: str) -> str:
    info = DeviceInfo(kind=kind, **{"name": "Some GPU", "driver": "570.1", **device})
    return device_key(Environment(device=info, threads=threads, versions={"torch": "2.9.0"}))


def test_the_newest_ceilings_of_a_device_count(history: History, location: str) -> None:
    assert history.ceilings(key()) is None
    newer = msgspec.structs.replace(CEILINGS, copy_bytes_per_s=4.4e12)
    for measured in (CEILINGS, newer):
        history.keep_ceilings(measured)
        with History.open(location) as again:
            assert again.ceilings(key()) == measured
    history.keep_ceilings(msgspec.structs.replace(CEILINGS, schema=0))
    assert history.ceilings(key()) is None, "measured in another way"


def test_a_device_is_told_by_name_driver_and_kind_and_a_cpu_by_its_threads_too() -> None:
    keys = [key(**other) for other in ({}, {"name": "Another GPU"}, {"driver": "580.0"}, {"kind": "rocm"})]
    assert len(set(keys)) == 4
    assert key(threads=2) == key(threads=4) == device_key_of_ceilings(CEILINGS)
    assert key("cpu", threads=2) != key("cpu", threads=4)
