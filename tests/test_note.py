"""Code never reads prose: branches look at codes, and texts can only be printed."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from functools import cache
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
"""Names of values that are written for people, as variables, as fields and as keys."""
WORDED = ("told", "traceback", "seen", "next")
"""Further fields that hold such texts."""
NOTES = re.compile(r"(Note|(tuple|list|Sequence|Iterable|Iterator)\[Note(, \.\.\.)?\])( \| None)?")
"""Annotations of what holds notes."""
FIELD = re.compile(r"^    (\w+): ([^=\n]+?)(?: = .*)?$", re.MULTILINE)
"""A field of a class, and its annotation."""
TEXT = ("text", "_text", "_whole", "__str__", "plain")
"""What such a value calls its words."""
SEARCHING = (
    "startswith", "endswith", "find", "rfind", "index", "rindex", "count", "partition", "rpartition", "removeprefix",
    "removesuffix", "match", "search", "fullmatch", "findall", "finditer", "fnmatch", "fnmatchcase", "contains",
    "isdisjoint", "intersection", "issubset", "issuperset", "difference", "eq", "ne", "__eq__", "__ne__", "__contains__",
    "get_close_matches", "commonprefix", "isupper", "islower", "isdigit", "isdecimal", "isnumeric", "isalpha", "isalnum",
    "istitle", "lt", "le", "gt", "ge", "__lt__", "__le__", "__gt__", "__ge__", "bisect", "bisect_left", "bisect_right",
    "insort", "SequenceMatcher", "Counter", "hash", "crc32", "md5", "sha1", "sha256", "blake2b", "remove", "discard",
    "int", "float", "eval", "ord", "subn", "like", "ilike", "regexp_match", "groupby",
)  # fmt: skip
CUTTING = ("split", "rsplit", "replace", "strip", "lstrip", "rstrip")
"""Methods that search where what they look for has letters in it."""
CALLERS = (
    "map",
    "filter",
    "filterfalse",
    "takewhile",
    "dropwhile",
    "groupby",
    "starmap",
    "sorted",
    "min",
    "max",
    "sort",
)
"""Functions that call one of their arguments with another."""
FILLING = ("append", "add", "extend", "insert", "update", "write", "writelines", "setdefault")
"""Methods that put a text into what they are called on."""
PASSES_ON = (
    "str", "repr", "format", "list", "tuple", "set", "frozenset", "dict", "sorted", "reversed", "next", "iter", "map",
    "filter", "min", "max", "enumerate", "zip", "chain", "to_builtins", "escape", "quote", "shorten", "fill",
    "wrap", "dedent", "indent", "sub", "join", "cast", "one_line", "text_of", "because", "bytes", "encode", "decode", "reduce",
    "from_iterable", "literal_eval", "asdict", "astuple", "deepcopy", "copy", "vars", "attrgetter", "itemgetter", "as_text",
    "dumps", "Text", "Path", "UserString", "deque", "array", "asarray",
)  # fmt: skip
"""Functions that give back the text, or the text of the error, that they are given."""
STILL_TEXT = (
    "lower", "upper", "casefold", "title", "capitalize", "strip", "lstrip", "rstrip", "split", "rsplit", "splitlines",
    "replace", "translate", "expandtabs", "encode", "format", "__str__", "__repr__", "__format__", "items", "values", "keys", "copy",
    "getvalue", "decode", "pop",
)  # fmt: skip
"""What these methods return is a text as well, or a collection of texts."""
WHOLE = re.compile(r"_?(failure|verdict|record|finding|advice)")
"""Names of values that hold such texts among others: as a text, they show them."""
RENDERING = ("str", "repr", "format", "astuple", "asdict", "to_builtins", "encode", "dumps", "vars")
ERRORS_OF_ERRORS = ("exceptions", "__cause__", "__context__")
WORDS_OF_ERRORS = ("args", "strerror", "msg", "message", "__notes__")
TRACEBACKS = ("format_exc", "format_exception", "format_exception_only", "format_tb")

ENTRANCES = {
    "note.py": ("__eq__", "__hash__"),
    "bench/device/failure.py": None,
    "bench/watch/facts.py": ("is_out_of_memory", "saw_out_of_memory"),
    "bench/doctor.py": ("judge_compiler",),
    "report/compare.py": ("_remarks",),
    "report/payload.py": ("_packed",),
}
"""Where what foreign programs say is read and turned into kinds and codes: on the bench in the whole file, in these
functions of a watched script's process, which does not load the bench, and for what a compiler prints. A
comparison prints each line once, and the page of a report holds each text of a column once. Two notes are equal where their texts are too."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
RETURNING = (ast.Return, ast.Yield, ast.YieldFrom)
NAMING = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr, ast.For, ast.ExceptHandler, ast.Call, *RETURNING)
"""What gives a variable, or a function, its value."""
Names = frozenset[str]


