"""The command line before a fake bench: a file of tests says which, as its fixture `door`."""

from __future__ import annotations

import pytest
from invoking import Redline, invoke

from redline.testing.fake import FakeDoor
from redline.verbs import workspace


@pytest.fixture
def redline(door: FakeDoor, monkeypatch: pytest.MonkeyPatch) -> Redline:
    """Whatever door is asked for is that one."""
    monkeypatch.setattr(workspace, "open_door", lambda launch: door)
    return invoke
