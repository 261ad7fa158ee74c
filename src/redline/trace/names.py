"""This module reads the name of a kernel or operator: its function, a name short enough for a table, its class, and whose code it is.

Names come demangled (`void at::native::foo<float>(int)`), mangled (`_ZN2ck6device6kernelI…`) and plain (`triton_poi_0`).
Anyone may write a trace, so only the beginning of a name is looked at, and never with a pattern that backtracks. The words
that tell something stand in `data/kernels.toml`. The function's own name decides. Its template arguments count only if it
is a wrapper, because they also name types: a kernel on `cutlass::bfloat16_t` need not multiply anything.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from redline.model.units import printable

SHORT_NAME_LENGTH = 56
"""Names of kernels are cut to this many characters in tables."""
LONGEST_NAME = 1500
"""Only this many characters of a name are read. A function's own name, and the functor that tells what it does, stand before that."""

LABEL_LENGTH = 120
"""Names of operators, copies and annotations are cut to this many characters where people read them."""

_LONGEST_TEMPLATE = 300
_MOST_ARGUMENTS = 12
"""Only this many characters of template arguments, and this many of their names, are read, because a name can be endless."""
_IDENTIFIER = re.compile(r"([A-Za-z_]\w*)(::|\(?)")
_ARGUMENT = re.compile(r"[A-Za-z_]\w*+(?!::)")
"""It matches an identifier that is not a namespace."""
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_LENGTH = re.compile(r"L[a-zA-Z_]n?\d+E|(\d{1,4})")
_OWN_LENGTH = re.compile(r"\d{1,4}")
_TELLING = ("Op", "Ops", "_kernel_cuda", "_kernel_impl", "_cuda_kernel", "Epilogue", "KernelImpl")
_TOLD_BY = ("Functor", "Op", "_kernel", "Epilogue", "KernelImpl")
"""A name without any of these has no word that tells what it computes."""
WORDS: dict[str, Any] = tomllib.loads((files("redline.trace") / "data" / "kernels.toml").read_text("utf-8"))
"""This table says what the words in names tell."""
_GENERIC, _NAMESPACES, _WRAPPERS, _TYPES = (
    frozenset(WORDS["names"][kind].split()) for kind in ("generic", "namespaces", "wrappers", "types")
)


class Parts(NamedTuple):
    function: str
    """This is the name with its namespaces, without templates and parameters."""
    template: str = ""
    """These are its arguments as they stand in the name."""
    is_mangled: bool = False

    @property
    def arguments(self) -> list[str]:
        """Returns the first names among its template arguments that are neither namespaces nor built-in types."""
        words = _mangled_words(self.template) if self.is_mangled else _ARGUMENT.findall(self.template)
        return [word for word in words if word not in _TYPES][:_MOST_ARGUMENTS]

    @property
    def says_nothing(self) -> bool:
        return self.function.rpartition("::")[2].lower() in _GENERIC


def parts_of(name: str) -> Parts:
    plain = name[:LONGEST_NAME].removeprefix("void ").replace("(anonymous namespace)::", "")
    if plain.startswith("_Z"):
        return _demangled(plain)
    angle, paren = plain.find("<"), plain.find("(")
    if angle < 0 and paren < 1:
        return Parts(plain)
    if 0 < paren < angle or angle < 0:
        return Parts(plain[:paren].rstrip().rpartition(" ")[2] or plain)
    head = plain[:angle]
    # `enable_if` is the type that the function returns. The function's name comes later.
    if head.endswith("enable_if"):
        begin = plain.find(" ", _closing(plain, angle, ">::"))
        return parts_of(plain[begin + 1 :]) if begin >= 0 else Parts(plain)
    return Parts(head.rpartition(" ")[2] or plain, plain[angle : _closing(plain, angle)])


def words_of(text: str) -> set[str]:
    """Returns the words in an identifier in lower case, each alone and joined to the next. For example, `SoftMaxForward` has `softmax`."""
    words = [word.lower() for word in _WORD.findall(text)]
    return {*words, *map(str.__add__, words, words[1:])}


def short_name(name: str) -> str:
    """Returns the function without namespaces, types and parameters, with the functor that tells what it computes."""
    parts = parts_of(name)
    base = _base(parts) or parts.function
    short = printable(base + _functor(parts, base))
    return short if len(short) <= SHORT_NAME_LENGTH else short[: SHORT_NAME_LENGTH - 1] + "…"


def label_of(name: str) -> str:
    """Returns a name from a trace that is safe to print and cut to `LABEL_LENGTH`."""
    shown = printable(name[: LABEL_LENGTH + 1])
    return shown if len(shown) <= LABEL_LENGTH else shown[:LABEL_LENGTH] + "…"


def _base(parts: Parts) -> str:
    """Returns the function's own name. If that says nothing, it returns what the function runs, else where it comes from."""
    path, _, base = parts.function.rpartition("::")
    if base.lower() not in _GENERIC:
        return base
    owner = path.rpartition("::")[2]
    told = next((word for word in parts.arguments if len(word) > 3), None)
    if told is not None and (owner in _NAMESPACES or not owner):
        return told
    return f"{owner}::{base}" if owner else base


def _closing(plain: str, opening: int, closing: str = ">(") -> int:
    """Returns where the bracket is closed again, or the last place that is looked at. `closing` is the text expected there."""
    # `str` counts the brackets, because going from bracket to bracket would take most of the time of reading a name.
    end, limit = opening, opening + _LONGEST_TEMPLATE
    while (end := plain.find(closing, end + 1, limit)) >= 0:
        if plain.count("<", opening, end) <= plain.count(">", opening, end + 1) - plain.count("->", opening, end + 1):
            return end
    return min(limit, len(plain))


