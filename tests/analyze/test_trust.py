from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from by_hand import make_block, make_prepared, make_record

from redline.analyze.trust import error_text, target_half_width, verdict
from redline.model.note import note
from redline.model.record import (
    DeviceInfo,
    Environment,
    Epoch,
    Failure,
    Numerics,
    TelemetrySample,
    Warmup,
)
from redline.model.spec import DataSpec, TrainSpec
from redline.model.units import format_share


def look(**fields: Any) -> tuple[TelemetrySample, ...]:
    return (TelemetrySample(at_s=0.0), TelemetrySample(at_s=0.1, **fields))


def test_a_sound_run_is_valid_and_says_that_it_is_one_process() -> None:
    found = verdict(make_record())
    assert found.labels == ("valid",)
    assert found.trusted
    assert found.reasons == ()
    assert [each.code for each in found.notes] == ["one-process"]


OUT_OF_MEMORY = Failure(stage="measure", kind="oom", message="out of memory: 3 GiB needed")
APART = note("not-steady", "medians still 3 % apart")
OTHER_WORK = note("work-changes", "each call does other work")
NEIGHBOUR = Environment(device=DeviceInfo(kind="cuda"), neighbours=("Xorg 12",))


@pytest.mark.parametrize(
    ("run", "prepared", "label", "said"),
    [
        ({"failure": OUT_OF_MEMORY, "stopped": "failed"}, {}, "invalid", "out of memory: 3 GiB needed"),
        ({"blocks": ()}, {}, "invalid", ""),
        ({}, {"warmup": Warmup(steady=False, seconds=60.0, reason=APART)}, "no-steady-state", str(APART)),
        ({}, {"notes": (OTHER_WORK,)}, "no-steady-state", str(OTHER_WORK)),
        ({}, {"environment": NEIGHBOUR}, "shared-gpu", "Xorg 12"),
        ({}, {"isolated": False}, "not-isolated", ""),
    ],
)
def test_each_label_has_its_reason(run: dict[str, Any], prepared: dict[str, Any], label: str, said: str) -> None:
    if "notes" in prepared:
        prepared = {"workload": msgspec.structs.replace(make_prepared().workload, **prepared)}
    found = verdict(make_record(**{"prepared": make_prepared(**prepared), **run}))
    assert (found.labels, found.trusted) == ((label,), False)
    (reason,) = found.reasons
    assert said in str(reason)


def test_a_foreign_process_while_timing_shares_the_gpu_and_is_named_once() -> None:
    blocks = tuple(make_block(telemetry=look(foreign=("python 4711",))) for _ in range(2))
    found = verdict(make_record(blocks=blocks))
    assert found.labels == ("shared-gpu",)
    text = "other processes on the GPU while timing: python 4711"
    assert found.reasons == (note("shared-gpu", text, about="timing"),)


class TestNoisy:
    def wide(self) -> tuple[Any, ...]:
        """A spread of 4 %, not noisy by itself; 40 samples leave an interval of well over 1 %."""
        return tuple(make_block(count=10, sigma=0.04, round=number, seed=number) for number in range(4))

    @pytest.mark.parametrize(
        ("stopped", "said"),
        [
            ("ceiling", r"throughput: stopped at the time limit at ±.+: the target is ±1 %"),
            ("unreachable", r"throughput: stopped early at ±.+: reaching ±1 % would exceed the time limit"),
            ("interrupted", r"throughput: .+"),
            ("target", r"throughput: ended at ±.+: the target is ±1 %"),  # a race, whose pairs are told apart
        ],
    )
    def test_by_an_interval_wider_than_the_target(self, stopped: str, said: str) -> None:
        found = verdict(make_record(blocks=self.wide(), stopped=stopped))
        assert found.labels == ("noisy",)
        (reason,) = found.reasons
        assert (reason.code, reason.about) == ("wide-interval", "throughput")
        assert re.fullmatch(said, str(reason))

    def test_an_interval_of_more_than_a_factor_of_four_has_no_number(self) -> None:
        blocks = tuple(make_block(samples=(0.01, 0.2) * 5, round=number) for number in range(4))
        (reason, *_) = verdict(make_record(blocks=blocks, stopped="unreachable")).reasons
        assert str(reason) == "throughput: stopped early, too noisy: reaching ±1 % would exceed the time limit"

    def test_a_cpu_has_its_own_target(self) -> None:
        on_cpu = make_record(device="cpu", blocks=self.wide(), stopped="ceiling")
        assert target_half_width(on_cpu) == on_cpu.spec.measure.cpu_target_half_width
        assert verdict(on_cpu).labels == ("valid",)

    @pytest.mark.parametrize(("stopped", "labels"), [("ceiling", ("noisy",)), ("target", ("valid",))])
    def test_too_few_samples_for_an_interval_are_noisy_where_one_was_asked_for(
        self, stopped: str, labels: tuple[str, ...]
    ) -> None:
        """A profile takes a few steps and asks for none."""
        found = verdict(make_record(blocks=(make_block(count=4),), stopped=stopped))
        assert found.labels == labels
        assert [reason.code for reason in found.reasons] == ["few-samples"] * (labels == ("noisy",))

    @pytest.mark.parametrize(("sigma", "said"), [(0.15, "spread 15"), (0.07, "spread 7")])
    def test_a_wide_spread_about_a_median_that_is_known_is_only_noted(self, sigma: float, said: str) -> None:
        found = verdict(make_record(blocks=(make_block(count=4000, sigma=sigma),), stopped="ceiling"))
        assert found.labels == ("valid",)
        (told,) = found.noted("spread")
        assert said in str(told)


