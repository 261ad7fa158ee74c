"""The plug-in in a pytest of its own, before a fake bench."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

# Loaded here: pytester forgets what a run has imported, and numpy and SQLAlchemy cannot be loaded twice.

PLUGIN = "redline.verbs.pytest_plugin"
pytest_plugins = ["pytester"]

CONFTEST = """
import pytest
from redline.verbs import workspace
from redline.model.record import Failure, Numerics
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape

@pytest.fixture(autouse=True)
def bench(monkeypatch, request):
    slowdown = getattr(request.module, "SLOWDOWN", 1.0)
    memory = getattr(request.module, "MEMORY", 2**28)
    broken = Failure(stage="measure", kind="user", message="it raised") if getattr(request.module, "BROKEN", 0) else None
    sketch = getattr(request.module, "OUTPUTS", ())
    numerics = Numerics(method="unchecked", finite=bool(sketch), sketch=sketch, sketch_signal=1.0)
    truth = Landscape(
        step_s=0.01 * slowdown, memory_bytes=memory, offset_sigma=0.001, seed=int(slowdown * 100),
        failure=lambda spec: broken, numerics=lambda spec: numerics,
    )
    door = FakeDoor(truth)
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
OTHERS = """
import pytest
BROKEN, OUTPUTS = {broken}, {outputs}

class TestClass:
    @pytest.mark.parametrize("size", [1.0, 2.0])
    def test_numerics(self, redline_benchmark, size):
        redline_benchmark(lambda x: x * 2, (size,), device="{device}", fail_on=["numerics"])

def test_skips(redline_benchmark):
    pytest.skip("not here")
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\n")
    return pytester


def run(project: pytest.Pytester, *words: str, slowdown: float = 1.0, memory: int = 2**28) -> pytest.RunResult:
    return run_text(project, TEST.format(slowdown=slowdown, memory=memory), *words)


def run_text(project: pytest.Pytester, text: str, *words: str) -> pytest.RunResult:
    project.makepyfile(test_it=text)
    # Where Redline is installed with this entry point, pytest has found it by itself.
    is_known = any(each.value == PLUGIN for each in entry_points(group="pytest11"))
    return project.runpytest(*([] if is_known else ["-p", PLUGIN]), "-p", "no:cacheprovider", "-p", "no:xdist", *words)


def test_the_first_run_passes_and_the_next_is_set_against_it(project: pytest.Pytester) -> None:
    run(project).assert_outcomes(passed=1)
    run(project).assert_outcomes(passed=1)
    slower = run(project, slowdown=1.2)
    slower.assert_outcomes(failed=1)
    slower.stdout.fnmatch_lines(["*redline: test_it.py::test_speed: slower: time +*threshold 3.0%*"])


def test_what_did_not_pass_is_no_baseline_until_it_is_accepted(project: pytest.Pytester) -> None:
    run(project).assert_outcomes(passed=1)
    for words, passed in (([], 0), ([], 0), (["--redline-accept"], 1), ([], 1)):
        run(project, *words, slowdown=1.2).assert_outcomes(passed=passed, failed=1 - passed)


def test_outputs_are_compared_with_those_of_the_history(project: pytest.Pytester) -> None:
    """Each parameter by itself; a skip is no mistake; another device is measured for the next time."""
    broken = run_text(project, OTHERS.format(broken=1, outputs=(0.5,), device="cuda:0"))
    broken.assert_outcomes(failed=2, skipped=1)
    broken.stdout.fnmatch_lines(["*failed: *it raised*"])
    for outputs, device, passed in [
        ((), "cuda:0", 0),  # not finite, the first time
        ((0.5,), "cuda:0", 2),
        ((0.6,), "cuda:0", 0),
        ((0.6,), "cpu", 2),
        ((), "cpu", 0),
    ]:
        found = run_text(project, OTHERS.format(broken=0, outputs=outputs, device=device))
        found.stdout.fnmatch_lines(["*numerics the outputs are not finite*"] if not outputs else [])
        found.assert_outcomes(passed=passed, failed=2 - passed, skipped=1)


def test_more_memory_fails_where_that_is_asked_for(project: pytest.Pytester) -> None:
    run(project).assert_outcomes(passed=1)
    run(project, memory=2**29).assert_outcomes(failed=1)


def test_it_can_be_skipped(project: pytest.Pytester) -> None:
    run(project, "--redline-skip").assert_outcomes(skipped=1)


def test_a_mistake_is_one_line(project: pytest.Pytester) -> None:
    result = run(project, "--redline-baseline", "tag:nobody")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["redline: no record has the tag 'nobody'*"])
