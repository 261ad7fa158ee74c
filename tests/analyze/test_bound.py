from __future__ import annotations

from typing import Any

import msgspec
import pytest
from by_hand import make_block, make_prepared, make_record

from redline.analyze import bound as rules
from redline.analyze.attainable import Attainable
from redline.analyze.bound import bound, bound_of_counters, host_share
from redline.model.record import Epoch, Failure


def issuing(*issue_s: float) -> tuple[Any, ...]:
    return tuple(make_block(0.010, issue_s=issue_s, seed=number) for number in range(3))


def test_the_host_is_the_limit_when_issuing_takes_as_long_as_the_step() -> None:
    found = bound(make_record(blocks=issuing(0.010, 0.0097, 0.0097)))
    assert found.label == "host"
    assert str(found.evidence) == "issue/step 0.97: the device waits for the host"


def test_the_device_is_the_limit_when_issuing_is_short() -> None:
    found = bound(make_record(blocks=issuing(0.010, 0.0031, 0.0031)))
    assert found.label == "device"
    assert str(found.evidence) == "issue/step 0.31: the device is the limit, not the host; work not counted"


def test_the_first_issue_may_pay_for_waking_up() -> None:
    assert host_share(make_record(blocks=issuing(1.0, 0.002))) == pytest.approx(0.2, rel=0.01)


def test_a_single_issue_counts_when_it_is_all_there_is() -> None:
    assert bound(make_record(blocks=issuing(0.010))).label == "host"


def test_later_issues_may_be_held_up_by_a_full_queue_and_do_not_count() -> None:
    blocks = issuing(0.003, 0.003, 0.003, *([0.010] * 50))
    assert bound(make_record(blocks=blocks)).label == "device"


def test_latency_blocks_say_nothing_about_issuing() -> None:
    blocks = (make_block(kind="latency", issue_s=(0.01, 0.01)), make_block(issue_s=(0.001, 0.001)))
    assert host_share(make_record(blocks=blocks)) == pytest.approx(0.1, rel=0.01)


def test_a_step_that_waits_for_the_device_itself_cannot_be_told() -> None:
    blocks = issuing(0.010, 0.010, 0.010)
    found = bound(make_record(blocks=blocks, prepared=make_prepared(step_synchronises=True)))
    assert found.label == "unknown"
    assert "waits for the device" in str(found.evidence)


@pytest.mark.parametrize(("share", "label"), [(0.49, "host"), (0.5, "device"), (None, "device")])
def test_on_a_cpu_the_host_is_the_limit_where_operators_take_less_than_half(share: float | None, label: str) -> None:
    record = make_record(device="cpu")
    record = msgspec.structs.replace(record, prepared=msgspec.structs.replace(record.prepared, operators_share=share))
    assert bound(record).label == label


def test_on_a_cpu_host_and_device_are_the_same() -> None:
    found = bound(make_record(device="cpu"))
    assert (found.label, str(found.evidence)) == ("device", "host and device are the same; work not counted")


def test_without_issue_times() -> None:
    assert (
        str(bound(make_record(blocks=(make_block(issue_s=()),))).evidence)
        == "no issue times were kept; work not counted"
    )


def test_a_failed_run_has_no_bound() -> None:
    found = bound(make_record(failure=Failure(stage="measure", kind="crash", message="gone")))
    assert (found.label, str(found.evidence)) == ("unknown", "nothing was measured")


def test_exactly_at_the_threshold_the_host_is_not_yet_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    record = make_record(blocks=issuing(0.010, 0.0097, 0.0097))
    monkeypatch.setattr(rules, "HOST_BOUND_SHARE", host_share(record))
    assert bound(record).label == "device"


def test_of_issues_the_second_and_the_third_count() -> None:
    record = make_record(blocks=issuing(0.9, 0.002, 0.004, 0.9))
    assert host_share(record) == pytest.approx(0.3, rel=0.01)


@pytest.mark.parametrize(("share", "label"), [(None, "unknown"), (0.8, "unknown"), (0.81, "memory")])
def test_counters_name_memory_above_four_fifths(share: float | None, label: str) -> None:
    assert bound_of_counters(share).label == label


def test_what_takes_equally_long_is_limited_by_compute() -> None:
    both = Attainable(
        compute_s=1.0, memory_s=1.0, unfused_s=2.0, unfused_compute_s=1.0, unfused_memory_s=1.0, classes=()
    )
    assert (both.limited_by, both.limit_s) == ("compute", 1.0)


@pytest.mark.parametrize(("waiting_s", "label"), [(1.0, "device"), (1.01, "data")])
def test_a_training_waits_for_data_above_a_tenth(waiting_s: float, label: str) -> None:
    phases = {"data": waiting_s, "forward": 10.0 - waiting_s}
    epochs = tuple(
        Epoch(number=number, seconds=10, train_s=10, steps=9, samples=9, train_loss=1.0, phases_s=phases)
        for number in (1, 2, 3)
    )
    assert bound(make_record(task="train", epochs=epochs)).label == label
