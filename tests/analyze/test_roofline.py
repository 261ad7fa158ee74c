"""Work, ceilings and a measured time, all made up: what comes out is known."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from by_hand import make_block, make_prepared, make_record

from redline.analyze.attainable import attainable
from redline.analyze.bound import Bound, bound
from redline.analyze.measurement import measurements
from redline.analyze.roofline import Roofline, at_step, roofline, roofline_of
from redline.model.note import note
from redline.model.record import Capabilities
from redline.model.work import Ceilings, OperatorWork, WorkCount

UNKNOWN = Bound(label="unknown", evidence=note("not-measured", ""))
CEILINGS = Ceilings(
    kind="cuda",
    name="some cuda",
    driver=None,
    torch=None,
    threads=None,
    flops_per_s={"fp32": 50e12, "fp16": 800e12},
    copy_bytes_per_s=4e12,
    launch_s=4e-6,
    cache_bytes=50_000_000,
)


def operator(name: str, kind: Any, flops: float, moved: float, **changes: Any) -> OperatorWork:
    one = OperatorWork(
        name=name, kind=kind, number_format="fp16", phase="forward", calls=1, flops=int(flops), bytes=int(moved)
    )
    return msgspec.structs.replace(one, **changes)


def work_of(*operators: OperatorWork, compulsory: float = 400e6) -> WorkCount:
    return WorkCount(params=1, compulsory_bytes=int(compulsory), operators=operators)


MATMUL = operator("mm", "matmul", 1.6e12, 2e9)  # 2 ms of products, 0.5 ms of bytes
RELU = operator("relu", "elementwise", 1e9, 4e9, calls=2)  # 2 ms of bytes
WORK = work_of(MATMUL, RELU)


def rated(work: WorkCount, measured_s: float, **changes: Any) -> Roofline:
    return roofline(work, msgspec.structs.replace(CEILINGS, **changes), measured_s, UNKNOWN)


class TestTheLimit:
    def test_uses_the_compulsory_bytes_and_never_the_operators_own(self) -> None:
        found = rated(WORK, 0.010)
        assert found.compute_s == pytest.approx(2e-3)
        assert found.memory_s == pytest.approx(1e-4)
        assert (found.attainable_s, found.limited_by) == (found.compute_s, "compute")
        assert found.headroom == pytest.approx(5.0)
        assert found.unfused_s == pytest.approx(4e-3)
        assert (found.compulsory_bytes, found.operator_bytes) == (400_000_000, 10_000_000_000)

    def test_memory_when_that_takes_longer(self) -> None:
        found = rated(work_of(MATMUL, compulsory=40e9), 0.020)
        assert (found.attainable_s, found.limited_by) == (pytest.approx(10e-3), "memory")
        assert found.achieved_bytes_per_s == pytest.approx(2e12)

    def test_efficiency_is_achieved_over_peak_also_of_mixed_formats(self) -> None:
        mixed = work_of(MATMUL, operator("mm", "matmul", 0.1e12, 1, number_format="fp32"))  # 2 ms and 2 ms
        found = rated(mixed, 0.008)
        assert found.efficiency == pytest.approx(0.5)
        assert found.achieved_flops_per_s == pytest.approx(1.7e12 / 0.008)

    def test_share_of_the_datasheet_s_peak_where_there_is_one(self) -> None:
        assert rated(WORK, 0.010).mfu is None
        assert rated(WORK, 0.010, name="NVIDIA H200").mfu == pytest.approx(1.6e12 / 989.4e12 / 0.010)

    def test_a_format_without_a_ceiling_is_told_and_left_out(self) -> None:
        found = rated(work_of(MATMUL, operator("mm", "matmul", 1e12, 1, number_format="int8")), 0.010)
        assert found.compute_s == pytest.approx(2e-3)
        assert any("no ceiling for int8" in str(each) for each in found.notes)
        # How far the step is from its limit is then not known: half of it may be those products.
        assert (found.efficiency, found.headroom, found.limited_by) == (None, None, "compute")
        assert at_step(found, 0.020).efficiency is None

    def test_a_step_whose_products_have_no_ceiling_is_not_said_to_be_limited_by_memory(self) -> None:
        found = rated(work_of(msgspec.structs.replace(MATMUL, number_format="fp64"), RELU), 0.010)
        assert (found.efficiency, found.headroom, found.limited_by) == (None, None, None)
        assert {one.name: one.limited_by for one in found.classes} == {"matmul": None, "elementwise": "memory"}
        timed = [msgspec.structs.replace(one, measured_s=0.005) for one in found.classes]
        assert {one.name: one.efficiency is None for one in timed} == {"matmul": True, "elementwise": False}

    def test_intensity_and_ridge(self) -> None:
        found = rated(WORK, 0.010)
        assert found.intensity == pytest.approx(1.6e12 / 400e6)
        assert found.ridge == pytest.approx(800e12 / 4e12)


class TestAStepThatBeatsItsLimit:
    """Planted: the count says more than the device could have done in the time."""

    def test_is_an_error_of_count_or_ceiling_and_nothing_is_clamped(self) -> None:
        found = rated(WORK, 0.001)
        assert found.error is not None
        assert "the count or the ceiling is wrong" in str(found.error)
        assert "100.0% above" in str(found.error)
        assert found.headroom == pytest.approx(0.5)
        assert found.efficiency == pytest.approx(2.0)

    def test_also_by_bytes_beyond_the_cache(self) -> None:
        assert rated(work_of(compulsory=40e9), 0.005).error is not None

    def test_but_bytes_that_fit_into_the_cache_claim_nothing(self) -> None:
        found = rated(work_of(compulsory=40e6), 1e-6)
        assert found.error is None
        assert found.headroom == pytest.approx(0.1)
        assert any("fits into the cache" in str(each) for each in found.notes)

    def test_nor_where_the_cache_is_not_known(self) -> None:
        found = rated(work_of(compulsory=40e9), 0.005, cache_bytes=None)
        assert found.error is None
        assert any("does not report its cache" in str(each) for each in found.notes)

    def test_products_do_whatever_fits_where(self) -> None:
        assert rated(work_of(MATMUL, compulsory=1), 0.001).error is not None

    def test_it_stands_in_the_row_of_a_run(self) -> None:
        heavy = work_of(operator("mm", "matmul", 16e12, 1))  # 20 ms of products in a step of 10 ms
        record = make_record(prepared=make_prepared(work=heavy))
        (row,) = measurements([record], lambda _: CEILINGS)
        assert row.roofline.error is not None


class TestClasses:
    def test_each_with_what_limits_it_and_what_it_took(self) -> None:
        found = roofline(WORK, CEILINGS, 0.010, UNKNOWN, class_times={"matmul": 0.004})
        matmul, relu = found.classes
        assert (matmul.name, matmul.limited_by, matmul.attainable_s) == ("matmul", "compute", pytest.approx(2e-3))
        assert (matmul.measured_s, matmul.efficiency) == (0.004, pytest.approx(0.5))
        assert (relu.name, relu.limited_by, relu.calls, relu.bytes) == ("elementwise", "memory", 2, 8_000_000_000)
        assert (relu.measured_s, relu.efficiency) == (None, None)

    def test_every_call_is_held_against_its_own_limit(self) -> None:
        """A large product and a small one: together they would look compute-bound."""
        small = operator("mm", "matmul", 0.08e12, 4e9)  # 0.1 ms of products, 1 ms of bytes
        found = attainable(work_of(MATMUL, small), CEILINGS)
        assert found.unfused_s == pytest.approx(3e-3)
        assert (found.unfused_compute_s, found.unfused_memory_s) == (pytest.approx(2e-3), pytest.approx(1e-3))


class TestBound:
    def of(self, work: WorkCount | None, **changes: Any) -> Bound:
        """Of a step of 10 ms that the device, not the host, takes."""
        return bound(make_record(prepared=make_prepared(work=work)), msgspec.structs.replace(CEILINGS, **changes))

    def test_compute(self) -> None:
        found = self.of(work_of(operator("mm", "matmul", 6.4e12, 1), RELU))
        assert found.label == "compute"
        assert str(found.evidence).startswith(
            "at the device's limits, unfused operators need 80% of the step for arithmetic and 20% for memory traffic"
        )

    def test_memory(self) -> None:
        work = work_of(MATMUL, operator("relu", "elementwise", 1, 20e9))
        assert self.of(work).label == "memory"

    def test_products_without_a_ceiling_may_take_all_that_the_bytes_leave(self) -> None:
        double = msgspec.structs.replace(MATMUL, number_format="fp64")
        for moved, label in ((16e9, "device"), (24e9, "memory")):  # 4 and 6 ms of 10
            found = self.of(work_of(double, operator("relu", "elementwise", 1, moved)))
            assert found.label == label
        assert "no ceiling is known for fp64" in str(self.of(work_of(double)).evidence)

    def test_neither_when_the_limits_explain_little_of_the_step(self) -> None:
        found = self.of(work_of(operator("mm", "matmul", 0.8e12, 1)))
        assert found.label == "device"
        assert found.evidence.code == "not-host"
        assert "10% of the step for arithmetic" in str(found.evidence)

    def test_a_fused_recipe_is_not_judged_by_unfused_bytes(self) -> None:
        """Its elementwise traffic is fused away: the products alone explain 60 % of the step, or too little to tell."""
        fused = {"compile": Capabilities(compiles=True)}
        for flops, label in ((4.8e12, "compute"), (1.6e12, "device")):
            work = work_of(operator("mm", "matmul", flops, 1), operator("relu", "elementwise", 1, 30e9))
            eager = make_record(prepared=make_prepared(work=work))
            compiled = make_record(prepared=make_prepared(work=work, switches=fused))
            assert bound(eager, CEILINGS).label == "memory"
            assert bound(compiled, CEILINGS).label == label

    def test_the_host_comes_first(self) -> None:
        blocks = (make_block(0.010, issue_s=(0.01, 0.01, 0.01)),)
        record = make_record(blocks=blocks, prepared=make_prepared(work=WORK))
        assert bound(record, CEILINGS).label == "host"

    def test_on_a_cpu_work_tells_what_issuing_cannot(self) -> None:
        record = make_record(
            device="cpu", prepared=make_prepared("cpu", work=work_of(operator("mm", "matmul", 6e12, 1)))
        )
        assert bound(record, CEILINGS).label == "compute"
        assert "ceilings --threads" in str(bound(record).evidence) or "ceilings" in str(bound(record).evidence)


def test_nothing_is_said_without_work_or_ceilings() -> None:
    counted = make_record(prepared=make_prepared(work=WORK))
    assert roofline_of(make_record(), CEILINGS) is None
    assert roofline_of(counted, None) is None
    (row,) = measurements([counted])
    assert (row.prepared.work.total_flops, row.roofline) == (WORK.total_flops, None)
