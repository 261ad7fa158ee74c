"""The user's own model: `path/to/file.py:factory` or `package.module:factory`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from redline.bench.device.failure import is_out_of_memory, one_line
from redline.bench.workload.batch import contract_axes, size_along
from redline.bench.workload.called import OwnStep, batch_parameter, call_with, is_named_as_step
from redline.bench.workload.decoder import generator_workload
from redline.bench.workload.fingerprint import code_fingerprint, short_hash
from redline.bench.workload.handed import (
    Handed,
    KnownBatch,
    batch_to_ask,
    sort_out,
    workload_of,
    workload_of_step,
)
from redline.bench.workload.hf_decoder import own_decoder
from redline.bench.workload.inputs import Inputs, seeded
from redline.bench.workload.source import SOURCES, Source, refuse_options
from redline.bench.workload.structure import describe, hides_something
from redline.bench.workload.workload import Workload, choose_batch
from redline.model.errors import BenchError, SpecError, closest
from redline.model.note import Note
from redline.model.spec import Task, WorkloadSpec

_loaded: dict[Path, tuple[str, ModuleType]] = {}


class UserSource(Source):
    is_built_elsewhere = True
    writes_text = True

    def claims(self, model: str) -> bool:
        return ":" in model or model.endswith(".py")

    def check(self, spec: WorkloadSpec) -> None:
        """Look without running: the user's file may do anything when imported."""
        refuse_options(spec, "classes", "sequence_length", "stem", why="the factory decides it")
        check_object(spec.model.removeprefix("user:"), what="model", called="factory")

    def task_of(self, spec: WorkloadSpec) -> Task:
        return "step" if spec.task == "infer" and is_named_as_step(_split(spec.model)[1]) else spec.task

    def fingerprint(self, spec: WorkloadSpec) -> str:
        path = _path_of(_split(spec.model)[0])
        return code_fingerprint(path) if path is not None else ""

    def build(self, spec: WorkloadSpec, seed: int) -> Workload:
        return self._build(spec, seed, None)

    def build_for(self, spec: WorkloadSpec, seed: int, inputs: Inputs) -> Workload:
        return self._build(spec, seed, inputs)

    def _build(self, spec: WorkloadSpec, seed: int, inputs: Inputs | None) -> Workload:
        if spec.task == "generate":
            return self._generator(spec, seed)
        origin, name = _split(spec.model)
        module = _load(origin)
        whose = f"factory {name} in {origin}"
        factory = _attribute(module, name, origin)
        notes: list[Note] = []
        if spec.task == "step":
            step = OwnStep(factory, name, setup=_beside(module, "setup"), teardown=_beside(module, "teardown"))
            return workload_of_step(step, spec, source="user", identity=_identity(module, name), seed=seed)
        parameter = batch_parameter(factory, whose)
        known = batch_to_ask(parameter, spec, notes)
        make = _Factory(factory, parameter, whose)
        handed = _made(make, known, seed, notes)
        if known is not None and handed.inputs is not None and not _follow(make, handed.inputs, known.size, seed):
            if spec.batch is not None:
                raise SpecError(_ignored(make, spec.batch))
            known, notes = None, []  # whatever that parameter is, it is not the batch
        return workload_of(
            handed,
            spec,
            whose=whose,
            source="user",
            identity=_identity(module, name),
            seed=seed,
            notes=notes,
            known=known,
            again=make.inputs,
            data=inputs,
        )

    def _generator(self, spec: WorkloadSpec, seed: int) -> Workload:
        """The factory's model with a prompt of tokens it knows."""
        origin, name = _split(spec.model)
        module = _load(origin)
        whose = f"factory {name} in {origin}"
        factory = _attribute(module, name, origin)
        notes: list[Note] = []
        batch = choose_batch(spec.batch, "generate", notes)
        handed = _Factory(factory, batch_parameter(factory, whose), whose)(batch, seed)
        decoder = own_decoder(handed.model, spec, batch, seed, whose)
        return generator_workload(decoder, source="user", identity=_identity(module, name), seed=seed, notes=notes)


