"""This makes a `Failure` of an exception on the bench: its kind, what it says in one line, and its traceback.

Errors of torch and of the libraries below it often differ only in their wording. This is the one place that looks at it.
"""

from __future__ import annotations

import re
import site
import sysconfig
import traceback
import warnings
from pathlib import Path
from typing import Literal

import torch

import redline
from redline.bench.device.process import is_near_private_limit
from redline.model.errors import BenchError, UsageError
from redline.model.note import Note, note
from redline.model.record import Failure, FailureKind
from redline.model.units import format_bytes, parse_bytes

_OOM_WORDINGS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory: you tried to allocate",
    "std::bad_alloc",
    "_alloc_failed",  # a status of cuBLAS, cuDNN, cuSOLVER, cuSPARSE, cuFFT and hipBLAS ends like this
    "_allocation_failed",  # cuDNN 9 says CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
    "cudaerrormemoryallocation",
    "hiperroroutofmemory",
    "miopenstatusallocfailed",
    "rocblas_status_memory_error",
    # A library that finds no room for its own handle says only that it could not be initialised.
    "cublas_status_not_initialized when calling `cublascreate",
    "cudnn_status_not_initialized",
    "unable to find a valid cudnn algorithm",
)
# oneDNN says no more than this whatever the reason is, so it counts as memory only near the limit.
_ONEDNN_WORDINGS = ("could not create a primitive", "could not execute a primitive", "could not create a memory object")
_NOT_USERS = {
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *map(Path, (*site.getsitepackages(), site.getusersitepackages())),
    Path(redline.__file__).parent,
}
"""Code in these folders is not the user's: it belongs to the standard library, to installed packages, or to Redline."""
_TORCHSCRIPT_WRAPPER = "The following operation failed in the TorchScript interpreter"
"""TorchScript begins an error with this sentence, and what really went wrong stands in the last line."""
_NO_ATTENTION_WORDINGS = ("No viable backend", "No available kernel")
_SYNCHRONIZING_WORDING = "called a synchronizing"
"""Torch's debug mode warns with this wording if a step waits for the device."""
DriverProblem = Literal["driver-too-old", "library-mismatch", "no-fabric-manager", "other"]
_DRIVER_WORDINGS: dict[str, DriverProblem] = {
    "too old": "driver-too-old",
    "Error 803": "library-mismatch",
    "Error 802": "no-fabric-manager",
}
"""The driver's problem is told by these wordings in what torch says."""
_BROKEN_COLLECTIVE_WORDINGS = (
    "connection closed by peer",
    "connection reset by peer",
    "timed out waiting",
    "watchdog caught collective",
    "nccl communicator was aborted",
)
"""NCCL and gloo say this if another rank is gone, in lower case."""
_UNSUPPORTED_WORDINGS = ("not implemented for", "not supported", "could not run '", "no kernel image is available")
"""Such an error says that torch or the device cannot do something, and that nothing is wrong with the model."""


def failure_from(error: BaseException, stage: str) -> Failure:
    """Returns the failure that an exception in this stage is, with everything that can be read from it."""
    return Failure(
        stage=stage,
        kind=kind_of(error, stage),
        message=one_line(error),
        notes=(*fragmentation(text_of(error)), *_broken_collective(error)),
        traceback=_unicode("".join(traceback.format_exception(error))[-20_000:]),
        switches=error.switches if isinstance(error, BenchError) else (),
        scope=error.scope if isinstance(error, BenchError) else "recipe",  # type: ignore[arg-type]
        where=user_line(error),
    )


def user_line(error: BaseException | None) -> str:
    """Returns the innermost line of the user's own code that led to the error or to its cause, or "" if none did."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))  # causes may go in a circle
        if line := line_of_user(traceback.extract_tb(error.__traceback__)):
            return line
        error = error.__cause__ or error.__context__
    return ""


def line_of_user(stack: traceback.StackSummary) -> str:
    """Returns the innermost line of the user's own code in a stack, or "" if there is none."""
    for frame in reversed(stack):
        if _is_users(frame.filename):
            return _unicode(f"{_shown(Path(frame.filename))}:{frame.lineno} in {frame.name}")
    return ""


def _shown(path: Path) -> Path:
    """Returns the path relative to the working folder if it lies inside, otherwise as it is."""
    try:
        return path.relative_to(Path.cwd())
    except (OSError, ValueError):  # it lies elsewhere, or somebody has removed the folder
        return path


def _is_users(filename: str) -> bool:
    """Returns whether a file is the user's: it is not Redline's, not Python's and not installed. Code typed into a notebook has no file."""
    path = Path(filename)
    return path.is_absolute() and path.suffix == ".py" and not any(path.is_relative_to(folder) for folder in _NOT_USERS)


