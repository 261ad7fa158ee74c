"""From a call to specs: the settings every verb takes, models by name, and live models as files a worker can open."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from redline.api.workspace import Workspace
from redline.launch.inline import InlineDoor
from redline.model.errors import SpecError, UsageError
from redline.model.spec import RunSpec
from redline.model.spec_table import specs_from_table

P = ParamSpec("P")
T = TypeVar("T")


def listed(value: str | Iterable[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def specs_of(
    workspace: Workspace,
    model: Any = None,
    inputs: Any | None = None,
    *,
    recipes: str | Iterable[str] = "baseline",
    loss: Any | None = None,
    targets: Any | None = None,
    setup: Any | None = None,
    teardown: Any | None = None,
    **settings: Any,
) -> tuple[list[RunSpec], Workspace]:
    """The specs of a call, and the workspace to run them in: a live model that cannot be pickled needs its own door."""
    described, workspace = described_model(
        workspace, model, inputs, loss, targets, setup, teardown, task=settings.get("task")
    )
    return specs_from_table({"recipe": listed(recipes), **settings, **described}), workspace


def one_spec(
    workspace: Workspace, what: str, model: Any, inputs: Any | None, **given: Any
) -> tuple[RunSpec, Workspace]:
    """The one spec of a verb that takes a single model and recipe; `what` names it in the refusal."""
    specs, workspace = specs_of(workspace, model, inputs, **given)
    if len(specs) != 1:
        raise UsageError(f"{what} takes one model under one recipe, got {len(specs)}")
    return specs[0], workspace


def described_model(
    workspace: Workspace,
    model: Any,
    inputs: Any | None,
    loss: Any | None,
    targets: Any | None = None,
    setup: Any | None = None,
    teardown: Any | None = None,
    *,
    task: Any = None,
) -> tuple[dict[str, Any], Workspace]:
    """What a spec says of a model by name, of a live one, or of a function that is timed as it is."""
    export = sys.modules.get("torch.export")
    if export is not None and isinstance(model, export.ExportedProgram):  # it can be called, but refuses to run
        model = model.module()
    if is_function(model):
        if loss is not None or targets is not None or task not in (None, "step", ["step"]):
            raise UsageError("a function is timed as it is: leave out loss, targets and task")
        return _described_function(workspace, model, inputs, setup, teardown)
    if setup is not None or teardown is not None:
        raise UsageError("setup and teardown go with a function: redline.run(step, setup=..., teardown=...)")
    if model is None:
        return {}, workspace
    if isinstance(model, str) or (isinstance(model, list | tuple) and all(isinstance(name, str) for name in model)):
        if inputs is not None or loss is not None or targets is not None:
            raise UsageError("inputs, loss and targets go with a live module; a model by name brings its own")
        return {"model": model}, workspace
    if task in ("step", ["step"]):
        raise UsageError("task step is for a function of yours, and this is a module: leave task out")
    return _handed_over(workspace, (model, inputs, loss, targets), f"live:{type(model).__name__}", model)


def _handed_over(workspace: Workspace, live: Any, name: str, model: Any) -> tuple[dict[str, Any], Workspace]:
    """As a file that a worker can open, or in this process."""
    artifact = workspace.artifact(live)
    if artifact is not None:
        return {"model": name, "artifact": artifact}, workspace
    # It cannot be pickled: the bench runs in this process, nothing is isolated, and the verdict says so.
    address = f"memory:{id(model)}"
    return (
        {"model": name, "artifact": address, "launch": {"door": "inline"}},
        workspace.derived(door=InlineDoor(handed_over={address: live})),
    )


def is_function(model: Any) -> bool:
    """Whether it is called as it is: anything callable that is no module of torch."""
    torch = sys.modules.get("torch")  # where it was never loaded, nothing is a module
    is_module = torch is not None and isinstance(model, torch.nn.Module)
    return callable(model) and not is_module


def _described_function(
    workspace: Workspace, function: Any, inputs: Any | None, setup: Any | None, teardown: Any | None
) -> tuple[dict[str, Any], Workspace]:
    """What a spec says of a function that is timed as it is."""
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    name: str = (getattr(inner, "__name__", "") or type(inner).__name__).strip("<>")
    if isinstance(function, type):
        raise UsageError(f"{name} is a class: pass an instance of it")
    for what, given in (("setup", setup), ("teardown", teardown)):
        if given is not None and not callable(given):
            raise UsageError(f"{what} must be a function, got {type(given).__name__}")
    live = {"step": function, "name": name, "inputs": inputs, "setup": setup, "teardown": teardown}
    described, workspace = _handed_over(workspace, live, f"live:{name}", function)
    return {**described, "task": "step"}, workspace


def named_function(workspace: Workspace, what: str, given: Any) -> str:
    """A function by its name, or as a file that a worker can open."""
    if not isinstance(given, str):
        artifact = workspace.artifact(given)
        if artifact is None:
            raise UsageError(f"{what} cannot be pickled: give it as 'file.py:function'")
        return f"pickle:{artifact}"
    origin, _, function = given.rpartition(":")
    if not origin or not function.isidentifier():
        raise SpecError(f"{what} {given!r} does not name a function: write path/to/file.py:function")
    if origin.endswith(".py") and not Path(origin).expanduser().is_file():
        raise SpecError(f"{what} {given!r}: no such file: {origin}")
    return given
