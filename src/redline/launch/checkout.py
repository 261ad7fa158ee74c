"""Another commit of the project, in a folder and an environment of its own, so that it can be measured beside this one."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil

from redline.launch.connection import last_line
from redline.launch.supervisor import checkout_of, current_folder
from redline.model.errors import UsageError
from redline.model.fields import Frozen
from redline.model.spec import LaunchSpec

NOTHING = "it said nothing"
PREFIX = "redline-checkout-"
"""The folder of a checkout is called this, followed by the process that made it."""


class Setup(Frozen):
    """This says how the environment of another commit is made; with nothing given, it runs in this one."""

    setup: str = ""
    """This shell command is run in the root of the checkout. It may install packages, or fetch submodules, which git leaves empty there."""
    python: str = ""
    """This is the interpreter to use, relative to the root of the checkout."""


class Checkout(Frozen):
    """A commit that is there to be measured."""

    commit: str
    folder: str
    """A worker stands here: it is the counterpart of the folder that the command stands in."""
    python: str = ""

    def launch(self, launch: LaunchSpec) -> LaunchSpec:
        """Returns the same launch, of this commit. Another environment needs a fresh interpreter."""
        door = "spawn" if self.python and launch.door == "fork" else launch.door
        return msgspec.structs.replace(launch, folder=self.folder, python=self.python, door=door)


def resolve_commit(ref: str, folder: str | None = None) -> str:
    """Returns the commit that a ref names in the project of a folder."""
    where = folder or current_folder() or "/"
    if ref.startswith("-") or not ref.isprintable():
        raise UsageError(f"{ref!r} is not a git ref")
    if not (Path(checkout_of(where)) / ".git").exists():
        raise UsageError(f"no git checkout at {where}: a baseline {ref!r} must be a file of records, or a ref of one")
    # A clone of CI has no branches of its own, only those of its origin.
    for name in (ref, f"refs/remotes/origin/{ref}"):
        parsed = _git(where, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
        if parsed.returncode == 0:
            return parsed.stdout.strip()
    is_shallow = _git(where, "rev-parse", "--is-shallow-repository").stdout.strip() == "true"
    advice = f"; this clone is shallow: 'git fetch --depth=1 origin {ref}' brings a branch" if is_shallow else ""
    raise UsageError(f"{ref!r} is neither a file nor a git ref of {checkout_of(where)}{advice}")


def commits_between(good: str, bad: str) -> list[str]:
    """Returns the commits after `good` up to `bad`, oldest first, along the first parents."""
    where = current_folder() or "/"
    first, last = resolve_commit(good), resolve_commit(bad)
    if _git(where, "merge-base", "--is-ancestor", first, last).returncode != 0:
        raise UsageError(f"{good!r} is not an ancestor of {bad!r}: name an older commit first")
    listed = _git(where, "rev-list", "--first-parent", "--reverse", f"{first}..{last}")
    return listed.stdout.split()


def subject_of(commit: str) -> str:
    """Returns the first line of a commit's message."""
    return _git(current_folder() or "/", "log", "-1", "--format=%s", commit).stdout.strip()


@contextmanager
def checked_out(ref: str, environment: Setup | None = None) -> Iterator[Checkout]:
    """Yields a worktree of its own for a ref, and removes it afterwards. Nothing of this checkout is touched."""
    here = current_folder() or "/"
    commit, root, environment = resolve_commit(ref), checkout_of(here), environment or Setup()
    _remove_left_behind(root)
    temporary = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")).resolve()
    tree = temporary / Path(root).name
    try:
        # Without the project's hooks: they may install or change things, and are meant for people's own checkouts.
        added = _git(root, "-c", f"core.hooksPath={os.devnull}", "worktree", "add", "--detach", str(tree), commit)
        if added.returncode != 0:
            raise UsageError(f"git cannot check out {ref!r}: {last_line(added.stderr, NOTHING)}")
        python = _prepared(tree, environment)
        folder = tree / os.path.relpath(os.path.realpath(here), os.path.realpath(root))
        # A folder that this commit does not have yet: its root is the best there is.
        yield Checkout(commit=commit, folder=str(folder if folder.is_dir() else tree), python=python)
    finally:
        _git(root, "worktree", "remove", "--force", str(tree))
        shutil.rmtree(temporary, ignore_errors=True)
        _git(root, "worktree", "prune")


def _remove_left_behind(root: str) -> None:
    """Removes the checkouts of processes that were killed."""
    for line in _git(root, "worktree", "list", "--porcelain").stdout.splitlines():
        temporary = Path(line.removeprefix("worktree ")).parent
        pid = temporary.name.removeprefix(PREFIX).partition("-")[0]
        is_ours = temporary.name.startswith(PREFIX) and pid.isdecimal() and temporary.is_dir()
        if is_ours and not psutil.pid_exists(int(pid)):
            shutil.rmtree(temporary, ignore_errors=True)


def _prepared(tree: Path, environment: Setup) -> str:
    if environment.setup:
        made = subprocess.run(environment.setup, shell=True, cwd=tree, capture_output=True, text=True)
        if made.returncode != 0:
            reason = last_line(made.stderr or made.stdout, NOTHING)
            raise UsageError(f"the environment's setup failed with status {made.returncode}: {reason}")
    if not environment.python:
        return ""
    python = tree / environment.python
    if not os.access(python, os.X_OK):
        raise UsageError(f"environment: no interpreter at {environment.python} in the checkout of the baseline")
    return str(python)


def _git(folder: str, *words: str) -> subprocess.CompletedProcess[str]:
    # A hook of git hands these down, and they would lead every command to the hook's own repository.
    of_hook = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
    variables = {name: value for name, value in os.environ.items() if name not in of_hook}
    command = ["git", "-C", folder, *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, env=variables)
    except FileNotFoundError:
        raise UsageError("git is not installed: a baseline must then be a file of records") from None
