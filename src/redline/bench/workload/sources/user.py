"""This module has the sources of models that people bring: `path/to/file.py:factory` or `package.module:factory`, and live
modules that their Python hands over."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import pickle
import symtable
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from redline.bench.device.failure import is_out_of_memory, one_line
from redline.bench.workload.build import SOURCES, refuse_options
from redline.bench.workload.called import NO_INPUTS, OwnStep, batch_parameter
from redline.bench.workload.fingerprint import code_fingerprint, short_hash
from redline.bench.workload.handed import Factory, OwnSource, sort_inputs
from redline.model.errors import BenchError, SpecError, closest
from redline.model.spec import Task, WorkloadSpec

_loaded: dict[Path, tuple[str, ModuleType]] = {}


class UserSource(OwnSource):
    name = "user"

    def claims(self, model: str) -> bool:
        return ":" in model or model.endswith(".py")

    def check(self, spec: WorkloadSpec) -> None:
        """Checks the name without running the file, because the user's file may do anything when imported."""
        refuse_options(spec, "classes", "sequence_length", "stem", why="the factory decides it")
        check_object(spec.model.removeprefix("user:"), what="model", called="factory")

    def task_of(self, spec: WorkloadSpec) -> Task:
        """Returns the task. A function called `step`, or with a name that ends so, is timed as it is."""
        is_step = spec.task == "infer" and f"_{_split(spec.model)[1]}".endswith("_step")
        return "step" if is_step else spec.task

    def fingerprint(self, spec: WorkloadSpec) -> str:
        path = _path_of(_split(spec.model)[0])
        return code_fingerprint(path) if path is not None else ""

    def identity(self, spec: WorkloadSpec) -> str:
        """Returns the content of the file and not its path, because moving it does not make another model."""
        origin, name = _split(spec.model)
        file = getattr(_load(origin), "__file__", None)
        return f"user {short_hash(Path(file).read_bytes()) if file and Path(file).is_file() else origin} {name}"

    def factory(self, spec: WorkloadSpec) -> Factory:
        origin, name = _split(spec.model)
        function, whose = _attribute(_load(origin), name, origin), f"factory {name} in {origin}"
        if isinstance(function, nn.Module):
            raise SpecError(
                f"{name} in {origin} is a model, not a function that makes one: write `def build(): return model, inputs`"
            )
        return Factory(function, batch_parameter(function, whose), whose)

    def step(self, spec: WorkloadSpec) -> OwnStep:
        origin, name = _split(spec.model)
        module = _load(origin)
        # An imported function of such a name, such as setuptools' `setup`, does not belong to the step.
        beside = {
            called: getattr(module, called)
            for called in ("setup", "teardown")
            if getattr(getattr(module, called, None), "__module__", None) == module.__name__
        }
        return OwnStep(_attribute(module, name, origin), name, **beside)


def load_function(name: str, what: str) -> Callable[..., Any]:
    """Returns the user's function behind `path/to/file.py:name`, `package.module:name` or `pickle:PATH`. Messages name it by `what`."""
    origin, _, attribute = name.rpartition(":")
    if not origin:
        raise SpecError(f"{what} {name!r} does not name a function: write path/to/file.py:function")
    if origin == "pickle":
        found = pickle.loads(Path(attribute).read_bytes())
    else:
        found = _attribute(_load(origin), attribute, origin)
    if not callable(found):
        raise SpecError(f"{what} {name!r} is {type(found).__name__}, not a function")
    return found


