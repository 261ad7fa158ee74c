"""What is safe to try first: the recipes an experienced engineer would begin with, unless a measurement rules them out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from redline.model.questions import SwitchChoice
from redline.search.tune.space import BASELINE, BY_BLOCK, Expectation, Space, Switches, expectation
from redline.search.tune.tuner import CLEARLY_SLOWER, Tuner

GRAPH_MARGIN = 0.7
"""A graph is tried as soon as the host is expected to need this share of the time that the device needs."""
HALF_OVER_STRICT = 6.0
"""By so much products are faster in half precision than in strict fp32, on a card with tensor cores: a decoder's training step on
an H200 took 3.8 times less with amp, and was then limited by the host."""
CLEAR_GAIN = 0.3
"""Of the logarithm of the time: more than is expected of a switch of which nothing is known."""
AS_SHORT = 0.1
"""Of the logarithm of the time: formats that differ by less are taken to be as fast."""
MOSTLY = 0.5
CONVOLUTION_S = 0.17
"""To try a library's kernels for one kind of convolution: the 15 of a U-Net took an H200 two seconds and a half."""
TRAINED_CONVOLUTION_S = 0.13
"""The same for one of its three passes in training: the 33 of ResNet-18 at 32 pixels took 4 s, the 102 of RegNet-Y-400MF more than 15 s."""
USUAL_KINDS = 0.6
"""Kinds of convolutions over their number, where old records do not tell."""
TUNING_SHARE = 0.1
"""Of the budget, for all of them."""


@dataclass(frozen=True)
class SafeRecipes:
    """What an experienced engineer tries first: of each family, the switch that usually gains most."""

    space: Space
    on_cpu: bool
    host_share: float | None
    """The time to issue a step of the baseline over the time of the step; None where it is not known."""
    may_run: Callable[[Switches], bool] = lambda _: True
    """Nothing that was learned speaks against it."""
    slow: Switches = BASELINE
    """Switches of recipes that turned out slower than the baseline."""
    products_share: float | None = None
    """Of the time of the baseline's step, for products and convolutions in strict fp32; None where it is not known."""
    tunes_quickly: bool = False
    """Whether a library can be let choose its kernels by trying them, at little cost."""
    synchronises: bool = False
    """Whether the step waits for the device by itself: the host then never runs ahead, and each launch is waited for."""

    def in_order(self) -> list[Switches]:
        """Half precision (or TF32, where that is slow here), the layout, patches as products, in training the optimizer, on a CPU the
        allocator; the same recorded as a graph where the host would be in the way of it; the same through a compiler, the
        whole model and block by block."""
        precision = self._best("precision") if not self._is_slow("precision") else self._best("tf32")
        others = (self._best(family) for family in ("layout", "patches", "optimizer", "allocator"))
        plain = precision.union(*others)
        graphed = [plain | self._graph] if self._may_be_host_bound(plain) else []
        # There is time to compile once: what is quick to add comes with it. Convolutions are left to the library, which tunes them.
        tuned = self._without_loss_scaling(plain) | (self._best("autotune") if self.tunes_quickly else BASELINE)
        # Kernels of our own leave norms and activations to a compiler, and spare it the products that it takes longest for.
        by_hand = tuned | self._best("attention", at_least=CLEAR_GAIN)
        whole = self._first_that_may_run(self._compiled(by_hand, self._compilers(by_block=False)))
        by_block = self._first_that_may_run(self._compiled(tuned, self._compilers(by_block=True)))
        completed = [self.space.completed(each) for each in (plain, *graphed, whole, by_block)]
        return [each for each in dict.fromkeys(completed) if each and self.space.is_valid(each)]

    def _compiled(self, plain: Switches, compilers: Sequence[SwitchChoice]) -> Iterator[Switches]:
        """With what a compiler can do beyond its own, where that goes with the rest.

        What launches on further streams costs the host more than it saves the device, unless the launches are recorded.
        """
        fused, beside = self._best("fused-linear"), self._best("overlap-gradients")
        for each in dict.fromkeys((plain | fused, plain)):
            for recipe in self._through_a_compiler(each, compilers):
                if any(self.space.by_switch[switch].capabilities.records_graph for switch in recipe):
                    yield recipe | beside
                yield recipe

    def _through_a_compiler(self, plain: Switches, compilers: Sequence[SwitchChoice]) -> Iterator[Switches]:
        """With a graph where the host may be in the way, in one or the other form; and without, the best of them first."""
        if not compilers:
            return
        on_device = min(compilers, key=lambda each: self._expected(each).device)
        with_host = min(compilers, key=lambda each: self._expected(each).device + self._expected(each).host)
        if self._graph and self._may_be_host_bound(plain | {on_device.switch}):
            yield plain | {on_device.switch} | self._graph
            yield plain | {with_host.switch}
        elif self._only_parts_can_be_recorded:
            yield plain | {with_host.switch}
        for each in sorted(compilers, key=lambda each: self._expected(each).device):
            yield plain | {each.switch}

    def _first_that_may_run(self, recipes: Iterable[Switches]) -> Switches:
        completed = map(self.space.completed, recipes)
        return next((each for each in completed if self.space.is_valid(each) and self.may_run(each)), BASELINE)

    @property
    def _only_parts_can_be_recorded(self) -> bool:
        """Those between what the step waits for."""
        return self.synchronises and not self.on_cpu

    def _compilers(self, *, by_block: bool) -> list[SwitchChoice]:
        compilers = [each for each in self._usable(self.space.choices) if each.capabilities.compiles]
        return [each for each in compilers if (each.switch == BY_BLOCK) == by_block and self._expected(each).device < 0]

    @cached_property
    def _graph(self) -> Switches:
        recording = [each for each in self._usable(self.space.choices) if each.relieves == "host"]
        chosen = min(recording, key=lambda each: self._expected(each).device + self._expected(each).host, default=None)
        return frozenset({chosen.switch}) if chosen is not None else BASELINE

    def _best(self, family: str, at_least: float = 0.0) -> Switches:
        usable = [
            each
            for each in self._usable(self.space.families.get(family, ()))
            if self._expected(each).device < -at_least
        ]
        chosen = min(usable, key=lambda each: self._expected(each).device, default=None)
        return frozenset({chosen.switch}) if chosen is not None else BASELINE

    def _without_loss_scaling(self, switches: Switches) -> Switches:
        """In training through a compiler, a format as short that needs no GradScaler, which reads every gradient once more.

        Without a compiler it is the other way round where batch-norm has no fast kernel for that format: on an H200, training
        steps took 4 to 21 % longer in bf16 than in fp16.
        """
        scaling = [each for each in self.space.choices if each.switch in switches and each.capabilities.scales_loss]
        if self.space.task != "train" or not scaling:
            return switches
        near = self._expected(scaling[0]).device + AS_SHORT
        others = [
            each
            for each in self._usable(self.space.families[scaling[0].family])
            if not each.capabilities.scales_loss and self._expected(each).device <= near
        ]
        best = min(others, key=lambda each: self._expected(each).device, default=None)
        return switches - {scaling[0].switch} | {best.switch} if best is not None else switches

    def _is_slow(self, family: str) -> bool:
        return any(choice.switch in self.slow for choice in self.space.families.get(family, ()))

    def _may_be_host_bound(self, switches: Switches) -> bool:
        """Whether the host is expected to need nearly as long as the device, or longer."""
        if self.on_cpu or self.host_share is None:
            return False
        chosen = [self.space.by_switch[switch] for switch in switches]
        expected = list(map(self._expected, chosen))
        host = math.log(max(self.host_share, 1e-6)) + sum(each.host for each in expected)
        device = sum(each.device for each in expected)
        usual = [self._expected(each).device for each in chosen if each.family == "precision"]
        if usual and self.products_share is not None:
            in_half = math.log(1 - self.products_share + self.products_share / HALF_OVER_STRICT)
            device += min(in_half - sum(usual), 0.0)
        return host > math.log(GRAPH_MARGIN) + device

    def _expected(self, choice: SwitchChoice) -> Expectation:
        return expectation(choice, on_cpu=self.on_cpu, task=self.space.task)

    def _usable(self, choices: Iterable[SwitchChoice]) -> list[SwitchChoice]:
        quick = (each for each in choices if not is_slow_for_its_gain(each) and not each.capabilities.quantizes)
        return [each for each in quick if self.may_run(frozenset({each.switch}))]


