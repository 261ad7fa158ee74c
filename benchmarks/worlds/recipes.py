"""Spaces of recipes to search, drawn at random but with a known truth.

Effects are drawn widely and know nothing of any search's expectations: a switch may help, hurt or do nothing, two switches
may meddle with each other, a recipe may have a quirk of its own, some fail, some give wrong numbers and are fast at it.
A switch takes the longer of the host's and the device's time; compiling costs seconds, less when the same graph was
compiled before; and some switches cost seconds the first time anything on the machine uses them, never again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations
from random import Random

from redline.model.note import note
from redline.model.protocol import Relief, SwitchChoice
from redline.model.record import Capabilities, Failure, FailureScope, Numerics
from redline.model.spec import RunSpec, Task
from redline.testing.landscape import EXACT, Landscape

Switches = frozenset[str]

WRONG = Numerics(
    rel_l2=0.7,
    finite=True,
    floor=1e-3,
    tolerance=4e-3,
    reason=note("above-tolerance", "error 0.7 is above the tolerance 0.004"),
)
SHORT_LOSS_PATH = 5
"""Steps over which a trial follows the losses."""
_GRAPHED = ("compile:reduce-overhead", "compile:max-autotune")
_LEAVE_PROGRAM = frozenset({"graphs", "cudnn-benchmark", "fused-optimizer"})


@dataclass(frozen=True)
class Fault:
    """Switches that break every recipe they are all in."""

    part: Switches
    stage: str = "compile"
    """Where it breaks: `build` at once, `compile` after compiling."""
    after_s: float = 0.0
    """What it takes longer than a recipe that runs, before it breaks."""
    is_named: bool = False
    """The bench knows which switches caused it."""

    @property
    def failure(self) -> Failure:
        told = tuple(sorted(self.part)) if self.is_named else ()
        scope: FailureScope = "recipe" if not told else "switch" if len(told) == 1 else "pair"
        message = f"{'+'.join(sorted(self.part))} breaks this model"
        return Failure(stage=self.stage, kind="compile", message=message, switches=told, scope=scope)


@dataclass(kw_only=True)
class RecipeTruth:
    """What every recipe of one space takes, and which of them must not be used."""

    choices: tuple[SwitchChoice, ...]
    device_s: float
    host_s: float
    on_cpu: bool
    effects: dict[str, float]
    host_effects: dict[str, float]
    pairs: dict[Switches, float] = field(default_factory=dict)
    quirk: Callable[[Switches], float] = lambda _: 0.0
    failing: tuple[Fault, ...] = ()
    wrong: tuple[Switches, ...] = ()
    wrong_in_race: tuple[Switches, ...] = ()
    """Wrong as well, which only a check over a longer path of losses shows."""
    cold_compile_s: float
    warm_compile_s: float
    build_s: float
    first_use_s: dict[str, float]
    """What the first process with a switch pays: libraries and kernels that come from disk."""
    each_use_s: dict[str, float] = field(default_factory=dict)
    """What every process with a switch pays."""
    compile_shares: dict[str, float] = field(default_factory=lambda: {"compile:regional": 0.4})
    """By compiler: of what compiling the model takes, where that is not all."""
    task: Task = "infer"
    clock: Callable[[], float] = lambda: math.inf
    """Of the simulation: what another process is still compiling is not in the cache."""
    _compiled: dict[Switches, float] = field(default_factory=dict)
    """When each program is in the cache."""
    _used: set[str] = field(default_factory=set)

    def step_s(self, switches: Switches) -> float:
        return max(self.host_time_s(switches), self.device_time_s(switches))

    def device_time_s(self, switches: Switches) -> float:
        log = sum(self.effects[switch] for switch in switches) + self.quirk(switches)
        log += sum(effect for pair, effect in self.pairs.items() if pair <= switches)
        return self.device_s * math.exp(log - (0.3 if self.is_wrong(switches) else 0.0))

    def host_time_s(self, switches: Switches) -> float:
        if self.on_cpu:
            return 0.0
        return self.host_s * math.exp(max(sum(self.host_effects.get(switch, 0.0) for switch in switches), -4.0))

    def is_wrong(self, switches: Switches) -> bool:
        return any(part <= switches for part in self.wrong)

    def fault_of(self, switches: Switches) -> Fault | None:
        """The one that strikes first."""
        faults = [fault for fault in self.failing if fault.part <= switches]
        return min(faults, key=lambda fault: (fault.stage != "build", fault.after_s), default=None)

    def failure_of(self, switches: Switches) -> Failure | None:
        fault = self.fault_of(switches)
        return fault.failure if fault is not None else None

    def is_wrong_in_race(self, switches: Switches) -> bool:
        return any(part <= switches for part in self.wrong_in_race)

    def is_usable(self, switches: Switches) -> bool:
        return self.fault_of(switches) is None and not self.is_wrong(switches) and not self.is_wrong_in_race(switches)

    def numerics_of(self, spec: RunSpec) -> Numerics:
        switches, is_long = switches_of(spec), spec.measure.loss_path_steps > SHORT_LOSS_PATH
        return WRONG if self.is_wrong(switches) or (is_long and self.is_wrong_in_race(switches)) else EXACT

    def first_call_s(self, switches: Switches) -> float:
        """Every call is a process that calls it first: some of what it waits for is there from the second on."""
        once_s = sum(self.first_use_s.get(switch, 0.0) for switch in switches - self._used)
        once_s += sum(self.each_use_s.get(switch, 0.0) for switch in switches)
        self._used |= switches
        fault = self.fault_of(switches)
        return once_s + self._compile_s(switches) + (fault.after_s if fault is not None else 0.0)

    def _compile_s(self, switches: Switches) -> float:
        """The second compilation of one graph finds it in the cache."""
        compiling = [choice for choice in self.choices if choice.switch in switches and choice.family == "compiler"]
        if not compiling:
            return 0.0
        program = frozenset(
            choice.switch for choice in self.choices if choice.switch in switches and not choice.leaves_program
        )
        now_s = self.clock()
        is_warm = self._compiled.get(program, math.inf) <= now_s
        slow = 6.0 if compiling[0].is_slow_to_prepare and not is_warm else 1.0
        slow *= self.compile_shares.get(compiling[0].switch, 1.0)
        seconds = (self.warm_compile_s if is_warm else self.cold_compile_s) * slow
        self._compiled[program] = min(self._compiled.get(program, math.inf), now_s + seconds)
        return seconds

    def landscape(self, chance: Random) -> Landscape:
        """With the noise of a machine that is not alone."""
        scale = 4.0 if self.on_cpu else 1.0
        return Landscape(
            step_s=lambda spec: self.step_s(switches_of(spec)),
            issue_share=lambda spec: min(self.host_time_s(switches_of(spec)) / self.step_s(switches_of(spec)), 0.98),
            compile_s=lambda spec: self.first_call_s(switches_of(spec)),
            failure=lambda spec: self.failure_of(switches_of(spec)),
            numerics=self.numerics_of,
            build_s=self.build_s,
            slowdown_per_sibling=0.1,
            choices=self.choices,
            device_kind="cpu" if self.on_cpu else "cuda",
            noise_sigma=scale * chance.uniform(0.003, 0.015),
            noise_rho=chance.uniform(0.0, 0.6),
            drift_sigma=scale * chance.uniform(0.0, 0.003),
            offset_sigma=chance.uniform(0.001, 0.008),
            seed=chance.randrange(2**31),
        )


def switches_of(spec: RunSpec) -> Switches:
    return frozenset(str(switch) for switch in spec.recipe.switches)


def gpu_inference(chance: Random) -> RecipeTruth:
    """The switches a GPU offers for inference, with effects of any size."""
    choices = [
        *_family(("fp16", "bf16", "amp", "amp-bf16"), "precision"),
        choice_of("tf32", "tf32", excludes=("fp16", "bf16")),
        choice_of("channels-last", "layout"),
        *_compilers(freeze=True),
        choice_of("torchscript", "compiler", "both", excludes=("graphs",)),
        choice_of("graphs", "graphs", "host", excludes=("compile:reduce-overhead", "compile:max-autotune")),
        choice_of("cudnn-benchmark", "autotune"),
        choice_of("fold-bn", "fold-bn"),
    ]
    return _drawn(chance, choices, on_cpu=False)


def gpu_training(chance: Random) -> RecipeTruth:
    choices = [
        *_family(("amp", "amp-bf16"), "precision"),
        choice_of("tf32", "tf32"),
        choice_of("channels-last", "layout"),
        *_compilers(freeze=False),
        choice_of("graphs", "graphs", "host", excludes=("compile:reduce-overhead", "compile:max-autotune")),
        choice_of("fused-optimizer", "optimizer", "both"),
        choice_of("cudnn-benchmark", "autotune"),
    ]
    return _drawn(chance, choices, on_cpu=False)


def cpu_inference(chance: Random) -> RecipeTruth:
    """Where half precision may be many times slower."""
    choices = [
        *_family(("fp16", "bf16", "amp-bf16"), "precision"),
        choice_of("channels-last", "layout"),
        *_family(("compile", "compile:freeze", "compile:reduce-overhead", "torchscript"), "compiler", "both"),
        choice_of("fold-bn", "fold-bn"),
        choice_of("onnx", "runtime", "both", excludes=("compile", "torchscript", "channels-last")),
    ]
    return _drawn(chance, choices, on_cpu=True)


def strangers(chance: Random) -> RecipeTruth:
    """Plug-ins nobody has met, in families and with exclusions of any kind."""
    choices: list[SwitchChoice] = []
    for family in range(chance.randint(4, 7)):
        relieves: Relief = chance.choice(("device", "device", "both", "host"))
        choices += _family(
            tuple(f"s{family}{letter}" for letter in "abc"[: chance.randint(1, 3)]), f"f{family}", relieves
        )
    excluded = []
    for choice in choices:
        others = tuple(other.switch for other in choices if other.family != choice.family and chance.random() < 0.05)
        excluded.append(choice_of(choice.switch, choice.family, choice.relieves, excludes=others))
    return _drawn(chance, excluded, on_cpu=chance.random() < 0.3)


SPACES: dict[str, Callable[[Random], RecipeTruth]] = {
    "GPU inference": gpu_inference,
    "GPU training": gpu_training,
    "CPU inference": cpu_inference,
    "strangers": strangers,
}


def always_failing(chance: Random) -> RecipeTruth:
    """A switch in all its variants, and another one, fail wherever they stand, at once."""
    truth, others = gpu_inference(chance), [f"stranger:{letter}" for letter in "abcd"]
    choices = (*truth.choices, *_family(tuple(others), "stranger"))
    truth = replace(truth, choices=choices, effects={**truth.effects, **dict.fromkeys(others, -0.1)})
    broken = [*others, chance.choice(("channels-last", "cudnn-benchmark", "fold-bn"))]
    return _with_faults(truth, [Fault(frozenset({switch}), "build") for switch in broken])


def failing_pairs(chance: Random) -> RecipeTruth:
    """Three pairs of switches fail together, each alone does not."""
    truth = gpu_inference(chance)
    pairs = [(one, other) for one, other in combinations(truth.choices, 2) if one.family != other.family]
    chosen = chance.sample(pairs, 3)
    return _with_faults(truth, [Fault(frozenset({one.switch, other.switch}), "build") for one, other in chosen])


def failing_with_compile(chance: Random) -> RecipeTruth:
    """Two switches that no compiler accepts, which shows when it has compiled."""
    truth = chance.choice((gpu_inference, gpu_training))(chance)
    compilers = [choice.switch for choice in truth.choices if choice.family == "compiler"]
    others = [choice.switch for choice in truth.choices if choice.family in ("precision", "layout", "graphs", "tf32")]
    parts = [frozenset({other, compiler}) for other in chance.sample(others, 2) for compiler in compilers]
    return _with_faults(truth, [Fault(part, "compile") for part in parts])


def failing_slowly(chance: Random) -> RecipeTruth:
    """One switch, or one pair, that breaks only after fifteen to thirty seconds."""
    truth = chance.choice((gpu_inference, gpu_training))(chance)
    part = frozenset(choice.switch for choice in chance.sample(truth.choices, chance.choice((1, 2))))
    return _with_faults(truth, [Fault(part, "compile", after_s=chance.uniform(15.0, 30.0))])


def wrong_in_race(chance: Random) -> RecipeTruth:
    """Training whose number formats lose their numbers slowly: trials do not show it, the longer check of the race does."""
    truth = gpu_training(chance)
    formats = [choice.switch for choice in truth.choices if choice.family == "precision"]
    parts = chance.choice(([*formats], [formats[0]], [formats[-1], "channels-last"], [*formats, "tf32"]))
    # A switch that made it slower would never have led.
    effects = {**truth.effects, **{switch: min(truth.effects[switch], -0.3) for switch in parts}}
    faulty = replace(truth, task="train", effects=effects, wrong_in_race=tuple(frozenset({switch}) for switch in parts))
    return _with_faults(faulty, [])


FAILURES: dict[str, Callable[[Random], RecipeTruth]] = {
    "always failing": always_failing,
    "failing pairs": failing_pairs,
    "failing with compile": failing_with_compile,
    "failing slowly": failing_slowly,
    "wrong in the race": wrong_in_race,
}


def _with_faults(truth: RecipeTruth, faults: list[Fault]) -> RecipeTruth:
    return replace(truth, failing=tuple(faults), wrong=())


def _drawn(chance: Random, choices: list[SwitchChoice], *, on_cpu: bool) -> RecipeTruth:
    by_family = {choice.family: _family_effect(chance, choice.family, on_cpu) for choice in choices}
    effects = {choice.switch: by_family[choice.family] + chance.gauss(0.0, 0.1) for choice in choices}
    host = {
        choice.switch: -chance.uniform(1.5, 4.0) if _is_graphed(choice) else chance.gauss(-0.1, 0.3)
        for choice in choices
        if choice.relieves != "device"
    }
    pairs = {
        frozenset({one.switch, other.switch}): chance.gauss(0.0, 0.2 if chance.random() < 0.1 else 0.05)
        for one, other in combinations(choices, 2)
        if one.family != other.family and chance.random() < 0.4
    }
    salt = chance.randrange(2**31)
    device_s = math.exp(chance.uniform(math.log(0.001), math.log(0.05)))
    return RecipeTruth(
        choices=tuple(choices),
        device_s=device_s * (4 if on_cpu else 1),
        host_s=device_s * math.exp(chance.uniform(-2.0, 1.0)),
        on_cpu=on_cpu,
        effects=effects,
        host_effects=host,
        pairs=pairs,
        quirk=lambda switches: Random(f"{salt} {sorted(switches)}").gauss(0.0, 0.004),
        failing=tuple(map(Fault, _parts(chance, choices, 0.5))),
        wrong=tuple(_parts(chance, choices, 0.4)),
        cold_compile_s=chance.uniform(8.0, 40.0),
        warm_compile_s=chance.uniform(3.0, 8.0),
        build_s=chance.uniform(0.5, 3.0),
        first_use_s={choice.switch: _first_use_s(chance, choice.family) for choice in choices},
    )


def _first_use_s(chance: Random, family: str) -> float:
    """On an H200 the first process with cudnn-benchmark took ten seconds longer than those after it."""
    return chance.uniform(4.0, 12.0) if family == "autotune" else chance.uniform(0.0, 1.5)


def _family_effect(chance: Random, family: str, on_cpu: bool) -> float:
    if family == "precision":
        return chance.gauss(1.0, 0.8) if on_cpu else chance.gauss(-0.6, 0.4)
    if family in ("compiler", "runtime"):
        return chance.gauss(-0.2, 0.25)
    if family == "graphs":
        return chance.gauss(-0.02, 0.03)
    return 0.0 if chance.random() < 0.25 else chance.gauss(-0.07, 0.15)


def _parts(chance: Random, choices: list[SwitchChoice], share: float) -> list[Switches]:
    """A switch or a pair that must not be used, in some spaces."""
    if chance.random() > share:
        return []
    return [frozenset(choice.switch for choice in chance.sample(choices, chance.choice((1, 2, 2))))]


def _is_graphed(choice: SwitchChoice) -> bool:
    return choice.capabilities.records_graph


def _compilers(*, freeze: bool) -> list[SwitchChoice]:
    names = ["compile", "compile:reduce-overhead", *(["compile:freeze"] if freeze else [])]
    return [
        *_family(tuple(names), "compiler", "both"),
        choice_of("compile:max-autotune", "compiler", "both", is_slow=True),
    ]


def _family(switches: tuple[str, ...], family: str, relieves: Relief = "device") -> list[SwitchChoice]:
    return [choice_of(switch, family, relieves) for switch in switches]


def choice_of(
    switch: str, family: str, relieves: Relief = "device", excludes: tuple[str, ...] = (), *, is_slow: bool = False
) -> SwitchChoice:
    """A switch as a bench would offer it."""
    return SwitchChoice(
        switch=switch,
        family=family,
        relieves=relieves,
        excludes=excludes,
        capabilities=Capabilities(
            compiles=family in ("compiler", "runtime"), records_graph=relieves == "host" or switch in _GRAPHED
        ),
        leaves_program=switch in _LEAVE_PROGRAM,
        is_slow_to_prepare=is_slow,
    )