def check_object(name: str, *, what: str, called: str) -> None:
    """Raises a `SpecError` if `file.py:name` cannot be there, as far as that can be told without running the file."""
    origin, attribute = _split(name, what, called)
    path = _path_of(origin)
    if path is None:
        return
    try:
        names = _top_level_names(path.read_bytes(), str(path))
    except SyntaxError as error:
        raise SpecError(f"{origin} line {error.lineno}: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise SpecError(f"cannot read {origin}: {error}") from None
    if names is not None and attribute not in names:
        raise SpecError(f"{origin} has no {attribute}{_did_you_mean(attribute, names)}")


@lru_cache(maxsize=8)
def _top_level_names(source: bytes, path: str) -> frozenset[str] | None:
    """Returns every name a file binds outside functions and classes. Returns None if that cannot be told without running it.

    The result is kept for a while, because every question about a model checks its name again.
    """
    symbols = symtable.symtable(source.decode(), path, "exec").get_symbols()
    names = frozenset(one.get_name() for one in symbols if one.is_assigned() or one.is_imported())
    return None if "__getattr__" in names or b"import *" in source else names


def _split(name: str, what: str = "model", called: str = "factory") -> tuple[str, str]:
    origin, _, attribute = name.removeprefix("user:").rpartition(":")
    if not origin or not attribute.isidentifier():
        raise SpecError(
            f"{what} {name!r} does not name a {called}: write path/to/file.py:{called} or package.module:{called}"
        )
    return origin, attribute


def _is_file(origin: str) -> bool:
    return origin.endswith(".py") or os.sep in origin


def _path_of(origin: str) -> Path | None:
    """Returns the source file behind an origin (a file or a module), if it has one."""
    if _is_file(origin):
        path = Path(origin).expanduser()
        if not path.is_file():
            raise SpecError(f"no such file: {origin}")
        return path
    _make_importable(Path.cwd())
    try:
        found = importlib.util.find_spec(origin)
    except (ImportError, ValueError):
        found = None
    except Exception as error:  # a parent package may raise anything while it is imported
        raise SpecError(f"module {origin} cannot be found: {one_line(error)}") from error
    if found is None:
        near = closest(origin, [name for name in SOURCES if name not in ("user", "live")])
        raise SpecError(f"no module named {origin!r}{f'; did you mean {near[0]}:?' if near else ''}")
    return Path(found.origin) if found.origin is not None and found.origin.endswith(".py") else None


def _attribute(module: ModuleType, name: str, origin: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if found is None:
        raise SpecError(f"{origin} has no {name}{_did_you_mean(name, vars(module))}")
    if not callable(found):
        raise SpecError(f"{name} in {origin} is {type(found).__name__}, not a function that makes a model")
    return found


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = closest(name, known)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _load(origin: str) -> ModuleType:
    try:
        if _is_file(origin):
            return _load_file(Path(origin).expanduser().resolve())
        _make_importable(Path.cwd())
        return importlib.import_module(origin)
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        raise BenchError("user", f"importing {origin} raised {one_line(error)}") from error


def _load_file(path: Path) -> ModuleType:
    """Runs the file as a module that others can import, because compiling and pickling look its classes up by the module's name.

    It is part of a package if its folder has an `__init__.py`, or if its relative imports say so.
    """
    body = path.read_bytes()
    content = short_hash(body)
    known, module = _loaded.get(path, ("", None))
    if module is not None and known == content:
        return module
    parts, folder = [path.stem], path.parent
    levels = max((node.level for node in ast.walk(ast.parse(body)) if isinstance(node, ast.ImportFrom)), default=0)
    while ((folder / "__init__.py").exists() or len(parts) <= levels) and folder.name.isidentifier():
        parts.insert(0, folder.name)
        folder = folder.parent
    name, taken = ".".join(parts), sys.modules.get(parts[0])
    # Another package, or a module of Python, keeps a name that it already has.
    home = [str(Path(place).resolve()) for place in getattr(taken, "__path__", ())]
    is_others = str(path.parents[len(parts) - 2]) not in home if len(parts) > 1 else taken is not module
    if parts[0] in sys.stdlib_module_names or (taken is not None and is_others):
        name = f"redline_user_{short_hash(str(path.parent))}.{path.stem}"
        sys.modules[name.partition(".")[0]] = parent = ModuleType(name.partition(".")[0])
        parent.__path__ = [str(path.parent)]
    _make_importable(folder)
    if "." in name:
        importlib.import_module(name.rpartition(".")[0])
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        # We do not use the module's loader, because it takes old byte-code for new if a file was changed twice within a second.
        exec(compile(body, path, "exec", dont_inherit=True), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    _loaded[path] = (content, module)
    return module


def _make_importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


SOURCES.register("user")(UserSource())


HANDED_OVER: dict[str, Any] = {}
"""It holds models that cannot be pickled, by the name in their spec. They are for a bench in the very process they live in."""


class LiveSource(OwnSource):
    name = "live"

    def claims(self, model: str) -> bool:
        # A live model is identified by its artifact, never by a name.
        return False

    def check(self, spec: WorkloadSpec) -> None:
        if spec.artifact is None:
            raise SpecError(f"model {spec.model!r} is live but has no artifact: pass the module itself")
        if spec.artifact not in HANDED_OVER and not Path(spec.artifact).is_file():
            raise SpecError(f"no such file: {spec.artifact} (the pickled {spec.model})")
        refuse_options(spec, "classes", "sequence_length", "stem", why="the module is already built")

    def task_of(self, spec: WorkloadSpec) -> Task:
        return spec.task

    def fingerprint(self, spec: WorkloadSpec) -> str:
        return Path(spec.artifact or "").stem  # the desk names the file by its content

    def identity(self, spec: WorkloadSpec) -> str:
        return "live"

    def factory(self, spec: WorkloadSpec) -> Factory:
        opened = _open(spec)
        if spec.task == "generate" and isinstance(opened, tuple) and opened[1] is not None:
            raise SpecError("a generation draws its prompt: leave the inputs out, and say --prompt how long it is")
        return Factory(lambda: opened, None, f"live model {spec.model}")

    def step(self, spec: WorkloadSpec) -> OwnStep:
        handed = _open(spec)
        inputs = NO_INPUTS if handed["inputs"] is None else sort_inputs(handed["inputs"])
        return OwnStep(handed["step"], handed["name"], inputs, setup=handed["setup"], teardown=handed["teardown"])


def _open(spec: WorkloadSpec) -> Any:
    assert spec.artifact is not None
    if spec.artifact in HANDED_OVER:
        return HANDED_OVER[spec.artifact]
    # Classes outside `__main__` were pickled by name, so they must be importable from the current folder.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return pickle.loads(Path(spec.artifact).read_bytes())
    except Exception as error:
        if is_out_of_memory(error):
            raise
        text = f"live model {spec.model} cannot be opened in the worker: {one_line(error)}"
        raise BenchError("user", text) from error


SOURCES.register("live")(LiveSource())


def remember_live(spec: WorkloadSpec) -> Callable[[], None]:
    """Returns a function that restores a module of this process to its present state. What a function changes stays changed."""
    handed = HANDED_OVER.get(spec.artifact or "")
    return remember_module(handed[0]) if isinstance(handed, tuple) and handed else lambda: None


def remember_module(model: nn.Module) -> Callable[[], None]:
    """Returns a function that restores the module: it undoes casts, moves, training steps, changes of mode, and layers,
    weights or methods that were replaced."""
    tensors = [(tensor, _copied(tensor), _copied(tensor.grad)) for tensor in (*model.parameters(), *model.buffers())]
    # A cast replaces the buffer itself, folding and quantizing replace weights and whole layers, compiling and recomputing
    # replace what a block does when it is called, and patches as products replace the class of a convolution. A TorchScript
    # module has views of its parts in their place: nothing can be put there, so nothing was replaced.
    scripts = [(module, module.training) for module in model.modules() if isinstance(module, torch.jit.ScriptModule)]
    kinds = [(module, type(module)) for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    parts = [
        (part, dict(part))
        for module in model.modules()
        for part in (vars(module), module._parameters, module._buffers, module._modules)
        if isinstance(part, dict)
    ]

    def restore() -> None:
        for module, kind in kinds:
            if type(module) is not kind:
                module.__class__ = kind
        for part, then in parts:
            part.clear()
            part.update(then)
        for script, mode in scripts:
            # TorchScript keeps this mode in none of its parts.
            script.training = mode
        for tensor, value, gradient in tensors:
            assert value is not None
            tensor.data, tensor.grad = value, gradient

    return restore


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
