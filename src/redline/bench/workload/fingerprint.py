"""What the user's own code is, told without running it: a hash of a file and of the files beside it that it imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from redline.bench.workload.identity import short_hash


def code_fingerprint(path: Path) -> str:
    """Changes whenever the file changes, or a module of the same project that it imports, however far down."""
    roots = _roots(path)
    seen: dict[Path, bytes] = {}
    waiting = [path.resolve()]
    while waiting:
        file = waiting.pop()
        if file not in seen and (content := _content(file)) is not None:
            seen[file] = content
            waiting += _imported(file, content, roots)
    # By content, not by place: moving a project does not make another model.
    return short_hash(b"\0".join(sorted(seen.values())))


def _roots(path: Path) -> list[Path]:
    """Where the project's own modules lie: the file's folder, the one its package lies in, and where the person stands."""
    folder = path.resolve().parent
    top = folder
    while (top / "__init__.py").exists() and top.parent != top:
        top = top.parent
    return list(dict.fromkeys((folder, top, Path.cwd())))


def _imported(file: Path, content: bytes, roots: list[Path]) -> Iterator[Path]:
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files_of(alias.name, roots)
        elif isinstance(node, ast.ImportFrom):
            bases = [file.parents[node.level - 1]] if 0 < node.level <= len(file.parents) else roots
            prefix = f"{node.module}." if node.module else ""
            for alias in node.names:  # what is imported from a package may be a module of it
                yield from _files_of(f"{prefix}{alias.name}", bases)


def _files_of(dotted: str, bases: list[Path]) -> Iterator[Path]:
    """Every file that importing `a.b.c` runs, where `c` may be a name inside `a.b`."""
    for base in bases:
        place = base
        for part in dotted.split("."):
            place = place / part
            for candidate in (place.with_name(f"{part}.py"), place / "__init__.py"):
                if candidate.is_file():
                    yield candidate.resolve()


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None
