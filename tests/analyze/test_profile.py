"""A profile as a whole: several ranks, damaged files, and what the record beside the trace changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from by_hand import make_block, make_record
from kineto import ADD, GEMM, TraceMaker, training_trace

from redline.analyze.profile import profile_of
from redline.model.record import RunRecord, TraceRef
from redline.model.spec import Recipe
from redline.trace.decode import read_trace, read_traces

US = 1000


def two_steps(*, late_us: int = 0, names: tuple[str, str] = (GEMM, ADD)) -> TraceMaker:
    """Two steps of two kernels of 100 µs; with `late_us` the host launches each kernel so late."""
    maker = TraceMaker()
    at = 100 * US
    for number in range(2):
        begin = at - 50 * US
        for name in names:
            maker.kernel(name, at, 100 * US, launched=at - 2 * US if late_us else begin + US, call_ns=100)
            at += 100 * US + max(late_us * US, US)
        maker.annotation(f"ProfilerStep#{number}", begin, at - 60 * US - begin)
    return maker


def test_phases_are_told_apart_and_shares_add_up(tmp_path: Path) -> None:
    training_trace(tmp_path / "a.json", megabytes=4)
    profile = profile_of(read_traces([tmp_path / "a.json"]))
    assert profile.lost is None
    assert {phase.name for phase in profile.phases} == {"data", "forward", "backward", "optimizer"}
    assert sum(row.share for row in profile.classes) == pytest.approx(1)
    assert sum(row.share for row in profile.kernels) == pytest.approx(1)


def test_ranks_add_up_and_stay_apart(tmp_path: Path) -> None:
    truths = [
        training_trace(tmp_path / f"{rank}.json", megabytes=0.5, seed=rank, rank=rank).timeline() for rank in range(2)
    ]
    profile = profile_of(read_traces([tmp_path / "0.json", tmp_path / "1.json"]))
    assert [rank.rank for rank in profile.ranks] == [0, 1]
    for rank, truth in zip(profile.ranks, truths, strict=True):
        assert rank.timeline.busy_s == truth["busy"] / 1e9
    assert profile.timeline.busy_s == sum(truth["busy"] for truth in truths) / 1e9
    assert profile.timeline.exposed_communication_s == sum(t["exposed_communication"] for t in truths) / 1e9


def test_a_truncated_trace_says_what_it_cost(tmp_path: Path) -> None:
    maker = TraceMaker()
    for number in range(50):
        maker.call("cudaLaunchKernel", number * 10 * US, 4 * US, correlation=1000 + number)
    for number in range(50):
        maker.kernel(GEMM, number * 10 * US + 5 * US, 4 * US, correlation=1000 + number)
    text = maker.text()
    (tmp_path / "cut.json").write_text(text[: text.index('"correlation": 1030', text.index('"kernel"'))])
    profile = profile_of([read_trace(tmp_path / "cut.json")])
    assert profile.lost.truncated
    assert profile.lost.launches == 20
    assert any("20 launches" in reason for reason in profile.lost.reasons)


def recorded(step_s: float, issue_share: float, **changes: Any) -> RunRecord:
    block = make_block(samples=(step_s,) * 20, issue_s=(step_s * issue_share,) * 20)
    trace = TraceRef(path="/somewhere/t.json.gz", steps=2, capture_s=3.0, bytes=1)
    return make_record("fp16+channels-last", blocks=(block,), trace=trace, **changes)


class TestWithItsRecord:
    """The record holds steps timed without the profiler, which outweigh what the trace looks like."""

    def test_a_host_that_is_late_only_under_the_profiler_is_not_the_limit(self) -> None:
        maker = two_steps(late_us=150)
        assert maker.profile().bound.label == "host"
        profile = maker.profile(recorded(step_s=210e-6, issue_share=0.4))
        assert profile.bound.label != "host"
        assert not any(finding.code == "host-bound" for finding in profile.findings)

    def test_the_gain_is_bounded_by_the_step_without_the_profiler(self) -> None:
        profile = two_steps(late_us=150).profile(recorded(step_s=400e-6, issue_share=0.98))
        (found,) = [finding for finding in profile.findings if finding.code == "host-bound"]
        assert profile.bound.label == "host"
        assert "issue/step 0.98" in found.evidence
        assert found.gain_bound == pytest.approx(2.0)
        assert "-r fp16+channels-last+graphs" in found.next

    def test_work_can_save_what_the_host_leaves_without_the_profiler(self) -> None:
        """Replayed with the host as slow as the profiler makes it, faster products would save less."""
        maker = two_steps(late_us=5, names=("ampere_sgemm_128x64_tn", GEMM))
        bounds = []
        for issue_share in (0.2, 0.7, 1.0):
            profile = maker.profile(recorded(step_s=200e-6, issue_share=issue_share))
            bounds += [each.gain_bound for each in profile.findings if each.code == "fp32-matmul"]
        # A host that needs the whole step leaves nothing to save, so that nothing is said.
        assert bounds == pytest.approx([2.0, 1 / 0.7], rel=0.01)

    def test_a_host_that_was_quicker_now_and_then_does_not_lower_what_work_can_save(self) -> None:
        """The first steps of a block find a host that has just been waiting: what faster products bring is not held to it."""
        maker = two_steps(late_us=5, names=("ampere_sgemm_128x64_tn", GEMM))
        record = recorded(step_s=200e-6, issue_share=0.8)
        (block,) = record.blocks
        issue_s = (*block.issue_s[:3], *[60e-6] * 5, *[200e-6] * 12)  # then it is quick, until its queue is full
        quick = msgspec.structs.replace(block, issue_s=issue_s)
        profile = maker.profile(msgspec.structs.replace(record, blocks=(quick,)))
        (found,) = [each for each in profile.findings if each.code == "fp32-matmul"]
        assert (profile.capture.issue_share, profile.capture.least_issue_s) == (pytest.approx(0.8), 60e-6)
        assert found.gain_bound == pytest.approx(2.0, rel=0.01)

    def test_where_issuing_says_nothing_work_may_save_all_its_time(self) -> None:
        record = recorded(step_s=200e-6, issue_share=0.99)
        assert record.prepared is not None
        waits = msgspec.structs.replace(record.prepared, step_synchronises=True)
        record = msgspec.structs.replace(record, prepared=waits)
        profile = two_steps(late_us=5, names=("ampere_sgemm_128x64_tn", GEMM)).profile(record)
        (found,) = [each for each in profile.findings if each.code == "fp32-matmul"]
        assert found.gain_bound == pytest.approx(2.0, rel=0.01)

    def test_a_compiler_is_not_held_to_the_host_of_what_it_replaces(self) -> None:
        profile = two_steps().profile(recorded(step_s=200e-6, issue_share=0.8))
        (found,) = [each for each in profile.findings if each.code == "elementwise"]
        assert found.gain_bound == pytest.approx(2.0, rel=0.01)

    def test_strict_products_under_tf32_are_told_to_go_further(self) -> None:
        maker = two_steps(names=("ampere_sgemm_128x64_tn", GEMM))
        record = recorded(step_s=200e-6, issue_share=0.2)
        spec = msgspec.structs.replace(record.spec, recipe=Recipe.parse("tf32"))
        (found, *_) = maker.profile(msgspec.structs.replace(record, spec=spec)).findings
        assert (found.code, found.recipe) == ("fp32-matmul", "tf32+amp")

    def test_what_capturing_cost_is_told(self) -> None:
        capture = two_steps().profile(recorded(step_s=200e-6, issue_share=0.5)).capture
        assert (capture.capture_s, capture.step_s) == (3.0, 200e-6)

    def test_a_step_that_waits_by_itself_leaves_the_verdict_to_the_trace(self) -> None:
        record = recorded(step_s=400e-6, issue_share=0.99)
        assert record.prepared is not None
        waits = msgspec.structs.replace(record.prepared, step_synchronises=True)
        record = msgspec.structs.replace(record, prepared=waits)
        assert two_steps().profile(record).bound.label != "host"
        assert two_steps(late_us=150).profile(record).bound.label == "host"


def test_launches_without_records_of_their_work_are_not_a_run_on_the_cpu() -> None:
    maker = TraceMaker()
    for number in range(5):
        operator = maker.operator("aten::mm", number * 100 * US, 50 * US)
        maker.call(
            "cudaLaunchKernel", number * 100 * US + US, 4 * US, correlation=number + 1, **{"External id": operator}
        )
    profile = maker.profile()
    assert "records are missing" in profile.host.verdict
    assert profile.bound.label == "unknown"
    assert "no record of it is in the trace" in str(profile.bound.evidence)
