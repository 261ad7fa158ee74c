"""The map in the README is true: it names every room, and the files it walks through are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import redline

PACKAGE = Path(redline.__file__).parent
README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
MAP = README.partition("## The map of the code")[2].partition("\n## ")[0]
WALKS = MAP.partition("Walks through it")[2].partition("Words that mean")[0]


def rooms() -> Iterator[str]:
    """Folders of the package, and the modules that stand beside them."""
    for path in sorted(PACKAGE.rglob("*")):
        relative = path.relative_to(PACKAGE)
        if path.is_dir() and path.name != "__pycache__" and any(each.is_file() for each in path.iterdir()):
            yield f"{relative}/"
        if path.suffix == ".py" and path.parent == PACKAGE and not path.name.startswith("__"):
            yield str(relative)


@pytest.mark.parametrize("room", list(rooms()))
def test_every_room_is_on_the_map(room: str) -> None:
    """By its path, or by its name in the row of the folder that it is in."""
    rows = [line for line in MAP.splitlines() if line.startswith("| `")]
    parent, _, name = room.rstrip("/").rpartition("/")
    inside = [row for row in rows if row.startswith(f"| `{parent}/`") and f"`{name}/`" in row]
    assert inside or any(f"`{room}`" in row.split("|")[1] for row in rows)


def test_every_file_on_the_map_is_there() -> None:
    words = re.findall(r"`([\w/]+\.py)`", MAP)
    found = [any(PACKAGE.rglob(word)) or (PACKAGE.parents[1] / word).is_file() for word in words]
    assert [word for word, is_there in zip(words, found, strict=True) if not is_there] == []


def test_each_walk_names_functions_of_the_file_before_them() -> None:
    """`api/run.py` `run`: the file defines the function."""
    pairs = re.findall(r"`([\w/]+\.py)`\s+`(\w+)`", WALKS)
    assert len(pairs) > 40
    texts = {file: (PACKAGE / file).read_text("utf-8") for file, _ in pairs}
    assert [(file, name) for file, name in pairs if not re.search(rf"^(def|class) {name}\b", texts[file], re.M)] == []