def is_slow_for_its_gain(choice: SwitchChoice) -> bool:
    """Takes minutes, and nobody has said how many of them it is worth for this task."""
    return choice.is_slow_to_prepare and choice.prepare_s is None


def safe_recipes(tuner: Tuner) -> SafeRecipes:
    lessons, seen, baseline, facts = tuner.lessons(), tuner.seen(), tuner.baseline(), tuner.tune.facts
    slow = [
        recipe
        for recipe, each in seen.items()
        if baseline is not None and not each.is_host_bound and each.log_s > baseline.log_s + CLEARLY_SLOWER
    ]
    return SafeRecipes(
        tuner.space,
        tuner.on_cpu,
        _host_share(tuner),
        lambda each: lessons.chance(each) == 1.0,
        frozenset(switch for recipe in slow for switch in recipe),
        facts.products_share if facts is not None and facts.kinds else None,
        _tunes_quickly(tuner),
        facts is not None and bool(facts.synchronises),
    )


def _tunes_quickly(tuner: Tuner) -> bool:
    """Whether convolutions take most of the step, and are of few enough kinds to try the library's kernels for each."""
    facts = tuner.tune.facts
    convolutions = facts.layers.get("convolution") if facts is not None else None
    if convolutions is None or convolutions.share < MOSTLY:
        return False
    each_s = 3 * TRAINED_CONVOLUTION_S if tuner.space.task == "train" else CONVOLUTION_S
    kinds = convolutions.kinds or USUAL_KINDS * convolutions.calls
    return kinds * each_s <= TUNING_SHARE * tuner.budget_s


def _host_share(tuner: Tuner) -> float | None:
    """The time to issue a step of the baseline over the time of the step: as it was timed, or as the facts say.

    The facts leave out a fast path on which a step may wait for the device, and so do recipes that compile or record it.
    """
    baseline, facts = tuner.baseline(), tuner.tune.facts
    if baseline is not None and baseline.host_log_s is not None:
        return math.exp(baseline.host_log_s - baseline.log_s)
    if facts is None or not facts.step_s or facts.host_s is None or facts.synchronises:
        return None
    return facts.host_s / facts.step_s
