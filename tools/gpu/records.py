"""The records behind a check's figures, as one file in its folder.

    python tools/gpu/records.py --out FOLDER FILE…    histories and archives of several calls as one file

Records are kept outside the folder while checks run. `records.redline.gz` is written at the end, on SIGTERM, and whenever
`write` is called; a second call into the same folder adds to it. `redline report FILE` reads it. The names of the machine and
the folders of whoever ran it are taken out, so that the file can be published. A record takes 5 to 30 KB.
"""

from __future__ import annotations

import argparse
import gzip
import os
import re
import shutil
import signal
import sqlite3
import tempfile
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import msgspec

from redline.store import History
from redline.verbs.workspace import Workspace

NAME = "records.redline.gz"
ROOT = Path(__file__).resolve().parents[2]
MACHINES = ("hostname", "host")
PACKAGES = re.compile(r"(?:/[^\s/'\":,()]+)+/(?=(?:site|dist)-packages/|lib/python\d)")
"""Where Python and its packages are installed."""


class RawRecords:
    """Collects records for `out / NAME`, with those of the histories and archives in `others`."""

    def __init__(self, out: Path, *others: Path) -> None:
        self._out, self._others = out, others
        self._scratch = Path(tempfile.mkdtemp(prefix="redline-raw-"))
        self._earlier = self._scratch / NAME
        if (out / NAME).exists():
            shutil.copy(out / NAME, self._earlier)
        self._journal: History | None = None
        self._writing = threading.RLock()  # a signal may come while the same thread writes

    @property
    def journal(self) -> History:
        """Receives records; a workspace with it behaves as one that keeps nothing."""
        if self._journal is None:
            self._journal = History.open(self.history("journal"))
        return self._journal

    def history(self, name: str) -> Path:
        """The file of a history of its own: an empty one for each search, which would otherwise know the earlier ones."""
        return self._scratch / f"{name}.sqlite"

    def write(self) -> None:
        """All that was measured until now. Never raises, as it is called when a script has to end at once."""
        try:
            with self._writing:
                self._write()
        except Exception as error:
            print(f"the records were not written: {error!r}", flush=True)

    def _write(self) -> None:
        out = self._out
        found = [file for file in (*sorted(self._scratch.glob("*.sqlite")), *self._others) if file.exists()]
        with tempfile.TemporaryDirectory() as folder:
            gathered = Path(folder) / "history.sqlite"
            with Workspace(history=gathered) as workspace:
                # The earlier file last: what it has of a record that is in a history too may be less.
                for file in (*found, *([self._earlier] if self._earlier.exists() else [])):
                    workspace.history.add_file(file)
                number = workspace.history.count()
            if not number:
                return
            publish(gathered)
            out.mkdir(parents=True, exist_ok=True)
            unfinished = out / f"{NAME}.unfinished"
            with (
                unfinished.open("wb") as file,
                gzip.GzipFile(NAME, "wb", fileobj=file, mtime=0) as packed,
                Workspace(history=gathered) as workspace,
            ):
                workspace.history.export_archive(packed)
            unfinished.replace(out / NAME)
        print(f"{number} records in {out / NAME}, {(out / NAME).stat().st_size / 1000:.0f} KB", flush=True)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._process, self._before = os.getpid(), signal.signal(signal.SIGTERM, self._terminated)
        return self

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:  # not in a loader's worker, which inherits this
            self.write()
        raise SystemExit(128 + number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.write()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)
        if self._journal is not None:
            self._journal.close()
        shutil.rmtree(self._scratch, ignore_errors=True)


def publish(history: Path) -> None:
    """Take the machine's name and its folders out of every row."""
    with sqlite3.connect(history) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            rows = connection.execute(f'SELECT rowid, * FROM "{table}"')
            names = [column[0] for column in rows.description][1:]
            changed = ", ".join(f'"{name}" = ?' for name in names)
            for row, *values in rows.fetchall():
                connection.execute(f'UPDATE "{table}" SET {changed} WHERE rowid = ?', [*map(_public, values), row])
    connection.close()


def _public(value: Any, key: str = "") -> Any:
    if isinstance(value, bytes):
        return msgspec.msgpack.encode(_public(msgspec.msgpack.decode(value)))
    if isinstance(value, dict):
        return {name: _public(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_public(each) for each in value]
    if not isinstance(value, str):
        return value
    if key in MACHINES:
        return ""
    return PACKAGES.sub("", value.replace(f"{ROOT}/", "")).replace(f"{Path.home()}/", "~/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if missing := [str(each) for each in given.files if not each.exists()]:
        parser.error(f"no such file: {', '.join(missing)}")
    with RawRecords(given.out, *given.files):
        pass


if __name__ == "__main__":
    main()
