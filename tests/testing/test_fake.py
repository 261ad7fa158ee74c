"""The fake bench against its own landscape: what it was told to be is what a measurement finds."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from redline.analyze.bound import bound
from redline.analyze.measurement import measurements
from redline.analyze.pairs import ratio_of
from redline.analyze.statistics import median_interval, paired_log
from redline.model import protocol
from redline.model.errors import DoorError
from redline.model.note import note
from redline.model.record import Block, Failure, Numerics, Prepared, RunRecord
from redline.model.spec import LaunchSpec, MeasureSpec, Recipe, RunSpec, WorkloadSpec
from redline.testing.fake import FakeDoor, FakeSession
from redline.testing.landscape import Landscape


def spec_of(recipe: str = "baseline", model: str = "resnet50", **fields: Any) -> RunSpec:
    device = fields.pop("device", "auto")
    workload = WorkloadSpec(model=model, **{"batch": 32, **fields})
    return RunSpec(workload=workload, recipe=Recipe.parse(recipe), device=device)


def prepared(session: FakeSession, spec: RunSpec) -> Prepared:
    reply = session.ask(protocol.Prepare(spec=spec))
    assert isinstance(reply, protocol.PreparedReply)
    return reply.prepared


def opened(door: FakeDoor, spec: RunSpec) -> FakeSession:
    session = door.open(spec)
    prepared(session, spec)
    return session


def block_of(session: FakeSession, kind: Any = "throughput", seconds: float = 0.25, number: int = 0) -> Block:
    reply = session.ask(protocol.Measure(kind=kind, seconds=seconds, round=number))
    assert isinstance(reply, protocol.BlockReply)
    return reply.block


def failure_of(reply: protocol.Reply) -> Failure:
    assert isinstance(reply, protocol.FailureReply)
    return reply.failure


class TestTruth:
    @pytest.mark.parametrize(
        "step_s",
        [
            {"baseline": 0.010, "fp16": 0.004},
            {"resnet50 baseline": 0.010, "resnet50": 0.004, "*": 9.0},
            lambda spec: 0.004 if spec.recipe.switches else 0.010,
        ],
    )
    def test_is_found_again(self, step_s: Any) -> None:
        door = FakeDoor(Landscape(step_s=step_s, noise_sigma=0.02, noise_rho=0.5, tail_share=0.01))
        for recipe, truth in (("baseline", 0.010), ("fp16", 0.004)):
            session = opened(door, spec_of(recipe))
            interval = median_interval([block_of(session, number=number).samples for number in range(20)])
            assert interval.median == pytest.approx(truth, rel=0.01)
            assert interval.low <= truth * 1.005
            assert interval.high >= truth * 0.995

    def test_unknown_to_a_table_is_not_made_up(self) -> None:
        door = FakeDoor(Landscape(step_s={"fp16": 0.004}))
        with pytest.raises(KeyError, match="resnet50 baseline"):
            opened(door, spec_of())

    def test_noise_is_as_wide_and_as_correlated_as_told(self) -> None:
        session = opened(FakeDoor(Landscape(step_s=0.001, noise_sigma=0.03, noise_rho=0.7)), spec_of())
        logs = np.log(block_of(session, seconds=40.0).samples)
        assert float(logs.std()) == pytest.approx(0.03, rel=0.05)
        assert float(np.corrcoef(logs[1:], logs[:-1])[0, 1]) == pytest.approx(0.7, abs=0.03)

    def test_noise_fades_between_blocks_and_is_as_wide_at_their_start(self) -> None:
        door = FakeDoor(Landscape(step_s=0.01, noise_sigma=0.03, noise_rho=0.9))
        session, sibling = opened(door, spec_of()), opened(door, spec_of("fp16"))
        edges = []
        for _ in range(500):
            block = session.ask(protocol.Measure(kind="throughput", seconds=0.05, settle_seconds=0.0))
            edges.append((block.block.samples[0], block.block.samples[-1]))
            block_of(sibling, seconds=2.0)
        starts, ends = np.log(edges).T
        assert float(starts.std()) == pytest.approx(0.03, rel=0.1)
        assert abs(float(np.corrcoef(starts[1:], ends[:-1])[0, 1])) < 0.15

    def test_the_tail_and_the_offsets_between_processes_are_as_told(self) -> None:
        session = opened(FakeDoor(Landscape(step_s=0.001, tail_share=0.02)), spec_of())
        samples = np.array(block_of(session, seconds=40.0).samples)
        assert float((samples > 0.0015).mean()) == pytest.approx(0.02, rel=0.2)
        door, spec = FakeDoor(Landscape(step_s=0.001, noise_sigma=0.001, offset_sigma=0.02)), spec_of()
        middles = np.log([np.median(block_of(opened(door, spec)).samples) for _ in range(200)])
        assert float(middles.std()) == pytest.approx(0.02, rel=0.2)


class TestDrift:
    landscape = Landscape(step_s={"baseline": 0.010, "fp16": 0.005}, noise_sigma=0.005, drift_sigma=0.02, seed=3)

    def test_cancels_when_interleaved(self) -> None:
        door = FakeDoor(self.landscape)
        first, other = opened(door, spec_of()), opened(door, spec_of("fp16"))
        times: dict[str, dict[int, float]] = {"first": {}, "other": {}}
        for number in range(30):
            for name, session in (("first", first), ("other", other)):
                times[name][number] = float(np.median(block_of(session, number=number).samples))
        paired = ratio_of(paired_log(times["first"], times["other"]))
        assert paired.low <= 2.0 <= paired.high
        assert paired.high / paired.low < 1.02
        wandered = np.log(list(times["first"].values()))
        assert float(wandered.max() - wandered.min()) > 0.05


class TestProgress:
    def test_is_told_when_it_is_reached_and_stands_still_with_its_worker(self) -> None:
        door = FakeDoor(Landscape(step_s=0.01, compile_s=20.0))
        session, heard = door.open(spec_of()), list[str]()
        session.begin(protocol.Prepare(spec=spec_of()))

        def after(seconds: float) -> str:
            session.wait(lambda progress: heard.append(progress.stage), seconds)
            return heard[-1]

        assert after(0.1) == "build"
        assert after(15.0) == "compile"
        session.pause()
        other = door.open(spec_of("fp16"))
        prepared(other, spec_of("fp16"))
        session.resume()
        assert after(0.1) == "compile"
        assert after(100.0) == "warm-up"
        assert heard == ["build", "compile", "numerics", "warm-up"]


class TestFailures:
    def test_too_much_memory_is_an_oom(self) -> None:
        landscape = Landscape(
            step_s=0.01, memory_bytes=lambda spec: 10 * (spec.workload.batch or 1), memory_limit_bytes=640
        )
        door = FakeDoor(landscape)
        fits, too_large = spec_of(batch=64), spec_of(batch=65)
        assert prepared(door.open(fits), fits).memory.peak_reserved_bytes == 640
        session = door.open(too_large)
        failure = failure_of(session.ask(protocol.Prepare(spec=too_large)))
        assert failure.kind == "oom"
        assert failure_of(session.ask(protocol.Measure(kind="throughput", seconds=0.1))) == failure
        session.close()

    @pytest.mark.parametrize("stage", ["build", "compile", "numerics", "warm-up"])
    def test_scripted_ones_strike_at_their_stage(self, stage: str) -> None:
        scripted = Failure(stage=stage, kind="crash", message="gone")
        door = FakeDoor(Landscape(step_s=0.01, failure={"fp16": scripted, "*": None}))
        seen: list[str] = []
        spec = spec_of("fp16")
        reply = door.open(spec).ask(protocol.Prepare(spec=spec), lambda progress: seen.append(progress.stage))
        assert failure_of(reply) == scripted
        assert seen[-1] == stage
        opened(door, spec_of())

    def test_a_measurement_may_break_after_some_blocks(self) -> None:
        scripted = Failure(stage="measure", kind="timeout", message="hung")
        session = opened(FakeDoor(Landscape(step_s=0.01, failure=scripted, fails_after_blocks=2)), spec_of())
        block_of(session)
        block_of(session)
        assert failure_of(session.ask(protocol.Measure(kind="throughput", seconds=0.1))) == scripted

    def test_what_it_cannot_do_is_a_failure_and_the_session_goes_on(self) -> None:
        door = FakeDoor(Landscape(step_s=0.01))
        early = door.open(spec_of())
        assert failure_of(early.ask(protocol.Measure(kind="throughput", seconds=0.1))).stage == "measure"
        session = opened(door, spec_of())
        assert failure_of(session.ask(protocol.Profile(path="trace.json.gz"))).kind == "unsupported"
        block_of(session)


class TestSession:
    def test_a_mistake_of_the_desk_is_not_passed_over(self) -> None:
        with opened(FakeDoor(Landscape(step_s=0.01)), spec_of()) as session:
            session.pause()
            with pytest.raises(DoorError, match="paused"):
                block_of(session)
            session.resume()
            block_of(session)
        assert session.close().memory.peak_reserved_bytes == 2**28
        with pytest.raises(DoorError, match="closed"):
            block_of(session)

    def test_time_is_virtual(self) -> None:
        door = FakeDoor(Landscape(step_s=0.01, noise_sigma=0.001, compile_s={"compile": 1200.0, "*": 0.0}))
        session = opened(door, spec_of("compile"))
        before_s = door.clock_s
        assert before_s > 1200
        block = block_of(session, seconds=10.0)
        assert door.clock_s - before_s == pytest.approx(block.wall_s)
        assert block.wall_s == pytest.approx(10.0, rel=0.02)
        assert block.started_at == before_s

    def test_sessions_are_prepared_at_the_same_time(self) -> None:
        landscape = Landscape(step_s=0.001, compile_s={"compile": 30.0, "fp16": 5.0}, slowdown_per_sibling=0.1)
        door = FakeDoor(landscape)
        slow, quick = door.open(spec_of("compile")), door.open(spec_of("fp16"))
        for session, recipe in ((slow, "compile"), (quick, "fp16")):
            session.begin(protocol.Prepare(spec=spec_of(recipe)))
        assert door.clock_s == 0.0
        assert quick.wait(timeout_s=1.0) is None
        assert door.clock_s == 1.0
        assert isinstance(quick.wait(), protocol.PreparedReply)
        assert 5.5 < door.clock_s < 8, "5 s, and a tenth more for the sibling"
        before_s = door.clock_s
        slow.pause()
        block = block_of(quick, seconds=10.0)
        slow.resume()
        assert isinstance(slow.wait(), protocol.PreparedReply)
        assert door.clock_s > before_s + block.wall_s + 20, "what is paused does not get on"

    def test_who_takes_too_long_to_prepare_is_stopped(self) -> None:
        door = FakeDoor(Landscape(step_s=0.01, compile_s=100.0))
        spec = msgspec.structs.replace(spec_of(), launch=LaunchSpec(prepare_timeout_s=20.0))
        session = door.open(spec)
        assert failure_of(session.ask(protocol.Prepare(spec=spec))).kind == "timeout"
        assert door.clock_s == pytest.approx(20.0)
        assert failure_of(session.ask(protocol.Measure(kind="throughput", seconds=1.0))).kind == "timeout"

    def test_same_requests_same_answers(self) -> None:
        def everything(seed: int) -> list[Any]:
            landscape = Landscape(
                step_s=0.01, noise_rho=0.5, drift_sigma=0.01, tail_share=0.1, offset_sigma=0.1, seed=seed
            )
            door = FakeDoor(landscape)
            sessions = [opened(door, spec_of(recipe)) for recipe in ("baseline", "fp16", "baseline")]
            return [block_of(session, number=number) for number in range(4) for session in sessions]

        assert everything(1) == everything(1)
        assert everything(1) != everything(2)

    def test_noise_is_seeded_by_what_is_measured_not_by_how_a_spec_is_encoded(self) -> None:
        """Renaming a field of the spec once drew every simulation anew, and a test failed for it."""
        landscape = Landscape(step_s=0.01, offset_sigma=0.1)
        plain = spec_of("fp16")
        other = msgspec.structs.replace(plain, measure=MeasureSpec.for_effort("quick"))
        first, again = (block_of(opened(FakeDoor(landscape), spec)).samples for spec in (plain, other))
        assert first == again


class TestBlocks:
    def test_on_an_accelerator(self) -> None:
        session = opened(FakeDoor(Landscape(step_s=0.004, sync_s=0.001, power_w=100.0)), spec_of())
        throughput, latency = block_of(session), block_of(session, "latency", number=7)
        assert (throughput.clock, latency.clock) == ("device", "host")
        assert len(throughput.issue_s) == len(throughput.settling) + len(throughput.samples)
        assert latency.issue_s == ()
        assert latency.round == 7
        assert np.median(latency.samples) == pytest.approx(0.005, rel=0.02)
        assert sum(throughput.settling) == pytest.approx(0.02, rel=0.1)
        assert throughput.energy_j == pytest.approx(100 * throughput.wall_s)

    def test_on_a_cpu(self) -> None:
        session = opened(FakeDoor(Landscape(step_s=0.004, device_kind="cpu")), spec_of())
        block = block_of(session)
        assert (block.clock, block.issue_s) == ("host", ())
        assert block.memory.peak_rss_bytes == 2**28
        assert block.memory.peak_reserved_bytes is None

    def test_training_has_phases_that_make_up_the_step(self) -> None:
        block = block_of(opened(FakeDoor(Landscape(step_s=0.004)), spec_of(task="train")))
        assert set(block.phases) == {"forward", "backward", "optimizer"}
        assert [sum(parts) for parts in zip(*block.phases.values(), strict=True)] == pytest.approx(list(block.samples))

    def test_a_long_step_is_one_sample_and_none_are_more_than_asked_for(self) -> None:
        block = block_of(opened(FakeDoor(Landscape(step_s=2.0)), spec_of()))
        assert (len(block.samples), block.settling) == (1, ())
        session = opened(FakeDoor(Landscape(step_s=0.001)), spec_of())
        reply = session.ask(protocol.Measure(kind="throughput", seconds=1.0, max_steps=5))
        assert len(reply.block.samples) == 5


def test_prepared_says_what_the_landscape_says() -> None:
    numerics = Numerics(rel_l2=0.5, passed=False, reason=note("above-tolerance", "far off"))
    landscape = Landscape(step_s=0.01, compile_s=30.0, numerics={"fp16": numerics}, steady=False)
    spec = spec_of("fp16", device="cuda:1")
    found = prepared(FakeDoor(landscape).open(spec), spec)
    assert found.numerics == numerics
    assert (found.cold_start.compile_s, found.cold_start.compile_cache) == (30.0, "cold")
    assert not found.warmup.steady
    assert (found.environment.device.kind, found.environment.device.index) == ("cuda", 1)
    assert found.workload.items_per_step == 32


@pytest.mark.parametrize(("share", "label"), [(0.97, "host"), (0.3, "device")])
def test_the_issue_share_decides_who_is_the_limit(share: float, label: str) -> None:
    spec = spec_of()
    session = FakeDoor(Landscape(step_s=0.01, issue_share=share)).open(spec)
    record = RunRecord(
        id="x", spec=spec, prepared=prepared(session, spec), blocks=tuple(block_of(session) for _ in range(8))
    )
    assert bound(record).label == label
    (row,) = measurements([record])
    assert row.throughput_per_s == pytest.approx(3200, rel=0.01)


def test_questions_are_answered_from_the_landscape() -> None:
    truth = Landscape(step_s=0.01, models=("resnet50", "resnet18", "vit_b_16"), unknown_models=("resnet5",))
    session = FakeDoor(truth).open()

    def ask(question: protocol.Question) -> Any:
        return session.ask(protocol.Ask(question=question))

    specs = (spec_of(), spec_of(device="cpu"), spec_of(model="resnet5"))
    first, second, third = ask(protocol.AskCheck(specs=specs)).answers
    assert (first.spec.device, first.usage, second.spec.device, second.usage) == ("cuda:0", None, "cpu", None)
    assert "resnet50" in third.usage
    models = ask(protocol.AskModels(pattern="ResNet")).models
    assert [model.name for model in models] == ["resnet18", "resnet50"]
    assert ask(protocol.AskEnvironment()).environment.device.kind == "cuda"
    assert ask(protocol.AskHealth()).items[0].ok


def test_what_it_answers_passes_the_door() -> None:
    """Everything it says can be sent: the same bytes a real worker would send."""
    spec = RunSpec(workload=WorkloadSpec(model="resnet50"), measure=MeasureSpec.for_effort("quick"))
    session = FakeDoor(Landscape(step_s=0.01, throttle=("hw_thermal",))).open(spec)
    for request in (protocol.Prepare(spec=spec), protocol.Measure(kind="throughput", seconds=0.1), protocol.Close()):
        reply = session.ask(request)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=protocol.Reply) == reply
