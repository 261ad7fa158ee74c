"""What the documents say can be followed: links lead somewhere, and commands can be typed as they stand."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from redline.cli.main import filled
from redline.verbs import NAMES

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
GROUP: Any = typer.main.get_command(filled(*NAMES))
COMMANDS: dict[str, Any] = GROUP.commands


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    heads = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-") for head in heads}


def whole_commands(text: str) -> Iterator[str]:
    """Command lines in blocks of code, those over several lines joined, without pipes and comments."""
    for block in re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.match(r"(?:\$ )?(redline \w.*)", line.strip())
            if found:
                yield from re.split(r" [|>] |  #", found[1])[0].split("; ")


def parse(line: str) -> None:
    name, command, words = GROUP.resolve_command(None, shlex.split(line)[1:])
    command.make_context(name, words)


def test_there_are_commands_to_check() -> None:
    assert len([line for path in DOCUMENTS for line in whole_commands(path.read_text("utf-8"))]) > 40


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text("utf-8")):
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        if link.startswith(("http://", "https://")):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_programs_beside_the_source_are_there(path: Path) -> None:
    named = re.findall(r"(?<![\w/])((?:benchmarks|scripts|tests|tools)/[\w/]+\.py)", path.read_text("utf-8"))
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_commands_can_be_typed_as_they_stand(path: Path) -> None:
    """They are parsed and not run: options and commands are there, and values are of their kind."""
    for line in whole_commands(path.read_text("utf-8")):
        parse(line)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_commands_within_sentences_name_options_that_exist(path: Path) -> None:
    wrong = []
    for line in re.findall(r"`redline ([a-z]+[^`]*)`", path.read_text("utf-8")):
        names, words = line.split()[0], line.partition(" -- ")[0]
        two = " ".join(line.split()[:2])
        for name in {two} if two in COMMANDS else set(re.findall(r"[a-z]+", names)) - {"micro"}:
            known = {each for option in COMMANDS[name].params for each in (*option.opts, *option.secondary_opts)}
            typed = re.findall(r"(?<![\w-])--?[a-z][\w-]*", words)
            wrong += [f"{line}: {word}" for word in typed if word not in known | {"--help"}]
    assert wrong == []


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_examples_of_the_help_can_be_typed_as_they_stand(name: str) -> None:
    for line in COMMANDS[name].help.partition("Examples:")[2].strip().splitlines():
        assert len(line) <= 78
        assert line.strip().startswith(f"redline {name}")
        parse(re.split(r" [|>] ", line.strip())[0])
