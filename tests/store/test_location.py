"""Where the history lies, and what is said when it cannot lie there."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from store_writer import make_record

from redline.model.errors import MissingExtra, StoreError
from redline.store import History
from redline.store.location import describe, resolve


def test_importing_loads_no_torch() -> None:
    code = "import sys, redline.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_new_folder_is_made_and_the_file_is_tuned(tmp_path: Path) -> None:
    path = tmp_path / "not" / "yet" / "there.sqlite"
    with History.open(path) as history:
        history.finish(make_record())
        assert history.location == str(path)
        with history._database.reading() as connection:
            pragmas = ("journal_mode", "synchronous", "busy_timeout", "foreign_keys")
            values = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in pragmas]
    assert values == ["wal", 1, 60_000, 1]


@pytest.mark.parametrize("form", ["{path}", "sqlite:///{path}"])
def test_the_environment_names_a_path_or_a_url(path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setenv("REDLINE_STORE", form.format(path=path))
    with History.open() as history:
        history.finish(make_record())
        assert history.location == str(path)
    assert path.exists()


def test_an_argument_goes_before_the_environment(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_STORE", str(path))
    assert describe(resolve("/elsewhere/h.sqlite")) == "/elsewhere/h.sqlite"


@pytest.mark.parametrize("value", [None, ""])
def test_by_default_it_is_in_the_data_folder_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("REDLINE_STORE", raising=False)
    if value is not None:
        monkeypatch.setenv("REDLINE_STORE", value)
    monkeypatch.setattr("platformdirs.user_data_path", lambda name: tmp_path / name)
    assert describe(resolve()) == str(tmp_path / "redline" / "history.sqlite")


def test_paths_are_absolute_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert describe(resolve("a b#?.sqlite")) == str(tmp_path / "a b#?.sqlite")
    assert describe(resolve("sqlite:///x.sqlite")) == str(tmp_path / "x.sqlite")
    assert describe(resolve("~/x.sqlite")) == "/home/someone/x.sqlite"


@pytest.mark.parametrize("url", [":memory:", "sqlite://", "sqlite:///:memory:"])
def test_memory_will_do_for_a_try(url: str) -> None:
    record = make_record()
    with History.open(url) as history:
        history.finish(record)
        assert history.load(record.id) == record
        assert history.location == ":memory:"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:s3cret@host:5432/db", "postgresql+psycopg://me:***@host:5432/db"),
        ("postgres://me@host/db", "postgresql+psycopg://me@host/db"),
        (
            "postgresql+psycopg://host/db?password=s3cret&sslmode=require",
            "postgresql+psycopg://host/db?sslmode=require",
        ),
    ],
)
def test_a_password_is_never_shown(url: str, shown: str) -> None:
    assert describe(resolve(url)) == shown


class TestRefusals:
    def refused(self, place: str | Path) -> str:
        with pytest.raises(StoreError) as caught:
            History.open(place)
        message = str(caught.value)
        assert "\n" not in message
        assert "s3cret" not in message
        return message

    def test_a_file_that_is_no_database(self, path: Path) -> None:
        path.write_text("this is a letter, not a database\n" * 200)
        before = path.read_bytes()
        assert self.refused(path) == (
            f"cannot open the history at {path}: file is not a database; "
            "if it was one, 'redline history recover' writes what can be read of it to a new file; "
            "otherwise set REDLINE_STORE to another location"
        )
        assert path.read_bytes() == before

    def test_a_damaged_database(self, path: Path) -> None:
        with History.open(path) as history:
            for _ in range(50):
                history.finish(make_record())
        whole = path.read_bytes()
        path.write_bytes(whole[:100] + b"\x55" * (len(whole) - 100))
        assert f"the history at {path} is damaged (" in self.refused(path)

    def test_a_database_of_something_else(self, path: Path) -> None:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE bookmarks (url TEXT)")
        assert f"{path} belongs to something else (tables bookmarks)" in self.refused(path)
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("bookmarks",)]

    def test_a_folder(self, tmp_path: Path) -> None:
        assert f"no history at {tmp_path}: it is a folder; name a file in it" in self.refused(tmp_path)

    def test_a_folder_that_is_a_file(self, path: Path) -> None:
        path.write_text("")
        assert f"{path} is not a folder; set REDLINE_STORE" in self.refused(path / "history.sqlite")
        assert "is not a folder" in self.refused(path / "deeper" / "history.sqlite")

    @pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
    def test_a_folder_that_is_not_ours(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o500)
        assert "cannot make the folder" in self.refused(tmp_path / "new" / "history.sqlite")
        assert "unable to open database file" in self.refused(tmp_path / "history.sqlite")

    @pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder where even root may not write")
    def test_a_folder_that_cannot_be_made(self) -> None:
        assert "cannot make the folder of the history at /proc/self/x/" in self.refused("/proc/self/x/history.sqlite")

    @pytest.mark.parametrize(
        "url",
        ["mysql://me:s3cret@h/db", "foo://me:s3cret@h", "sqlite+aiosqlite:///x"],
    )
    def test_a_database_we_do_not_speak(self, url: str) -> None:
        message = self.refused(url)
        assert message.startswith(f"no history in '{url.partition(':')[0]}'")
        assert "set REDLINE_STORE to a path, sqlite:///PATH or postgresql://" in message

    @pytest.mark.parametrize(
        "url",
        [
            "sqlite:/x.sqlite",
            "postgres:me:s3cret@h",
            "postgresql://me:s3cret@h:port/db",
            "postgresql://h:port/db?password=s3cret",
        ],
    )
    def test_a_url_with_a_slip(self, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert "as a location for the history: write a path" in self.refused(url)
        assert list(tmp_path.iterdir()) == []  # it was not taken for a path

    @pytest.mark.parametrize("driver", ["asyncpg", "psycopg2", "nope"])
    def test_another_driver_than_ours(self, driver: str) -> None:
        """None is advised that would then be refused."""
        message = self.refused(f"postgresql+{driver}://me:s3cret@h/db")
        assert message.startswith(f"no history by the driver '{driver}'")
        assert message.endswith("write postgresql://USER@HOST/DATABASE")

    def test_a_driver_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "psycopg", None)
        with pytest.raises(MissingExtra) as caught:
            History.open("postgresql://me:s3cret@h/db")
        assert str(caught.value) == (
            "the history at postgresql+psycopg://me:***@h/db needs the package psycopg: pip install 'torch-redline[postgres]'"
        )

    def test_a_server_that_never_answered_is_not_waited_for(self, tmp_path: Path) -> None:
        pytest.importorskip("psycopg")
        assert "cannot open the history at postgresql" in self.refused(f"postgresql://me@/db?host={tmp_path}")


class TestReadOnly:
    def url(self, path: Path) -> str:
        return f"sqlite:///file:{path}?mode=ro&uri=true"

    @pytest.mark.parametrize(
        "form",
        [
            "sqlite:///file:{path}?mode=ro&uri=true",
            "sqlite:///file:{path}?mode=ro",
            "sqlite:///{path}?mode=ro&uri=true",
            "sqlite:///{path}?mode=ro",
        ],
    )
    def test_it_can_be_read_and_says_so_when_written(self, tmp_path: Path, form: str) -> None:
        path = tmp_path / "with a space.sqlite"
        record = make_record()
        with History.open(path) as history:
            history.finish(record)
        with History.open(form.format(path=path)) as history:
            assert history.location == str(path)
            assert history.load(record.id) == record
            with pytest.raises(StoreError, match=r"cannot write to .*: attempt to write a readonly database; make the"):
                history.begin(make_record())
            with pytest.raises(StoreError, match=r"cannot write to .*: attempt to write a readonly database; make the"):
                history.require_writable()
            assert history.count() == 1
        with History.open(path) as history:
            history.require_writable()

    @pytest.mark.parametrize("form", ["sqlite:///{path}?mode=rwc", "sqlite:///file:{path}?mode=rwc&uri=true"])
    def test_a_new_folder_is_made_for_one_with_options_too(self, tmp_path: Path, form: str) -> None:
        path = tmp_path / "new" / "history.sqlite"
        with History.open(form.format(path=path)):
            assert path.exists()

    def test_a_missing_one_is_not_made(self, path: Path) -> None:
        with pytest.raises(StoreError, match="unable to open database file"):
            History.open(self.url(path))
        assert not path.exists()
        with pytest.raises(StoreError, match="unable to open database file"):
            History.open(f"sqlite:///{path}?mode=ro&uri=true")
        assert list(path.parent.iterdir()) == [], "nor one with the options in its name"

    def test_options_that_sqlite_does_not_have_are_refused(self, path: Path) -> None:
        with pytest.raises(StoreError, match="SQLite has no option 'moed'"):
            History.open(f"sqlite:///{path}?moed=ro")
        assert not path.exists()

    @pytest.mark.parametrize("is_written_to", [False, True])
    def test_a_folder_where_nothing_may_be_written_can_be_read(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, is_written_to: bool
    ) -> None:
        record = make_record()
        with History.open(path) as writer:
            writer.finish(record)
            if not is_written_to:
                writer.close()
            before = sorted(path.parent.iterdir())
            # Root may write anywhere, whatever the folder's mode.
            monkeypatch.setattr("redline.store.location.os.access", lambda folder, mode: folder != path.parent)
            with History.open(path, only_to_read=True) as history:
                assert history.location == str(path)
                assert history.load(record.id) == record
                with pytest.raises(StoreError, match="it was opened only to read"):
                    history.begin(make_record())
            assert sorted(path.parent.iterdir()) == before
