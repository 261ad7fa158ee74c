"""A recipe on its way to becoming a snippet of plain PyTorch: each step adds its own lines to the places below."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from redline.spec import Task


@dataclass
class RecipeCode:
    """The parts a snippet is put together from. Lines speak of `model`, and of `tensor` for one input."""

    task: Task
    device: str
    """As torch spells it: `cuda`, `cpu`."""
    imports: list[str] = field(default_factory=list)
    """Whole lines, beyond `import torch`."""
    flags: list[str] = field(default_factory=list)
    """Switches of the process, set first."""
    helpers: list[str] = field(default_factory=list)
    """Functions or classes the lines below call; each a whole block of code."""
    model_lines: list[str] = field(default_factory=list)
    """Statements that turn `model` into a faster one, in order. `args` and `kwargs` hold prepared example inputs."""
    input_changes: list[str] = field(default_factory=list)
    """Expressions of `tensor` that give the tensor the model wants, in order."""
    contexts: list[str] = field(default_factory=list)
    """Context managers held around every call of the model."""
    autocast: str | None = None
    """The dtype as text (`torch.bfloat16`), where autocast is held around the forward and the loss."""
    scales_gradients: bool = False
    optimizer_options: dict[str, str] = field(default_factory=dict)
    """Keyword arguments of the optimizer, as text."""
    is_graphed: bool = False
    """The whole step goes into one CUDA graph."""
    notes: list[str] = field(default_factory=list)
    """Remarks for the reader, each printed as a comment."""

    def carry(self, *things: Callable[..., Any]) -> None:
        """Functions or classes of `plain/`, as they stand there: the snippet then does what was measured."""
        self.helpers += [inspect.getsource(thing).rstrip() for thing in things]

    def bring_in(self, *lines: str) -> None:
        """Imports, each once."""
        self.imports += [line for line in lines if line not in self.imports]


def literal(value: Any) -> str:
    """As a formatter would leave it: texts in double quotes."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
    return repr(value)
