"""Which work belongs to the recorded steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from kineto import ADD, GEMM, Time, TraceMaker
from strangers import Program

from redline.trace.window import recorded, steps_of

US = 1000


def running_ahead(steps: int = 3) -> TraceMaker:
    """The host is a step ahead: 900 µs of work from before run while the first step is launched."""
    maker = TraceMaker()
    for number in range(9):
        maker.kernel(GEMM, (10 + 100 * number) * US, 99 * US)
    at = 910
    for step in range(steps):
        begin = 50 + 300 * step
        maker.annotation(f"ProfilerStep#{step}", begin * US, 300 * US)
        for number in range(4):
            maker.kernel(ADD, at * US, 99 * US, launched=(begin + 10 + 10 * number) * US)
            at += 100
    return maker


def test_work_from_before_the_window_is_a_row_of_its_own() -> None:
    profile = running_ahead().profile()
    assert profile.timeline.span_s == pytest.approx(1200e-6, rel=0.01)
    assert profile.steps.mean_s == pytest.approx(400e-6, rel=0.01)
    assert [row.name for row in profile.kernels] == [ADD]
    assert profile.classes[0].calls == 12
    assert (profile.outside.before_work, profile.outside.before_s) == (9, pytest.approx(891e-6))
    assert profile.outside.between_work == 0


def test_a_diff_per_step_does_not_inherit_it(tmp_path: Path) -> None:
    from redline.analyze.profile_diff import diff_profiles
    from redline.verbs.capture import read_profile

    running_ahead(2).write(tmp_path / "a.json")
    running_ahead(4).write(tmp_path / "b.json")
    diff = diff_profiles(read_profile(tmp_path / "a.json"), read_profile(tmp_path / "b.json"))
    assert diff.step.before_s == pytest.approx(400e-6, rel=0.01)
    assert diff.step.after_s == pytest.approx(400e-6, rel=0.01)
    assert diff.step.change == "same"


def test_without_marks_of_steps_only_early_work_is_left_out() -> None:
    maker = running_ahead()
    maker.events = [event for event in maker.events if not event["name"].startswith("ProfilerStep")]
    found = recorded(maker.read())
    assert (found.outside.before_work, len(found.trace.work)) == (9, 12)
    assert steps_of([found]) is None


def test_work_whose_launch_is_missing_in_the_middle_still_counts() -> None:
    maker = running_ahead()
    maker.kernel("nobody's", 1000 * US + 99_500, 400)  # between two kernels of the steps
    profile = maker.profile()
    assert {row.name for row in profile.kernels} == {ADD, "nobody's"}
    assert any(row.source == "no-launch" for row in profile.operators)


def test_work_launched_between_two_steps_keeps_the_device_busy() -> None:
    """Marks may leave time between them: a device that works for an evaluation there is not idle."""
    maker = TraceMaker()
    for step in range(3):
        begin = 1000 * US * step
        maker.annotation(f"ProfilerStep#{step}", begin, 498 * US)
        maker.kernel(GEMM, begin + 20 * US, 480 * US, launched=begin + 12 * US)
        maker.kernel(ADD, begin + 501 * US, 500 * US, launched=begin + (490 if step == 2 else 499) * US + 500)
    profile = maker.profile()
    assert {row.name: row.calls for row in profile.kernels} == {GEMM: 3, ADD: 3}
    assert profile.timeline.idle_s < 100e-6
    assert profile.idle.dependency_s + profile.idle.unknown_s < 10e-6, "launched in time"


def test_work_launched_after_the_last_step_is_told_apart() -> None:
    maker = TraceMaker()
    maker.annotation("ProfilerStep#1", 0, 100 * US)
    maker.kernel(GEMM, 20 * US, 50 * US, launched=10 * US)
    maker.kernel(ADD, 200 * US, 50 * US, launched=150 * US)  # after the step
    profile = maker.profile()
    assert [row.name for row in profile.kernels] == [GEMM]
    assert (profile.outside.between_work, profile.outside.between_s) == (1, pytest.approx(50e-6))


def test_a_step_may_begin_and_end_with_a_wait() -> None:
    """One step that loads for 300 µs, computes for 100 and logs for 200 took 600, not 100."""
    maker = TraceMaker()
    maker.annotation("ProfilerStep#1", 0, 600 * US)
    maker.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 290 * US)
    maker.kernel(GEMM, 300 * US, 100 * US, launched=292 * US)
    profile = maker.profile()
    assert profile.timeline.span_s == pytest.approx(600e-6)
    assert profile.idle.data_wait_s == pytest.approx(290e-6)
    (loader,) = [finding for finding in profile.findings if finding.code == "data-wait"]
    assert loader.gain_bound == pytest.approx(600 / 310, rel=0.01)


def test_no_launch_in_the_whole_file_means_all_of_it_counts() -> None:
    maker = TraceMaker()
    for number in range(5):
        maker.kernel(GEMM, number * 100 * US, 99 * US)
    profile = maker.profile()
    assert profile.kernels[0].calls == 5
    assert not profile.outside


@pytest.mark.parametrize(
    ("ahead_us", "waits", "host_us", "is_told"),
    [
        (0, False, 110, False),
        (0, True, 110, False),
        (30, False, 110, False),  # a slow device starts its work so late
        (30, True, 110, True),
        (500, False, 110, True),
        (500, True, 110, True),
        (-300, False, 110, True),
        (500, False, 20, False),  # a device that is behind anyway tells nothing
    ],
)
def test_clocks_that_disagree_are_found_and_aligned(ahead_us: int, waits: bool, host_us: int, is_told: bool) -> None:
    program = Program()
    for number in range(5):
        begin = program.now
        program.products(40, 50 * US, host=host_us * US)
        if waits:
            program.wait("cudaDeviceSynchronize")
        program.step(number, begin)
    for event in program.maker.events:
        if event["cat"] == "kernel":
            event["ts"] = Time(event["ts"].nanoseconds + ahead_us * US)
    found = program.profile()
    assert ("clocks-disagree" in {note.code for note in found.notes}) is is_told
    assert found.findings[0].code == "host-bound" if host_us > 50 else not found.idle.host_wait_s > 1e-3
