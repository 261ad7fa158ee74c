"""The plug-in in a pytest of its own, before a fake bench."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

PLUGIN = "redline.api.pytest_plugin"
pytest_plugins = ["pytester"]

CONFTEST = """
import pytest
from redline.api import workspace
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape

@pytest.fixture(autouse=True)
def bench(monkeypatch, request):
    slowdown = getattr(request.module, "SLOWDOWN", 1.0)
    memory = getattr(request.module, "MEMORY", 2**28)
    door = FakeDoor(Landscape(step_s=0.01 * slowdown, memory_bytes=memory, offset_sigma=0.001, seed=int(slowdown * 100)))
    monkeypatch.setattr(workspace, "open_door", lambda launch: door)
"""
TEST = """
SLOWDOWN, MEMORY = {slowdown}, {memory}

def double(x):
    return x * 2

def test_speed(redline_benchmark):
    row = redline_benchmark(double, (1.0,), device="cuda:0", fail_on=["memory"])
    assert row.threshold == 0.03
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\n")
    return pytester


def run(project: pytest.Pytester, *words: str, slowdown: float = 1.0, memory: int = 2**28) -> pytest.RunResult:
    project.makepyfile(test_it=TEST.format(slowdown=slowdown, memory=memory))
    # Where Redline is installed with this entry point, pytest has found it by itself.
    is_known = any(each.value == PLUGIN for each in entry_points(group="pytest11"))
    return project.runpytest(*([] if is_known else ["-p", PLUGIN]), "-p", "no:cacheprovider", "-p", "no:xdist", *words)


def test_the_first_run_passes_and_the_next_is_set_against_it(project: pytest.Pytester) -> None:
    run(project).assert_outcomes(passed=1)
    run(project).assert_outcomes(passed=1)
    slower = run(project, slowdown=1.2)
    slower.assert_outcomes(failed=1)
    slower.stdout.fnmatch_lines(["*redline: test_it.py::test_speed: slower: time +*threshold 3.0%*"])


def test_more_memory_fails_where_that_is_asked_for(project: pytest.Pytester) -> None:
    run(project).assert_outcomes(passed=1)
    run(project, memory=2**29).assert_outcomes(failed=1)


def test_it_can_be_skipped(project: pytest.Pytester) -> None:
    run(project, "--redline-skip").assert_outcomes(skipped=1)


def test_a_mistake_is_one_line(project: pytest.Pytester) -> None:
    result = run(project, "--redline-baseline", "tag:nobody")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["redline: no record in * has the tag 'nobody'*"])
