"""A `Space` has all recipes that a search may try. This module also says what is expected of each switch before anything is measured.

Expectations only say where to look first: they are wide priors that a few trials overrule, as logarithms of the factor on the time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations

import msgspec

from redline.model.errors import SpecError, UnknownName
from redline.model.note import Note, note
from redline.model.protocol import SwitchChoice, SwitchNeed
from redline.model.spec import Recipe, Task, refuse_removed
from redline.search.tune.record import Refused, TuneSpec

Switches = frozenset[str]
"""A recipe is the set of its switches' texts."""

BASELINE: Switches = frozenset()
BY_BLOCK = "compile:regional"
"""This switch compiles each kind of repeated block only once."""


@dataclass(frozen=True)
class Expectation:
    """One switch is expected to do this to the device's time and to the host's, as logarithms with standard deviations."""

    device: float
    device_sd: float
    host: float = 0.0
    host_sd: float = 0.1


ON_GPU: dict[str, Expectation] = {
    "fp16": Expectation(-0.8, 0.3),
    "bf16": Expectation(-0.75, 0.3),
    "amp": Expectation(-0.55, 0.3, 0.3, 0.3),
    "amp-bf16": Expectation(-0.55, 0.3, 0.3, 0.3),
    "tf32": Expectation(-0.4, 0.3),
    "channels-last": Expectation(-0.15, 0.2),
    "compile": Expectation(-0.35, 0.25, -0.3, 0.5),
    "compile:reduce-overhead": Expectation(-0.35, 0.25, -2.0, 0.8),
    "compile:max-autotune": Expectation(-0.38, 0.25, -2.0, 0.8),
    BY_BLOCK: Expectation(-0.24, 0.25, -0.2, 0.4),
    # In training, casts of weights and the ends of reductions are hundreds of kernels of a microsecond or two.
    "compile:combine": Expectation(-0.38, 0.25, -0.3, 0.5),
    "compile:coordinate-descent": Expectation(-0.4, 0.25, -0.3, 0.5),
    "compile:freeze": Expectation(-0.4, 0.25, -0.3, 0.5),
    "torchscript": Expectation(-0.1, 0.15, -0.3, 0.4),
    "graphs": Expectation(-0.03, 0.06, -2.5, 0.8),
    "cudnn-benchmark": Expectation(-0.06, 0.1),
    "fused-optimizer": Expectation(-0.05, 0.07, -0.3, 0.3),
    # Eager convolutions add the folded bias in a kernel of its own, with which ResNet-50 was 5 % slower on an H200.
    "fold-bn": Expectation(0.0, 0.08, -0.2, 0.3),
    "patch-products": Expectation(-0.04, 0.06),
    "fused-linear": Expectation(-0.06, 0.06),
    "sdpa": Expectation(0.0, 0.1),  # torch chooses among its kernels by itself
    "sdpa:math": Expectation(0.15, 0.2),
    # On an H200 it has saved 12 % of ResNet-18's training step at 32 pixels, 6 % of RegNet-Y's and 3 % of ResNet-50's. RegNet-Y's host took
    # 30 % longer.
    "overlap-gradients": Expectation(-0.05, 0.06, 0.25, 0.2),
    "tensorrt": Expectation(-0.5, 0.4, -0.5, 0.5),
    "onnx": Expectation(0.0, 0.4, -0.3, 0.5),
    # Without a compiler the scales are kernels of their own, which cost more than the shorter products save.
    "fp8": Expectation(-0.1, 0.4, 0.4, 0.3),
    # Generation reads all weights for every token, which differs from a forward of many items.
    "generate static-cache": Expectation(0.03, 0.1, 0.0, 0.2),
    "generate compile": Expectation(-0.45, 0.25, -0.3, 0.5),
    "generate compile:reduce-overhead": Expectation(-0.45, 0.25, -2.0, 0.8),
    # Products of one row become reductions that are tuned for reading weights, which libraries are not.
    "generate compile:coordinate-descent": Expectation(-0.8, 0.35, -0.3, 0.5),
    "generate compile:pdl": Expectation(-0.85, 0.35, -0.3, 0.5),
    # Without a compiler, eager norms and activations leave it little to gain; with one it is about as fast as memory.
    "generate decode-kernels": Expectation(-0.5, 0.35, 0.0, 0.3),
    # Unknown switches, such as those of plug-ins, are judged by what they say they relieve.
    "relieves host": Expectation(-0.03, 0.1, -2.0, 1.0),
    "relieves both": Expectation(-0.15, 0.3, -0.3, 0.6),
    "relieves device": Expectation(-0.1, 0.3),
}
"""The keys are switches, with or without their options, and may begin with a task; the last three say what an unknown switch relieves."""
ON_CPU: dict[str, Expectation] = {
    "static-cache": Expectation(0.05, 0.15),
    # Few CPUs have arithmetic for these formats; on others they are many times slower.
    **dict.fromkeys(("fp16", "bf16", "amp", "amp-bf16"), Expectation(2.0, 0.4)),
    "channels-last": Expectation(-0.2, 0.2),
    "compile": Expectation(-0.15, 0.2),
    BY_BLOCK: Expectation(-0.12, 0.2),
    "compile:freeze": Expectation(-0.35, 0.2),
    "fused-optimizer": Expectation(-0.1, 0.1),
    "keep-memory": Expectation(-0.1, 0.15),
    "torchscript": Expectation(-0.2, 0.2),
    "fold-bn": Expectation(-0.06, 0.08),
    "patch-products": Expectation(0.0, 0.05),
    "onnx": Expectation(-0.4, 0.3),
}
"""A switch that is not named here is judged on a CPU by what it says it relieves."""
IN_COMMON = {"precision": 0.4, "compiler": 0.2, "other": 0.1, "precision on a CPU": 1.0}
"""The switches of a family have this standard deviation in common: one slow half precision makes the others suspect."""


