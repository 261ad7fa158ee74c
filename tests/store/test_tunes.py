"""Searches in the history: the last word counts, and one process at a time has it."""

from __future__ import annotations

import pytest

from redline.model.errors import UsageError
from redline.store import History, TuneRow


def row(name: str, state: str = "running", created_at: float = 1.0) -> TuneRow:
    return TuneRow(name=name, created_at=created_at, model="resnet18", task="infer", state=state)


def test_a_search_is_rewritten_as_more_is_known(history: History) -> None:
    ledger = history.tunes()
    assert ledger.load("study") is None
    ledger.save(row("study"), b"one")
    ledger.save(row("study", "done"), b"two")
    ledger.save(row("newer", created_at=2.0), b"three")
    assert ledger.load("study") == b"two"
    assert [(each.name, each.state) for each in ledger.rows()] == [("newer", "running"), ("study", "done")]


def test_a_search_is_held_by_one(location: str) -> None:
    with History.open(location) as one, History.open(location) as other:
        with one.tunes().held("study"):
            with other.tunes().held("another"):
                pass
            with pytest.raises(UsageError, match="is being run by process"), other.tunes().held("study"):
                pass
        with other.tunes().held("study"):
            pass
