"""What a kernel or operator does, told by the words in its name; the words stand in `data/kernels.toml`.

The function's own name decides; its template arguments only where it is a wrapper, for they also name types: a kernel on
`cutlass::bfloat16_t` need not multiply anything.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import Literal, get_args

import msgspec

from redline.trace.names import LONGEST_NAME, WORDS, parts_of, words_of

KernelClass = Literal[
    "convolution",
    "matmul",
    "attention",
    "norm",
    "embedding",
    "fft",
    "elementwise",
    "reduction",
    "copy",
    "communication",
    "other",
]
CLASSES: tuple[KernelClass, ...] = get_args(KernelClass)
UNCLASSIFIED: KernelClass = "other"

MEMORY_CLASSES: frozenset[KernelClass] = frozenset(("elementwise", "norm", "reduction", "copy", "embedding"))
"""Do little with each byte they touch: memory is what limits them, whatever the device."""

PRODUCT_CLASSES: frozenset[KernelClass] = frozenset(("convolution", "matmul", "attention"))
"""These run on the matrix units."""

_BY_RANK: tuple[KernelClass, ...] = (*WORDS["classes"], UNCLASSIFIED)
_RANK = {kind: number for number, kind in enumerate(_BY_RANK)}
_CLASS_OF_WORD: dict[str, int] = {"cudnn": _RANK[UNCLASSIFIED]}  # alone it tells nothing
for _kind, _listed in reversed(WORDS["classes"].items()):
    _CLASS_OF_WORD |= dict.fromkeys(_listed.split(), _RANK[_kind])
_KNOWN_WORDS = frozenset(_CLASS_OF_WORD)
_WRAPPERS: frozenset[KernelClass] = frozenset(("elementwise", "reduction", UNCLASSIFIED))
"""Of kernels called so, what they run may stand in the template arguments."""


class Described(msgspec.Struct, frozen=True, gc=False):
    """What a name tells, worked out once: a trace may hold hundreds of thousands of them. The data file explains the marks."""

    kernel_class: KernelClass
    converts_layout: bool = False
    is_strict_fp32: bool = False
    is_fixed_norm: bool = False
    is_training_norm: bool = False
    is_unfused: bool = False
    is_softmax: bool = False


_ANY_DIGIT = bytes.maketrans(b"123456789", b"000000000")
_NUMBERS_TELL: frozenset[KernelClass] = frozenset(("copy", "matmul", "convolution", "fft"))
"""In these, as in `tf32`, `fft2d` and `nchw2nhwc`; in the others numbers only tell one generated kernel from the next."""


@lru_cache(maxsize=1 << 18)
def describe(name: str) -> Described:
    text = name[:LONGEST_NAME]
    if text.startswith("_Z"):  # mangled: numbers are the lengths of words
        return _described(text, _class_of(text))
    told = _numbers_aside(text.encode("utf-8", "surrogatepass").translate(_ANY_DIGIT))
    return _described(text, told.kernel_class) if told.kernel_class in _NUMBERS_TELL else told


@lru_cache(maxsize=1 << 12)
def _numbers_aside(masked: bytes) -> Described:
    """Return what all names tell that differ only in numbers. Bytes are masked in a tenth of the time of a text."""
    text = masked.decode("utf-8", "surrogatepass")
    kind = _class_of(text)
    return _told(kernel_class=kind) if kind in _NUMBERS_TELL else _described(text, kind)


_LOOKED_AT = 400
_MARKS = [
    (mark, rule.get("classes", CLASSES), re.compile(rule["rule"]), re.compile(rule.get("unless", "(?!)")))
    for mark, rule in WORDS["marks"].items()
]


def _described(text: str, kind: KernelClass) -> Described:
    head = text[:_LOOKED_AT].lower()
    marks = (
        (mark, kind in classes and rule.search(head) is not None and unless.search(head) is None)
        for mark, classes, rule, unless in _MARKS
    )
    return _told(kernel_class=kind, **dict(marks))


_told = cache(Described)
"""One object for all names that tell the same."""

_LIBRARIES = [(name, re.compile(rule, re.IGNORECASE)) for name, rule in WORDS["libraries"].items()]


@lru_cache(maxsize=100_000)
def library_of(name: str) -> str:
    """Return whose code a kernel is, or the operator on a CPU; `native` is torch's own."""
    return next((library for library, rule in _LIBRARIES if rule.search(name[:LONGEST_NAME])), "native")


def class_of(name: str) -> KernelClass:
    return describe(name).kernel_class


def _class_of(name: str) -> KernelClass:
    if name.startswith("triton_"):
        kind: KernelClass = WORDS["triton"].get(name.split("_", 2)[1], UNCLASSIFIED)
        words = words_of(name)
        if kind == "matmul":
            return "convolution" if "convolution" in words else "attention" if "attention" in words else "matmul"
        return kind if kind != UNCLASSIFIED else _of_words(_telling_words(name[7:]), name)
    if name in WORDS["names"]["views"].split():
        return UNCLASSIFIED
    parts = parts_of(name)
    # FBGEMM is a library of embeddings, whatever its name says.
    found = _of_words(_telling_words(parts.function.replace("fbgemm", "")), parts.function)
    arguments = parts.arguments if found in _WRAPPERS or parts.says_nothing else []
    if not arguments:
        return found
    told = _of_words(frozenset[str]().union(*map(_telling_words, arguments)), name)
    return found if _RANK[found] <= _RANK[told] else told


@lru_cache(maxsize=1 << 14)
def _telling_words(identifier: str) -> frozenset[str]:
    """Those of its words that tell a class. Names differ by the hundred thousand, the identifiers in them hardly."""
    return _KNOWN_WORDS & words_of(identifier)


_ROTARY = frozenset(("rotary", "rope"))
_NUMBERED_CUDNN = re.compile(r"\dcudnn")
"""As in `volta_fp16_s884cudnn_fp16_256x64`: a convolution of older versions."""


def _of_words(words: frozenset[str], name: str) -> KernelClass:
    if "embedding" in words and words & _ROTARY:
        return "elementwise"
    if "cudnn" in words and _NUMBERED_CUDNN.search(name) and "sdpa" not in words:
        return "convolution"
    return _BY_RANK[min((_CLASS_OF_WORD[word] for word in words), default=-1)]
