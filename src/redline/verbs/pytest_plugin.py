"""In this pytest plug-in, `redline_benchmark` measures a module or a function and fails the test when it got slower.

    def test_speed(redline_benchmark):
        redline_benchmark(model, inputs, threshold=0.05, fail_on=["memory", "numerics"])

The first run has nothing to compare with: it measures, passes, and says so. Records go into the history, under the name
of the test and of the folder that pytest takes for the project. What did not pass is no baseline of later runs, unless it was
run with `--redline-accept`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # nothing of Redline is loaded for tests that do not measure
    from redline.analyze.checks import CheckName
    from redline.analyze.gate import GateRow

RedlineBenchmark = Callable[..., "GateRow"]
HAS_PASSED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("redline", "benchmarks of Redline")
    group.addoption(
        "--redline-baseline",
        default="history",
        metavar="WHAT",
        help="what redline_benchmark compares with: history (default), tag:NAME, or a file of records",
    )
    group.addoption(
        "--redline-accept", action="store_true", help="pass, and compare later runs with what is measured now"
    )
    group.addoption("--redline-skip", action="store_true", help="skip tests that use redline_benchmark")
    group.addoption(
        "--redline-undecided",
        choices=("ok", "fail"),
        default="ok",
        help="whether an undecided benchmark passes (default) or fails",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call":
        item.stash[HAS_PASSED] = report.passed
    return report


@pytest.fixture
def redline_benchmark(request: pytest.FixtureRequest) -> Iterator[RedlineBenchmark]:
    """Measure a module or a function against the history; returns what the gate says of it."""
    config = request.config
    if config.getoption("--redline-skip"):
        pytest.skip("--redline-skip")
    measured = 0

    def benchmark(
        model: Any,
        inputs: Any = None,
        *,
        name: str | None = None,
        threshold: float = 0.03,
        fail_on: Sequence[CheckName] = (),
        **settings: Any,
    ) -> GateRow:
        from redline.model.errors import RedlineError
        from redline.verbs.gate import against_history

        nonlocal measured
        measured += 1
        told = name or request.node.nodeid + (f" ({measured})" if measured > 1 else "")
        baseline, accept = config.getoption("--redline-baseline"), config.getoption("--redline-accept")
        try:
            row = against_history(
                model,
                inputs,
                name=f"{config.rootpath.name}/{told}",
                threshold=threshold,
                fail_on=fail_on,
                baseline=baseline,
                accept=accept,
                **settings,
            )
        except RedlineError as error:
            pytest.fail(f"redline: {error}", pytrace=False)
        said = f"{told}: {row}"
        request.node.add_report_section("call", "redline", said)
        undecided = row.undecided and not any(known.code == "no-baseline" for known in row.notes)
        if accept and row.verdict != "failed":
            return row
        if row.failed or (undecided and config.getoption("--redline-undecided") == "fail"):
            pytest.fail(f"redline: {said}", pytrace=False)
        return row

    yield benchmark
    if not measured and request.node.stash.get(HAS_PASSED, False):
        pytest.fail("redline_benchmark was not called", pytrace=False)
