"""A PostgreSQL server of the tests' own, in a temporary folder, reached through a socket in it."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path


def binaries() -> Path | None:
    """The folder of the newest PostgreSQL that is installed: Debian keeps it off the PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: float(path.parts[-3]))
    on_path = shutil.which("postgres")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


class Server:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # PostgreSQL refuses to run as root.
        self._user = pwd.getpwnam("postgres") if os.getuid() == 0 else pwd.getpwuid(os.getuid())
        os.chown(folder, self._user.pw_uid, self._user.pw_gid)
        self._numbers = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self._run("initdb", "-D", str(folder / "data"), "-A", "trust", "-U", "redline", "-E", "UTF8", "-N")
        self.start()

    def start(self) -> None:
        """Durable is not what is tested of it: without fsync it is much faster."""
        options = ["-c", "fsync=off", "-c", "listen_addresses=", "-c", f"unix_socket_directories={self.folder}"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._binary("postgres"), "-D", str(self.folder / "data"), *options],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                **self._as_user(),
            )
        deadline = time.monotonic() + 60
        while subprocess.run([self._binary("pg_isready"), "-q", "-h", self.folder], check=False).returncode:
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.05)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self, number: signal.Signals = signal.SIGQUIT) -> None:
        """SIGQUIT is a crash: clients are cut off, and the next start recovers."""
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait()

    def new_database(self) -> str:
        """The URL of an empty one: a schema of its own, which is made much faster."""
        name = f"test{next(self._numbers)}"
        self.execute(f"CREATE SCHEMA {name}")
        return f"postgresql://redline@/postgres?host={self.folder}&options=-csearch_path%3D{name}"

    def execute(self, statement: str) -> str:
        return self._run("psql", "-h", str(self.folder), "-U", "redline", "-tA", "-c", statement, "postgres")

    def _run(self, program: str, *arguments: str) -> str:
        done = subprocess.run(
            [self._binary(program), *arguments], capture_output=True, text=True, cwd=self.folder, **self._as_user()
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def _as_user(self) -> dict[str, object]:
        environment = {**os.environ, "HOME": str(self.folder), "LC_ALL": "C.UTF-8"}
        if os.getuid() != 0:
            return {"env": environment}
        return {"env": environment, "user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}

    def _binary(self, name: str) -> str:
        folder = binaries()
        assert folder is not None
        return str(folder / name)


def new_server() -> Server:
    return Server(Path(tempfile.mkdtemp(prefix="redline-pg-")))
