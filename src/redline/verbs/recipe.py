"""This is a recipe outside of any measurement: its plain PyTorch code, and that code applied to a model of the caller's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from redline.launch.inline import InlineDoor
from redline.model.errors import BenchError, UsageError
from redline.model.fields import Frozen
from redline.model.protocol import AskSnippet, Snippet
from redline.model.spec import OptimizerName, RunSpec, Task
from redline.model.spec_table import specs_from_table
from redline.verbs.workspace import Workspace

_HANDED_OVER = "yours"
"""Under this name the bench is shown a model of the caller's."""


class PlainRecipe(Frozen):
    """`redline.recipe` returns this. What it applies is the code it shows: nothing else happens to the model."""

    recipe: str
    task: Task
    code: str
    spec: RunSpec
    """The recipe was made for this."""

    def apply(self, model: Any, *args: Any, inplace: bool = False, **kwargs: Any) -> Callable[..., Any]:
        """Returns, for inference, a function to call in place of the model, made for inputs like these.

        It works on a copy: the model stays as it is. `inplace=True` saves the memory of the copy and changes the model
        itself: it is moved to the device, set to eval, and cast, folded or quantized as the recipe says.

        The function prepares its inputs (device, number format, layout) at every call; in a hot loop do that beforehand,
        as `code` shows. A recipe that would change nothing about this model is refused, as a run refuses it.
        """
        self._require("infer", "training_step")
        self._look_at(model)
        namespace = self._namespace()
        own = model if inplace else _copied(model)
        fast, prepare = namespace["optimise"](own, *args, **kwargs), namespace["prepare_inputs"]

        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = prepare(*args, **kwargs)
            return fast(*args, **kwargs)

        return call

    def training_step(
        self, model: Any, loss: Callable[[Any, Any], Any], inputs: Any, targets: Any
    ) -> Callable[[Any, Any], Any]:
        """Returns, for training, a function of inputs and targets that does one whole step and returns the loss.

        It trains the model it is given, in place: the model is moved to the device, set to train, and cast to another
        number format where the recipe says so.

        A dict of inputs goes in by keyword, a tuple or list by position, anything else is the one input.
        """
        self._require("train", "apply")
        self._look_at(model)
        namespace = self._namespace()
        prepare = namespace["prepare_inputs"]

        def prepared(inputs: Any, targets: Any) -> tuple[Any, Any, Any]:
            given, named = arguments_of(inputs)
            (args, kwargs), ((own,), _) = prepare(*given, **named), prepare(targets)
            return args, kwargs, own

        step = namespace["make_training_step"](model, loss, *prepared(inputs, targets))

        def one(inputs: Any, targets: Any) -> Any:
            return step(*prepared(inputs, targets))

        return one

    def __str__(self) -> str:
        return self.code

    def _require(self, task: Task, other: str) -> None:
        if self.task != task:
            raise UsageError(f"this recipe is for {self.task}: call {other}() instead")

    def _look_at(self, model: Any) -> None:
        """Refuse a model that this recipe is not for, before anything happens to it."""
        workload = msgspec.structs.replace(self.spec.workload, artifact=_HANDED_OVER)
        _code_of(msgspec.structs.replace(self.spec, workload=workload), {_HANDED_OVER: (model,)})

    def _namespace(self) -> dict[str, Any]:
        namespace: dict[str, Any] = {"__name__": "redline_recipe"}
        exec(compile(self.code, f"<recipe {self.recipe}>", "exec"), namespace)
        return namespace


def recipe(
    text: str,
    *,
    task: Task = "infer",
    device: str = "auto",
    optimizer: OptimizerName = "sgd",
    threads: int | None = None,
) -> PlainRecipe:
    """Returns the recipe as plain PyTorch code for this machine, and that code applied to a model of yours.

    `optimizer` is for training; `threads`, on a CPU, is what the code sets.
    """
    if not isinstance(text, str):
        raise UsageError(f"one recipe, as text such as 'fp16+channels-last', got {text!r}")
    if task == "generate":
        raise UsageError("code that generates is written for its model: redline.tune(..., task='generate').snippet")
    # `live` models have no constructor to show.
    table = {"model": "your model", "artifact": _HANDED_OVER, "task": task, "recipe": text}
    if task == "train" or optimizer != "sgd":
        table["optimizer"] = optimizer
    (spec,) = specs_from_table({**table, "device": device, "threads": threads})
    # There is no model yet to look at; mistakes in the recipe itself are told without one.
    Workspace(door=InlineDoor(handed_over={_HANDED_OVER: ()}), keep=False).checked([spec])
    return plain_recipe(spec)


def plain_recipe(spec: RunSpec) -> PlainRecipe:
    return PlainRecipe(recipe=str(spec.recipe), task=spec.workload.task, code=_code_of(spec), spec=spec)


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments that a model is called with for what a person handed over: it is the same reading as on the bench."""
    if isinstance(inputs, Mapping):
        return (), {str(key): value for key, value in inputs.items()}
    if isinstance(inputs, tuple | list) and not hasattr(inputs, "_fields"):
        return tuple(inputs), {}
    return (inputs,), {}


def _copied(model: Any) -> Any:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        # Modules that hold results of autograd or open files cannot be copied, and each says so in its own way.
        told = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(
            f"{type(model).__name__} cannot be copied ({told[0]}): apply(..., inplace=True) changes the model itself"
        ) from error


def _code_of(spec: RunSpec, handed_over: dict[str, Any] | None = None) -> str:
    """A recipe that cannot be had here is the caller's mistake, told in one line; what breaks is a bug and keeps all."""
    try:
        workspace = Workspace(door=InlineDoor(handed_over=handed_over), keep=False)
        return workspace.ask(AskSnippet(spec=spec), Snippet).code
    except BenchError as error:
        if error.kind != "unsupported":
            raise
        raise UsageError(str(error)) from None
