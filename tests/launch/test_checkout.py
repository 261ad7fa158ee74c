"""Other commits of a project, checked out beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from redline.bench.environment import refuse_other_checkout
from redline.launch.checkout import Setup, checked_out, resolve_commit
from redline.model.errors import BenchError, UsageError

GIT = ["git", "-c", "user.email=a@example.org", "-c", "user.name=a"]


def git(folder: Path, *words: str) -> str:
    return subprocess.run([*GIT, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a hook, a tag and a space in its path."""
    folder = tmp_path / "my project"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "model.py").write_text("SIZE = 1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "one")
    git(folder, "tag", "-a", "v1", "-m", "the first")
    hook = folder / ".git" / "hooks" / "post-checkout"
    hook.write_text("#!/bin/sh\ntouch hooked\n")
    hook.chmod(0o755)
    monkeypatch.chdir(folder)
    return folder


def test_a_commit_comes_without_hooks_and_is_set_up(project: Path) -> None:
    before = (project / ".git" / "config").read_text()
    with checked_out("v1", Setup(setup="cp model.py made.py")) as found:
        assert (Path(found.folder) / "made.py").read_text() == "SIZE = 1\n"
        assert not (Path(found.folder) / "hooked").exists()
    assert not Path(found.folder).exists()
    assert (project / ".git" / "config").read_text() == before
    assert len(git(project, "worktree", "list").splitlines()) == 1


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (Setup(setup="echo no such package >&2; exit 3"), "failed with status 3: no such package"),
        (Setup(python=".venv/bin/python"), "no interpreter at .venv/bin/python"),
    ],
)
def test_an_environment_that_cannot_be_made_is_one_line(project: Path, environment: Setup, says: str) -> None:
    with pytest.raises(UsageError, match=says), checked_out("v1", environment):
        pass
    assert len(git(project, "worktree", "list").splitlines()) == 1


def test_a_checkout_that_a_killed_process_left_behind_is_removed(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getpid", lambda: 2**22 + 1)  # more than the kernel gives out
    left = checked_out("main")
    folder = Path(left.__enter__().folder)
    monkeypatch.undo()
    monkeypatch.chdir(project)
    assert folder.is_dir()
    with checked_out("main"):
        assert not folder.exists()
    assert len(git(project, "worktree", "list").splitlines()) == 1


def test_a_module_of_the_persons_own_checkout_is_not_measured_as_another_commit(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editable install leads there, and so does an absolute path."""
    with checked_out("main") as found:
        for place in (Path(found.folder), project / ".venv" / "lib" / "site-packages"):
            module = ModuleType("model")
            module.__file__ = str(place / "model.py")
            monkeypatch.setitem(sys.modules, "model", module)
            refuse_other_checkout(found.folder)
        module.__file__ = str(project / "model.py")
        with pytest.raises(BenchError, match=r"model was imported from .*/my project/model.py, another checkout"):
            refuse_other_checkout(found.folder)


@pytest.mark.parametrize("ref", ["", "--all", "main\n", "v1^{tree}", "HEAD:model.py", "HEAD~1"])
def test_what_is_no_commit_is_one_line(project: Path, ref: str) -> None:
    with pytest.raises(UsageError, match=r"^[^\n]+ (is not a git ref|is neither a file nor a git ref of [^\n]+)$"):
        resolve_commit(ref)
