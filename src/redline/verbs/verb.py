"""This module makes a function a verb: `redline NAME` and `redline.NAME(...)` take the same settings, declared once.

    @verb(takes=WORKLOAD, examples=("redline batch resnet50 -r fp16+channels-last",))
    def batch(model: ModelName, *, max_batch: Annotated[int | None, setting("Try no batch larger than this.")] = None, ...) -> Result:

The function stands in `verbs/NAME.py`, where NAME is a line of `GROUPS` in `verbs/__init__.py`. Parameters that carry a `setting` become options of the command, those named in `takes` are settings of the specs that many verbs share, and
the others (a live module, a workspace) exist in Python only.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ParamSpec, TypeVar

import msgspec

from redline.model.fields import seconds_of
from redline.model.settings import HOW, WHAT, Declared, read_setting, setting, settings_of
from redline.model.spec import WorkloadSpec
from redline.model.spec_table import SHARED

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

SHAPE = ("image_size", "classes", "sequence_length", "batch_axis")
DEVICE = ("device", "threads", "seed")
WORKLOAD = (*settings_of(WorkloadSpec), *DEVICE)
"""These settings say what is measured."""
ANY_BATCH = tuple(name for name in WORKLOAD if name not in ("batch", "items"))
"""A verb that chooses the batch itself takes these instead."""
ONE_STEP = tuple(name for name in WORKLOAD if name not in ("prompt", "new_tokens"))
"""A verb about one step takes these instead, because a generation has many."""
MEASURED = ("effort", "no_check", "tail", "max_memory", "door")
RANKS = ("ranks", "batch_per_rank", "rendezvous")
ISOLATED = ("max_memory", "door")
PYTHON_ONLY = ("measure", "launch")
"""Tables of the specs that a command line has no option for."""

ModelName = Annotated[
    Any,
    setting(
        "A model: a name ('redline models'), timm:NAME, hf:NAME, or your own as file.py:factory.",
        kind=str,
        is_argument=True,
    ),
]
Models = Annotated[
    Any,
    setting(
        "A model: a name ('redline models'), timm:NAME, hf:NAME, or your own as file.py:factory. Several may be named.",
        kind=list[str],
        is_argument=True,
        shape="[MODEL]...",
    ),
]
_SWITCHES = "Switches joined by '+', such as fp16+channels-last+compile; 'baseline' is strict fp32, eager."
_SEVERAL = setting(f"{_SWITCHES} Repeat to compare several.", short="-r", option="--recipe", group=WHAT, kind=list[str])
Recipes = Annotated[str | Iterable[str], _SEVERAL]
AnyRecipes = Annotated[str | Iterable[str] | None, _SEVERAL]
"""The same where a file may name them, too."""
OneRecipe = Annotated[str, setting(_SWITCHES, short="-r", option="--recipe", group=WHAT)]
Ray = Annotated[
    bool,
    setting(
        "Measure on a Ray cluster: one trial or search per GPU.",
        option="--launch",
        shape="[ray]",
        kind=str,
        read=lambda _, word: _is_ray(word),
    ),
]
Address = Annotated[str | None, setting("Address of the Ray cluster: auto (this machine's), or HOST:PORT.")]


def _is_ray(word: str) -> bool:
    if word != "ray":
        raise ValueError(f"must be ray, got {word!r}")
    return True


def target(doc: str) -> Any:
    """Returns a setting that is a limit in seconds. A person may write it as a text such as 20ms."""
    return setting(doc, group=HOW, kind=str, read=seconds_of)


@dataclass(frozen=True)
class Verb:
    """This holds what is known of a verb beside its function."""

    takes: tuple[str, ...]
    examples: tuple[str, ...]
    tasks: tuple[str, ...]
    """These are the tasks it is for, where those are not all."""
    also: tuple[str, ...]
    """The command has these of `plot`, `save` and `report`, beside `--json`, `-v` and `-q`."""
    settings: type | None
    """This is a class of settings that several verbs take, besides those of the specs."""
    grid: tuple[str, ...]
    """These are settings of which several values may be given: repeated, joined by commas, or as a range."""


def verb(
    *,
    takes: Iterable[str] = (),
    examples: Iterable[str] = (),
    tasks: Iterable[str] = (),
    also: Iterable[str] = (),
    settings: type | None = None,
    grid: Iterable[str] = (),
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        own = {**settings_of(function), **(settings_of(settings) if settings is not None else {})}

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            given: Any = kwargs
            for name in given.keys() & own.keys():
                given[name] = read_setting(own[name], given[name])
                own[name].check(given[name])
            return function(*args, **given)

        described: Any = called
        described.verb = Verb(tuple(takes), tuple(examples), tuple(tasks), tuple(also), settings, tuple(grid))
        described.__signature__ = _signature(function, {**own, **{name: SHARED[name] for name in takes}})
        return called

    return decorate


def _signature(function: Callable[..., Any], taken: Mapping[str, Declared]) -> inspect.Signature:
    """Returns the signature with the shared settings and their defaults, for `help()` and completion."""
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=declared.default)
        for name, declared in taken.items()
        if name not in signature.parameters
    ]
    tables = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default={}) for name in PYTHON_ONLY]
    return signature.replace(parameters=[*own, *shared, *(tables if shared else [])])


def options_of(function: Any) -> dict[str, Declared]:
    """Returns the settings of a verb's command, by name: its own first, then the shared ones."""
    known = function.verb
    own = {**settings_of(inspect.unwrap(function)), **(settings_of(known.settings) if known.settings else {})}
    return {**own, **{name: SHARED[name] for name in known.takes if name not in own}}


def split(kind: type[S], settings: dict[str, Any]) -> S:
    """Returns an instance of the class from those of the settings that are its fields; they are taken out of `settings`."""
    return kind(**{name: settings.pop(name) for name in kind.__struct_fields__ if name in settings})
