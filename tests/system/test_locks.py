"""Locks of a machine: seen by all its users, and by nothing that somebody has planted in their place."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from filelock import FileLock

from redline.model.errors import RedlineError, UsageError
from redline.store import History
from redline.system import locks
from redline.system.locks import file_lock, machine_folder


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In a folder that every user may enter, as /tmp is."""
    around = Path(tempfile.mkdtemp(prefix="redline-test-"))
    around.chmod(0o1777)
    monkeypatch.setattr(locks, "MACHINE_FOLDER", around / "redline-locks")
    yield around / "redline-locks"
    shutil.rmtree(around)


def no_fallback(note: str) -> None:
    raise AssertionError(note)


def own_folder(folder: Path) -> tuple[Path, str]:
    """What is used instead of the shared folder, and what is said of it."""
    notes: list[str] = []
    found = machine_folder(notes.append)
    assert found != folder
    assert found.stat().st_uid == os.getuid()
    (note,) = notes
    assert "\n" not in note
    with file_lock(found / "card.lock") as holder:
        assert holder is None
    return found, note


@pytest.fixture
def users() -> Iterator[list[int]]:
    """Two accounts of this machine."""
    if os.getuid() != 0 or shutil.which("useradd") is None:
        pytest.skip("only root may make two users")
    names = [f"redline-{os.getpid()}-{letter}" for letter in "ab"]
    alone = FileLock(Path(tempfile.gettempdir()) / "redline-tests-users.lock")  # of all test workers
    with alone:
        for name in names:
            subprocess.run(["useradd", "--system", "--no-create-home", name], check=True)
    yield [int(subprocess.check_output(["id", "-u", name])) for name in names]
    with alone:
        for name in names:
            subprocess.run(["userdel", name], check=True, capture_output=True)


