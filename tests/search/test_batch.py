"""The batch finder against a fake bench: largest, knee and latency target set against the truth."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from known import known
from worlds.memory import MemoryOf, convolutional, curve, largest_batch

from redline.analyze.batch import BatchSummary, BatchTrial, Knee, curve_of, supported_knee, trial_of
from redline.analyze.bound import Bound
from redline.analyze.statistics import Interval
from redline.analyze.trust import Verdict
from redline.model.errors import SpecError
from redline.model.note import Note, note
from redline.model.record import Failure, RunRecord
from redline.model.spec import RunSpec, WorkloadSpec
from redline.search.batch import MAX_TRIALS
from redline.search.observer import NoJournal
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape, MemoryTruth
from redline.verbs.batch import batch, result_of, trial_row
from redline.verbs.workspace import Workspace

MIB = 2**20
replaced = msgspec.structs.replace


def batch_of(spec: RunSpec) -> int:
    return spec.workload.batch or 1


def find(landscape: Landscape, **settings: Any) -> BatchSummary:
    """What one search finds: the summary that its result is made of."""
    found: list[BatchSummary] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("redline.verbs.batch.result_of", lambda searches: found.extend(searches))
        find_all(landscape, **settings)
    return found[0]


def find_all(landscape: Landscape, **settings: Any) -> Any:
    journal = settings.pop("journal", NoJournal())
    options = {"launch": {"door": "fake"}, "max_memory": "16GiB", **settings}
    return batch("m", **options, workspace=Workspace(door=FakeDoor(landscape), journal=journal))


def timed(batch: int, per_s: float, **changes: Any) -> BatchTrial:
    """A trial that ran, with nothing known of it but its speed."""
    bound = Bound(label="device", evidence=note("work", ""))
    row = known("baseline", "m", batch, "cuda", throughput_per_s=per_s, bound=bound, **changes)
    return BatchTrial(row)


def step_times(fixed_s: float, item_s: float) -> Any:
    return lambda spec: fixed_s + item_s * batch_of(spec)


def test_nothing_is_recommended_by_trials_that_others_disturbed() -> None:
    quiet = Landscape(
        step_s=step_times(0.01, 1e-4), device_kind="cpu", memory_bytes=lambda spec: 2**20 * batch_of(spec)
    )
    busy = replace(quiet, others_cores=lambda _: 2.0, slowed_by_others=0.5)
    settings = {"device": "cpu", "max_batch": 2000}
    assert "already has" in str(result_of([find(quiet, **settings)]))
    found = find(busy, **settings)
    assert "doubted-trials" in {each.code for each in found.notes}
    told = str(result_of([found]))
    assert "(shared-cpu): speeds and knee may be off" in told
    assert "next: run it again on a quiet machine" in told


class TestLargest:
    @pytest.mark.parametrize("task", ["train", "infer"])
    def test_through_a_caching_allocator(self, task: str) -> None:
        """Training needs little more than is allocated, inference nearly all that is reserved: only a squeeze tells."""
        model = convolutional(trains=task == "train")
        known: dict[int, MemoryTruth] = {}

        def memory(spec: RunSpec) -> MemoryTruth:
            return known.setdefault(batch_of(spec), model.truth(batch_of(spec)))

        found = find(Landscape(step_s=step_times(0.01, 1e-4), memory_bytes=memory), task=task)
        truth = largest_batch(memory, lambda batch: RunSpec(workload=WorkloadSpec(model="m", batch=batch)), 2**34)
        assert 0.97 * truth <= found.max_batch <= truth < found.max_batch_below
        assert len(found.trials) <= MAX_TRIALS
        assert found.ooms <= 1

    def test_on_a_cpu_the_workers_own_memory_counts(self) -> None:
        memory = curve(lambda batch: 900 * MIB + 2 * MIB * batch, resident=850 * MIB)
        landscape = Landscape(step_s=0.01, memory_bytes=memory, device_kind="cpu")
        found = find(landscape, max_memory="2GiB")
        assert found.max_batch == pytest.approx((2048 - 900) / 2, rel=0.03)
        assert all(trial.memory.peak_reserved_bytes is None for trial in found.trials)
        assert all(trial.needed_bytes for trial in found.trials if trial.fits)

    def test_out_of_memory_is_data(self) -> None:
        def memory(spec: RunSpec) -> int:
            step = 1024 * MIB if batch_of(spec) > 230 else 0  # not to be seen from below
            return batch_of(spec) * 64 * MIB + step

        found = find(Landscape(step_s=0.01, memory_bytes=memory))
        failed = [trial for trial in found.trials if not trial.fits]
        assert found.ooms == len(failed) >= 1
        assert {trial.failure.kind for trial in failed if trial.failure} == {"oom"}
        assert 0.97 * 240 <= found.max_batch <= 240

    def test_a_batch_that_breaks_in_another_way_bounds_the_search(self) -> None:
        def failure(spec: RunSpec) -> Failure | None:
            too_large = batch_of(spec) > 1000
            return Failure(stage="measure", kind="user", message="index out of range") if too_large else None

        found = find(Landscape(step_s=0.01, memory_bytes=curve(lambda batch: 1e6 * batch), failure=failure))
        assert 900 < found.max_batch <= 1000
        assert found.ooms == 0
        assert any("another reason than memory: index out of range" in str(each) for each in found.notes)

    def test_a_model_that_never_runs_is_not_tried_eight_times(self) -> None:
        failure = Failure(stage="build", kind="user", message="no such weights")
        found = find(Landscape(step_s=0.01, failure=failure))
        assert found.max_batch is None
        assert len(found.trials) == 1
        assert "no such weights" in str(next(found.notes))
        assert found.max_batch_below is None, "a refused model says nothing about what fits"

    def test_where_nothing_fits_the_smallest_that_ran_out_of_memory_is_the_bound(self) -> None:
        def failure(spec: RunSpec) -> Failure | None:
            return Failure(stage="build", kind="user", message="at least 8") if batch_of(spec) < 8 else None

        landscape = Landscape(step_s=0.01, memory_bytes=lambda spec: 2**40, failure=failure)
        assert (find(landscape).max_batch, find(landscape).max_batch_below) == (None, 8)
        landscape = Landscape(step_s=0.01, memory_bytes=lambda spec: 2**40)
        assert (find(landscape).max_batch, find(landscape).max_batch_below) == (None, 1)

    def test_a_squeezed_trial_is_marked(self) -> None:
        memory = curve(lambda batch: 40 * MIB * batch, ease=1.3)
        found = find(Landscape(step_s=step_times(0.01, 1e-4), memory_bytes=memory))
        assert any(each.code == "short-of-memory" for each in found.notes)
        squeezed = max((trial for trial in found.trials if trial.fits), key=lambda trial: trial.batch)
        assert squeezed.memory.allocator_retries > 0


class TestKnee:
    @pytest.mark.parametrize("task", ["infer", "train"])
    @pytest.mark.parametrize(("fixed_s", "item_s"), [(0.010, 1e-4), (0.002, 1e-4), (0.001, 5e-4), (0.0005, 2e-5)])
    def test_of_a_known_curve_is_found_within_ten_percent(self, fixed_s: float, item_s: float, task: str) -> None:
        memory: MemoryOf = curve(lambda batch: 2e8 + 8 * MIB * batch, resident=2e8)
        landscape = Landscape(step_s=step_times(fixed_s, item_s), noise_sigma=0.02, noise_rho=0.3, memory_bytes=memory)
        found = find(landscape, task=task)
        assert found.knee_batch == pytest.approx(9 * fixed_s / item_s, rel=0.1)
        assert len(found.trials) <= MAX_TRIALS

    def test_small_batches_that_wait_for_the_host_are_left_out(self) -> None:
        """Below the batch whose work outgrows the host's 5 ms, the step takes 5 ms whatever the batch."""
        device_s = step_times(0.0005, 1e-4)
        landscape = Landscape(
            step_s=lambda spec: max(0.005, device_s(spec)),
            issue_share=lambda spec: 0.005 / max(0.005, device_s(spec)),
            memory_bytes=curve(lambda batch: 2e8 + 8 * MIB * batch, resident=2e8),
        )
        found = find(landscape)
        assert curve_of(found.trials).per_item_s == pytest.approx(1e-4, rel=0.03)
        assert found.knee_batch == pytest.approx(45, rel=0.1)  # 0.9 · 5 ms / 0.1 ms

    def test_where_throughput_still_grows_there_is_none(self) -> None:
        landscape = Landscape(step_s=step_times(0.1, 1e-5), memory_bytes=curve(lambda batch: 64 * MIB * batch))
        found = find(landscape)
        assert found.knee_batch is None
        assert any("still grows" in str(each) for each in found.notes)

    def test_where_the_times_lie_on_no_curve_there_is_none(self) -> None:
        rates = {8: 0.97e6, 569: 35.7e6, 80_624: 5e6, 9_065_534: 22e6, 73_499_497: 14.7e6}
        told = supported_knee([timed(batch, rate) for batch, rate in rates.items()])
        assert isinstance(told, Note)
        assert "do not follow one curve" in str(told)

    def test_it_is_a_batch_that_was_measured_and_reaches_what_it_says(self) -> None:
        """The fit may be wrong where nothing was measured: three points off one curve must not make a fourth."""
        rates = {8: 1000.0, 64: 4200.0, 256: 8200.0, 1024: 10_000.0, 4096: 10_200.0}
        found = supported_knee([timed(batch, rate) for batch, rate in rates.items()])
        assert isinstance(found, Knee)
        assert found.batch == 1024, "256 has 82 % of it"
        assert found.above == 256
        assert found.share >= 0.895

    def test_a_batch_that_nothing_much_larger_confirms_is_not_claimed(self) -> None:
        rates = {8: 4000.0, 64: 8300.0, 80: 9900.0}
        told = supported_knee([timed(batch, rate) for batch, rate in rates.items()])
        assert isinstance(told, Note)
        assert "none much larger was measured" in str(told)

    def test_a_noisy_maximum_is_not_the_limit(self) -> None:
        """A rate that is 6 % too high counts for what its interval surely has, and for nothing without one."""
        trials = [timed(batch, batch / (0.002 + 1e-4 * batch)) for batch in (8, 20, 192, 600, 1000, 1500)]
        surely = Interval(low=9800.0, median=10_500.0, high=11_000.0)
        for interval in (surely, None):
            found = supported_knee([*trials, timed(2000, 10_500.0, throughput_interval=interval)])
            assert isinstance(found, Knee)
            assert 10_000 < found.limit_per_s < 10_200

    def test_none_is_claimed_below_the_smallest_that_ran(self) -> None:
        """Training is never tried below 2: speed that is flat from there on says nothing of 1."""
        landscape = Landscape(step_s=step_times(0.0, 1e-4), memory_bytes=curve(lambda batch: 64 * MIB * batch))
        found = find(landscape, task="train")
        assert found.knee_batch == min(trial.batch for trial in found.trials) == 2

    def test_every_row_carries_its_interval_and_its_trust(self) -> None:
        landscape = Landscape(step_s=step_times(0.002, 1e-4), memory_bytes=curve(lambda batch: 64 * MIB * batch))
        found = find(landscape)
        assert found.knee.batch in {trial.batch for trial in found.trials}
        assert all(trial.row.throughput_interval and trial.row.verdict.labels for trial in found.trials if trial.fits)
        row = trial_row(found, next(trial for trial in found.trials if trial.fits))
        assert row["throughput"].has_interval
        trial = found.trials[0]
        noisy = Verdict(labels=("noisy",), reasons=(note("wide-interval", "it scatters", about="throughput"),))
        row = trial_row(found, replace(trial, row=trial.row.changed(verdict=noisy)))
        assert (row["remark"], row["throughput"].doubt.code) == ("noisy", "wide-interval")
        shared = Verdict(labels=("shared-cpu",), reasons=(note("shared-cpu", "others ran"),))
        bound = Bound(label="host", evidence=note("host", "it waits"))
        row = trial_row(found, replace(trial, row=trial.row.changed(verdict=shared, bound=bound)))
        assert row["remark"] == "shared-cpu, host-bound"


