"""The models of a watched program are the outermost modules that own what is trained."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch

MOST_LEVELS = 4
"""A model whose parts are called one by one, as Lightning does, is looked into so deep."""
FEWEST_TO_PRUNE = 4096


class Models:
    """Hears of every module that is made, and holds none that the script lets go."""

    def __init__(self, on_class: Callable[[type], None]) -> None:
        self._on_class = on_class
        """Called with the class of each model that is found."""
        self._made: list[weakref.ref[Any]] = []
        self._prune_at = FEWEST_TO_PRUNE
        self._levels = 0
        self.known: list[weakref.ref[Any]] = []
        self.frozen: set[int] = set()
        """The ids of models that run beside those and are not trained, as a teacher or a backbone: only their time counts."""

    def add(self, module: Any) -> None:
        if len(self._made) >= self._prune_at:
            self._made = [seen for seen in self._made if seen() is not None]
            self._prune_at = FEWEST_TO_PRUNE + 2 * len(self._made)
        self._made.append(weakref.ref(module))

    def find(self, optimizer: Any | None) -> None:
        """Finds the outermost modules that own what the optimizer trains, or without an optimizer what has gradients."""
        if optimizer is None:
            owners = [one for one in self._live() if any(weight.grad is not None for weight in _parameters(one))]
        else:
            trained = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
            owners = [one for one in self._live() if any(id(weight) in trained for weight in _parameters(one))]
        inner = {id(child) for one in owners for child in _children(one)}
        known = {id(root) for root in self.roots()}
        for root in owners:
            self.frozen.discard(id(root))
            if id(root) not in inner and id(root) not in known:
                self.known.append(weakref.ref(root))
                self._on_class(type(root))

    def find_frozen(self) -> None:
        """Finds the outermost modules that have weights and share none with the models that are trained."""
        alive = self._live()
        inner = {id(child) for one in alive for child in vars(one)["_modules"].values()}
        trained = {id(weight) for root in self.roots() for weight in _parameters(root)}
        for one in alive:
            weights = [] if id(one) in inner else _parameters(one)
            if weights and not any(id(weight) in trained for weight in weights):
                self.frozen.add(id(one))
                self._on_class(type(one))

    def hear(self, module: Any) -> None:
        """It was called with weights that are not its own, as by `torch.func.functional_call`: no optimizer leads to it."""
        if not self.holds(module):
            self.known.append(weakref.ref(module))
            self._on_class(type(module))

    def _live(self) -> list[Any]:
        """Returns every module that is alive and whose constructor has run, once."""
        made = {id(one): one for seen in self._made if (one := seen()) is not None}
        return [one for one in made.values() if "_modules" in vars(one)]

    def roots(self, trained: Collection[int] = ()) -> list[torch.nn.Module]:
        """Returns the models that own one of these parameters, given by their ids, as a program may hold others; all if none does."""
        alive = [root for known in self.known if (root := known()) is not None]
        return [root for root in alive if any(id(weight) in trained for weight in _parameters(root))] or alive

    def holds(self, module: Any) -> bool:
        return any(module is one() for one in self.known)

    def registered(self, holder: Any, name: str, part: Any) -> None:
        """A module was put into another one, as `torch.compile` and DDP do with a model: that one is called instead."""
        if part is not None and self.holds(part):
            self.known = [one for one in self.known if one() is not part and one() is not holder]
            self.known.append(weakref.ref(holder))
            self._on_class(type(holder))

    def look_deeper(self) -> None:
        """Listens to the parts of models that nobody calls themselves."""
        if self._levels < MOST_LEVELS:
            self._levels += 1
            parts = [child for root in self.roots() for child in root.children()]
            self.known = [weakref.ref(part) for part in parts] or self.known
            for part in parts:
                self._on_class(type(part))


def live_objects(base: type) -> list[Any]:
    """Asks the garbage collector for every instance of the class and of those derived from it."""
    kinds, waiting = set[type](), [base]
    while waiting:
        kind = waiting.pop()
        if kind not in kinds:
            kinds.add(kind)
            waiting += type.__subclasses__(kind)
    return [one for one in gc.get_objects() if type(one) in kinds]


def _parameters(module: torch.nn.Module) -> list[Any]:
    return [one for one in _walk(module, "_parameters") if one is not None]


def _children(module: torch.nn.Module) -> list[Any]:
    return [one for one in _walk(module, "_modules") if one is not None]


def with_children(module: torch.nn.Module) -> list[Any]:
    return [module, *_children(module)]


def _walk(module: torch.nn.Module, what: str) -> list[Any]:
    """Collects `what` of the module and of all below it, without calling anything that a class may have overridden."""
    entries: list[Any] = []
    seen: set[int] = set()
    waiting = [module]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        own = vars(one)
        entries += own.get(what, {}).values()
        waiting += [child for child in own.get("_modules", {}).values() if child is not None]
    return entries
