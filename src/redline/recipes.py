"""A recipe outside of any measurement: its plain PyTorch code, and that code applied to a model of the caller's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redline.api import ask
from redline.errors import UsageError
from redline.launch.inline import InlineDoor
from redline.protocol import AskSnippet, Snippet
from redline.spec import RunSpec, Spec, Task, specs_from_table


class PlainRecipe(Spec):
    """What `redline.recipe` returns. What it applies is the code it shows: nothing else happens to the model."""

    recipe: str
    task: Task
    code: str

    def apply(self, model: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """For inference: a function in place of the model, made for inputs like these. The model itself is changed.

        It prepares its inputs (device, number format, layout) at every call; in a hot loop do that beforehand, as
        `code` shows.
        """
        self._require("infer", "training_step")
        namespace = self._namespace()
        fast, prepare = namespace["optimise"](model, *args, **kwargs), namespace["prepare_inputs"]

        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = prepare(*args, **kwargs)
            return fast(*args, **kwargs)

        return call

    def training_step(
        self, model: Any, loss: Callable[[Any, Any], Any], args: tuple[Any, ...], targets: Any
    ) -> Callable[[tuple[Any, ...], Any], Any]:
        """For training: a function of inputs and targets that does one whole step and returns the loss."""
        self._require("train", "apply")
        namespace = self._namespace()
        prepare = namespace["prepare_inputs"]
        prepared, _ = prepare(*args)
        (own_targets,), _ = prepare(targets)
        step = namespace["make_training_step"](model, loss, prepared, {}, own_targets)

        def one(args: tuple[Any, ...], targets: Any) -> Any:
            (given, _), ((own,), _) = prepare(*args), prepare(targets)
            return step(given, {}, own)

        return one

    def __str__(self) -> str:
        return self.code

    def _require(self, task: Task, other: str) -> None:
        if self.task != task:
            raise UsageError(f"this recipe is for {self.task}: call {other}() instead")

    def _namespace(self) -> dict[str, Any]:
        namespace: dict[str, Any] = {"__name__": "redline_recipe"}
        exec(compile(self.code, f"<recipe {self.recipe}>", "exec"), namespace)
        return namespace


def recipe(text: str, *, task: Task = "infer", **settings: Any) -> PlainRecipe:
    """The recipe as code for this machine; `settings` may name a device and an optimizer."""
    # `live` models have no constructor to show.
    (spec,) = specs_from_table({"model": "your model", "artifact": "yours", "task": task, "recipe": text, **settings})
    return plain_recipe(spec)


def plain_recipe(spec: RunSpec) -> PlainRecipe:
    reply = ask(AskSnippet(spec=spec), InlineDoor())
    assert isinstance(reply, Snippet)
    return PlainRecipe(recipe=str(spec.recipe), task=spec.workload.task, code=reply.code)
