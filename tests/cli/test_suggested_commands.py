"""A command that a report suggests measures what its records did: typed in again, it gives the same spec."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from invoking import invoke

import redline
from redline.analyze.advice import command_line
from redline.analyze.measurement import Replicates, measurements
from redline.cli.main import RENAMED, filled
from redline.model.errors import UsageError
from redline.model.record import RunRecord
from redline.model.spec import RunSpec
from redline.model.spec_table import specs_from_table, training_table
from redline.search.grid import grid_from_tables
from redline.verbs import NAMES
from redline.verbs.run import Measured
from redline.verbs.workspace import Workspace

EVERYTHING = {
    "task": "train",
    "image_size": 32,
    "classes": 10,
    "sequence_length": 128,
    "optimizer": "adamw",
    "stem": "cifar",
    "device": "cpu",
    "threads": 2,
    "seed": 7,
    "max_memory": "1500MiB",
    "batch_axis": 1,
    "items": 57,
}


SOURCES = sorted(Path(redline.__file__).parent.rglob("*.py"))
GROUP: Any = typer.main.get_command(filled(*NAMES))


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Every text of a program that is no docstring; what an f-string fills in is an X."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else " X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs | inside:
            yield node.value


def test_every_command_that_the_program_names_exists_with_its_options() -> None:
    wrong, seen = [], 0
    for path in SOURCES:
        for text in texts_of(ast.parse(path.read_text("utf-8"))):
            wrong += [f"{path.name}: {name}" for name in re.findall(r"\bredline (\w+)", text) if name in RENAMED]
            for line in re.findall(r"'(redline [a-z][^'\n]*)'", text):
                name, *words = line.partition(" -- ")[0].split()[1:]
                if name == "X":
                    continue  # it is filled in, and tested where that is done
                command = GROUP.commands.get(f"{name} {words[0]}" if words else name) or GROUP.commands.get(name)
                if command is None:
                    wrong.append(f"{path.name}: {line}")
                    continue
                known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
                typed = [word for word in words if re.fullmatch(r"--?[a-z][\w-]*", word)]
                wrong += [f"{path.name}: {line}" for word in typed if word not in known | {"--help"}]
                seen += 1
    assert wrong == []
    assert seen > 30


def spec_of(**table: Any) -> RunSpec:
    (spec,) = specs_from_table({"model": "simple_cnn", **table})
    return spec


def typed(monkeypatch: pytest.MonkeyPatch, line: str) -> list[RunSpec]:
    """What the command line makes of it, with nothing measured."""
    seen: list[RunSpec] = []

    def keep(tables: Sequence[dict[str, Any]], *more: Any, **known: Any) -> Measured:
        seen.extend(grid_from_tables(tables, where=known["where"]).cells)
        return Measured()

    monkeypatch.setattr("redline.verbs.run.measure", keep)
    assert invoke(*shlex.split(line)[1:]).exit_code == 0
    return seen


@pytest.mark.parametrize(
    "table",
    [
        {},
        *({name: value} for name, value in EVERYTHING.items() if name != "optimizer"),  # which needs the task
        EVERYTHING,
        {"max_memory": 123456789},
        {"model": "my models/net.py:make", "recipe": "compile:max-autotune,fullgraph=true"},
    ],
    ids=str,
)
def test_what_is_suggested_measures_the_same_again(monkeypatch: pytest.MonkeyPatch, table: dict[str, Any]) -> None:
    spec = spec_of(batch=4, **table)
    line = command_line("run", spec, batch=4)
    assert line is not None
    assert typed(monkeypatch, line) == [spec]


@pytest.mark.parametrize(
    "how",
    [
        {"no_check": True},
        {"effort": "quick"},
        {"effort": "strict", "tail": True},
        {"launch": {"door": "spawn"}},
        {"effort": "quick", "no_check": True, "launch": {"door": "inline"}},
    ],
    ids=str,
)
def test_what_is_suggested_keeps_how_it_was_measured(monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]) -> None:
    spec = spec_of(batch=4, **how)
    (row,) = measurements([RunRecord(id="a", spec=spec, created_at=0.0)])
    assert typed(monkeypatch, str(row.command("run", ["baseline"]))) == [spec]
    for command in ("profile", "tune"):
        assert invoke(*shlex.split(str(row.command(command)))[1:], "--help").exit_code == 0
    again = Replicates([row] * 3)
    assert "--replicates 3" in str(again.command("run"))


@pytest.mark.parametrize("command", ["run", "batch", "tune", "profile", "profile --memory"])
def test_every_command_that_is_suggested_knows_the_options_it_is_given(command: str) -> None:
    line = command_line(command, spec_of(**EVERYTHING), batch=None if command == "batch" else 4)
    assert line is not None
    assert invoke(*shlex.split(line)[1:], "--help").exit_code == 0
    assert invoke(*shlex.split(line)[1:], "--no-such-option", "--help").exit_code == 2, "which would be noticed"
    of_two = command_line(command, spec_of(task="train", ranks=2), batch=4)
    assert (of_two is None) == (command not in ("run", "profile")), "the others measure one process"
    if of_two is not None:
        assert invoke(*shlex.split(of_two)[1:], "--help").exit_code == 0


def test_a_live_module_has_no_command_line() -> None:
    assert command_line("run", spec_of(model="live:Net", artifact="/somewhere/net.pkl"), batch=4) is None


def test_a_training_is_suggested_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "epochs": 7,
        "target_accuracy": 0.9,
        "deterministic": True,
        "workers": 3,
        "prefetch": False,
        "folder": "/my data",
        "augment": "host",
        "loader_timeout_s": 5.0,
        "stem": "imagenet",
        "seed": 3,
    }
    (spec,) = specs_from_table({"model": "resnet18", **training_table("cifar10", settings), "batch": 64})
    line = command_line("train", spec, batch=64)
    assert line is not None
    assert command_line("run", spec, batch=64) is None
    seen: list[RunSpec] = []

    def keep(specs: Sequence[RunSpec], workspace: Workspace, **_: Any) -> list[RunRecord]:
        seen.extend(specs)
        raise UsageError("enough")

    monkeypatch.setattr("redline.verbs.train.train_specs", keep)
    assert invoke(*shlex.split(line)[1:]).exit_code == 2
    assert seen == [spec]
    fed = command_line("train --find-workers", spec, batch=64)
    assert invoke(*shlex.split(str(fed))[1:]).exit_code == 2
    assert seen[1].train.data == seen[0].train.data  # type: ignore[union-attr]
    assert seen[1].workload == spec.workload