class As:
    """A process of another user that runs a function; `said` is what the function has written, line by line."""

    def __init__(self, user: int, deed: Callable[[Callable[[str], None], Callable[[], None]], None]) -> None:
        said, say = os.pipe()
        wait, go = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
                os.umask(0o077)  # a careful user's files are nobody else's
                deed(lambda words: os.write(say, f"{words}\n".encode()) and None, lambda: os.read(wait, 1) and None)
                status = 0
            except BaseException as error:
                os.write(say, f"{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(status)
        os.close(say)
        self.said = os.fdopen(said)
        self._go = go

    def go_on(self) -> None:
        os.write(self._go, b".")

    def end(self) -> int:
        self.said.close()
        return os.waitpid(self.pid, 0)[1]


def test_two_users_hold_one_lock_in_turn(folder: Path, users: list[int]) -> None:
    def hold(say: Callable[[str], None], wait: Callable[[], None]) -> None:
        path = machine_folder(no_fallback) / "card.lock"
        with file_lock(path, on_wait=lambda holder: say(f"waiting for {holder}")):
            say("held")
            wait()

    first = As(users[0], hold)
    assert first.said.readline() == "held\n"
    second = As(users[1], hold)
    assert second.said.readline() == f"waiting for process {first.pid}\n"
    first.go_on()
    assert second.said.readline() == "held\n"
    second.go_on()
    assert [first.end(), second.end()] == [0, 0]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    assert stat.S_IMODE((folder / "card.lock").stat().st_mode) == 0o666
    assert (folder / "card.lock").stat().st_uid == users[0]


def hold_a_sweep(path: Path) -> Callable[[Callable[[str], None], Callable[[], None]], None]:
    def deed(say: Callable[[str], None], wait: Callable[[], None]) -> None:
        try:
            with History.open(path) as history, history.sweep("night").held():
                say("held")
                wait()
        except RedlineError as error:
            say(str(error))

    return deed


def test_two_users_sweep_in_a_shared_history(folder: Path, users: list[int], tmp_path: Path) -> None:
    """With a umask of 077: all that a sweep needs besides is in the history itself."""
    shared = folder.parent / "history.sqlite"
    History.open(shared).close()
    # Imports what is imported late, from folders that only this user may be allowed to read.
    hold_a_sweep(tmp_path / "other.sqlite")(lambda words: None, lambda: None)
    shared.chmod(0o666)
    first = As(users[0], hold_a_sweep(shared))
    said = [first.said.readline()]
    second = As(users[1], hold_a_sweep(shared))
    said.append(second.said.readline())
    first.go_on()
    assert [first.end(), second.end()] == [0, 0], said
    third = As(users[1], hold_a_sweep(shared))
    said.append(third.said.readline())
    third.go_on()
    assert third.end() == 0, said
    held_by = f"sweep 'night' is being run by process {first.pid} on {socket.gethostname()}: wait for it, or give this one another --name\n"
    assert said == ["held\n", held_by, "held\n"]


def test_the_folder_of_another_user_who_closed_it_is_not_used(folder: Path, users: list[int]) -> None:
    folder.mkdir(mode=0o755)
    os.chown(folder, users[0], users[0])

    def look(say: Callable[[str], None], wait: Callable[[], None]) -> None:
        os.environ["XDG_DATA_HOME"] = str(folder.parent / "mine")
        say(own_folder(folder)[1])

    other = As(users[1], look)
    assert other.said.readline().startswith(f"{folder} has the mode 755 instead of 1777; locking in ")
    assert other.end() == 0


def test_a_lock_file_that_may_not_be_opened_is_one_line(folder: Path, users: list[int]) -> None:
    path = machine_folder(no_fallback) / "card.lock"
    path.touch(mode=0o600)

    def hold(say: Callable[[str], None], wait: Callable[[], None]) -> None:
        try:
            with file_lock(path):
                say("held")
        except UsageError as error:
            say(str(error))

    other = As(users[1], hold)
    assert other.said.readline() == f"cannot lock {path}: Permission denied; remove it, or ask its owner to\n"
    assert other.end() == 0


@pytest.mark.parametrize("kind", ["link", "letter"])
def test_what_stands_in_the_folders_place_is_told_and_left_alone(folder: Path, tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    folder.symlink_to(victim) if kind == "link" else folder.write_text("a letter")
    assert f"{folder} is no folder for locks (Not a directory); locking in " in own_folder(folder)[1]
    assert (stat.S_IMODE(victim.stat().st_mode), list(victim.iterdir())) == (0o700, [])
    assert kind == "link" or folder.read_text() == "a letter"


def test_a_folder_of_ours_with_another_mode_is_mended(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    assert machine_folder(no_fallback) == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777


@pytest.mark.parametrize("kind", ["link", "folder", "fifo", "hard link"])
def test_what_somebody_has_planted_is_refused_in_one_line_or_left_as_it_is(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    path = machine_folder(no_fallback) / "card.lock"
    victim = folder.parent / "victim"
    victim.write_text("do not touch")
    victim.chmod(0o600)
    {
        "link": lambda: path.symlink_to(victim),
        "folder": path.mkdir,
        "fifo": lambda: os.mkfifo(path),
        "hard link": lambda: path.hardlink_to(victim),
    }[kind]()
    refused = pytest.raises(UsageError, match=f"^cannot lock {path}: .*; remove it, or ask its owner to$")
    with refused if kind in ("link", "folder") else nullcontext(), file_lock(path, on_wait=lambda holder: None):
        pass
    assert victim.read_text() == "do not touch"
    assert stat.S_IMODE(victim.stat().st_mode) == 0o600


def test_a_holder_is_named_or_waited_for(folder: Path) -> None:
    path = machine_folder(no_fallback) / "card.lock"
    with file_lock(path) as holder:
        assert holder is None
        with file_lock(path) as other:
            assert other == f"process {os.getpid()}"
    with file_lock(path) as holder:
        assert holder is None, "free again"


def test_an_error_inside_is_not_taken_for_one_of_the_lock(folder: Path) -> None:
    path = machine_folder(no_fallback) / "card.lock"
    for _ in range(2):
        with pytest.raises(FileNotFoundError), file_lock(path):
            raise FileNotFoundError("of the caller's")


def test_a_killed_holder_lets_go(folder: Path) -> None:
    path = machine_folder(no_fallback) / "card.lock"
    child = os.fork()
    if child == 0:
        with file_lock(path):
            os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    with file_lock(path) as holder:
        assert holder is None