def expectation(choice: SwitchChoice, *, on_cpu: bool, task: Task = "infer") -> Expectation:
    if (
        choice.expected_time is not None
    ):  # autocast takes a tenth more: it casts weights and activations again in every step
        return Expectation(math.log(choice.expected_time) + 0.1 * choice.switch.startswith("amp"), 0.3)
    name, table = choice.switch.partition(":")[0], ON_CPU if on_cpu else ON_GPU
    known = (table.get(key) for key in (f"{task} {choice.switch}", choice.switch, f"{task} {name}", name))
    return next(filter(None, known), ON_GPU[f"relieves {choice.relieves}"])


def pair_expectation(one: SwitchChoice, other: SwitchChoice) -> float:
    """Returns what two switches together are expected to do beyond their own effects, as a logarithm."""
    if "precision" in (one.family, other.family):
        if "tf32" in (one.switch, other.switch):
            return 0.42  # little work is left in fp32 that tf32 could speed up
        if "channels-last" in (one.switch, other.switch):
            return -0.1  # tensor cores want the channel innermost
    return 0.0


MOST_RECIPES = 20_000
"""If there are more recipes than this, only those with few switches are enumerated."""

READING_ORDER = (
    *("precision", "tf32", "quantization", "layout", "patches", "cache", "fold-bn", "sdpa", "fused-linear"),
    *("overlap-gradients", "compiler", "runtime", "optimizer", "graphs", "autotune"),
)
"""In this order of its families a recipe reads well; families that are not named stand before the last."""


@dataclass(frozen=True)
class Space:
    """A space has the switches that may be used, and knows which recipes they make."""

    choices: tuple[SwitchChoice, ...]
    task: Task = "infer"

    @cached_property
    def by_switch(self) -> dict[str, SwitchChoice]:
        return {choice.switch: choice for choice in self.choices}

    @cached_property
    def families(self) -> dict[str, list[SwitchChoice]]:
        known = {name: place for place, name in enumerate(READING_ORDER)}
        names = {choice.family for choice in self.choices}
        in_order = sorted(names, key=lambda name: (known.get(name, len(known) - 1.5), name))
        return {name: [choice for choice in self.choices if choice.family == name] for name in in_order}

    @cached_property
    def kin(self) -> dict[str, str]:
        """Maps a switch to what it shares with others that often break where it breaks.

        These are its variants (`sdpa:*` for `sdpa:flash`), and all switches that compile the model.
        """
        names = {choice.switch: choice.switch.partition(":")[0] for choice in self.choices}
        counts = Counter(names.values())
        variants = {switch: f"{name}:*" for switch, name in names.items() if counts[name] > 1}
        compilers = {variants.get(one.switch, one.switch) for one in self.choices if one.family == "compiler"}
        return variants | (dict.fromkeys(compilers, "compiler:*") if len(compilers) > 1 else {})

    @cached_property
    def recipes(self) -> tuple[Switches, ...]:
        """Returns all valid recipes; those with fewer switches come first, and the baseline is the very first."""
        grown: list[tuple[SwitchChoice, ...]] = [()]
        for family in self.families.values():
            grown += [(*chosen, choice) for chosen in grown for choice in family if _fits(chosen, choice)]
            grown = sorted(grown, key=len)[:MOST_RECIPES]
        recipes = (frozenset(choice.switch for choice in chosen) for chosen in grown)
        return tuple(switches for switches in recipes if self._lacking(switches) is None)

    @cached_property
    def _order(self) -> dict[str, int]:
        """Maps a switch to the place that it has in a recipe's text."""
        return {choice.switch: index for index, choice in enumerate(chain(*self.families.values()))}

    def text(self, switches: Switches) -> str:
        return "+".join(sorted(switches, key=self._order.__getitem__)) or "baseline"

    def checked(self, text: str) -> Switches:
        """Returns the recipe that a person's text names; a mistake in it is raised as one line."""
        switches = self.switches_of(text)
        lacking = self._lacking(switches)
        if lacking is not None:
            raise SpecError(f"recipe {text}: {lacking[0]}: {lacking[1].reason}")
        return switches

    def switches_of(self, text: str) -> Switches:
        """Returns the recipe of a text. One that was tried before may lack what its switches need: that is how the need was learned."""
        if text not in self._read:
            parts = Recipe.parse(text).switches
            for switch in parts:
                refuse_removed(switch)
            switches = frozenset(map(str, parts))
            unknown = sorted(switches - self.by_switch.keys())
            if unknown:
                raise UnknownName("switch", unknown[0], self.by_switch, hint="not among those that can be tried here")
            if not self._fit_together(switches):
                raise SpecError(f"recipe {text}: its switches exclude each other")
            self._read[text] = switches
        return self._read[text]

    @cached_property
    def _read(self) -> dict[str, Switches]:
        """Holds recipes by their texts, because a search reads those of all its trials again and again."""
        return {}

    def is_valid(self, switches: Switches) -> bool:
        return self._fit_together(switches) and self._lacking(switches) is None

    def _fit_together(self, switches: Switches) -> bool:
        return all(_fits([one], other) for one, other in combinations(map(self.by_switch.__getitem__, switches), 2))

    def less_one(self, switches: Switches) -> dict[Switches, str]:
        """Maps each recipe that lacks one of the switches to that switch. What cannot do without it is left out and named as well."""
        found: dict[Switches, str] = {}
        for switch in sorted(switches, key=self._order.__getitem__):
            rest = switches - {switch}
            while (lacking := self._lacking(rest)) is not None:
                rest -= {lacking[0]}
            if rest or switches == {switch}:
                found.setdefault(rest, self.text(switches - rest))
        return found

    def _lacking(self, switches: Switches) -> tuple[str, SwitchNeed] | None:
        """Returns a switch that cannot do without one that is not there, and what it needs; None if all have what they need."""
        chosen = [self.by_switch[switch] for switch in switches]
        if not any(choice.needs for choice in chosen):
            return None
        names = set(chain.from_iterable(map(_names, chosen)))
        needs = (
            (choice.switch, need) for choice in sorted(chosen, key=lambda one: one.switch) for need in choice.needs
        )
        return next(((switch, need) for switch, need in needs if not need.is_met(names)), None)