@dataclass(frozen=True)
class _Factory:
    """The user's factory, called with the batch and the seed where it takes them."""

    function: Callable[..., Any]
    parameter: inspect.Parameter | None
    whose: str

    def __post_init__(self) -> None:
        if isinstance(self.function, nn.Module):
            name = self.whose.removeprefix("factory ")
            raise SpecError(
                f"{name} is a model, not a function that makes one: write `def build(): return model, inputs`"
            )

    def __call__(self, batch: int | None, seed: int) -> Handed:
        return sort_out(call_with(self.function, self.parameter, batch, seed, self.whose), self.whose)

    def inputs(self, seed: int, batch: int | None) -> Inputs:
        """The inputs alone, of another seed. The model that comes with them is let go."""
        with seeded(seed):
            inputs = self(batch, seed).inputs
        if inputs is None:
            raise BenchError("user", f"{self.whose} gave no inputs this time")
        return inputs


def _made(make: _Factory, known: KnownBatch | None, seed: int, notes: list[Note]) -> Handed:
    try:
        return make(known.size if known else None, seed)
    except BenchError as error:
        # What was returned, or could not be imported, does not hang on the batch.
        if error.kind != "user" or not notes or isinstance(error.__cause__, ImportError | None):
            raise
        raise BenchError(
            "user", f"{error} ({notes[0]}; --batch sets another)"
        ) from error  # the default may not suit it


def _follow(make: _Factory, inputs: Inputs, batch: int, seed: int) -> bool:
    """Whether the inputs hold as many items as the factory was told to make.

    By the contract the first input shows it. Packed and ragged inputs and graphs do not: then the factory is asked for twice
    as many, without memory if its code allows that, and must give other inputs. A factory that takes no other batch is believed.
    """
    axes = contract_axes(inputs)
    if (axes and size_along(inputs, axes) == batch) or hides_something(inputs):
        return True
    for mode in (torch.device("meta"), nullcontext()):
        with suppress(Exception), mode:
            return describe(make.inputs(seed, 2 * batch)) != describe(inputs)
    return True


def _ignored(make: _Factory, batch: int) -> str:
    return (
        f"{make.whose} takes {make.parameter.name if make.parameter else 'batch'} but gives the same inputs for "
        f"{batch} and {2 * batch}: make the inputs with it, or leave it out"
    )


def load_function(name: str, what: str) -> Callable[..., Any]:
    """The user's function behind `path/to/file.py:name`, `package.module:name` or `pickle:PATH`; `what` it is for."""
    origin, _, attribute = name.rpartition(":")
    if origin == "pickle":
        found = pickle.loads(Path(attribute).read_bytes())
    elif origin:
        module = _load(origin)
        if not hasattr(module, attribute):
            raise SpecError(f"{origin} has no {attribute}{_did_you_mean(attribute, vars(module))}")
        found = getattr(module, attribute)
    else:
        raise SpecError(f"{what} {name!r} does not name a function: write path/to/file.py:function")
    if not callable(found):
        raise SpecError(f"{what} {name!r} is {type(found).__name__}, not a function")
    return found


def check_object(name: str, *, what: str, called: str) -> None:
    """Raise a `SpecError` where `file.py:name` cannot be there, as far as that can be told without running the file."""
    origin, attribute = _split(name, what, called)
    path = _path_of(origin)
    if path is not None:
        _check_attribute(path, origin, attribute)


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
    """The source file behind an origin (a file or a module), where it has one."""
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
    except Exception as error:  # a parent package that raises while it is imported
        raise SpecError(f"module {origin} cannot be found: {one_line(error)}") from error
    if found is None:
        sources = [name for name in SOURCES if name not in ("user", "live")]
        near = [f"{name}:" for name in closest(origin, sources)]
        raise SpecError(f"no module named {origin!r}{f'; did you mean {near[0]}?' if near else ''}")
    return Path(found.origin) if found.origin is not None and found.origin.endswith(".py") else None


