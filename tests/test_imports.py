"""The desk stays light: no torch anywhere, no plotting before a plot, and `--help` loads no library of ours but typer."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import redline

HEAVY = ("torch", "torchvision", "matplotlib", "plotly")


DESK = ("cli.main", "api.run", "api.profile", "api.report", "api.quick", "api.race", "api.tune", "api.doctor", "launch")


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
    code = "import sys, redline.cli.main; print([name for name in ('rich', 'msgspec', 'sqlalchemy', 'numpy') if name in sys.modules])"
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
    (tmp_path / "a/deep/three.py").write_text("def lazily():\n    from redline.a import one")
    with pytest.raises(CycleError):
        TopologicalSorter(folder_imports(tmp_path)).prepare()


def folder_imports(package: Path) -> dict[str, set[str]]:
    """By folder: the other folders that its modules import anywhere in their code.

    A file of the top folder is a room of its own. The package's face is no node: it loads public names on first use.
    """
    files = {_module_name(file, package): file for file in package.rglob("*.py")}
    del files["redline"]
    folders = {name: _folder_name(name, file, package) for name, file in files.items()}
    found: dict[str, set[str]] = {}
    for name, file in files.items():
        targets = {folders[target] for target in _imported(file, files)} - {folders[name]}
        if targets:
            found.setdefault(folders[name], set()).update(targets)
    return found


def _imported(file: Path, files: Mapping[str, Path]) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= inner & files.keys() or {node.module}
    return names & files.keys()


def _module_name(file: Path, package: Path) -> str:
    parts = file.relative_to(package).with_suffix("").parts
    return ".".join(("redline", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def _folder_name(module: str, file: Path, package: Path) -> str:
    return module if file.parent == package else ".".join(("redline", *file.relative_to(package).parent.parts))
