"""The documents other programs read."""

from __future__ import annotations

import json

import pytest

from redline.show.export import DOCUMENT_SCHEMA, harmless, json_document


def test_every_document_says_what_it_is_first() -> None:
    assert list(json.loads(json_document("models", {"name": "x"}))) == ["schema", "kind", "name"]
    with pytest.raises(AssertionError):
        json_document("show", {"kind": "cuda"})


def test_what_is_not_finite_becomes_null() -> None:
    document = json.loads(json_document("export", {"x": {"deep": [float("nan"), float("-inf")]}}))
    assert document == {"schema": DOCUMENT_SCHEMA, "kind": "export", "x": {"deep": [None, None]}}


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=1+1", "'=1+1"),
        ("+1", "'+1"),
        ("-1", "'-1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\tx", "'\tx"),
        ("\rx", "' x"),
        ("\n=x", "' =x"),
        ("  =x", "'  =x"),
        ("a\nb\r\nc\u2028d", "a b c d"),
        ('say "a,b"; =x', 'say "a,b"; =x'),
        ("模型 🏎️", "模型 🏎️"),
    ],
)
def test_text_stays_text(text: str, cell: str) -> None:
    assert harmless(text) == cell