def _check_attribute(path: Path, origin: str, factory: str) -> None:
    try:
        names = _top_level_names(path.read_bytes(), str(path))
    except SyntaxError as error:
        raise SpecError(f"{origin} line {error.lineno}: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise SpecError(f"cannot read {origin}: {error}") from None
    if names is not None and factory not in names:
        raise SpecError(f"{origin} has no {factory}{_did_you_mean(factory, names)}")


@lru_cache(maxsize=8)
def _top_level_names(source: bytes, path: str) -> frozenset[str] | None:
    """Every name a file binds outside functions and classes; None where that cannot be told without running it.

    Kept for a while: every question about a model checks its name again.
    """
    names: set[str] = set()
    waiting: list[ast.AST] = list(ast.parse(source, filename=path).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name == "__getattr__":
                return None
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            if any(alias.name == "*" for alias in node.names):
                return None
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        else:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            waiting += ast.iter_child_nodes(node)
    return frozenset(names)


def _attribute(module: ModuleType, name: str, origin: str) -> Callable[..., Any]:
    factory = getattr(module, name, None)
    if factory is None:
        raise SpecError(f"{origin} has no {name}{_did_you_mean(name, vars(module))}")
    if not callable(factory):
        raise SpecError(f"{name} in {origin} is {type(factory).__name__}, not a function that makes a model")
    return factory


def _beside(module: ModuleType, name: str) -> Callable[..., Any] | None:
    """A function of this name that the file itself defines: an imported one, such as setuptools' setup, is not meant."""
    found = getattr(module, name, None)
    return found if callable(found) and getattr(found, "__module__", None) == module.__name__ else None


def _did_you_mean(name: str, known: Any) -> str:
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
    """Run the file as a module others can import: compiling and pickling look its classes up by the module's name."""
    body = path.read_bytes()
    content = short_hash(body)
    if path in _loaded and _loaded[path][0] == content:
        return _loaded[path][1]
    package = _package_of(path, body)
    name = f"{package}.{path.stem}" if package else _module_name(path)
    if not package:
        _make_importable(path.parent)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        # Not by its loader: that takes old byte-code for new where a file was changed twice within a second.
        exec(compile(body, path, "exec", dont_inherit=True), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    _loaded[path] = (content, module)
    return module


def _package_of(path: Path, body: bytes) -> str:
    """The package a file belongs to, imported; empty for a file on its own.

    It belongs to one where its folder has an `__init__.py`, or where it says so by relative imports.
    """
    levels = max((node.level for node in ast.walk(ast.parse(body)) if isinstance(node, ast.ImportFrom)), default=0)
    folders: list[Path] = []
    folder = path.parent
    while (folder / "__init__.py").exists() or len(folders) < levels:
        if not folder.name.isidentifier():
            break
        folders.insert(0, folder)
        folder = folder.parent
    if not folders:
        return ""
    _make_importable(folder)
    package = ".".join(each.name for each in folders)
    found = importlib.import_module(package)
    if str(path.parent) in {str(Path(origin).resolve()) for origin in found.__path__}:
        return package
    # Another package of that name was imported first: this one goes by a name of its own.
    other = f"redline_user_{short_hash(str(path.parent))}"
    twin = ModuleType(other)
    twin.__path__ = [str(path.parent)]
    sys.modules.setdefault(other, twin)
    return other


def _module_name(path: Path) -> str:
    """The file's own name, so that a neighbour importing it gets the same module; another where that one is taken."""
    name = path.stem
    taken = sys.modules.get(name)
    is_ours = path in _loaded and _loaded[path][1] is taken
    if name.isidentifier() and name not in sys.stdlib_module_names and (taken is None or is_ours):
        return name
    return f"redline_user_{short_hash(str(path))}"


def _make_importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _identity(module: ModuleType, factory: str) -> str:
    """The content of the file, not its path: moving it does not make another model."""
    file = getattr(module, "__file__", None)
    content = short_hash(Path(file).read_bytes()) if file and Path(file).is_file() else module.__name__
    return f"user {content} {factory}"


SOURCES.register("user")(UserSource())
