"""The processes that compile kernels are ended, quietly, and start again when they are needed."""

from __future__ import annotations

import logging
import sys

import psutil
import pytest
from torch._inductor import async_compile

from redline.bench.device.compile_pool import MODULE, end_compile_pool


def children() -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [each for each in found if "compile_worker" in " ".join(each.cmdline())]


@pytest.fixture(autouse=True)
def _several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 2)


def test_they_are_ended_while_they_still_begin(caplog: pytest.LogCaptureFixture) -> None:
    first = async_compile.AsyncCompile.process_pool()
    waiting = first.submit(len, "three")
    assert children()
    end_compile_pool()
    assert waiting.done()
    first.shutdown()  # as torch does when a program ends
    assert not children()
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    second = async_compile.AsyncCompile.process_pool()
    assert second is not first
    assert second.submit(len, "four").result(60) == 4
    assert len(children()) > 1
    end_compile_pool()
    assert not children()


def test_there_may_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    end_compile_pool()
    monkeypatch.delitem(sys.modules, MODULE)
    end_compile_pool()
    assert MODULE not in sys.modules