class Reader:
    """Finds where code compares or searches what is written for people.

    A text is followed through variables, fields of `self`, collections, and functions of the same module. Errors are
    followed too: `name!` stands for a variable that holds one.
    """

    def __init__(self, tree: ast.Module, allowed: tuple[str, ...] = ()) -> None:
        """`allowed`: functions that may."""
        self._allowed = allowed
        self._functions: dict[str, Scope] = {each.name: each for each in ast.walk(tree) if isinstance(each, Function)}
        self._classes = {each.name for each in ast.walk(tree) if isinstance(each, ast.ClassDef)}
        for holder in ast.walk(tree):
            for each in holder.body if isinstance(holder, ast.ClassDef) else ():
                if isinstance(each, Function) and each.name == "__init__":
                    self._functions[holder.name] = each
        self._aliases: dict[str, str] = {}
        """Names that functions and methods are given by an assignment: `has = PATTERN.search`."""
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                self._aliases |= {each.asname: each.name for each in node.names if each.asname}
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._note_alias(node.targets[0].id, node.value)
        self._returning = _note_functions(tree)
        """Functions that return such a text."""
        self._statements: dict[ast.AST, list[ast.AST]] = {}
        self._handed: dict[ast.AST | None, set[str]] = {}
        """By function: parameters that are handed a text somewhere in this module."""
        self._fields: set[str] = set()
        """Of `self`."""
        self._given: set[str] = set()
        """Fields that some object is made with."""
        self.found: list[str] = []
        known = -1
        while known != (known := self._known()):
            self.found.clear()
            self._read(tree, frozenset())

    def _known(self) -> int:
        return len(self._fields) + len(self._given) + len(self._returning) + sum(map(len, self._handed.values()))

    def _note_alias(self, name: str, value: ast.AST) -> None:
        if isinstance(value, ast.Lambda):
            self._functions[name] = value
        if isinstance(value, ast.Name | ast.Attribute) or _makes_function(value):
            self._aliases[name] = _last_name(value)

    def _called(self, node: ast.Call) -> str:
        name = _called(node)
        return self._aliases.get(name, name) if isinstance(node.func, ast.Name) else name

    def _read(self, node: ast.AST, prose: Names) -> None:
        """`prose`: variables that hold such a text here, beside those that are called so."""
        if isinstance(node, ast.FunctionDef) and node.name in self._allowed:
            return
        if isinstance(node, ast.Module | Function):
            prose = self._assigned(node, prose)
        if isinstance(node, Function) and any(
            self._is_prose(each.value, prose) for each in self._statements[node] if isinstance(each, RETURNING)
        ):
            self._returning.add(node.name)
        if isinstance(node, Comprehension):
            prose = self._with_targets(node.generators, prose)
        if any(self._searches(node, prose)):
            self.found.append(f"line {node.lineno}: {ast.unparse(node)}")  # type: ignore[attr-defined]
        if isinstance(node, ast.Call):
            self._hand_over(node, prose)
        for child in ast.iter_child_nodes(node):
            inner = self._in_lambda(node, child, prose) if isinstance(child, ast.Lambda) else prose
            self._read(child, inner)
            if isinstance(child, ast.keyword) and isinstance(child.value, ast.Lambda):
                self._read(child.value, self._in_lambda(node, child.value, prose))

    def _assigned(self, scope: ast.AST, outer: Names) -> Names:
        """With what the scopes around it hold: a function inside another sees its variables."""
        own = (
            {each.arg for each in ast.walk(scope.args) if isinstance(each, ast.arg)}
            if isinstance(scope, Function)
            else set()
        )
        prose: set[str] = {each for each in outer if each.rstrip("!") not in own}
        if scope not in self._statements:
            self._statements[scope] = [each for each in _own_nodes(scope) if isinstance(each, NAMING)]
        statements = self._statements[scope]
        prose |= {f"{each.name}!" for each in statements if isinstance(each, ast.ExceptHandler)}
        if isinstance(scope, Function):
            prose |= {f"{each.arg}!" for each in scope.args.args + scope.args.kwonlyargs if _is_error(each)}
            prose |= self._handed.get(scope, set())
            prose |= {name for name, default in _defaults(scope) if self._is_prose(default, outer)}
        while True:
            more = {name for each in statements for name in self._named(each, frozenset(prose))} - prose
            if not more:
                return frozenset(prose)
            prose |= more

    def _named(self, node: ast.AST, prose: Names) -> Iterator[str]:
        """Variables that hold a text after this statement; fields of `self` are kept for the whole module."""
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from self._unpacked(target, node.value, prose)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
            yield from self._unpacked(node.target, node.value, prose)
        elif isinstance(node, ast.For):
            yield from self._each(node.target, node.iter, prose)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FILLING:
            for value in (*node.args, *(each.value for each in node.keywords)):
                yield from self._unpacked(node.func.value, value, prose)
        elif isinstance(node, ast.Call) and _called(node) == "print":
            for target in (each.value for each in node.keywords if each.arg == "file"):
                yield from self._unpacked(target, ast.Tuple(node.args), prose)
        elif isinstance(node, ast.Call) and _called(node) in ("redirect_stdout", "redirect_stderr"):
            yield from (each.id for each in node.args if isinstance(each, ast.Name))  # whatever is printed meanwhile

    def _unpacked(self, target: ast.AST, value: ast.AST, prose: Names) -> Iterator[str]:
        """One by one where both sides are written out."""
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, other in zip(target.elts, value.elts, strict=True):
                yield from self._unpacked(one, other, prose)
        elif isinstance(target, ast.Tuple | ast.List):
            for one in target.elts:
                yield from self._unpacked(one, value, prose)
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Call):  # globals()["name"] = …
            if isinstance(target.slice, ast.Constant) and self._is_prose(value, prose):
                yield str(target.slice.value)
        elif isinstance(target, ast.Subscript | ast.Starred):
            yield from self._unpacked(target.value, value, prose)
        elif self._is_prose(value, prose):
            if isinstance(target, ast.Name):
                yield target.id
            if isinstance(target, ast.Attribute) and _is_own(target):
                self._fields.add(target.attr)
        elif self._holds_error(value, prose) and isinstance(target, ast.Name):
            yield f"{target.id}!"

    def _each(self, target: ast.AST, iterated: ast.AST, prose: Names) -> Iterator[str]:
        """Of a loop or a comprehension: what its variables are of each turn."""
        if isinstance(iterated, Comprehension) and not isinstance(iterated, ast.DictComp):
            yield from self._unpacked(target, iterated.elt, self._with_targets(iterated.generators, prose))
        elif isinstance(target, ast.Tuple) and isinstance(iterated, ast.Call):
            number = ast.Constant(0)
            parts = {"enumerate": [number, *iterated.args[:1]], "zip": iterated.args, "items": [number, iterated]}
            for one, other in zip(
                target.elts, parts.get(_called(iterated), [iterated] * len(target.elts)), strict=False
            ):
                yield from self._each(one, other, prose)
        else:
            yield from self._unpacked(target, iterated, prose)

    def _with_targets(self, generators: list[ast.comprehension], prose: Names) -> Names:
        for each in generators:
            own = {name.id for name in ast.walk(each.target) if isinstance(name, ast.Name)}
            prose = (prose - own) | set(self._each(each.target, each.iter, prose))
        return prose

    def _hand_over(self, call: ast.Call, prose: Names) -> None:
        """Mark the parameters of this module's functions, and the fields of objects, that this call gives a text or an error."""
        if _called(call)[:1].isupper():
            self._given |= {each.arg for each in call.keywords if each.arg and self._is_prose(each.value, prose)}
        name, values = _last_name(call.func), call.args
        if _called(call) == "partial" and call.args:
            name, values = _last_name(call.args[0]), call.args[1:]
        function = self._functions.get(name) if self._is_ours(call.func) else None
        if function is None:
            return
        own = [each.arg for each in function.args.posonlyargs + function.args.args]
        own = own[1:] if own[:1] in (["self"], ["cls"]) else own
        more = function.args.vararg.arg if function.args.vararg is not None else ""
        named = function.args.kwarg.arg if function.args.kwarg is not None else ""
        known = {*own, *(each.arg for each in function.args.kwonlyargs)}
        given = [*zip(own, values, strict=False), *((more, each) for each in values[len(own) :])]
        given += [(each.arg if each.arg in known else named, each.value) for each in call.keywords]
        for parameter, value in given:
            if parameter and self._is_prose(value, prose):
                self._handed.setdefault(function, set()).add(parameter)
            if parameter and self._holds_error(value, prose):
                self._handed.setdefault(function, set()).add(f"{parameter}!")

    def _is_ours(self, called: ast.AST) -> bool:
        """Whether a function of this module is called: by its name, of `self`, or of a class."""
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            return called.value.id in ("self", "cls", "functools", *self._classes)
        return isinstance(called, ast.Name)

    def _in_lambda(self, call: ast.AST, function: ast.Lambda, prose: Names) -> Names:
        """A function that is handed over with texts is called with them."""
        own = {each.arg for each in function.args.args}
        beside = call.args if isinstance(call, ast.Call) else []
        if isinstance(call, ast.Assign) and isinstance(call.targets[0], ast.Name):
            return (prose - own) | self._handed.get(self._functions.get(call.targets[0].id), set())
        return (prose | own) if any(self._is_prose(each, prose) for each in beside) else (prose - own)

    def _is_prose(self, node: ast.AST | None, prose: Names) -> bool:
        def holds(*parts: ast.AST | None) -> bool:
            return any(self._is_prose(each, prose) for each in parts)

        if isinstance(node, ast.Name):
            return bool(PROSE.fullmatch(node.id)) or node.id in prose
        if isinstance(node, ast.Attribute):
            return (
                bool(PROSE.fullmatch(node.attr))
                or node.attr in WORDED
                or node.attr in note_fields()
                or node.attr in ("_text", "_whole")
                or node.attr in self._given
                or (node.attr in (self._fields | self._returning) and _is_own(node))
                or (node.attr in TEXT and holds(node.value))
                or (node.attr in ("text", "change") and _is_whole(node.value))
                or (node.attr in WORDS_OF_ERRORS and self._holds_error(node.value, prose))
            )
        if isinstance(node, ast.Subscript):
            return holds(node.value) or _is_key(node.slice)
        if isinstance(node, ast.Starred | ast.NamedExpr | ast.Await):
            return holds(node.value)
        if isinstance(node, ast.FormattedValue):
            return holds(node.value) or self._holds_error(node.value, prose) or _is_whole(node.value)
        if isinstance(node, ast.BoolOp | ast.JoinedStr):
            return holds(*node.values)
        if isinstance(node, ast.IfExp):
            return holds(node.body, node.orelse)
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return holds(*node.elts)
        if isinstance(node, ast.Dict):
            return holds(*node.keys, *node.values)
        if isinstance(node, ast.DictComp):
            inner = self._with_targets(node.generators, prose)
            return self._is_prose(node.key, inner) or self._is_prose(node.value, inner)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
            return self._is_prose(node.elt, self._with_targets(node.generators, prose))
        if isinstance(node, ast.BinOp):
            return holds(node.left, node.right)
        return isinstance(node, ast.Call) and self._returns_prose(node, prose)

    def _returns_prose(self, node: ast.Call, prose: Names) -> bool:
        name = self._called(node)
        if name in self._returning and (isinstance(node.func, ast.Name) or _is_own(node.func)):
            return True
        if name == "get" and node.args and _is_key(node.args[0]):
            return True
        if name in STILL_TEXT and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "str":
            return any(self._is_prose(each, prose) for each in node.args)
        if name in TRACEBACKS:
            return True
        if isinstance(node.func, ast.Lambda):
            return self._is_prose(node.func.body, prose)
        if name in ("attrgetter", "itemgetter", "__getattribute__") and any(map(_is_key, _all_arguments(node))):
            return True
        if name in RENDERING and any(map(_is_whole, node.args)):
            return True
        if name == "getattr" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            return self._is_prose(ast.Attribute(node.args[0], str(node.args[1].value)), prose)
        if name == "getattr" and isinstance(node.func, ast.Name):  # a name known only at run time may be the text's
            return self._is_prose(node.args[0], prose)
        if isinstance(node.func, ast.Attribute) and name in STILL_TEXT and self._is_prose(node.func.value, prose):
            return True
        return name in PASSES_ON and any(self._is_prose(e, prose) or self._holds_error(e, prose) for e in node.args)

    def _holds_error(self, node: ast.AST, prose: Names) -> bool:
        if isinstance(node, ast.Subscript):
            return self._holds_error(node.value, prose)
        if isinstance(node, ast.Call):
            return _called(node) in ("exc_info", "exception")
        if isinstance(node, ast.Attribute) and node.attr in ERRORS_OF_ERRORS:
            return self._holds_error(node.value, prose)
        return isinstance(node, ast.Name) and f"{node.id}!" in prose

    def _searches(self, node: ast.AST, prose: Names) -> Iterator[bool]:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            yield any(map(_is_made_with_words, sides))
            for operator, left, right in zip(node.ops, sides, sides[1:], strict=False):
                either = self._is_prose(left, prose) or self._is_prose(right, prose)
                if isinstance(operator, ast.Is | ast.IsNot):  # with None is whether there is one
                    yield either and any(isinstance(each, ast.Constant) and each.value for each in (left, right))
                else:
                    yield either
                yield any(self._is_number_of_texts(each, prose) for each in (left, right))
                if isinstance(operator, ast.In | ast.NotIn):
                    yield _is_rendered(right)
                if isinstance(operator, ast.Eq | ast.NotEq):
                    yield any(self._is_length_of_text(each, prose) for each in (left, right))
        if isinstance(node, ast.Call) and self._called(node) in SEARCHING:
            searched = [node.func.value, *node.args] if isinstance(node.func, ast.Attribute) else node.args
            searched = [*searched, *(each.value for each in node.keywords)]
            yield any(self._is_prose(each, prose) or _is_rendered(each) for each in searched)
        if isinstance(node, ast.Call) and self._called(node) in CALLERS:
            given = [*node.args, *(each.value for each in node.keywords)]
            handed = {self._aliases.get(name, name) for name in map(_last_name, given)}
            texts = [*given, node.func.value] if isinstance(node.func, ast.Attribute) else given
            yield not handed.isdisjoint(SEARCHING) and any(self._is_prose(each, prose) for each in texts)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CUTTING:
            yield self._is_prose(node.func.value, prose) and any(map(_has_letters, node.args))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max", "sorted"):
            keys = [_last_name(each.value) for each in node.keywords if each.arg == "key"]
            yield (not keys or keys == ["str"]) and any(self._is_prose(each, prose) for each in node.args)
        if isinstance(node, ast.Call) and _called(node) == "split":  # by a pattern, as in re.split(PATTERN, text)
            yield any(self._is_prose(each, prose) for each in node.args)
        if isinstance(node, ast.Call) and _called(node) in ("getattr", "hasattr"):
            yield any(self._is_prose(each, prose) for each in node.args[1:2])
        if isinstance(node, ast.Attribute) and node.attr in SEARCHING and isinstance(node.ctx, ast.Load):
            yield self._is_prose(node.value, prose)
        if (
            isinstance(node, ast.Call)
            and _called(node) in ("get", "pop", "setdefault")
            and isinstance(node.func, ast.Attribute)
        ):
            yield any(self._is_prose(each, prose) for each in node.args[:1])
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            yield self._is_prose(node.slice, prose)
            yield isinstance(node.value, ast.Dict) and any(self._is_prose(each, prose) for each in node.value.keys)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitXor | ast.Sub):
            yield self._is_prose(node.left, prose) or self._is_prose(node.right, prose)
        if isinstance(node, ast.Match):
            yield self._is_prose(node.subject, prose)
        if isinstance(node, ast.MatchClass):
            yield any(PROSE.fullmatch(each) or each in (*WORDED, *TEXT) for each in node.kwd_attrs)
        if isinstance(node, ast.MatchMapping):
            yield any(map(_is_key, node.keys))

    def _is_number_of_texts(self, node: ast.AST, prose: Names) -> bool:
        """How many of them differ."""
        if not isinstance(node, ast.Call) or _called(node) != "len" or not node.args:
            return False
        (held,) = node.args
        return isinstance(held, ast.Call) and _called(held) in ("set", "frozenset") and self._is_prose(held, prose)

    def _is_length_of_text(self, node: ast.AST, prose: Names) -> bool:
        """Of one text, whose exact length would tell it from another; several notes may be counted."""
        if not isinstance(node, ast.Call) or _called(node) != "len" or not node.args:
            return False
        (text,) = node.args
        is_one = (
            _called(text) == "str" if isinstance(text, ast.Call) else _last_name(text) in ("message", "_text", "text")
        )
        return is_one and self._is_prose(text, prose)