def kind_of(error: BaseException, stage: str) -> FailureKind:
    """Returns the kind of failure that an error in this stage is. Whatever cannot be told apart is the user's."""
    text = f"{type(error).__name__} {text_of(error)}".lower()
    if isinstance(error, BenchError):
        return error.kind  # type: ignore[return-value]
    if is_out_of_memory(error):
        return "oom"
    if isinstance(error, UsageError):
        return "user"
    if any(module in type(error).__module__ for module in ("torch._dynamo", "torch._inductor", "triton")):
        return "compile"
    if any(wording in text for wording in _UNSUPPORTED_WORDINGS):
        return "unsupported"
    return "compile" if stage == "compile" else "user"


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether memory ran out: by the class of torch's own error, by the wordings of libraries, or by the cause that a compiler
    wrapped."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = text_of(error).lower()
    if any(wording in said for wording in _OOM_WORDINGS):
        return True
    if any(said.startswith(wording) for wording in _ONEDNN_WORDINGS) and is_near_private_limit():
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def _broken_collective(error: BaseException) -> list[Note]:
    """Returns one note if a rank failed because another went away or never came. The cause is then found at the other rank."""
    said = text_of(error).lower()
    is_one = isinstance(error, torch.distributed.DistError) or "gloo" in said or "nccl" in said
    broken = is_one and any(wording in said for wording in _BROKEN_COLLECTIVE_WORDINGS)
    return [note("broken-collective", "another rank went away or never came")] if broken else []


def is_without_attention_backend(error: BaseException) -> bool:
    """Returns whether an error says that none of the attention backends that were allowed can do the call."""
    return any(wording in text_of(error) for wording in _NO_ATTENTION_WORDINGS)


def refused_attention(said: list[warnings.WarningMessage]) -> str:
    """Returns why attention was refused. Torch warns once for every backend, and those that are switched off do not count."""
    lines = [str(warning.message).partition(" (Triggered")[0].strip() for warning in said]
    reasons = [line for line in lines if line and not line.endswith("because:") and "disabled" not in line]
    return "; ".join(dict.fromkeys(reasons))


def loader_trouble(error: BaseException) -> tuple[FailureKind, str] | None:
    """Returns the kind of failure and what broke in a loader's workers, or None if the error is not about that.

    Torch raises plain RuntimeErrors for a worker that is dead or late, and puts the traceback of one that raised into the message.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, ConnectionError | EOFError):  # a batch is read from the worker that made it
        return "crash", f"a worker of the loader died: {one_line(error)}"
    if not lines:
        return None
    if lines[0].startswith("DataLoader timed out"):
        return "timeout", f"a worker of the loader hangs: {lines[0]}"
    if lines[0].startswith("DataLoader worker"):
        return "crash", f"a worker of the loader died: {lines[0]}"
    if not lines[0].startswith("Caught "):
        return None
    # The text is "Caught ValueError in DataLoader worker process 0.", a traceback, and what it said, which may have several lines.
    name = lines[0].split()[1]
    said = next((line for line in reversed(lines) if line.startswith(name)), lines[-1])
    return "user", f"the loader raised {said}"


def is_about_synchronizing(warning: warnings.WarningMessage) -> bool:
    """Returns whether a warning is about a step that waits for the device. Switching torch's debug mode on warns too, in other words."""
    return _SYNCHRONIZING_WORDING in str(warning.message)


def driver_problem(said: str) -> DriverProblem:
    """Returns why torch finds no GPU, judged by what torch said."""
    return next((problem for wording, problem in _DRIVER_WORDINGS.items() if wording in said), "other")


_SIZE = r"([\d.]+ (?:[KMGT]iB|bytes))"
_ASKED = re.compile(rf"Tried to allocate {_SIZE}")
_IDLE = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_CURE = re.compile(r"PYTORCH_\w*ALLOC_CONF=expandable_segments:True")


def fragmentation(said: str) -> list[Note]:
    """Returns one note if torch's error shows fragmented memory: more was idle than was asked for, but it was in pieces.

    Then it is a matter of luck whether a batch fits, and a larger one may run where this one failed.
    """
    asked, idle, cure = (pattern.search(said) for pattern in (_ASKED, _IDLE, _CURE))
    if asked is None or idle is None:
        return []
    asked_bytes, idle_bytes = (parse_bytes(found.group(1).replace("bytes", "B")) for found in (asked, idle))
    if idle_bytes < asked_bytes:
        return []
    text = f"{format_bytes(asked_bytes)} were requested while {format_bytes(idle_bytes)} were idle in pieces"
    return [note("fragmented", f"{text}; {cure.group()} joins them" if cure else text)]


def text_of(error: BaseException) -> str:
    """Returns the text of an exception, even if it cannot be printed or its text is not Unicode."""
    try:
        said = str(error)
    except BaseException as broken:
        said = f"(its message cannot be printed: {type(broken).__name__})"
    return _unicode(said)


def _unicode(text: str) -> str:
    """Returns the text without halves of surrogate pairs. A file name that is not UTF-8 leaves them, and no message can carry them."""
    return text.encode("utf-8", "backslashreplace").decode()


def one_line(error: BaseException) -> str:
    """Returns an error in one line: its class and the first line of what it says. Errors of Redline need no class."""
    lines = [line.strip() for line in text_of(error).splitlines() if line.strip()]
    said = _opening(lines)
    if isinstance(error, BenchError | UsageError):
        return said
    if isinstance(error, SystemExit):
        return f"SystemExit: the code called sys.exit({error.code!r})"
    name = type(error).__name__
    if said.startswith(_TORCHSCRIPT_WRAPPER):
        said = lines[-1].removeprefix(f"{name}: ")
    return f"{name}: {said}"[:500] if said else name


def first_line(error: BaseException) -> str:
    """Returns the first line of what an error says, with the next if it ends in a colon. It is cut, because some list every model
    there is."""
    return _opening([line.strip() for line in str(error).splitlines() if line.strip()])[:160] or type(error).__name__


def _opening(lines: list[str]) -> str:
    """Returns the first line, with the next one if the first only announces it, as in "backend='inductor' raised:"."""
    return " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
