"""This module makes hashes that say whether two models, or two inputs, are the same thing. The values of weights do not matter."""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from torch import nn

from redline.bench.workload.structure import describe

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def short_hash(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()[:16]


def model_hash(model: nn.Module, identity: str) -> str:
    """Returns a hash of the class, the names, shapes and dtypes of what it holds, how it prints, and where it came from.

    Printing a module shows what shapes cannot: strides, activations, dropout.
    """
    held = [*model.named_parameters(), *model.named_buffers()]
    shapes = [f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in held]
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    return short_hash("\n".join((identity, kind, _ADDRESS.sub("", repr(model)), *shapes)))


def input_hash(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return short_hash(describe((args, kwargs)))


def forward_code(model: nn.Module) -> str:
    """Returns a hash of the byte-code of every forward that is not torch's own.

    A live module may have been defined in a notebook. Then there is no file to hash, and its source text is gone in the
    worker, but the code itself came along.
    """
    kinds = {
        type(module) for module in model.modules() if not type(module).__module__.startswith(("torch.", "redline."))
    }
    codes = [code_of(kind.forward) for kind in sorted(kinds, key=lambda kind: kind.__qualname__)]
    return short_hash("\n".join(codes))


def code_of(function: Any) -> str:
    """Returns the byte-code of a function as text. The text is empty if the function has none."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else _code_text(code)


def _code_text(code: CodeType) -> str:
    constants = (
        _code_text(part) if isinstance(part, CodeType) else _ADDRESS.sub("", repr(part)) for part in code.co_consts
    )
    return f"{code.co_code.hex()} {code.co_names} {' '.join(constants)}"


def code_fingerprint(path: Path) -> str:
    """Returns a hash that changes whenever the file does, or a module of the same project that it imports.

    The project's modules lie beside the file, beside its package, and where the person stands.
    """
    folder = path.resolve().parent
    top = next((parent for parent in (folder, *folder.parents) if not (parent / "__init__.py").exists()), folder)
    roots, seen, waiting = (folder, top, Path.cwd()), dict[Path, bytes](), [path.resolve()]
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        try:
            seen[file] = file.read_bytes()
            tree = ast.parse(seen[file])
        except (OSError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                level, module = (node.level, node.module) if isinstance(node, ast.ImportFrom) else (0, None)
                bases = file.parents[level - 1 : level] if level else roots
                # A name that is imported from a package may be a module of that package.
                for alias in node.names:
                    waiting += _files_of(f"{module}.{alias.name}" if module else alias.name, bases)
    # The hash is of the content and not of the path, because moving a project does not make another model.
    return short_hash(b"\0".join(sorted(seen.values())))


def _files_of(dotted: str, bases: Sequence[Path]) -> Iterator[Path]:
    """Yields every file that importing `a.b.c` runs. `c` may be a name inside `a.b`."""
    for path in bases:
        for part in dotted.split("."):
            path = path / part
            for candidate in (path.with_suffix(".py"), path / "__init__.py"):
                if candidate.is_file():
                    yield candidate.resolve()
