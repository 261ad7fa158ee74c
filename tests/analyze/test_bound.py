from __future__ import annotations

from typing import Any

import msgspec
import pytest

from redline.analyze import bound as rules
from redline.analyze.attainable import Attainable
from redline.analyze.bound import TraceEvidence, bound, bound_of_counters, bound_of_trace, host_share
from redline.model.record import Failure
from redline.model.training import Epoch


def issuing(make_block: Any, *issue_s: float) -> tuple[Any, ...]:
    return tuple(make_block(0.010, issue_s=issue_s, seed=number) for number in range(3))


def test_the_host_is_the_limit_when_issuing_takes_as_long_as_the_step(make_record: Any, make_block: Any) -> None:
    found = bound(make_record(blocks=issuing(make_block, 0.010, 0.0097, 0.0097)))
    assert found.label == "host"
    assert str(found.evidence) == "issue/step 0.97: the device waits for the host"


def test_the_device_is_the_limit_when_issuing_is_short(make_record: Any, make_block: Any) -> None:
    found = bound(make_record(blocks=issuing(make_block, 0.010, 0.0031, 0.0031)))
    assert found.label == "device"
    assert str(found.evidence) == "issue/step 0.31: the device is the limit, not the host; work not counted"


def test_the_first_issue_may_pay_for_waking_up(make_record: Any, make_block: Any) -> None:
    assert host_share(make_record(blocks=issuing(make_block, 1.0, 0.002))) == pytest.approx(0.2, rel=0.01)


def test_a_single_issue_counts_when_it_is_all_there_is(make_record: Any, make_block: Any) -> None:
    assert bound(make_record(blocks=issuing(make_block, 0.010))).label == "host"


def test_later_issues_may_be_held_up_by_a_full_queue_and_do_not_count(make_record: Any, make_block: Any) -> None:
    blocks = issuing(make_block, 0.003, 0.003, 0.003, *([0.010] * 50))
    assert bound(make_record(blocks=blocks)).label == "device"


def test_latency_blocks_say_nothing_about_issuing(make_record: Any, make_block: Any) -> None:
    blocks = (make_block(kind="latency", issue_s=(0.01, 0.01)), make_block(issue_s=(0.001, 0.001)))
    assert host_share(make_record(blocks=blocks)) == pytest.approx(0.1, rel=0.01)


def test_a_step_that_waits_for_the_device_itself_cannot_be_told(
    make_record: Any, make_block: Any, make_prepared: Any
) -> None:
    blocks = issuing(make_block, 0.010, 0.010, 0.010)
    found = bound(make_record(blocks=blocks, prepared=make_prepared(step_synchronises=True)))
    assert found.label == "unknown"
    assert "waits for the device" in str(found.evidence)


@pytest.mark.parametrize(("share", "label"), [(0.49, "host"), (0.5, "device"), (None, "device")])
def test_on_a_cpu_the_host_is_the_limit_where_operators_take_less_than_half(
    make_record: Any, make_prepared: Any, share: float | None, label: str
) -> None:
    record = make_record(device="cpu")
    record = msgspec.structs.replace(record, prepared=msgspec.structs.replace(record.prepared, operators_share=share))
    assert bound(record).label == label
    trace = TraceEvidence(has_device=False, span_s=1.0, busy_s=0.4)
    assert bound_of_trace(trace, record).label == label


def test_on_a_cpu_host_and_device_are_the_same(make_record: Any) -> None:
    found = bound(make_record(device="cpu"))
    assert (found.label, str(found.evidence)) == ("device", "host and device are the same; work not counted")


def test_without_issue_times(make_record: Any, make_block: Any) -> None:
    assert (
        str(bound(make_record(blocks=(make_block(issue_s=()),))).evidence)
        == "no issue times were kept; work not counted"
    )


def test_a_failed_run_has_no_bound(make_record: Any) -> None:
    found = bound(make_record(failure=Failure(stage="measure", kind="crash", message="gone")))
    assert (found.label, str(found.evidence)) == ("unknown", "nothing was measured")