class TestThrottled:
    @pytest.mark.parametrize("word", ["hw_slowdown", "sw_thermal", "hw_thermal", "power_brake"])
    def test_by_heat_or_hardware(self, word: str) -> None:
        found = verdict(make_record(blocks=(make_block(), make_block(telemetry=look(throttle=(word,))))))
        assert found.labels == ("throttled",)
        assert found.reasons[0].about == word
        assert "1 of 3 samples" in str(found.reasons[0])
        assert [each.code for each in found.notes] == ["one-process"]

    @pytest.mark.parametrize("word", ["sw_power_cap", "sync_boost", "something_new"])
    def test_other_words_are_only_noted(self, word: str) -> None:
        found = verdict(make_record(blocks=(make_block(telemetry=look(throttle=(word,))),)))
        assert found.labels == ("valid",)
        (noted,) = found.noted("clock-limited")
        assert noted.about == word
        assert "1 of 2 samples" in str(noted)


class TestSharedCpu:
    def record(self, device: str = "cpu", cores: int | None = 2, **use: Any) -> Any:
        prepared = Environment(device=DeviceInfo(kind=device, name="some CPU"), logical_cores=cores)
        record = make_record(device=device, blocks=(make_block(wall_s=1.0, **use), make_block(wall_s=1.0, **use)))
        return msgspec.structs.replace(record, prepared=msgspec.structs.replace(record.prepared, environment=prepared))

    @pytest.mark.parametrize(
        ("waited_s", "others_cpu_s", "labels"),
        [
            (0.0, 0.0, ("valid",)),
            (0.05, 1.0, ("valid",)),  # 5 % of 0.95 + 0.05: not more
            (0.0501, 1.0, ("shared-cpu",)),
            (0.95, 0.95, ("shared-cpu",)),
            (0.95, 0.0, ("valid",)),  # its threads waited for each other
            (0.95, 0.05, ("valid",)),
            (0.95, 0.0501, ("shared-cpu",)),
        ],
    )
    def test_by_the_time_it_waited_while_others_ran(
        self, waited_s: float, others_cpu_s: float, labels: tuple[str, ...]
    ) -> None:
        record = self.record(cpu_s=0.95, waited_s=waited_s, others_cpu_s=others_cpu_s)
        assert verdict(record).labels == labels

    @pytest.mark.parametrize(
        ("cores", "others_cpu_s", "labels"),
        [
            (2, 0.95, ("valid",)),  # of 2 s it used 1, and others 95 % of the other
            (2, 0.951, ("shared-cpu",)),
            (4, 0.951, ("valid",)),
            (None, 0.951, ("shared-cpu",)),
        ],
    )
    def test_where_the_system_does_not_tell_by_how_little_was_left(
        self, cores: int | None, others_cpu_s: float, labels: tuple[str, ...]
    ) -> None:
        record = self.record(cores=cores, cpu_s=1.0, waited_s=None, others_cpu_s=others_cpu_s)
        assert verdict(record).labels == labels

    def test_a_gpu_is_not_judged_by_its_host(self) -> None:
        record = self.record(device="cuda", cpu_s=1.0, waited_s=1.0, others_cpu_s=1.0)
        assert verdict(record).labels == ("valid",)

    @pytest.mark.parametrize(
        ("device", "others_cpu_s", "noted"),
        [("cpu", 0.25, False), ("cpu", 0.26, True), ("cuda", 0.26, True), ("cuda", None, False)],
    )
    def test_others_that_did_not_slow_it_are_noted_by_name(
        self, device: str, others_cpu_s: float | None, noted: bool
    ) -> None:
        busiest = ("python (pid 7): 0.26 cores",)
        record = self.record(device=device, cpu_s=1.0, waited_s=0.0, others_cpu_s=others_cpu_s, busiest=busiest)
        found = verdict(record)
        assert found.labels == ("valid",)
        told = [str(each) for each in found.noted("others-at-work")]
        expected = ["other processes kept 0.3 cores busy while it was timed (python (pid 7): 0.26 cores)"]
        assert told == (expected if noted else [])


