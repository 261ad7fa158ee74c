"""What is believed about recipes that were not tried, from those that were.

A switch multiplies the time of the device by its effect; switches of a family have something in common; two switches together
may do more or less than both alone; every such effect is Gaussian in the logarithm, so what is known about all recipes
is one Gaussian process with the kernel of those sums. Time to issue a step has a process of its own, because a step
takes the longer of the two: `time = max(host, device)`. While the host is the limit, the device's time is only known
to be shorter, and switches that relieve the device cannot show what they are worth.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from redline.search.tune.estimates import Estimate
from redline.search.tune.space import Space, Switches, expectation, pair_expectation, shared_sd

Floats = NDArray[np.float64]

PAIR_SDS = (0.01, 0.03, 0.06, 0.12, 0.2)
"""How much two switches may do together beyond their own effects; what was seen chooses among them."""
PAIR_SD_DOUBTS = (1.5, 0.5, 0.0, 0.3, 1.0)
"""Against each of those, as logarithms of odds: a few trials must not rule out that switches meddle with each other."""
SURPRISE_SD = 0.2
SURPRISE_RATE = 0.05
"""Most pairs hardly meddle and a few do strongly, which no single standard deviation says: of pairs never seen
together, one in twenty may do this much."""
DOUBT_SHARE = 0.15
DOUBT_FACTOR = 2.5
"""And a strong pair once seen has bent the estimates of others: so often they are off by so many times as much."""
NEGLIGIBLE = 0.01
HOST_PAIR_SD = 0.08
RESIDUAL_SD = 0.006
PROCESS_SD = 0.006
"""How far two processes of one recipe lie apart, beyond what a single process shows of its noise."""
HOST_ERROR = 0.05
START_SD = 1.5
"""Of the baseline itself, before it is measured."""
_QUANTILES = 48
_LARGEST_Z = 60.0


@dataclass(frozen=True)
class Gaussian:
    """One process: what switches and families may do, and what was seen."""

    step_variances: Floats
    family_variances: Floats
    pair_variance: float
    prior: Floats
    """The expected logarithm for every recipe."""

    def kernel(self, one: Floats, other: Floats, one_families: Floats, other_families: Floats) -> Floats:
        common = one @ other.T
        added = (one * self.step_variances) @ other.T + (one_families * self.family_variances) @ other_families.T
        product: Floats = START_SD**2 + added + self.pair_variance * common * (common - 1) / 2
        return product


class Beliefs:
    """Over every recipe of a space."""

    def __init__(self, space: Space, *, on_cpu: bool, host_is_seen: bool = True) -> None:
        self.space = space
        self.recipes = list(space.recipes)
        self.index = {recipe: place for place, recipe in enumerate(self.recipes)}
        self.host_is_seen = host_is_seen and not on_cpu
        switches = [choice.switch for choice in space.choices]
        families = list(space.families)
        self._steps = np.array([[switch in recipe for switch in switches] for recipe in self.recipes], dtype=np.float64)
        self._steps = self._steps.reshape(len(self.recipes), len(switches))
        belongs = np.array([[choice.family == name for name in families] for choice in space.choices], dtype=np.float64)
        self._families: Floats = self._steps @ belongs.reshape(len(switches), len(families))
        expected = [expectation(choice, on_cpu=on_cpu) for choice in space.choices]
        self._device = np.array([each.device for each in expected])
        self._host = np.array([each.host for each in expected])
        self._device_variances = np.array([self._device_sd(each.device_sd, each.host_sd) ** 2 for each in expected])
        self._host_variances = np.array([each.host_sd**2 for each in expected])
        self._family_variances = np.array([shared_sd(name, on_cpu=on_cpu) ** 2 for name in families])
        self._pairs = self._pair_means()
        self._z = _normal_quantiles(_QUANTILES)

    def _device_sd(self, device_sd: float, host_sd: float) -> float:
        # Where nobody can tell host from device, a switch that relieves the host shows as one that relieves the device.
        return device_sd if self.host_is_seen or host_sd < 0.5 else math.hypot(device_sd, 0.2)

    def _pair_means(self) -> Floats:
        means = np.zeros(len(self.recipes))
        for (at, one), (other_at, other) in combinations(enumerate(self.space.choices), 2):
            beyond = pair_expectation(one, other)
            if beyond:
                means += beyond * self._steps[:, at] * self._steps[:, other_at]
        return means

    def promises(self, seen: Mapping[Switches, Estimate], fastest: float) -> Floats:
        """For every recipe, by how much it is expected to improve on the fastest so far, as a share of its time.

        Averaged over how much switches may meddle with each other, each weighed by how well it explains what was seen.
        """
        z, others = self._z
        hosts: Floats | None = None
        seen_hosts = {recipe: estimate for recipe, estimate in seen.items() if estimate.host_log_s is not None}
        if self.host_is_seen and seen_hosts:
            host_mean, host_sd = self._believe_host(seen_hosts)
            hosts = host_mean[:, None] + host_sd[:, None] * others
        surprise = self._surprises(seen)
        gains = np.zeros(len(self.recipes))
        for weight, mean, sd in self._believe_device(seen):
            misled = DOUBT_SHARE * (1 - surprise)
            likely = ((1 - surprise - misled, sd), (misled, DOUBT_FACTOR * sd), (surprise, np.hypot(sd, SURPRISE_SD)))
            for share, width in likely:
                times = mean[:, None] + width[:, None] * z
                times = times if hosts is None else np.maximum(times, hosts)
                gains += weight * share * np.maximum(fastest - times, 0.0).mean(axis=1)
        return gains

    def _surprises(self, seen: Mapping[Switches, Estimate]) -> Floats:
        """The chance that a recipe holds a strong pair: one of those never yet seen together may be."""
        shown = self._steps[[self.index[recipe] for recipe, each in seen.items() if not each.is_host_bound]]
        unseen = (shown.T @ shown == 0).astype(np.float64)
        np.fill_diagonal(unseen, 0.0)
        counts = ((self._steps @ unseen) * self._steps).sum(axis=1) / 2
        chances: Floats = 1 - (1 - SURPRISE_RATE) ** counts
        return chances

    def _believe_device(self, seen: Mapping[Switches, Estimate]) -> list[tuple[float, Floats, Floats]]:
        """Weight, mean and standard deviation of the logarithm under each amount of meddling."""
        free = [(self.index[recipe], each) for recipe, each in seen.items() if not each.is_host_bound]
        bound = [(self.index[recipe], each) for recipe, each in seen.items() if each.is_host_bound]
        places = np.array([at for at, _ in free], dtype=np.intp)
        values = np.array([each.log_s for _, each in free])
        noises = np.array([each.error**2 + PROCESS_SD**2 + RESIDUAL_SD**2 for _, each in free])
        prior = self._steps @ self._device + self._pairs
        prior = prior + (values.mean() - prior[places].mean() if free else min(each.log_s for _, each in bound))
        processes = [Gaussian(self._device_variances, self._family_variances, sd**2, prior) for sd in PAIR_SDS]
        weights = self._weights(processes, places, values, noises)
        believed = []
        for weight, process in zip(weights, processes, strict=True):
            if weight < NEGLIGIBLE:
                continue
            sites = self._censored(process, places, values, noises, bound)
            together = [np.concatenate([old, new]) for old, new in zip((places, values, noises), sites, strict=True)]
            mean, sd = self._posterior(process, together[0].astype(np.intp), together[1], together[2])
            believed.append((float(weight), mean, sd))
        return believed

    def _weights(self, processes: list[Gaussian], places: NDArray[np.intp], values: Floats, noises: Floats) -> Floats:
        fits = np.array([self._log_likelihood(process, places, values, noises) for process in processes])
        scores = fits - np.array(PAIR_SD_DOUBTS)
        weights: Floats = np.exp(scores - scores.max())
        normed: Floats = weights / weights.sum()
        return normed

    def _believe_host(self, seen: Mapping[Switches, Estimate]) -> tuple[Floats, Floats]:
        places = np.array([self.index[recipe] for recipe in seen], dtype=np.intp)
        values = np.array([each.host_log_s for each in seen.values()], dtype=np.float64)
        prior = self._steps @ self._host
        prior = prior - prior[places].mean() + values.mean()
        process = Gaussian(self._host_variances, self._family_variances * 0.1, HOST_PAIR_SD**2, prior)
        return self._posterior(process, places, values, np.full(len(values), HOST_ERROR**2))

    def _log_likelihood(self, process: Gaussian, places: NDArray[np.intp], values: Floats, noises: Floats) -> float:
        if not len(values):
            return 0.0
        factor = np.linalg.cholesky(self._among(process, places) + np.diag(noises))
        scaled = np.linalg.solve(factor, values - process.prior[places])
        return float(-0.5 * scaled @ scaled - np.log(np.diag(factor)).sum())

    def _among(self, process: Gaussian, places: NDArray[np.intp]) -> Floats:
        switches, families = self._steps[places], self._families[places]
        return process.kernel(switches, switches, families, families)

    def _posterior(
        self, process: Gaussian, places: NDArray[np.intp], values: Floats, noises: Floats
    ) -> tuple[Floats, Floats]:
        own = self._own_variances(process)
        if not len(values):
            return process.prior, np.sqrt(own)
        across = process.kernel(self._steps, self._steps[places], self._families, self._families[places])
        inverse = np.linalg.inv(self._among(process, places) + np.diag(noises))
        mean = process.prior + across @ (inverse @ (values - process.prior[places]))
        variance = own - np.einsum("ij,jk,ik->i", across, inverse, across)
        return mean, np.sqrt(np.maximum(variance, RESIDUAL_SD**2))

    def _own_variances(self, process: Gaussian) -> Floats:
        count = self._steps.sum(axis=1)
        own: Floats = (
            START_SD**2
            + self._steps @ process.step_variances
            + self._families @ process.family_variances
            + process.pair_variance * count * (count - 1) / 2
        )
        return own

    def _censored(
        self,
        process: Gaussian,
        places: NDArray[np.intp],
        values: Floats,
        noises: Floats,
        bound: list[tuple[int, Estimate]],
    ) -> tuple[Floats, Floats, Floats]:
        """A device time known to be shorter than the step: the Gaussian observation that says as much.

        From what the others predict for it, the part below the bound, by its mean and variance.
        """
        mean, sd = self._posterior(process, places, values, noises)
        found = []
        for place, estimate in bound:
            below, width = _truncated(mean[place], sd[place], estimate.log_s)
            precision = 1 / width**2 - 1 / sd[place] ** 2
            if precision > 1e-3:
                value = (below / width**2 - mean[place] / sd[place] ** 2) / precision
                found.append((float(place), value, 1 / precision))
        columns = np.array(found, dtype=np.float64).reshape(len(found), 3)
        return columns[:, 0], columns[:, 1], columns[:, 2]


def _truncated(mean: float, sd: float, above: float) -> tuple[float, float]:
    """Mean and standard deviation of the part of a Gaussian below a bound."""
    z = float(np.clip((above - mean) / sd, -8.0, _LARGEST_Z))
    density = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    below = max(0.5 * math.erfc(-z / math.sqrt(2)), 1e-16)
    slope = density / below
    width = max(1 - z * slope - slope * slope, 1e-3)
    return mean - sd * slope, sd * math.sqrt(width)


def _normal_quantiles(count: int) -> tuple[Floats, Floats]:
    """Two columns of standard normal values, evenly spread and independent of each other; always the same."""
    from statistics import NormalDist

    levels = (np.arange(count) + 0.5) / count
    values = np.array([NormalDist().inv_cdf(float(level)) for level in levels])
    return values, np.random.default_rng(0).permutation(values)


SAME_AGAIN = 0.005
"""Chance that a recipe with all switches of a broken one works after all."""
PAIR_WEIGHT = 0.3
"""Of a pair being to blame, against one switch by itself."""
THERE_AGAIN = 20.0
"""By so much each further broken recipe speaks against those that were in it too."""
MOST_TOLD = 12
"""More breakages than this say nothing new."""


class Blame:
    """What broke, set against what worked."""

    def __init__(self, sound: Iterable[Switches], broken: Iterable[Switches]) -> None:
        self._broken = list(broken)
        cleared = {part for recipe in sound for part in _parts(recipe)}
        suspects = [[part for part in _parts(recipe) if part not in cleared] for recipe in self._broken]
        present = Counter(part for parts in suspects for part in parts)
        self._guilt: dict[Switches, float] = {}
        for parts in suspects:
            weights = {part: _weight(part, present[part]) for part in parts}
            whole = sum(weights.values())
            for part, weight in weights.items():
                self._guilt[part] = max(self._guilt.get(part, 0.0), weight / whole)

    def chance(self, recipe: Switches) -> float:
        """That this recipe runs and keeps its numbers."""
        if any(broken <= recipe for broken in self._broken):
            return SAME_AGAIN
        chance = 1.0
        for part, guilt in self._guilt.items():
            if part <= recipe:
                chance *= 1 - guilt
        return chance


def _parts(recipe: Switches) -> list[Switches]:
    switches = sorted(recipe)
    return [frozenset(part) for size in (1, 2) for part in combinations(switches, size)]


def _weight(part: Switches, times: int) -> float:
    return (1.0 if len(part) == 1 else PAIR_WEIGHT) * THERE_AGAIN ** (min(times, MOST_TOLD) - 1)