def test_exactly_at_the_threshold_the_host_is_not_yet_the_limit(
    make_record: Any, make_block: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = make_record(blocks=issuing(make_block, 0.010, 0.0097, 0.0097))
    monkeypatch.setattr(rules, "HOST_BOUND_SHARE", host_share(record))
    assert bound(record).label == "device"


def test_of_issues_the_second_and_the_third_count(make_record: Any, make_block: Any) -> None:
    record = make_record(blocks=issuing(make_block, 0.9, 0.002, 0.004, 0.9))
    assert host_share(record) == pytest.approx(0.3, rel=0.01)


def seen(**seconds: Any) -> TraceEvidence:
    """A trace of ten seconds."""
    return TraceEvidence(**{"has_device": True, "span_s": 10.0, "busy_s": 9.0, **seconds})


class TestTraces:
    @pytest.mark.parametrize(
        ("seconds", "label", "says"),
        [
            ({"data_wait_s": 1.0}, "data", "waits for the data loader 10% of the time"),
            ({"data_wait_s": 0.99}, "device", "busy 90%"),
            ({"data_wait_s": 3.0, "exposed_copy_s": 2.0}, "data", "data loader 30%"),
            ({"data_wait_s": 2.0, "exposed_copy_s": 3.0}, "data", "copies alone keep the device busy 30% of the time"),
            ({"data_wait_s": 2.0, "exposed_copy_s": 2.0}, "data", "data loader 20%"),
            ({"exposed_copy_s": 1.0}, "data", "copies alone keep the device busy 10% of the time"),
            ({"exposed_copy_s": 0.99}, "device", "busy 90%"),
            ({"exposed_communication_s": 1.0}, "communication", "takes 10% of the time"),
            ({"exposed_communication_s": 0.99}, "device", "busy 90%"),
            ({"launch_gap_s": 1.0}, "launch", "take 10% of the time"),
            ({"launch_gap_s": 0.99}, "device", "busy 90%"),
            ({"host_wait_s": 4.0}, "host", "waits for the host 40% of the time"),
            ({"host_wait_s": 2.0, "sync_s": 3.0, "waits_in": "item"}, "host", "50% of the time, mostly because the host waits for it in item"),
            ({"host_wait_s": 3.0, "sync_s": 3.0}, "host", "the device waits for the host 60% of the time"),
            ({"host_wait_s": 4.0, "exposed_communication_s": 5.0}, "communication", "takes 50%"),
            ({"compute_limited_s": 4.5}, "compute", "busy 90% of the time, 100% of it in operators limited by the matrix"),
            ({"compute_limited_s": 4.4}, "device", "busy 90%"),
            ({"compute_limited_s": 3.0, "memory_limited_s": 3.0}, "compute", "50% of it"),
            ({"compute_limited_s": 2.0, "memory_limited_s": 6.0}, "memory", "75% of it in operators limited by memory"),
            ({"memory_classes_share": 0.5}, "memory", "50% of the device's work moves data"),
            ({"memory_classes_share": 0.49}, "device", "busy 90%"),
            ({"busy_share": 0.7}, "device", "busy 70%"),
            ({"busy_s": 2.9}, "unknown", "busy 29%"),
            ({"span_s": 0.0, "busy_s": 0.0}, "unknown", "busy 0%"),
        ],
    )  # fmt: skip
    def test_the_largest_share_at_or_above_its_threshold_is_the_limit(
        self, seconds: dict[str, Any], label: str, says: str
    ) -> None:
        found = bound_of_trace(seen(**seconds))
        assert (found.label, says in str(found.evidence)) == (label, True), found

    def test_the_host_at_exactly_its_share(self) -> None:
        share = rules.HOST_WAIT_SHARE
        assert bound_of_trace(seen(host_wait_s=10 * share)).label == "host"
        assert bound_of_trace(seen(host_wait_s=9.99 * share)).label == "device"

    def test_the_times_of_a_run_without_the_profiler_outweigh_it(self, make_record: Any, make_block: Any) -> None:
        fast = make_record(blocks=issuing(make_block, 0.010, 0.0031, 0.0031))
        assert bound_of_trace(seen(host_wait_s=9.0), fast).label == "device"
        slow = make_record(blocks=issuing(make_block, 0.010, 0.0097, 0.0097))
        found = bound_of_trace(seen(busy_share=0.4), slow)
        assert (
            str(found.evidence)
            == "issue/step 0.97: the device waits for the host; kernels keep the device busy 40% of the step"
        )
        # The host's share is what the device is not busy, where that is more than the trace shows.
        assert bound_of_trace(seen(busy_share=0.4, exposed_communication_s=5.9), slow).label == "host"
        assert bound_of_trace(seen(busy_share=0.4, exposed_communication_s=6.1), slow).label == "communication"
        assert bound_of_trace(seen(exposed_communication_s=9.0), slow).label == "host", "nothing is known to be busy"
        # A device that kernels fill does not wait for the host, however long issuing takes.
        assert [bound_of_trace(seen(busy_share=share), slow).label for share in (0.89, 0.9)] == ["host", "device"]

    def test_work_whose_records_are_missing_says_nothing(self) -> None:
        assert bound_of_trace(seen(launches_without_device=True, host_wait_s=9.0)).label == "unknown"


@pytest.mark.parametrize(("share", "label"), [(None, "unknown"), (0.8, "unknown"), (0.81, "memory")])
def test_counters_name_memory_above_four_fifths(share: float | None, label: str) -> None:
    assert bound_of_counters(share).label == label


def test_what_takes_equally_long_is_limited_by_compute() -> None:
    both = Attainable(
        compute_s=1.0, memory_s=1.0, unfused_s=2.0, unfused_compute_s=1.0, unfused_memory_s=1.0, classes=()
    )
    assert (both.limited_by, both.limit_s) == ("compute", 1.0)


@pytest.mark.parametrize(("waiting_s", "label"), [(1.0, "device"), (1.01, "data")])
def test_a_training_waits_for_data_above_a_tenth(waiting_s: float, label: str, make_record: Any) -> None:
    phases = {"data": waiting_s, "forward": 10.0 - waiting_s}
    epochs = tuple(
        Epoch(number=number, seconds=10, train_s=10, steps=9, samples=9, train_loss=1.0, phases_s=phases)
        for number in (1, 2, 3)
    )
    assert bound(make_record(task="train", epochs=epochs)).label == label
