"""Code never reads prose: branches look at codes, and texts can only be printed."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

import redline
from redline.model.note import RETIRED, Code, Note, note, notes_from_texts

SOURCE = Path(redline.__file__).parent

CONTENDED = note("contended", "ran 8 % faster", about="throughput")


class TestNote:
    def test_carries_code_about_and_text_in_json(self) -> None:
        plain = {"code": "contended", "about": "throughput", "text": "ran 8 % faster"}
        assert msgspec.to_builtins(CONTENDED) == plain
        assert msgspec.convert(plain, Note) == CONTENDED

    def test_refuses_a_code_nobody_knows(self) -> None:
        with pytest.raises(msgspec.ValidationError, match="no-such-code"):
            msgspec.convert({"code": "no-such-code", "text": "x"}, Note)

    def test_two_are_equal_where_all_of_it_is(self) -> None:
        assert note("note", "a") == note("note", "a")
        assert len({note("note", "a"), note("note", "a"), note("note", "b"), note("failed", "a")}) == 3

    def test_its_text_can_be_neither_compared_nor_searched(self) -> None:
        with pytest.raises(TypeError, match="look at its code"):
            assert CONTENDED == "ran 8 % faster"
        with pytest.raises(TypeError, match="look at its code"):
            assert CONTENDED != "ran 8 % faster"
        with pytest.raises(TypeError, match="look at its code"):
            assert "faster" in CONTENDED
        with pytest.raises(TypeError):
            re.search("faster", CONTENDED)  # type: ignore[call-overload]
        for method in ("startswith", "endswith", "find", "split", "text"):
            assert not hasattr(CONTENDED, method)

    def test_texts_of_before_become_notes_and_nothing_else_does(self) -> None:
        assert notes_from_texts(["old", {"code": "note", "text": "new"}]) == [
            {"code": "note", "about": "", "text": "old"},
            {"code": "note", "text": "new"},
        ]
        assert notes_from_texts(None) is None


def test_every_code_is_used_somewhere() -> None:
    sources = "\n".join(path.read_text("utf-8") for path in SOURCE.rglob("*.py") if path.name != "note.py")
    unused = [code for code in get_args(Code) if code not in RETIRED and f'"{code}"' not in sources]
    assert not unused


PROSE = (
    "message",
    "reason",
    "reasons",
    "evidence",
    "notes",
    "remarks",
    "refusal",
    "usage",
    "traceback",
    "text",
    "_text",
)
"""Fields that hold what is written for people."""
SEARCHES = ("startswith", "endswith", "find", "index", "count", "removeprefix", "removesuffix", "search", "match")
ENTRANCES = ("model/note.py", "bench/device/failure.py", "bench/doctor.py")
"""Files that turn what foreign programs say into kinds and codes, and so must read it."""


def readings_of(source: str) -> list[str]:
    """The places where a sentence is compared with a text or searched for one."""

    def is_prose(node: ast.AST) -> bool:
        if isinstance(node, ast.Call):  # str(note), error.message.lower()
            return is_prose(node.func.value) if isinstance(node.func, ast.Attribute) else any(map(is_prose, node.args))
        return isinstance(node, ast.Attribute) and node.attr in PROSE

    def is_text(node: ast.AST) -> bool:
        return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(node.value)

    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(map(is_prose, sides)) and any(map(is_text, sides)):
                found.append(ast.unparse(node))
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", "") in SEARCHES
            and any(map(is_prose, [node.func.value, *node.args]))
        ):
            found.append(ast.unparse(node))
    return found


def test_no_module_reads_a_sentence() -> None:
    """`Note` refuses this when the code runs; here failures, findings and whatever no test runs are looked at too."""
    files = [path for path in SOURCE.rglob("*.py") if str(path.relative_to(SOURCE)) not in ENTRANCES]
    assert {str(path): found for path in files if (found := readings_of(path.read_text("utf-8")))} == {}
    assert readings_of('if "noisy" in str(note.text): pass')
    assert readings_of('x = failure.message.lower().startswith("CUDA") or row.evidence == "host"')
    assert not readings_of('if note.code == "noisy" and not failure.message: print(failure.message)')