def test_the_title_names_the_limit_once_and_no_shape_of_a_single_trial() -> None:
    landscape = Landscape(step_s=0.01, memory_bytes=curve(lambda batch: 64 * MIB * batch))
    journal = Kept()
    found = find(landscape, journal=journal)
    assert str(result_of([found])).count("16.0 GiB") == 1
    record = next(each for each in journal.records if each.prepared)
    info = replaced(record.prepared.workload, input_shapes=("7×20×96 float32",), image_size=None)
    shaped = replaced(record, prepared=replaced(record.prepared, workload=info))
    summary = BatchSummary([trial_of(shaped)])
    assert "7×20×96" not in str(result_of([summary]))


class TestLatencyTarget:
    def test_where_none_keeps_it_nothing_that_breaks_it_is_recommended(self) -> None:
        landscape = Landscape(step_s=step_times(0.01, 1e-4), memory_bytes=curve(lambda batch: 8 * MIB * batch))
        found = find(landscape, slo_p95="1ms")
        assert found.knee_batch is not None
        assert "none that was tried keeps p95 ≤ 1.00 ms" in str(result_of([found]))

    def test_is_kept_with_confidence_and_not_missed_by_much(self) -> None:
        """Over many searches the true p95 of the batch found is over the target in fewer than one of twenty."""
        chance = Random(5)
        over, shares = 0, []
        for seed in range(40):
            fixed_s, item_s = chance.uniform(5e-4, 4e-3), chance.uniform(2e-5, 3e-4)
            sigma = chance.choice([0.01, 0.05])
            slo_s = fixed_s + item_s * chance.uniform(20, 400)
            landscape = Landscape(
                step_s=step_times(fixed_s, item_s),
                noise_sigma=sigma,
                memory_bytes=curve(lambda batch: 2e8 + 8 * MIB * batch, resident=2e8),
                seed=seed,
            )
            found = find(landscape, slo_p95=slo_s)
            p95 = math.exp(1.645 * sigma)
            largest = ((slo_s / p95) - fixed_s) / item_s
            over += (fixed_s + item_s * found.slo_batch) * p95 > slo_s
            shares.append(found.slo_batch / largest)
        assert over <= 2
        assert float(np.median(shares)) > 0.93

    def test_training_steps_have_one_too(self) -> None:
        landscape = Landscape(step_s=step_times(0.001, 1e-4), memory_bytes=curve(lambda batch: 8 * MIB * batch))
        found = find(landscape, slo_p95="10ms", task="train")
        assert found.slo_batch == pytest.approx(88, rel=0.06)


