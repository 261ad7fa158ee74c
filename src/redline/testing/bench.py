"""A `FakeBench` answers every request of the protocol from a `Landscape`, which is the truth, in virtual time."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from redline.model import protocol, record
from redline.model.arrivals import VirtualClock, run_arrivals
from redline.model.errors import UnknownName
from redline.model.note import note
from redline.model.protocol import OnProgress, Reply, Request
from redline.model.record import Capabilities, Failure, Memory, Numerics, Prepared
from redline.model.spec import Recipe, RunSpec
from redline.testing.landscape import (
    PHASES,
    Landscape,
    capabilities_of,
    data_of,
    device_info,
    device_of,
    environment_of,
    epoch_of,
    fed_of,
    generation_info_of,
    generation_parts_of,
    kind_of,
    look_up,
    memory_limit_of,
    memory_of,
    workload_of,
)

UNCHECKED = Numerics(method="unchecked", reason=note("unchecked", "not checked: it was not asked for"))
_FIRST_CALL_STEPS = 20
"""A first call is taken to cost as much as this many steady ones, without compiling."""
_WARMUP_SAMPLES = 20
"""A warm-up has this many steps at least, and reports as many samples."""
_LONG_STEP_FACTOR = 10
"""A step this many times as long as the settling time needs no settling."""

Floats = NDArray[np.float64]


class FakeWorld:
    """All sessions of a door share this world: its clock, its drift, and its device, on which one of them ran last."""

    def __init__(self, drift_sigma: float, seed: int) -> None:
        self.clock_s = 0.0
        self.preparing_until_s: list[float] = []
        """At these times the sessions that are being prepared will be ready."""
        self.ran_last: object = None
        self.log_drift = 0.0
        self._sigma = drift_sigma
        self._random = np.random.default_rng([seed, 0])

    def advance(self, seconds: float) -> None:
        self.clock_s += seconds
        if self._sigma:
            self.log_drift += self._sigma * math.sqrt(seconds) * float(self._random.standard_normal())

    def walk(self, count: int, step_s: float) -> Floats:
        """Returns the drift during `count` steps of about this length; the caller moves the clock once it knows the exact length."""
        if not self._sigma:
            return np.zeros(count)
        strides = self._sigma * math.sqrt(step_s) * self._random.standard_normal(count)
        path: Floats = self.log_drift + np.cumsum(strides)
        self.log_drift = float(path[-1])
        return path


class FakeBench:
    """This is one worker: it answers requests about one spec as the real bench would, and a failure is an answer too."""

    def __init__(self, landscape: Landscape, world: FakeWorld, random: np.random.Generator, number: int = 0) -> None:
        self.truth = landscape
        self._world = world
        self._number = number
        self._opened_at_s = world.clock_s
        self._random = random
        self._offset = math.exp(landscape.offset_sigma * float(random.standard_normal()))
        if landscape.slow_share and float(random.random()) < landscape.slow_share:
            self._offset *= landscape.slow_factor
        self._noise = float(random.standard_normal())
        self._noise_at_s = 0.0
        self._spec: RunSpec | None = None
        self._failure: Failure | None = None
        self._blocks = 0
        self._is_contended = False

    def answer(self, request: Request, on_progress: OnProgress | None = None) -> Reply:
        if isinstance(request, protocol.Ask):
            return self._tell(request.question)
        if isinstance(request, protocol.Close):
            return protocol.ClosedReply(closed=record.Closed(memory=self._memory()))
        if self._failure is not None:
            return protocol.FailureReply(failure=self._failure)
        if isinstance(request, protocol.Prepare):
            return self._prepare(request.spec, on_progress or (lambda progress: None))
        if self._spec is None:
            return self.fail(Failure(stage="measure", kind="crash", message="nothing is prepared yet"))
        if isinstance(request, protocol.Measure):
            return self._measure(self._spec, request)
        if isinstance(request, protocol.TrainEpoch):
            return self._train(self._spec, request.number)
        if isinstance(request, protocol.Feed):
            step_s = look_up(self.truth.step_s, self._spec)
            self._world.advance(request.seconds)
            fed = fed_of(
                self._spec, self.truth, request.part, request.seconds, step_s, request.workers, request.prefetch
            )
            return protocol.FedReply(fed=fed)
        if isinstance(request, protocol.Load):
            return self._load(self._spec, request)
        if isinstance(request, protocol.Squeeze):
            return protocol.SqueezeReply(needed_bytes=self._squeeze(self._spec))
        scripted = self._scripted(self._spec, "profile")
        # A profile leaves the session as it is, which may go on measuring afterwards.
        nothing = Failure(stage="profile", kind="unsupported", message="a fake bench has nothing to trace")
        return protocol.FailureReply(failure=scripted or nothing)

    def _prepare(self, spec: RunSpec, on_progress: OnProgress) -> Reply:
        truth, step_s = self.truth, look_up(self.truth.step_s, spec)
        compile_s = look_up(truth.compile_s, spec)
        stages = {
            "build": truth.start_s + truth.build_s,
            "compile": compile_s + _FIRST_CALL_STEPS * step_s,
            "numerics": 2 * step_s,
            "warm-up": max(spec.measure.warmup_min_seconds, _WARMUP_SAMPLES * step_s),
        }
        for stage, seconds in stages.items():
            on_progress(protocol.Progress(stage=stage))
            self._world.advance(seconds)
            failure = self._scripted(spec, stage) or (self._out_of_memory(spec) if stage == "compile" else None)
            if failure is not None:
                return self.fail(failure)
        self._spec = spec
        self._world.ran_last = self
        cold_start = record.ColdStart(
            import_s=0.0,
            start_s=truth.start_s,
            build_s=truth.build_s,
            first_call_s=stages["compile"],
            compile_s=compile_s or None,
            compile_cache="cold" if compile_s else None,
        )
        return protocol.PreparedReply(
            prepared=Prepared(
                environment=environment_of(device_of(spec, truth), truth),
                workload=workload_of(spec, truth),
                cold_start=cold_start,
                numerics=look_up(truth.numerics, spec) if spec.measure.check_numerics else UNCHECKED,
                warmup=self._warmup(step_s, stages["warm-up"]),
                memory=self._memory(),
                switches={str(switch): capabilities_of(str(switch), truth) for switch in spec.recipe.switches},
                step_synchronises=truth.step_synchronises,
                work=None if spec.measure.sparing else look_up(truth.work, spec),
                data=data_of(spec, truth) if spec.train is not None else None,
                generation=generation_info_of(spec, truth),
            ),
        )

    def _train(self, spec: RunSpec, number: int) -> Reply:
        if number > self.truth.fails_after_epochs and (failure := self._scripted(spec, "epoch")):
            return self.fail(failure)
        step_s = look_up(self.truth.step_s, spec) * self._offset
        epoch, block = epoch_of(spec, self.truth, number, step_s, self._memory())
        self._world.advance(epoch.seconds)
        return protocol.EpochReply(epoch=epoch, block=block)

    def _load(self, spec: RunSpec, request: protocol.Load) -> Reply:
        """Runs the real queue in virtual time: a batch takes what the landscape says of a step of its size."""
        if failure := self._scripted(spec, "load"):
            return self.fail(failure)
        assert spec.load is not None
        clock, steps_s = VirtualClock(), dict[int, float]()
        draws = iter(np.random.default_rng(request.seed).standard_normal(len(request.arrivals_s)).tolist())

        def run(size: int) -> int:
            if size not in steps_s:
                workload = msgspec.structs.replace(spec.workload, batch=size)
                alike = msgspec.structs.replace(spec, workload=workload)
                steps_s[size] = look_up(self.truth.step_s, alike) * self._offset
            clock.advance(steps_s[size] * math.exp(self.truth.noise_sigma * next(draws)))
            return size

        served = run_arrivals(request.arrivals_s, spec.load, clock, run, request.deadline_s)
        self._world.advance(served.ended_s)
        return protocol.LoadReply(served=msgspec.structs.replace(served, rate=request.rate, seed=request.seed))

    def _warmup(self, step_s: float, seconds: float) -> record.Warmup:
        steady = self.truth.steady
        return record.Warmup(
            samples=tuple(self._step_times(step_s, _WARMUP_SAMPLES).tolist()),
            seconds=seconds,
            steady=steady,
            reason=note("steady", "steady") if steady else note("not-steady", "never became steady"),
        )

    def _measure(self, spec: RunSpec, request: protocol.Measure) -> Reply:
        truth, world = self.truth, self._world
        if self._blocks >= truth.fails_after_blocks and (failure := self._scripted(spec, "measure")):
            return self.fail(failure)
        self._blocks += 1
        on_host = request.kind == "latency" or kind_of(device_of(spec, truth)) == "cpu"
        step_s = look_up(truth.step_s, spec) + (truth.sync_s if request.kind == "latency" else 0.0)
        self._is_contended |= world.ran_last is not self
        world.ran_last = self
        if self._is_contended:
            step_s *= look_up(truth.contended_factor, spec)
        settling, timed = _plan_steps(request, step_s * self._offset * math.exp(world.log_drift))
        times = self._step_times(step_s, settling + timed)
        others = self._others(spec, float(times.sum()))
        times *= others.pop("factor", 1.0)
        started_s, wall_s = world.clock_s, float(times.sum())
        world.clock_s = self._noise_at_s = started_s + wall_s
        return protocol.BlockReply(
            block=record.Block(
                kind=request.kind,
                clock="host" if on_host else "device",
                samples=tuple(times[settling:].tolist()),
                settling=tuple(times[:settling].tolist()),
                issue_s=() if on_host else self._issue_times(times, look_up(truth.issue_share, spec)),
                **_parts(spec, truth, times[settling:]),
                **others,
                wall_s=wall_s,
                started_at=started_s,
                round=request.round,
                memory=self._memory(),
                energy_j=None if truth.power_w is None else look_up(truth.power_w, spec) * wall_s,
                telemetry=(self._look(),),
            )
        )

    def _others(self, spec: RunSpec, seconds: float) -> dict[str, Any]:
        """Returns what other processes do to a block that would take this long without them: a factor, and fields of the block."""
        if self.truth.others_cores is None or kind_of(device_of(spec, self.truth)) != "cpu":
            return {}
        cores = self.truth.others_cores(self._world.clock_s)
        waited_s = seconds * cores * look_up(self.truth.slowed_by_others, spec)
        others_s = cores * (seconds + waited_s)
        return {
            "factor": 1 + waited_s / seconds,
            "cpu_s": seconds,
            "waited_s": waited_s,
            "others_cpu_s": max(others_s, waited_s),
        }

    def _step_times(self, step_s: float, count: int) -> Floats:
        truth, random = self.truth, self._random
        drift = self._world.walk(count, step_s)
        noise = random.standard_normal(count)
        if truth.noise_rho:
            noise = self._correlated(noise, step_s)
        times: Floats = step_s * self._offset * np.exp(drift + truth.noise_sigma * noise)
        if truth.pace is not None:
            clock_s: Floats = self._world.clock_s + step_s * np.arange(count, dtype=np.float64)
            times *= truth.pace(self._number, clock_s - self._opened_at_s, clock_s)
        if truth.tail_share:
            hit = random.random(count) < truth.tail_share
            times[hit] *= 2 + random.pareto(2.5, int(hit.sum()))
        return times

    def _correlated(self, fresh: Floats, step_s: float) -> Floats:
        """Returns noise of an AR(1) process. What the last block left of its noise has faded over the gap since then."""
        rho = self.truth.noise_rho
        left = rho ** (1 + (self._world.clock_s - self._noise_at_s) / step_s)
        start = left * self._noise + math.sqrt(1 - left**2) * float(fresh[0])
        shocks = (math.sqrt(1 - rho**2) * fresh[1:]).tolist()
        noise = np.array(list(accumulate(shocks, lambda before, shock: rho * before + shock, initial=start)))
        self._noise = float(noise[-1])
        return noise

    def _issue_times(self, times: Floats, share: float) -> tuple[float, ...]:
        middle_s = float(np.median(times))
        issues: Floats = share * middle_s * np.exp(0.05 * self._random.standard_normal(times.size))
        # The first step of a block takes longer to issue, because it wakes the process up.
        issues[0] *= 3
        return tuple(issues.tolist())

    def _look(self) -> record.TelemetrySample:
        truth = self.truth
        power_w = None if truth.power_w is None or self._spec is None else look_up(truth.power_w, self._spec)
        return record.TelemetrySample(at_s=0.0, power_w=power_w, throttle=truth.throttle, foreign=truth.foreign)

    def _memory(self) -> Memory:
        if self._spec is None:
            return Memory()
        memory, limit = memory_of(self._spec, self.truth), memory_limit_of(self._spec, self.truth)
        if kind_of(device_of(self._spec, self.truth)) == "cpu":
            return Memory(
                peak_rss_bytes=memory.needed,
                peak_private_bytes=memory.needed,
                resident_bytes=memory.resident,
                limit_bytes=limit,
            )
        return Memory(
            peak_allocated_bytes=memory.allocated,
            peak_reserved_bytes=memory.reserved if limit is None else min(memory.reserved, limit),
            # Under pressure the allocator gives its cache back, step after step.
            allocator_retries=0 if limit is None or memory.reserved <= limit else self._blocks + 1,
            resident_bytes=memory.resident,
            limit_bytes=limit,
        )

    def _squeeze(self, spec: RunSpec) -> int | None:
        on_cpu = kind_of(device_of(spec, self.truth)) == "cpu"
        return None if on_cpu else memory_of(spec, self.truth).needed

    def _out_of_memory(self, spec: RunSpec) -> Failure | None:
        limit, needed = memory_limit_of(spec, self.truth), memory_of(spec, self.truth).needed
        if limit is None or needed <= limit:
            return None
        return Failure(stage="compile", kind="oom", message=f"out of memory: {needed} bytes needed, {limit} there")

    def _scripted(self, spec: RunSpec, stage: str) -> Failure | None:
        failure = look_up(self.truth.failure, spec)
        return failure if failure is not None and failure.stage == stage else None

    def fail(self, failure: Failure) -> protocol.FailureReply:
        """A worker that broke stays broken: whatever it is asked next, the answer is the same."""
        self._failure = failure
        return protocol.FailureReply(failure=failure)

    def _tell(self, question: protocol.Question) -> Reply:
        truth = self.truth
        if isinstance(question, protocol.AskCheck):
            return protocol.CheckedSpecs(answers=tuple(_check(spec, truth) for spec in question.specs))
        if isinstance(question, protocol.AskEnvironment):
            device = truth.device_kind if question.device == "auto" else question.device
            return protocol.EnvironmentAnswer(environment=environment_of(device, truth))
        if isinstance(question, protocol.AskModels):
            pattern = (question.pattern or "").lower()
            names = sorted(name for name in truth.models if pattern in name.lower())
            return protocol.ModelNames(models=tuple(protocol.ModelName(name=name, source="fake") for name in names))
        if isinstance(question, protocol.AskCount) and (work := look_up(truth.work, question.spec)) is not None:
            return protocol.CountAnswer(work=work, workload=workload_of(question.spec, truth))
        if isinstance(question, protocol.AskCeilings) and truth.ceilings is not None:
            return protocol.CeilingsAnswer(ceilings=truth.ceilings)
        if isinstance(question, protocol.AskCount | protocol.AskCeilings):
            nothing = Failure(stage="ask", kind="unsupported", message="the landscape does not say")
            return protocol.FailureReply(failure=nothing)
        if isinstance(question, protocol.AskSwitches):
            return protocol.SwitchChoices(choices=tuple(truth.choices), facts=truth.facts)
        if isinstance(question, protocol.AskSnippet):
            return protocol.Snippet(code=f"# {question.spec.recipe}: a fake bench has no code to show\n")
        if isinstance(question, protocol.AskMetric):
            baseline = msgspec.structs.replace(question.spec, recipe=Recipe())
            if (failure := look_up(truth.metric_failure, question.spec)) is not None:
                return protocol.FailureReply(failure=failure)
            return protocol.MetricAnswer(
                value=look_up(truth.metric, question.spec), baseline=look_up(truth.metric, baseline)
            )
        item = protocol.HealthItem(name="bench", ok=True, seen="a fake one: every number is simulated")
        return protocol.Health(items=(item,), devices=(device_info(truth.device_kind, truth),))


def _check(spec: RunSpec, truth: Landscape) -> protocol.Checked:
    resolved = msgspec.structs.replace(spec, device=device_of(spec, truth))
    model = spec.workload.model
    if model in truth.unknown_models:
        return protocol.Checked(spec=resolved, usage=str(UnknownName("model", model, truth.models)))
    for switch in spec.recipe.switches:
        if switch.name in truth.unknown_switches:
            known = (choice.switch for choice in truth.choices)
            return protocol.Checked(spec=resolved, usage=str(UnknownName("switch", switch.name, known)))
    does = Capabilities.together(capabilities_of(str(switch), truth) for switch in spec.recipe.switches)
    return protocol.Checked(spec=resolved, fingerprint="fake", capabilities=does)


def _plan_steps(request: protocol.Measure, step_s: float) -> tuple[int, int]:
    """Returns how many steps pass first and how many are timed. As on the real bench, a long step needs no settling."""
    settling = 0
    if step_s < _LONG_STEP_FACTOR * request.settle_seconds:
        settling = math.ceil(request.settle_seconds / step_s)
    timed = max(1, round(request.seconds / step_s))
    return settling, min(timed, request.max_steps or timed)


def _parts(spec: RunSpec, truth: Landscape, times: Floats) -> dict[str, Any]:
    if spec.workload.task == "train":
        return {"phases": {name: tuple((times * share).tolist()) for name, share in PHASES.items()}}
    return generation_parts_of(spec, truth, times)