def _fits(chosen: Iterable[SwitchChoice], new: SwitchChoice) -> bool:
    return all(
        other.family != new.family and not (_names(other) & set(new.excludes) or _names(new) & set(other.excludes))
        for other in chosen
    )


def space_for(tune: TuneSpec, choices: Sequence[SwitchChoice]) -> tuple[Space, list[Refused]]:
    """Returns the space of the switches that can be tried, and those that cannot be, each with the reason."""
    known = [*choices, *_own_variants(tune.seeds, choices)]
    names = {name for choice in known for name in _names(choice)}
    for asked in (*tune.switches, *tune.without):
        if asked not in names:
            for switch in Recipe.parse(asked).switches:
                refuse_removed(switch)
            raise UnknownName("switch", asked, names, hint=f"there are {', '.join(sorted(c.switch for c in choices))}")
    reasons = {choice.switch: _reason_against(choice, tune) for choice in known}
    refused = [Refused(switch=switch, reason=reason) for switch, reason in reasons.items() if reason is not None]
    usable = tuple(choice for choice in known if reasons[choice.switch] is None)
    return Space(usable, tune.spec.workload.task), refused


def _reason_against(choice: SwitchChoice, tune: TuneSpec) -> Note | None:
    named = {str(switch) for seed in tune.seeds for switch in Recipe.parse(seed).switches}.union(tune.switches)
    if choice.refusal is not None and not (choice.refusal.code == "caution" and choice.switch in named):
        return choice.refusal
    if choice.capabilities.quantizes and not tune.allow_quantized:
        return note("quantizes", "changes the weights; --allow-quantized tries it")
    if choice.relieves == "memory":
        return note("caution", "spares memory and makes no step faster; 'redline batch -r' tries what it is for")
    if tune.switches and not _names(choice) & set(tune.switches):
        return note("not-asked-for", "not among the switches that were asked for")
    if _names(choice) & set(tune.without):
        return note("excluded", "left out as asked")
    return None


def _own_variants(seeds: Iterable[str], choices: Sequence[SwitchChoice]) -> list[SwitchChoice]:
    """Returns the switches of the user's recipes that have arguments or options of their own. They are tried like the plain switch."""
    plain = {choice.switch.partition(":")[0]: choice for choice in reversed(choices)}
    known = {choice.switch for choice in choices}
    asked = {str(switch): switch for seed in seeds for switch in Recipe.parse(seed).switches}
    own = []
    for text, switch in asked.items():
        if text not in known:
            refuse_removed(switch)
            if switch.name not in plain:
                raise UnknownName("switch", text, known, hint="not among those that can be tried here")
            own.append(msgspec.structs.replace(plain[switch.name], switch=text, refusal=None))
    return own


def _names(choice: SwitchChoice) -> set[str]:
    return {choice.switch, choice.switch.partition(":")[0]}
