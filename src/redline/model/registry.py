"""This is a registry of named plug-ins: our own register themselves, others come through entry points."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pkgutil import iter_modules
from typing import Generic, TypeVar

from redline.model.errors import UnknownName, UsageError, closest

T = TypeVar("T")


class Registry(Generic[T]):
    """A name-to-thing table that fills itself the first time it is asked."""

    def __init__(self, what: str, *, package: str | None = None, group: str | None = None) -> None:
        self.what = what
        self._package = package
        self._group = group
        self._entries: dict[str, T] = {}
        self._filled = False

    def register(self, name: str) -> Callable[[T], T]:
        def keep(thing: T) -> T:
            if name in self._entries and self._entries[name] is not thing:
                raise ValueError(f"two {self.what}s are called {name!r}")
            self._entries[name] = thing
            return thing

        return keep

    def get(self, name: str) -> T:
        self._fill()
        try:
            return self._entries[name]
        except KeyError:
            hint = "" if closest(name, self._entries) else f"there are {', '.join(self.names())}"
            raise UnknownName(self.what, name, self._entries, hint) from None

    def names(self) -> list[str]:
        self._fill()
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        self._fill()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def _fill(self) -> None:
        """Import every file of the package (adding a plug-in is adding a file), then what others installed."""
        if self._filled:
            return
        self._filled = True  # already now: a plug-in may ask for another while it is imported
        try:
            if self._package:
                package = import_module(self._package)
                for module in iter_modules(package.__path__):
                    import_module(f"{self._package}.{module.name}")
            if self._group:
                # In order of their values, so that of two with one name the same one is refused on every machine.
                for entry in sorted(entry_points(group=self._group), key=lambda entry: entry.value):
                    self._register_plug_in(entry)
        except BaseException:
            self._filled = False  # half a table would call what is missing unknown
            raise

    def _register_plug_in(self, entry: EntryPoint) -> None:
        """Registers what a plug-in brings. If it cannot be loaded, the error names the plug-in, because the fault is in its code."""
        try:
            self.register(entry.name)(entry.load())
        except Exception as error:
            what = f"the {self.what} plug-in {entry.name!r} ({entry.value})"
            raise UsageError(f"{what} cannot be used: {error}; fix or uninstall it") from error
