"""Options that more than one command has, each written once, and how a command takes a group of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

T = TypeVar("T")

Given = dict[str, Any]
"""The options of a group that were set, by the names that specs and TOML files use."""
Options = dict[str, Any]
"""A group: what typer is to read as the annotation, by the name of the parameter."""

Model = Annotated[str, typer.Argument(help="A name, timm:NAME, hf:NAME or file.py:factory.")]
Models = Annotated[list[str] | None, typer.Argument(help="Names, timm:NAME, hf:NAME, file.py:factory.")]
Recipe = Annotated[str | None, typer.Option("--recipe", "-r", help="Steps joined by '+'.")]
Recipes = Annotated[
    list[str] | None, typer.Option("--recipe", "-r", help="Steps joined by '+'; give it again to compare.")
]
Batch = Annotated[int | None, typer.Option("--batch", "-b", help="Items per step.")]
ImageSize = Annotated[int | None, typer.Option(help="Pixels per side.")]
Classes = Annotated[int | None, typer.Option(help="Output classes.")]
SequenceLength = Annotated[int | None, typer.Option(help="Tokens per sequence.")]
Task = Annotated[str | None, typer.Option(help="infer or train.")]
Optimizer = Annotated[str | None, typer.Option(help="sgd, adam or adamw, for training.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, rocm.")]
ThatDevice = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, rocm.")]
"""For commands that are about the device itself."""
Threads = Annotated[int | None, typer.Option(help="CPU threads inside operators.")]
Seed = Annotated[int | None, typer.Option(help="For weights and inputs.")]
Effort = Annotated[str | None, typer.Option(help="quick, normal or strict.")]
TrialEffort = Annotated[str, typer.Option(help="quick, normal or strict: how long each trial is timed.")]
Tail = Annotated[bool | None, typer.Option("--tail", help="Go on until p99 exists (662 samples).")]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        "--max-memory", help="Measure as if the device had this much, e.g. 16GiB or 14GB; on a CPU: stay within it."
    ),
]
Door = Annotated[str | None, typer.Option(help="fork, spawn or inline: how workers are started.")]
IsolatedDoor = Annotated[str | None, typer.Option(help="fork or spawn: how workers are started.")]
Report = Annotated[
    Path | None, typer.Option("--report", metavar="DIR", help="Also write a report there: dashboard, Markdown, CSV.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")]

ANY_BATCH: Options = {
    "image_size": ImageSize,
    "classes": Classes,
    "sequence_length": SequenceLength,
    "task": Task,
    "optimizer": Optimizer,
    "device": Device,
    "threads": Threads,
    "seed": Seed,
}
"""What is measured, for a command that looks for the batch itself."""
WORKLOAD: Options = {"batch": Batch, **ANY_BATCH}
"""What is measured."""
MEASURED: Options = {"effort": Effort, "tail": Tail, "max_memory": MaxMemory, "door": Door}
"""How it is measured."""
ISOLATED: Options = {"max_memory": MaxMemory, "door": IsolatedDoor}
"""How the workers of a search are started."""


def takes(options: Options) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """The command has these options where it writes its parameter `given`, which carries those that were set.

    typer reads options off the signature. None of a group has a default: one that has is a parameter of the command.
    """

    def decorate(command: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(command)
        def taking(**arguments: Any) -> T:
            given = only_set(**{name: arguments.pop(name) for name in options})
            if door := given.pop("door", None):
                given["launch"] = {"door": door}
            return command(**arguments, given=given)

        taking.__signature__ = _with_options(command, options)  # type: ignore[attr-defined]
        return taking

    return decorate


def only_set(**options: Any) -> Given:
    """Less what nobody set: None, a flag that is off, a list without entries."""
    return {name: value for name, value in options.items() if value is not None and value is not False and value != []}


def _with_options(command: Callable[..., Any], options: Options) -> inspect.Signature:
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
        for name, option in options.items()
    ]
    # Evaluated here: typer does not evaluate the annotations of a signature it is handed.
    signature = inspect.signature(command, eval_str=True)
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        parameters += added if parameter.name == "given" else [parameter]
    return signature.replace(parameters=parameters)
