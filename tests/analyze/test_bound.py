"""Measured times, all made up, and the limit that follows from them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from by_hand import make_block, make_prepared, make_record

from redline.analyze.attainable import Attainable
from redline.analyze.bound import bound, bound_of_counters, host_share
from redline.model.record import Epoch, Failure


def issuing(*issue_s: float) -> dict[str, Any]:
    """Steps of 10 ms, the first of each block issued in these times."""
    return {"blocks": tuple(make_block(0.010, issue_s=issue_s, seed=number) for number in range(3))}


def epochs(waiting_s: float) -> dict[str, Any]:
    phases = {"data": waiting_s, "forward": 10.0 - waiting_s}
    one = Epoch(number=1, seconds=10, train_s=10, steps=9, samples=9, train_loss=1.0, phases_s=phases)
    return {"task": "train", "epochs": tuple(msgspec.structs.replace(one, number=number) for number in (1, 2, 3))}


@pytest.mark.parametrize(
    ("given", "label", "says"),
    [
        (issuing(0.010, 0.0097, 0.0097), "host", "issue/step 0.97: the device waits for the host"),
        (issuing(0.010), "host", "the device waits for the host"),  # a single issue counts if there is no other
        (issuing(0.010, 0.0031, 0.0031), "device", "issue/step 0.31: the device is the limit, not the host; work not counted"),
        (issuing(0.003, 0.003, 0.003, *([0.010] * 50)), "device", ""),  # later issues are held up by a full queue
        ({**issuing(0.010, 0.010), "prepared": make_prepared(step_synchronises=True)}, "unknown", "waits for the device"),
        ({"blocks": (make_block(issue_s=()),)}, "unknown", "no issue times were kept; work not counted"),
        ({"device": "cpu"}, "device", "host and device are the same; work not counted"),
        ({"failure": Failure(stage="measure", kind="crash", message="gone")}, "unknown", "nothing was measured"),
        (epochs(1.0), "device", ""),
        (epochs(1.01), "data", "10% of the training time"),
    ],
)  # fmt: skip
def test_the_limit_follows_from_the_times(given: dict[str, Any], label: str, says: str) -> None:
    found = bound(make_record(**given))
    assert found.label == label
    assert says.replace(" ", "") in str(found.evidence).replace(" ", "")


@pytest.mark.parametrize(("share", "label"), [(0.49, "host"), (0.5, "device"), (None, "device")])
def test_on_a_cpu_the_host_is_the_limit_where_operators_take_less_than_half(share: float | None, label: str) -> None:
    record = make_record(device="cpu")
    record = msgspec.structs.replace(record, prepared=msgspec.structs.replace(record.prepared, operators_share=share))
    assert bound(record).label == label


@pytest.mark.parametrize(
    ("blocks", "share"),
    [
        (issuing(1.0, 0.002)["blocks"], 0.2),  # the first may pay for waking up
        (issuing(0.9, 0.002, 0.004, 0.9)["blocks"], 0.3),  # the second and the third count
        ((make_block(kind="latency", issue_s=(0.01, 0.01)), make_block(issue_s=(0.001, 0.001))), 0.1),
    ],
)
def test_the_share_of_the_host_is_that_of_issues_which_nothing_holds_up(blocks: Any, share: float) -> None:
    assert host_share(make_record(blocks=blocks)) == pytest.approx(share, rel=0.01)


@pytest.mark.parametrize(("share", "label"), [(None, "unknown"), (0.8, "unknown"), (0.81, "memory")])
def test_counters_name_memory_above_four_fifths(share: float | None, label: str) -> None:
    assert bound_of_counters(share).label == label


def test_what_takes_equally_long_is_limited_by_compute() -> None:
    both = Attainable(
        compute_s=1.0, memory_s=1.0, unfused_s=2.0, unfused_compute_s=1.0, unfused_memory_s=1.0, classes=()
    )
    assert (both.limited_by, both.limit_s) == ("compute", 1.0)