def _called(node: ast.Call) -> str:
    """The last name of what is called: `search` of `re.search`."""
    return _last_name(node.func)


def _last_name(node: ast.AST) -> str:
    """`search` of `re.search` and of `partial(re.search, "noisy")`; `find` of `methodcaller("find", "noisy")`."""
    if isinstance(node, ast.Call) and _makes_function(node) and node.args:
        first = node.args[0]
        return str(first.value) if isinstance(first, ast.Constant) else _last_name(first)
    if isinstance(node, ast.Call):  # of a function that another one makes: attrgetter("_text")(note)
        return _last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _makes_function(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
        "partial",
        "methodcaller",
    )


@cache
def note_fields() -> frozenset[str]:
    """Names under which structs and classes hold notes, by their annotations, and nothing but notes and texts."""
    found: dict[str, set[bool | None]] = {}
    for path in SOURCE.rglob("*.py"):
        for name, annotation in FIELD.findall(path.read_text("utf-8")):
            found.setdefault(name, set()).add(
                None if annotation.startswith("str") else bool(NOTES.fullmatch(annotation))
            )
    return frozenset(name for name, kinds in found.items() if True in kinds and False not in kinds)


def _note_functions(tree: ast.Module) -> set[str]:
    """Functions that return notes, by their annotations: of this module, and those it imports from others."""
    functions = set(_of_notes(tree))
    for each in tree.body:
        if isinstance(each, ast.ImportFrom) and (each.module or "").startswith("redline."):
            path = SOURCE.joinpath(*(each.module or "").split(".")[1:]).with_suffix(".py")
            theirs = _of_notes(tree_of(path)) if path.exists() and path.name != "note.py" else set()
            functions |= {one.asname or one.name for one in each.names if one.name in theirs}
    return functions