def _functor(parts: Parts, base: str) -> str:
    """Returns the name among a kernel's template arguments that says what it computes, in brackets. It is empty if none does."""
    if not any(map(parts.template.__contains__, _TOLD_BY)):
        return ""
    words = [(word, "") for word in parts.arguments] if parts.is_mangled else _IDENTIFIER.findall(parts.template)
    for word, after in words:
        tells = "Functor" in word or word.endswith(_TELLING) or (after == "(" and word.endswith("_kernel"))
        if tells and word not in _WRAPPERS and word not in base:
            return f"<{word}>"
    return ""


def _demangled(name: str) -> Parts:
    """Returns the parts of a nested name, found roughly. Those among the template arguments are found when asked for."""
    position = 3 if name.startswith("_ZN") else 2
    path: list[str] = []
    while found := _OWN_LENGTH.match(name, position):
        begin = found.end()
        position = begin + int(found.group())
        part = name[begin:position]
        if not part.startswith("_GLOBAL__N"):
            path.append(part)
    return Parts("::".join(path) or name, name[position:], is_mangled=True)


def _mangled_words(template: str) -> list[str]:
    """Returns the first identifiers among mangled template arguments. Each one is written after its length."""
    words: list[str] = []
    position = 0
    while len(words) < 2 * _MOST_ARGUMENTS and (found := _LENGTH.search(template, position)):
        position = found.end() + int(found.group(1) or 0)
        word = template[found.end() : position]
        if word[:1].isalpha():
            words.append(word)
    return words


# The rest of this file is about classes.

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
"""Kernels of these classes do little with each byte they touch, so memory limits them on any device."""

PRODUCT_CLASSES: frozenset[KernelClass] = frozenset(("convolution", "matmul", "attention"))
"""Kernels of these classes run on the matrix units."""

_BY_RANK: tuple[KernelClass, ...] = (*WORDS["classes"], UNCLASSIFIED)
_RANK = {kind: number for number, kind in enumerate(_BY_RANK)}
_CLASS_OF_WORD: dict[str, int] = {"cudnn": _RANK[UNCLASSIFIED]}  # alone it tells nothing
for _kind, _words in reversed(WORDS["classes"].items()):
    _CLASS_OF_WORD |= dict.fromkeys(_words.split(), _RANK[_kind])
_KNOWN_WORDS = frozenset(_CLASS_OF_WORD)
_RUN_OTHERS: frozenset[KernelClass] = frozenset(("elementwise", "reduction", UNCLASSIFIED))
"""The template arguments of kernels of these classes may say what they run."""


class Described(msgspec.Struct, frozen=True, gc=False):
    """This is what a name tells. It is worked out once, because a trace may hold hundreds of thousands of names. The data
    file explains the marks."""

    kernel_class: KernelClass
    converts_layout: bool = False
    is_strict_fp32: bool = False
    is_fixed_norm: bool = False
    is_training_norm: bool = False
    is_unfused: bool = False
    is_softmax: bool = False


_LOOKED_AT = 400
"""Marks are looked for only in this many characters at the beginning of a name."""
_MARKS = [
    (mark, rule.get("classes", CLASSES), re.compile(rule["rule"]), re.compile(rule.get("unless", "(?!)")))
    for mark, rule in WORDS["marks"].items()
]


@lru_cache(maxsize=1 << 18)
def describe(name: str) -> Described:
    kind, head = _class_of(name[:LONGEST_NAME]), name[:_LOOKED_AT].lower()
    marks = {
        mark: kind in classes and rule.search(head) is not None and unless.search(head) is None
        for mark, classes, rule, unless in _MARKS
    }
    return _told(kernel_class=kind, **marks)


_told = cache(Described)
"""All names that tell the same share one object."""

_LIBRARIES = [(name, re.compile(rule, re.IGNORECASE)) for name, rule in WORDS["libraries"].items()]


@lru_cache(maxsize=100_000)
def library_of(name: str) -> str:
    """Returns whose code a kernel is, or the operator on a CPU. `native` is torch's own code."""
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
    # FBGEMM is a library of embeddings, although its name says GEMM.
    found = _of_words(_telling_words(parts.function.replace("fbgemm", "")), parts.function)
    arguments = parts.arguments if found in _RUN_OTHERS or parts.says_nothing else []
    if not arguments:
        return found
    told = _of_words(frozenset[str]().union(*map(_telling_words, arguments)), name)
    return found if _RANK[found] <= _RANK[told] else told


@lru_cache(maxsize=1 << 14)
def _telling_words(identifier: str) -> frozenset[str]:
    """Returns those of its words that tell a class. There are hundreds of thousands of names, but few identifiers in them."""
    return _KNOWN_WORDS & words_of(identifier)


_ROTARY = frozenset(("rotary", "rope"))
_NUMBERED_CUDNN = re.compile(r"\dcudnn")
"""It matches names like `volta_fp16_s884cudnn_fp16_256x64`, which is a convolution of older versions."""


def _of_words(words: frozenset[str], name: str) -> KernelClass:
    if "embedding" in words and words & _ROTARY:
        return "elementwise"
    if "cudnn" in words and _NUMBERED_CUDNN.search(name) and "sdpa" not in words:
        return "convolution"
    return _BY_RANK[min((_CLASS_OF_WORD[word] for word in words), default=-1)]
