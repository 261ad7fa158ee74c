"""Code never reads prose: branches look at codes, and texts can only be printed."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest

import redline
from redline.note import Code, Note, note, notes_from_texts

SOURCE = Path(redline.__file__).parent

CONTENDED = note("contended", "ran 8 % faster", about="throughput")


class TestNote:
    def test_prints_as_its_text_on_one_line(self) -> None:
        assert str(note("note", "two\n   lines")) == "two lines"
        assert f"fp16: {CONTENDED}" == "fp16: ran 8 % faster"

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
    unused = [code for code in get_args(Code) if code != "note" and f'"{code}"' not in sources]
    assert not unused


PROSE = re.compile(r"_?(message|reasons?|evidence|notes?|noted|remarks?|refusal|usage|mend|why|sentence)")
"""Names of values that are written for people, as variables and as fields."""
SEARCHING = (
    "startswith", "endswith", "find", "rfind", "index", "rindex", "count", "partition", "rpartition", "removeprefix",
    "removesuffix", "match", "search", "fullmatch", "findall", "finditer",
)  # fmt: skip
PASSES_ON = (
    "str", "repr", "list", "tuple", "set", "sorted", "next", "map", "one_line", "text_of", "because",
)  # fmt: skip
"""Functions that give back the text, or the text of the error, that they are given."""
WORDS_OF_ERRORS = ("args", "strerror", "msg", "message")
STILL_TEXT = ("lower", "upper", "strip", "splitlines", "split", "replace", "casefold")
"""What these methods return is a text as well."""

ENTRANCES = {"bench/device/failure.py": None, "bench/watch/facts.py": ("is_out_of_memory", "saw_out_of_memory")}
"""Where what foreign libraries say is read and turned into kinds and codes: on the bench in the whole file, and in these
functions of a watched script's process, which does not load the bench."""

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class Reader:
    """Finds where code compares or searches what is written for people."""

    def __init__(self, allowed: tuple[str, ...] = ()) -> None:
        """`allowed`: functions that may."""
        self.found: list[str] = []
        self._allowed = allowed

    def read(self, node: ast.AST, prose: frozenset[str] = frozenset()) -> None:
        """`prose`: variables that hold such a text here, beside those that are called so."""
        if isinstance(node, ast.FunctionDef) and node.name in self._allowed:
            return
        if isinstance(node, ast.Module | Scope):
            prose = self._assigned(node)
        if isinstance(node, Comprehension):
            prose = self._with_targets(node.generators, prose)
        if any(self._searches(node, prose)):
            self.found.append(f"line {node.lineno}: {ast.unparse(node)}")  # type: ignore[attr-defined]
        for child in ast.iter_child_nodes(node):
            self.read(child, prose)

    def _assigned(self, scope: ast.AST) -> frozenset[str]:
        prose: set[str] = set()
        statements = list(_own_nodes(scope))
        errors = {f"{each.name}!" for each in statements if isinstance(each, ast.ExceptHandler)}
        if isinstance(scope, Scope):
            errors |= {f"{each.arg}!" for each in scope.args.args + scope.args.kwonlyargs if _is_error(each)}
        while True:
            more = {name for each in statements for name in self._named(each, frozenset(prose | errors))} - prose
            if not more:
                return frozenset(prose | errors)
            prose |= more

    def _named(self, node: ast.AST, prose: frozenset[str]) -> Iterator[str]:
        if isinstance(node, ast.Assign) and self._is_prose(node.value, prose):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        if isinstance(node, ast.NamedExpr) and self._is_prose(node.value, prose):
            yield node.target.id
        if isinstance(node, ast.For) and self._is_prose(node.iter, prose) and isinstance(node.target, ast.Name):
            yield node.target.id

    def _with_targets(self, generators: list[ast.comprehension], prose: frozenset[str]) -> frozenset[str]:
        for each in generators:
            if isinstance(each.target, ast.Name):
                name = {each.target.id}
                prose = prose | name if self._is_prose(each.iter, prose) else prose - name
        return prose

    def _is_prose(self, node: ast.AST | None, prose: frozenset[str]) -> bool:
        if isinstance(node, ast.Name):
            return bool(PROSE.fullmatch(node.id)) or node.id in prose
        if isinstance(node, ast.Attribute):
            return bool(PROSE.fullmatch(node.attr)) or (
                node.attr in WORDS_OF_ERRORS and self._holds_error(node.value, prose)
            )
        if isinstance(node, ast.Subscript | ast.Starred | ast.NamedExpr):
            return self._is_prose(node.value, prose)
        if isinstance(node, ast.BoolOp):
            return any(self._is_prose(each, prose) for each in node.values)
        if isinstance(node, Comprehension) and not isinstance(node, ast.DictComp):
            return self._is_prose(node.elt, self._with_targets(node.generators, prose))
        if isinstance(node, ast.JoinedStr):
            return any(self._is_prose(each, prose) for each in node.values)
        if isinstance(node, ast.FormattedValue):
            return self._is_prose(node.value, prose) or self._holds_error(node.value, prose)
        if isinstance(node, ast.BinOp):
            return self._is_prose(node.left, prose) or self._is_prose(node.right, prose)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            is_error = any(self._holds_error(each, prose) for each in node.args)
            return node.func.id in PASSES_ON and (is_error or any(self._is_prose(each, prose) for each in node.args))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "join":
                return any(self._is_prose(each, prose) for each in node.args)
            return node.func.attr in STILL_TEXT and self._is_prose(node.func.value, prose)
        return False

    def _holds_error(self, node: ast.AST, prose: frozenset[str]) -> bool:
        return isinstance(node, ast.Name) and f"{node.id}!" in prose

    def _searches(self, node: ast.AST, prose: frozenset[str]) -> Iterator[bool]:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for operator, left, right in zip(node.ops, sides, sides[1:], strict=False):
                if isinstance(operator, ast.In | ast.NotIn | ast.Eq | ast.NotEq):
                    yield self._is_prose(left, prose) or self._is_prose(right, prose)
                if isinstance(operator, ast.In | ast.NotIn):
                    yield _is_rendered(right)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SEARCHING:
            yield any(self._is_prose(each, prose) or _is_rendered(each) for each in (node.func.value, *node.args))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            yield any(self._is_prose(each, prose) for each in node.args[:1])
        if isinstance(node, ast.Match):
            yield self._is_prose(node.subject, prose)


