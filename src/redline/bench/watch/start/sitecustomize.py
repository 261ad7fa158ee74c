"""This runs when a watched interpreter starts, because this folder is first on PYTHONPATH, which child processes inherit.

It waits for torch to be imported, then puts the hooks in place. A `sitecustomize` that it hides is run as usual.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


def _load_watch() -> Any:
    """Loads the folder above as a package by itself, because Redline need not be installed here."""
    name = "_redline_watch"
    folder = os.path.dirname(HERE)
    spec = importlib.util.spec_from_file_location(
        name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return importlib.import_module(name + ".hooks")


class _WhenTorchArrives:
    """This finder finds nothing itself. It lets the next ones find torch and adds a call after its import.

    It stays until torch runs, because libraries ask whether torch can be found long before anybody imports it.
    """

    def __init__(self) -> None:
        self._is_asking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch" or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_asking = False
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return spec
        execute = spec.loader.exec_module

        def execute_and_watch(module: Any) -> None:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            execute(module)
            try:
                _load_watch().install(os.environ["REDLINE_WATCH"])
            except Exception as error:  # the script must run, watched or not
                sys.stderr.write(f"redline: this process is not watched: {error!r}\n")

        setattr(spec.loader, "exec_module", execute_and_watch)  # noqa: B010  (mypy sees a method)
        return spec


def _run_hidden_sitecustomize() -> None:
    others = [folder for folder in sys.path if os.path.abspath(folder or ".") != HERE]
    sys.path[:] = others
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("REDLINE_WATCH"):
    sys.meta_path.insert(0, _WhenTorchArrives())
_run_hidden_sitecustomize()