@pytest.mark.parametrize(
    ("numerics", "with_steps", "told"),
    [
        (None, False, "n/a"),
        (Numerics(method="unchecked"), False, "not checked"),
        (Numerics(finite=False), False, "not finite ✗"),
        (Numerics(method="reference", passed=True), False, "fp32"),
        (Numerics(degenerate=True, rel_error=0.1), False, "no signal ✗"),
        (Numerics(rel_error=1e-3, passed=True), False, "1.0e-03"),
        (Numerics(rel_error=1e-3, passed=False), False, "1.0e-03 ✗"),
        (Numerics(rel_error=None, passed=False), False, "inf ✗"),
        (Numerics(rel_l2=1e-3, passed=True), False, "1.0e-03 of the signal"),  # an older record has that error alone
        (Numerics(rel_error=0.0, by_equality=True, equal_share=1.0, passed=True), False, "equal"),
        (
            Numerics(rel_error=0.25, by_equality=True, equal_share=0.75, passed=False),
            False,
            f"{format_share(0.25)} unequal ✗",
        ),
        (Numerics(rel_error=1e-3, by_equality=False, equal_share=0.75, passed=True), False, "1.0e-03"),
        (Numerics(rel_error=1e-3, by_equality=True, equal_share=None, passed=True), False, "1.0e-03"),
        (Numerics(rel_error=1e-3, steps=5, passed=True), True, "1.0e-03 in 5 steps"),
        (Numerics(rel_error=1e-3, steps=5, passed=True), False, "1.0e-03"),
        (Numerics(rel_error=1e-3, passed=True), True, "1.0e-03"),
    ],
)
def test_the_error_of_a_recipe_in_words(numerics: Numerics | None, with_steps: bool, told: str) -> None:
    assert error_text(numerics, with_steps=with_steps) == told


@pytest.mark.parametrize(("epochs", "noted"), [(3, False), (4, True)])
def test_how_much_epochs_differ_is_said_of_three_beside_the_first(epochs: int, noted: bool) -> None:
    run = make_record(task="train")
    took = [1.0, 1.0, 2.0, 3.0]
    done = tuple(
        Epoch(number=number + 1, seconds=each, train_s=each, steps=10, samples=100, train_loss=1.0)
        for number, each in enumerate(took[:epochs])
    )
    spec = msgspec.structs.replace(run.spec, train=TrainSpec(data=DataSpec(name="cifar10")))
    found = verdict(msgspec.structs.replace(run, spec=spec, epochs=done))
    assert bool(found.noted("spread")) == noted


@pytest.mark.parametrize(("method", "is_told"), [("outputs", True), ("reference", False)])
def test_what_a_comparison_leaves_out_is_told_of_what_was_compared(method: Any, is_told: bool) -> None:
    record = make_record()
    left_out = note("masked-positions", "positions that a mask hides are not compared")
    workload = msgspec.structs.replace(record.prepared.workload, notes=(left_out,))
    numerics = Numerics(method=method, rel_l2=1e-3, passed=True)
    prepared = msgspec.structs.replace(record.prepared, workload=workload, numerics=numerics)
    assert (left_out in verdict(msgspec.structs.replace(record, prepared=prepared)).notes) is is_told