def _is_error(argument: ast.arg) -> bool:
    """Whether a function takes an exception or a warning here, by its annotation or by its name."""
    annotation = ast.unparse(argument.annotation) if argument.annotation is not None else ""
    return bool(re.search(r"(Exception|Error|Warning|WarningMessage)\b", annotation)) or argument.arg == "error"


def _is_rendered(node: ast.AST) -> bool:
    """The result of a function that words something for people."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith(("_text", "_line"))


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Of a function or a module, without the functions inside it."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, Scope):
            yield child
            yield from _own_nodes(child)


def readings_of(source: str, allowed: tuple[str, ...] = ()) -> list[str]:
    reader = Reader(allowed)
    reader.read(ast.parse(source))
    return reader.found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_module_compares_or_searches_a_text(path: Path) -> None:
    allowed = ENTRANCES.get(str(path.relative_to(SOURCE)), ())
    if allowed is None:
        pytest.skip("classifies what foreign libraries say")
    assert readings_of(path.read_text("utf-8"), allowed) == []


@pytest.mark.parametrize(
    "source",
    [
        'if "host" in row.bound.evidence: pass',
        'if row.failure.message.startswith("fp16:"): pass',
        'shown = [note for note in verdict.notes if "without a ratio" in note]',
        'found = next(each for each in verdict.reasons if each == "noisy")',
        'found = any(re.search("locked", why) for why in record.notes)',
        'lowered = str(record.failure.message).lower()\nif "out of memory" in lowered: pass',
        'try: go()\nexcept OSError as error:\n    if "locked" in str(error): pass',
        'style = "red" if error_text(numerics).endswith("x") else ""',
        'match answer.usage:\n    case "no": pass',
        'if (said := record.failure.message) != "": pass',
        'def f(error: Exception):\n    said = str(error)\n    return isinstance(error, OSError) and "meta" in said',
        'def f(error):\n    return error.args[0] == "locked"',
        'try: go()\nexcept OSError as error:\n    if "locked" in f"it says: {error}": pass',
        'if "contended" in ", ".join(map(str, verdict.reasons)): pass',
        'if one_line(error := caught()).startswith("CUDA"): pass\ntry: go()\nexcept OSError as error:\n    if one_line(error) == "x": pass',
        "kind = KINDS.get(failure.message)",
        "def f(failure):\n    said = failure.message.splitlines()[0]\n    return PATTERN.search(said)",
    ],
)
def test_the_test_sees_a_branch_on_a_sentence(source: str) -> None:
    assert readings_of(textwrap.dedent(source))


@pytest.mark.parametrize(
    "source",
    [
        'if note.code == "contended": pass',
        "if row.failure.message: pass",
        "if numerics.reason is None: pass",
        'print(f"{row.recipe}: {reason}", ", ".join(map(str, verdict.reasons)))',
        "first = str(error).splitlines()[0]",
        'if "exited" in event: pass',
    ],
)
def test_the_test_lets_codes_and_printing_pass(source: str) -> None:
    assert readings_of(source) == []