@cache
def _of_notes(tree: ast.Module) -> frozenset[str]:
    holders = [tree, *(each for each in tree.body if isinstance(each, ast.ClassDef))]
    functions = [each for holder in holders for each in holder.body if isinstance(each, Function)]
    return frozenset(each.name for each in functions if each.returns is not None and _is_of_notes(each.returns))


def _is_of_notes(annotation: ast.AST) -> bool:
    return "Note" in ast.dump(annotation) and bool(NOTES.fullmatch(ast.unparse(annotation)))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def _defaults(function: Function) -> Iterator[tuple[str, ast.AST | None]]:
    """Parameters with their default values."""
    own = [*function.args.posonlyargs, *function.args.args]
    yield from zip((each.arg for each in reversed(own)), reversed(function.args.defaults), strict=False)
    yield from zip((each.arg for each in function.args.kwonlyargs), function.args.kw_defaults, strict=True)


def _all_arguments(node: ast.Call) -> list[ast.expr]:
    """With those of the call that makes the function: attrgetter("message")(failure)."""
    return [*node.args, *(node.func.args if isinstance(node.func, ast.Call) else [])]


def _is_whole(node: ast.AST) -> bool:
    return isinstance(node, ast.Name | ast.Attribute) and bool(WHOLE.fullmatch(_last_name(node)))


