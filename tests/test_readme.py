"""`docs/internals.md` is true: it names every room, and the files and functions that it names are there."""

from __future__ import annotations

import re
from pathlib import Path

import redline

PACKAGE = Path(redline.__file__).parent
ROOT = Path(__file__).parents[1]
MAP = (ROOT / "docs/internals.md").read_text("utf-8")


def test_every_room_is_on_the_map() -> None:
    """A folder has a row of its own, or its parent's row names it."""
    rows = dict(re.findall(r"^\| `([\w/]+/)` \| (.+) \|$", MAP, re.M))
    folders = {path.parent for path in PACKAGE.rglob("*") if path.is_file() and path.parent.name != "__pycache__"}
    rooms = sorted(f"{folder.relative_to(PACKAGE)}/" for folder in folders - {PACKAGE})
    parents = {room: f"{Path(room).parent}/" for room in rooms}
    missing = [
        room for room in rooms if room not in rows and f"`{Path(room).name}/`" not in rows.get(parents[room], "")
    ]
    assert missing == []
    assert sorted(set(rows) - set(rooms)) == []


def test_every_file_on_the_map_is_there() -> None:
    words = re.findall(r"`([\w/]+\.py)`", MAP)
    assert [word for word in words if not any(PACKAGE.rglob(word)) and not any(ROOT.glob(f"*/{word}"))] == []
    folders = re.findall(r"`((?:[\w]+/)+)`", MAP)
    assert [each for each in folders if not any(PACKAGE.rglob(each.rstrip("/"))) and not (ROOT / each).is_dir()] == []


def test_each_walk_names_functions_of_the_file_before_them() -> None:
    """In `api/run.py` `run`, the file defines the function."""
    pairs = re.findall(r"`([\w/]+\.py)`\s+`(\w+)`", MAP)
    assert len(pairs) > 40
    texts = {file: (PACKAGE / file).read_text("utf-8") for file, _ in pairs}
    assert [(file, name) for file, name in pairs if not re.search(rf"^(def|class) {name}\b", texts[file], re.M)] == []
