"""The desk stays light: no torch anywhere, no plotting before a plot, and `--help` loads no library of ours but typer."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import redline
from redline.verbs import home_of

HEAVY = ("torch", "torchvision", "matplotlib", "plotly")


DESK = (
    "cli.main",
    "verbs.profile",
    "verbs.run",
    "verbs.report",
    "verbs.quick",
    "verbs.study",
    "verbs.tune",
    "verbs.doctor",
    "launch",
)


def test_the_desk_loads_nothing_heavy() -> None:
    # A process of its own: other tests have loaded torch into this one.
    code = f"""
import importlib, sys
for module in {DESK}:
    importlib.import_module(f"redline.{{module}}")
    print([(module, name) for name in {HEAVY} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["[]"] * len(DESK)), done.stderr


def test_help_loads_no_command_s_body() -> None:
    code = (
        "import sys, redline.cli.main; print([name for name in ('rich', 'sqlalchemy', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_check_can_fail() -> None:
    code = f"import sys, plotly; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['plotly']"


def test_no_folder_imports_in_a_circle() -> None:
    """Lazy imports count too. A folder's own modules are one node, and each of its subfolders is another."""
    try:
        TopologicalSorter(folder_imports(Path(redline.__file__).parent)).prepare()
    except CycleError as error:
        pytest.fail(f"folders that import each other: {' -> '.join(reversed(error.args[1]))}")


def test_a_circle_of_folders_is_found(tmp_path: Path) -> None:
    """Also one that only a function closes, and one between a folder and its own subfolder."""
    for name, text in {
        "__init__.py": "",
        "a/__init__.py": "",
        "a/one.py": "import redline.b.two",
        "a/deep/__init__.py": "",
        "a/deep/three.py": "",
        "b/__init__.py": "",
        "b/two.py": "def lazily():\n    from redline.a.deep import three",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    straight = folder_imports(tmp_path)
    assert straight == {"redline.a": {"redline.b"}, "redline.b": {"redline.a.deep"}}
    for closing in (
        "def lazily():\n    from redline.a import one",
        "from .. import one",
        "from ..one import thing",
        "import importlib\n\nimportlib.import_module('redline.a.one')",
        "one = __import__('redline.a.one')",
        "import redline.a.one as other",
        "if TYPE_CHECKING:\n    from redline.a.one import Thing",
    ):
        (tmp_path / "a/deep/three.py").write_text(closing)
        with pytest.raises(CycleError):
            TopologicalSorter(folder_imports(tmp_path)).prepare()


@pytest.mark.parametrize("used", ["from redline import tune", "import redline\n\nredline.tune()"])
def test_a_circle_through_the_package_s_face_is_found(tmp_path: Path, used: str) -> None:
    for name in ("verbs", "analyze"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "verbs/tune.py").write_text("import redline.analyze.pairs")
    (tmp_path / "analyze/pairs.py").write_text(used)
    with pytest.raises(CycleError):
        TopologicalSorter(folder_imports(tmp_path)).prepare()


@cache
def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


LAZY = {
    "__init__.py": "public names are loaded when they are first used",
    "verbs/pytest_plugin.py": "pytest loads it at every start",
    "verbs/watch.py": "the hooks load torch, in a program that uses it",
    "bench/supervisor.py": "torch is loaded once the desk is there",
    "bench/recipe/switches/generation.py": "the kernels load triton, which only GPUs need",
    "bench/worker.py": "torch is loaded once the connection stands",
    "compat/micro.py": "the bench loads torch",
    "launch/inline.py": "the bench loads torch",
}
"""Files beside the commands that import modules of Redline inside of functions, and why."""


def test_own_modules_are_imported_at_the_top() -> None:
    package = Path(redline.__file__).parent
    files = {file.relative_to(package).as_posix(): file for file in package.rglob("*.py")}
    found = {name for name, file in files.items() if not name.startswith("cli/") and any(lazy_imports(file))}
    assert found - LAZY.keys() == set()


def lazy_imports(file: Path) -> Iterator[int]:
    """Lines inside of functions that import a module of Redline."""
    for function in nodes_of(file.read_text()):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in (each for each in ast.walk(function) if isinstance(each, ast.Import | ast.ImportFrom)):
                is_from = isinstance(node, ast.ImportFrom)
                names = [node.module or ""] if is_from else [alias.name for alias in node.names]
                if any(name.partition(".")[0] == "redline" for name in names):
                    yield node.lineno


def folder_imports(package: Path) -> dict[str, set[str]]:
    """By folder: the other folders that its modules import anywhere in their code.

    A file of the top folder is a room of its own. The package's face is no node: a public name that is taken from there
    counts as taken from the module that holds it.
    """
    files = {_module_name(file, package): file for file in package.rglob("*.py")}
    del files["redline"]
    folders = {name: _folder_name(name, file, package) for name, file in files.items()}
    found: dict[str, set[str]] = {}
    for name, file in files.items():
        targets = {folders[target] for target in _imported(file, name, files)} - {folders[name]}
        if targets:
            found.setdefault(folders[name], set()).update(targets)
    return found


def _imported(file: Path, name: str, files: Mapping[str, Path]) -> set[str]:
    names: set[str] = set()
    for node in nodes_of(file.read_text()):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names |= _imported_from(node, name, is_package=file.stem == "__init__", files=files)
        elif isinstance(node, ast.Call):  # by a name in quotes
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                names.update(str(each.value) for each in node.args if isinstance(each, ast.Constant))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "redline":
            names.update(_home_of(node.attr))
    return names & files.keys()


def _imported_from(node: ast.ImportFrom, name: str, *, is_package: bool, files: Mapping[str, Path]) -> set[str]:
    module = node.module or ""
    if node.level:
        above = name.split(".")[: len(name.split(".")) - node.level + is_package]
        module = ".".join([*above, *([module] if module else [])])
    if module == "redline":
        taken = {home for alias in node.names for home in _home_of(alias.name)}
        return taken | {f"redline.{alias.name}" for alias in node.names}
    return {f"{module}.{alias.name}" for alias in node.names} & files.keys() or {module}


def _home_of(public: str) -> set[str]:
    home = home_of(public)
    return set() if home is None else {home}


def _module_name(file: Path, package: Path) -> str:
    parts = file.relative_to(package).with_suffix("").parts
    return ".".join(("redline", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def _folder_name(module: str, file: Path, package: Path) -> str:
    return module if file.parent == package else ".".join(("redline", *file.relative_to(package).parent.parts))