def _is_made_with_words(node: ast.AST) -> bool:
    """A struct that is compared with another, text and all: Failure(kind="oom", message="out of memory")."""
    return isinstance(node, ast.Call) and any(
        PROSE.fullmatch(each.arg or "") and _has_letters(each.value) for each in node.keywords
    )


def _has_letters(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and any(each.isalpha() for each in str(node.value))


def _is_own(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _is_key(node: ast.AST) -> bool:
    """A key under which plain tables hold what is written for people."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(PROSE.fullmatch(node.value))


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
    return Reader(ast.parse(source), allowed).found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_module_compares_or_searches_a_text(path: Path) -> None:
    allowed = ENTRANCES.get(str(path.relative_to(SOURCE)), ())
    if allowed is None:
        pytest.skip("classifies what foreign libraries say")
    assert Reader(tree_of(path), allowed).found == []


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
        'if "noisy" in note.text: pass',
        'if getattr(note, "_text").rstrip(".") == "noisy": pass',
        "colour = COLOURS[str(reason)]",
        'code, said = note.code, str(note)\nif "noisy" in said: pass',
        'said: str = failure.message if failure else ""\nif "memory" in said: pass',
        'said = ""\nsaid += str(reason)\nif "noisy" in said: pass',
        'for place, said in enumerate(map(str, record.notes)):\n    if said == "noisy": pass',
        'texts = {each.code: str(each) for each in record.notes}\nif "noisy" in texts["spread"]: pass',
        'if "memory" in failure.told: pass',
        'if "memory" in plain["failure"]["message"]: pass',
        'if fnmatch(str(note), "*noisy*"): pass',
        'found = filter(lambda each: "noisy" in each, map(str, record.notes))',
        'first = min(record.notes, key=lambda each: "noisy" in str(each))',
        'if {"noisy"} & set(map(str, record.notes)): pass',
        'if "CUDA" in traceback.format_exc(): pass',
        'if re.sub("[0-9]", "", str(reason)) == "noisy": pass',
        'match str(note).split():\n    case ["noisy", *_]: pass',
        "def f(line):\n    return PATTERN.match(line)\n\n\nfound = [f(str(each)) for each in record.notes]",
        'class C:\n    def f(self):\n        self.said = str(note)\n\n    def g(self):\n        return "noisy" in self.said',
        'if str(note).__contains__("noisy"): pass',
        'if str(note) > "m": pass',
        'if "noisy" in note._whole[2]: pass',
        'plain = msgspec.structs.asdict(note)\nif plain["_text"] == "noisy": pass',
        'if "noisy" in msgspec.json.encode(note).decode(): pass',
        'if b"noisy" in msgspec.json.encode(record.notes): pass',
        'def words(each): return str(each)\nif "noisy" in words(note): pass',
        'words = str\nif "noisy" in words(note): pass',
        'if "noisy" in str.lower(str(note)): pass',
        'said = str(sys.exc_info()[1])\nif "x" in said: pass',
        "has = PATTERN.search\nif has(str(note)): pass",
        'find = str(note).find\nif find("noisy") >= 0: pass',
        'found = str(note) is "x"',
        "if str(note).isupper(): pass",
        'if not str(note).replace("noisy", ""): pass',
        'if len(str(note).split("noisy")) > 1: pass',
        'class A:\n    def m(self):\n        return self.record.failure.message\n    def n(self):\n        return "oom" in self.m()',
        'def f(failure):\n    m = failure.message\n    def g():\n        return "oom" in m\n    return g',
        'f = lambda m: "oom" in m\nf(failure.message)',
        'if "oom" in failure.get("message", ""): pass',
        'match failure:\n    case Failure(message="oom"): pass',
        'if note.text.__eq__("noisy"): pass',
        'if str.__eq__(str(note), "x"): pass',
        'if eq(str(note), "x"): pass',
        "if difflib.get_close_matches(str(note), known): pass",
        'said = io.StringIO(); said.write(str(note))\nif "noisy" in said.getvalue(): pass',
        'said = [] ; said.append(str(note))\nif "noisy" in said: pass',
        'said.update(x=str(note))\nif "noisy" in said["x"]: pass',
        'if bytes(str(note), "utf8").startswith(b"x"): pass',
        'if set(str(note).split()) >= {"noisy"}: pass',
        'if {"noisy"} <= set(str(note).split()): pass',
        'if set(str(note).split()) - {"noisy"}: pass',
        'if os.path.commonprefix([str(note), "x"]): pass',
        'if functools.reduce(lambda a, b: a + b, map(str, record.notes)).startswith("x"): pass',
        'from itertools import chain\nif "x" in chain.from_iterable(map(str, record.notes)): pass',
        'said = ast.literal_eval(repr(str(note)))\nif said == "x": pass',
        "if hash(str(note)) == 5: pass",
        'found = {"noisy": 1}.setdefault(str(note), 2)',
        'if Counter(str(note).split())["noisy"]: pass',
        'globals()["m"] = str(note)\nif m == "x": pass',
        'if filter(re.compile("noisy").search, map(str, record.notes)): pass',
        'if any(map("noisy".__eq__, map(str, record.notes))): pass',
        'if partial(re.search, "noisy")(str(note)): pass',
        'has = functools.partial(re.search, "noisy")\nif has(str(note)): pass',
        'has = methodcaller("startswith", "noisy")\nif has(str(note)): pass',
        'from re import search as look\nif look("noisy", str(note)): pass',
        'if attrgetter("_text")(note) == "noisy": pass',
        'if getattr(note, name) == "noisy": pass',
        'if "noisy" in each._text: pass',
        'if vars(note)["_text"] == "noisy": pass',
        "if float(str(note).split()[0]) > 5: pass",
        'if bisect_left(["m"], str(note)): pass',
        'if operator.lt(str(note), "m"): pass',
        "if zlib.crc32(str(note).encode()) == 5: pass",
        'if SequenceMatcher(None, str(note), "noisy").ratio() > 0.9: pass',
        "known.remove(str(note))",
        'from redline.analyze.compare import why_broken\nif "noisy" in str(why_broken(row)): pass',
        'def f(row) -> Note | None:\n    return row.x\nif "noisy" in str(f(row)): pass',
        'if "noisy" in as_text(record.notes): pass',
        "if len(str(note)) == 5: pass",
        "if len(failure.message) != 5: pass",
        'print(note, file=said)\nif "noisy" in said.getvalue(): pass',
        'with redirect_stdout(said):\n    print(note)\nif "noisy" in said.getvalue(): pass',
        'x = getattr(self, f"on_{note}")',
        'def f(*texts): return any("oom" in each for each in texts)\nf(failure.message)',
        'def f(**texts): return "oom" in texts["a"]\nf(a=failure.message)',
        'x = {failure.message: 1}["oom"]',
        "x = sorted(record.notes, key=str)",
        "x = max(map(str, record.notes))",
        "x = itertools.groupby(map(str, record.notes))",
        "if len(set(map(str, record.notes))) > 1: pass",
        "if ord(str(note)[0]) == 3: pass",
        'if note.__format__("") == "oom": pass',
        "if PATTERN.search(string=str(note)): pass",
        'if re.split("oom", str(note))[1:]: pass',
        'if re.subn("oom", "", str(note))[1]: pass',
        'if UserString(note) == "oom": pass',
        'if Path(str(note)) == Path("oom"): pass',
        'if Text(str(note)).plain.startswith("oom"): pass',
        'y = deque([failure.message])\nif "x" in y: pass',
        'x = np.array(list(map(str, record.notes))) == "x"',
        'row = Row(words=str(note))\nif row.words == "oom": pass',
        'class Row:\n    def __init__(self, words): self.words = words\n    def f(self): return "x" in self.words\nRow(str(note))',
        'if "oom" in str(record.failure): pass',
        'if "oom" in f"{record.failure!r}": pass',
        'if "oom" in repr(record): pass',
        'if json.dumps(msgspec.to_builtins(record)).find("oom") > 0: pass',
        'if "x" in msgspec.structs.astuple(failure): pass',
        'if record.failure == Failure(stage="a", kind="b", message="oom"): pass',
        'try: go()\nexcept* OSError as group:\n    if "x" in str(group.exceptions[0]): pass',
        'try: go()\nexcept OSError as error:\n    if "x" in str(error.__cause__): pass',
        'if "host" in finding.next: pass',
        'if advice.text == "x": pass',
        'if "oom" in item.seen: pass',
        'def outer():\n    def inner(t=str(note)):\n        return "x" in t\n    return inner',
        'class A:\n    @property\n    def said(self): return str(self.note)\n    def go(self): return "x" in self.said',
        'class A:\n    @staticmethod\n    def check(t): return "x" in t\nA.check(failure.message)',
        'def check(t): return "x" in t\nfunctools.partial(check, failure.message)()',
        'if (lambda: failure.message)() == "x": pass',
        'def g():\n    yield failure.message\nfor m in g():\n    if m == "x": pass',
        'def g():\n    yield from map(str, record.notes)\nif "x" in list(g()): pass',
        'if "x" in operator.attrgetter("message")(failure): pass',
        'if "x" in failure.__getattribute__("message"): pass',
        'select(t).where(t.c.message.like("%x%"))',
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
        'for code, said in texts_of(record.notes).items():\n    print(said, end="" if code == "spread" else "\\n")',
        "for place, said in enumerate(record.notes):\n    print(place == 0, said)",
        "table[row.name] = reason\nif row.name == name: pass",
        "def f(line):\n    print(line)\n\n\nf(str(note))",
        "if str(note) is not None and len(str(note)) < width: print(note)",
        "if len(record.notes) == 1: print(record.notes[0])",
        "print(note, file=said)\nprint(said.getvalue())",
        'words = str(error).split(", ")\nprint(words[0])',
        "lines = []\nlines.append(str(note))\nif lines: print(lines)",
        "def f(record):\n    return record.failure.message\n\n\nprint(f(record))",
        'match failure:\n    case Failure(kind="oom"): pass',
        'if record.failure == Failure(stage="a", kind="oom", message=""): pass',
        'print(repr(failure), f"{record.failure}")',
        "for said in sorted(record.notes, key=lambda each: each.code): print(said)",
        'print(Row(words=str(note)).words, "x" in row.names)',
    ],
)
def test_the_test_lets_codes_and_printing_pass(source: str) -> None:
    assert readings_of(source) == []
