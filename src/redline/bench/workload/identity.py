"""When are two models, and two inputs, the same thing? Hashes that do not depend on the values of weights."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
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
    codes = (getattr(kind.forward, "__code__", None) for kind in sorted(kinds, key=lambda kind: kind.__qualname__))
    return short_hash("\n".join(_code_text(code) for code in codes if code is not None))


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
