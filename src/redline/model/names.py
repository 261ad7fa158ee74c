"""Names of models and devices that can be refused without torch: a typo should not cost an import of several seconds.

The bench knows which models there are; here only those are refused that it cannot know, because their names occur
nowhere in the code of the library they would come from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from redline.model.errors import SpecError, UnknownName
from redline.model.spec import WorkloadSpec

DEVICE_KINDS = ("cpu", "cuda", "rocm")
BUILTIN_MODELS = {"simple_cnn": "classification", "transformer": "language"}
"""The models that Redline brings, and what they do."""
SOURCES_GROUP = "redline.sources"
"""Entry points of packages that bring models of their own."""

_LIBRARIES = {"torchvision": "torchvision/models", "timm": "timm/models", "hf": "transformers/models/auto"}
_REGISTERED = re.compile(r'@register_model\((?:name="(\w+)")?.*?^def (\w+)', re.MULTILINE | re.DOTALL)


def refuse_impossible_name(workload: WorkloadSpec) -> None:
    """Raise `UnknownName` where no library installed here can have a model of this name; else leave it to the bench."""
    source, colon, name = workload.model.partition(":")
    if not colon:
        source, name = "torchvision", workload.model
    if workload.artifact is not None or source not in _LIBRARIES or not re.fullmatch(r"[\w.-]+", name):
        return
    if not colon and (name in BUILTIN_MODELS or entry_points(group=SOURCES_GROUP) or name.endswith(".py")):
        return
    if source == "hf" and Path(name).exists():
        return
    texts = _texts(_LIBRARIES[source])
    # A tag of pretrained weights stands behind the dot; torchvision puts `quantized_` in front of some names.
    written = name.partition(".")[0].removeprefix("quantized_")
    word = re.compile(rf"\b{re.escape(written)}\b")
    if not texts or any(written in text and word.search(text) for text in texts):
        return
    if colon:
        raise UnknownName("model", workload.model, (f"{source}:{each}" for each in _known(source)))
    raise UnknownName("model", name, _known(source), hint="`redline models` lists them")


def refuse_impossible_device(text: str) -> None:
    """Raise where a text names no device on any machine; whether it is there is left to the bench."""
    kind, colon, index = text.partition(":")
    if kind not in ("auto", *DEVICE_KINDS):
        raise UnknownName("device", text, ("auto", *DEVICE_KINDS), hint="write auto, cpu, cuda, cuda:1 or rocm:0")
    if colon and kind in ("auto", "cpu"):
        raise SpecError(f"device {kind} takes no index, got {text!r}")
    if colon and not re.fullmatch("[0-9]{1,9}", index):
        raise SpecError(f"device {kind} takes a number behind the colon, such as {kind}:0, got {text!r}")


@cache
def _texts(folder: str) -> tuple[str, ...]:
    """The code of a library; empty where it is not installed."""
    package, _, inside = folder.partition("/")
    found = find_spec(package)
    if found is None or found.origin is None:
        return ()
    files = sorted((Path(found.origin).parent / inside).rglob("*.py"))
    return tuple(file.read_text(encoding="utf-8", errors="replace") for file in files)


def _known(source: str) -> Iterator[str]:
    """Yields names to suggest, as far as the code shows them."""
    if source == "torchvision":
        yield from BUILTIN_MODELS
    for text in _texts(_LIBRARIES[source]):
        if source == "hf":
            yield from re.findall(r'^\s+\(?"([\w.-]+)", "\w+Config"\)?', text, re.MULTILINE)
        elif source == "timm":
            yield from re.findall(r"^@register_model\ndef (\w+)", text, re.MULTILINE)
        else:
            yield from (given or function for given, function in _REGISTERED.findall(text))
