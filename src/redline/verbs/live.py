"""Live models as files that a worker can open, named by what they are.

A pickle of the same model differs from process to process. The name is a hash of its structure, its code and its state,
so that a sweep or a search of it goes on in the next process and finds the file of the last one. No record needs the
file once it was measured: it is removed when nobody holds it any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import IO, Any

import cloudpickle
import platformdirs

from redline.model.errors import UsageError

SUFFIX = ".pkl"
_LIBRARIES = ("torch", "torchvision", "builtins", "collections", "functools", "abc")
"""Known by their version, which a record has. Code of other modules may change under its name."""


@contextlib.contextmanager
def held_artifact(live: Any) -> Iterator[str | None]:
    """Yields the path of `live` as a file, which stays as long as this is held, or None where it cannot be pickled."""
    name = digest(live)
    folder = Path(platformdirs.user_data_path("redline")) / "artifacts"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _prune(folder)
        path = folder / f"{name}{SUFFIX}"
        file = _held(path) or _written(live, path)
    except OSError as error:
        raise UsageError(f"cannot write the model to {folder}: {error.strerror or error}") from None
    if file is None:
        yield None
        return
    try:
        yield str(path)
    finally:
        file.close()
        _prune(folder)


def _held(path: Path) -> IO[bytes] | None:
    """Returns the file, locked against being pruned, or None where it is not there, or is going."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_nlink:
            return file
    except BlockingIOError:
        pass
    file.close()
    return None


def _written(live: Any, path: Path) -> IO[bytes] | None:
    """Writes the file whole or not at all. The file is locked before it gets its name."""
    try:
        body = cloudpickle.dumps(live)
    except Exception:
        # Whatever an object's own pickling code raises means the same: it cannot leave this process.
        return None
    unfinished = path.with_name(f"{path.stem}.{os.getpid()}.part")
    file = unfinished.open("w+b")
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
        file.write(body)
        file.flush()
        unfinished.replace(path)
    except BaseException:
        file.close()
        unfinished.unlink(missing_ok=True)
        raise
    return file


def _prune(folder: Path) -> None:
    """Remove what no process holds: what killed ones have left, and what was measured."""
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError, BlockingIOError, PermissionError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def digest(value: Any) -> str:
    """Returns a text that is the same for the same structure, code and state in any process. What is unknown makes it differ, never agree."""
    hashed = hashlib.sha256()
    try:
        _feed(value, hashed.update, {})
    except Exception:  # an object may raise when it is looked at, or hold itself without end
        hashed.update(secrets.token_bytes(16))
    return hashed.hexdigest()[:24]


Update = Callable[[Any], None]


def _feed(value: Any, update: Update, seen: dict[int, tuple[int, Any]]) -> None:
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        update(f"{type(value).__name__} {value!r};".encode("utf-8", "backslashreplace"))
        return
    if id(value) in seen:
        update(f"again {seen[id(value)][0]};".encode())
        return
    if not isinstance(value, tuple | frozenset | CodeType):  # of those, Python shares equal ones as it likes
        seen[id(value)] = (len(seen), value)  # kept, so that nothing else gets its id meanwhile
    update(f"{type(value).__module__}.{type(value).__qualname__}(".encode())
    _feed_parts(value, update, seen)
    update(b");")


def _feed_parts(value: Any, update: Update, seen: dict[int, tuple[int, Any]]) -> None:
    feed = functools.partial(_feed, update=update, seen=seen)
    if isinstance(value, list | tuple):
        for part in value:
            feed(part)
    elif isinstance(value, dict):
        for name, part in value.items():
            feed(name)
            feed(part)
    elif isinstance(value, set | frozenset):
        for each in sorted(map(digest, value)):  # their order differs from process to process
            update(each.encode())
    elif isinstance(value, type):
        _feed_class(value, feed)
    elif isinstance(value, FunctionType):
        _feed_function(value, feed)
    elif isinstance(value, CodeType):
        for part in (value.co_code, value.co_names, value.co_varnames, value.co_consts):
            feed(part)
    elif isinstance(value, MethodType):
        feed(value.__func__)
        feed(value.__self__)
    elif isinstance(value, functools.partial):
        for part in (value.func, value.args, value.keywords):
            feed(part)
    elif isinstance(value, BuiltinFunctionType | ModuleType):
        feed(value.__name__)
    elif hasattr(value, "data_ptr") and hasattr(value, "element_size"):
        _feed_tensor(value, feed, update)
    else:
        _feed_object(value, feed, update)


_TELLING = (FunctionType, int, float, complex, str, bytes, tuple, list, dict, set, frozenset)
"""If a class holds something of these types, it may change what its objects do."""


def _feed_class(kind: type, feed: Callable[[Any], None]) -> None:
    feed(f"{kind.__module__}.{kind.__qualname__}")
    if kind.__module__.partition(".")[0] in _LIBRARIES:
        return
    for base in kind.__bases__:
        feed(base)
    for name, part in sorted(vars(kind).items()):
        part = getattr(part, "__func__", part)  # of a static or class method
        if isinstance(part, _TELLING) and name != "__firstlineno__":
            feed(name)
            feed(part)
        elif isinstance(part, property):
            feed((name, part.fget, part.fset))


def _feed_function(function: FunctionType, feed: Callable[[Any], None]) -> None:
    feed(f"{function.__module__}.{function.__qualname__}")
    if (function.__module__ or "").partition(".")[0] in _LIBRARIES:
        return
    feed(function.__code__)
    feed(function.__defaults__)
    feed(function.__kwdefaults__)
    for cell in function.__closure__ or ():
        try:
            feed(cell.cell_contents)
        except ValueError:
            feed("an empty cell")
    for name in function.__code__.co_names:
        part = function.__globals__.get(name)
        if isinstance(part, FunctionType | type | int | float | complex | str | bytes | tuple | frozenset):
            feed(name)
            feed(part)


def _feed_tensor(tensor: Any, feed: Callable[[Any], None], update: Update) -> None:
    # A ragged axis has a number instead of a length, and it only counts how many there were before.
    shape = tuple(length if type(length) is int else None for length in tensor.shape)
    feed((str(tensor.dtype), shape, str(tensor.device.type), bool(tensor.requires_grad)))
    if hasattr(tensor, "__tensor_flatten__"):  # made of other tensors: ragged, quantized, spread over devices
        for name in tensor.__tensor_flatten__()[0]:
            feed(name)
            feed(getattr(tensor, name))
        return
    try:
        plain = tensor.detach().cpu().contiguous()
        count = plain.numel() * plain.element_size()
        if count and not plain.data_ptr():
            raise ValueError("its memory is not to be seen, and must not be read")
        update(memoryview((ctypes.c_char * count).from_address(plain.data_ptr())) if count else b"")
    except Exception:  # one without plain memory of its own: sparse, quantized, on no device
        update(cloudpickle.dumps(tensor))


def _feed_object(value: Any, feed: Callable[[Any], None], update: Update) -> None:
    """Its class, and all it holds. Hooks of a module have numbers that only count how many there were before."""
    feed(type(value))
    held = {**getattr(value, "__dict__", {}), **_slots(value)}
    if not held:
        update(_pickled(value))
    for name, part in sorted(held.items()):
        feed(name)
        feed(list(part.values()) if "_hooks" in name and isinstance(part, dict) else part)


def _slots(value: Any) -> dict[str, Any]:
    names = [name for kind in type(value).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _pickled(value: Any) -> bytes:
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception:
        return repr(value).encode("utf-8", "backslashreplace")
