"""These are the names of models and devices that the desk knows without torch."""

from __future__ import annotations

import re

from redline.model.errors import SpecError, UnknownName

DEVICE_KINDS = ("cpu", "cuda", "rocm")
BUILTIN_MODELS = {"simple_cnn": "classification", "transformer": "language"}
"""These are the models that Redline brings, and what they do."""
SOURCES_GROUP = "redline.sources"
"""Packages that bring models of their own register them under this group of entry points."""


def refuse_impossible_device(text: str) -> None:
    """Raises where a text names no device on any machine. Whether the device is there is left to the bench."""
    kind, colon, index = text.partition(":")
    if kind not in ("auto", *DEVICE_KINDS):
        raise UnknownName("device", text, ("auto", *DEVICE_KINDS), hint="write auto, cpu, cuda, cuda:1 or rocm:0")
    if colon and kind in ("auto", "cpu"):
        raise SpecError(f"device {kind} takes no index, got {text!r}")
    if colon and not re.fullmatch("[0-9]{1,9}", index):
        raise SpecError(f"device {kind} takes a number behind the colon, such as {kind}:0, got {text!r}")
