"""When are two models, and two inputs, the same thing? Hashes that do not depend on the values of weights."""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from torch import nn

from redline.bench.workload.structure import describe

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def short_hash(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()[:16]


def model_hash(model: nn.Module, identity: str) -> str:
    """From the class, the names, shapes and dtypes of what it holds, how it prints, and where it came from.

    Printing a module shows what shapes cannot: strides, activations, dropout.
    """
    return short_hash("\n".join((identity, class_name(model), _ADDRESS.sub("", repr(model)), *_tensors(model))))


def input_hash(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return short_hash(describe((args, kwargs)))


def class_name(model: nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


def forward_code(model: nn.Module) -> str:
    """A hash of the byte-code of every forward that is not torch's own.

    A live module may have been defined in a notebook: there is no file to hash, and its source text is gone in the
    worker, but the code itself came along.
    """
    kinds = {type(module) for module in model.modules() if not type(module).__module__.startswith("torch.")}
    codes = [code_of(kind.forward) for kind in sorted(kinds, key=lambda kind: kind.__qualname__)]
    return short_hash("\n".join(codes))


def code_of(function: Any) -> str:
    """The byte-code of a function as text; empty where it has none of its own."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else _code_text(code)


def _code_text(code: CodeType) -> str:
    constants = (
        _code_text(part) if isinstance(part, CodeType) else _ADDRESS.sub("", repr(part)) for part in code.co_consts
    )
    return f"{code.co_code.hex()} {code.co_names} {' '.join(constants)}"


def _tensors(model: nn.Module) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        yield f"p {name} {list(parameter.shape)} {parameter.dtype}"
    for name, buffer in model.named_buffers():
        yield f"b {name} {list(buffer.shape)} {buffer.dtype}"


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
    # By content, not by path: moving a project does not make another model.
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
        path = base
        for part in dotted.split("."):
            path = path / part
            for candidate in (path.with_name(f"{part}.py"), path / "__init__.py"):
                if candidate.is_file():
                    yield candidate.resolve()


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None
