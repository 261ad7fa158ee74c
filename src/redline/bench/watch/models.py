"""The models of a watched program are the outermost modules that own what is trained."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

MOST_LEVELS = 4
"""A model whose parts are called one by one, as Lightning does, is looked into to this depth at most."""
FEWEST_TO_PRUNE = 4096
"""References to modules that are gone are dropped once there are this many references, and later at this many plus twice what
was left. So adding stays cheap."""


class Models:
    """It hears of every module that is made, and keeps none alive that the script lets go."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[Any]] = []
        self._prune_at = FEWEST_TO_PRUNE
        self._known: list[weakref.ref[Any]] = []
        self._level = 0
        """The models' parts at this depth are called by themselves."""
        self.trained: set[int] = set()
        """These are the ids of the models that are trained. Models that run beside them, as a teacher or a backbone, only take time."""

    def add(self, module: Any) -> None:
        if len(self._made) >= self._prune_at:
            self._made = [seen for seen in self._made if seen() is not None]
            self._prune_at = FEWEST_TO_PRUNE + 2 * len(self._made)
        self._made.append(weakref.ref(module))

    def _live(self) -> dict[int, Any]:
        """Returns every module that is alive and whose constructor has run, by its id."""
        return {id(one): one for seen in self._made if (one := seen()) is not None and "_modules" in vars(one)}

    def with_gradients(self) -> set[int]:
        return {id(weight) for one in self._live().values() for weight in weights_of(one) if weight.grad is not None}

    def find(self, weights: set[int]) -> list[Any]:
        """Returns the outermost modules. Those that own one of these weights come first. `weights` are ids of what is trained."""
        made = self._live()
        inner = {id(child) for one in made.values() for child in vars(one)["_modules"].values()}
        owners = {key for key, one in made.items() if any(id(weight) in weights for weight in weights_of(one))}
        roots = [one for key, one in made.items() if key in owners and key not in inner]
        for _ in range(self._level):
            roots = [child for one in roots for child in children_of(one) if id(child) in owners] or roots
        self._known = [weakref.ref(one) for one in roots]
        self.trained = {id(one) for one in roots}
        beside = [
            one
            for key, one in made.items()
            if key not in owners and key not in inner and next(weights_of(one), None) is not None
        ]
        return [*roots, *beside]

    def look_deeper(self) -> bool:
        """Goes one level deeper: nobody calls the models that are known, so their parts must be called. Returns whether
        there is more to look into."""
        self._level += 1
        return self._level <= MOST_LEVELS

    @property
    def roots(self) -> list[Any]:
        return [root for known in self._known if (root := known()) is not None]


def live_objects(base: type) -> list[Any]:
    """Returns every instance of the class, and of classes derived from it, that the garbage collector knows."""
    return [one for one in gc.get_objects() if issubclass(type(one), base)]


def children_of(module: Any) -> Iterator[Any]:
    return (child for child in vars(module)["_modules"].values() if child is not None)


def with_children(module: Any) -> Iterator[Any]:
    """Yields the module and all below it once, without calling anything that a class may have overridden."""
    seen, waiting = set[int](), [module]
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += children_of(one)


def weights_of(module: Any) -> Iterator[Any]:
    return (
        one for part in with_children(module) for one in vars(part).get("_parameters", {}).values() if one is not None
    )