def test_recipes_stand_side_by_side_with_their_ratio() -> None:
    per_item = {"baseline": 80 * MIB, "fp16": 40 * MIB}
    landscape = Landscape(
        step_s=0.01, memory_bytes=lambda spec: batch_of(spec) * per_item[str(spec.recipe)] + 100 * MIB
    )
    result = batch(
        "m",
        recipes=["baseline", "fp16"],
        launch={"door": "fake"},
        max_memory="16GiB",
        workspace=Workspace(door=FakeDoor(landscape), keep=False),
    )
    first, other = (row["largest_batch"].value for row in result.rows)
    assert other / first == pytest.approx(2.0, rel=0.03)
    assert result.rows[1]["largest_ratio"].value == other / first
    assert f"{other / first:.2f}×" in str(result)


class Kept(NoJournal):
    def __init__(self) -> None:
        self.records: list[RunRecord] = []

    def finish(self, record: RunRecord) -> None:
        self.records.append(record)


def test_a_live_model_that_cannot_travel_has_no_fresh_process() -> None:
    class Rooted:
        def __reduce__(self) -> Any:
            raise TypeError("stays here")

    with pytest.raises(SpecError, match="this model cannot be pickled: give it as"):
        batch(Rooted(), (1,), workspace=Workspace(keep=False))


def test_every_trial_is_a_record_of_a_process_of_its_own() -> None:
    journal, door = Kept(), FakeDoor(Landscape(step_s=0.01, memory_bytes=curve(lambda batch: 64 * MIB * batch)))
    found = batch("m", launch={"door": "fake"}, max_memory="1GiB", workspace=Workspace(door=door, journal=journal))
    assert tuple(record.id for record in journal.records) == found.record_ids
    assert door.opened == len(found.record_ids) + 1  # and one question
    for record in journal.records:
        assert record.spec.launch.memory_limit_bytes == 2**30
        assert not record.spec.measure.check_numerics
        if record.prepared is not None:
            assert record.prepared.numerics.method == "unchecked"
            assert not record.prepared.numerics.passed


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"slo_p95": "0s"}, "slo_p95 must be above 0"),
        ({"slo_p95": "soon"}, "20ms"),
        ({"max_batch": 0}, "max_batch must be 1 or more"),
        ({"max_memory": "lots"}, "16GiB"),
        ({"max_memory": 0}, "max_memory must be above 0"),
    ],
)
def test_mistakes_are_told_in_one_line(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        find(Landscape(step_s=0.01), **settings)


def test_the_next_step_measures_the_same_thing() -> None:
    landscape = Landscape(step_s=step_times(0.1, 1e-5), memory_bytes=curve(lambda batch: 64 * MIB * batch))
    found = find(landscape, task="train", image_size=32)
    assert found.knee_batch is None
    text = str(result_of([found])).replace("\n", " ")
    for word in (f"--batch {found.max_batch}", "--task train", "--image-size 32", "--max-memory 16GiB"):
        assert word in text
