"""This module says what is believed about recipes that were not tried.

A switch multiplies the time of the device by its effect; switches of a family have something in common; two switches together
may do more or less than both alone; every such effect is Gaussian in the logarithm, so what is known about all recipes
is one Gaussian process with the kernel of those sums. Time to issue a step has a process of its own, because a step
takes the longer of the two: `time = max(host, device)`. While the host is the limit, the device's time is only known
to be shorter, and switches that relieve the device cannot show what they are worth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from redline.search.tune.space import IN_COMMON, Space, Switches, expectation, pair_expectation
from redline.search.tune.standings import NEAR_ENOUGH, PROCESS_SD, Estimate

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]

PAIR_SDS = {0.01: 1.5, 0.03: 0.5, 0.06: 0.0, 0.12: 0.3, 0.2: 1.0}
"""Two switches may do this much together beyond their own effects (a standard deviation); what was seen weighs these levels. Each level has
a doubt against it, as the logarithm of odds, because a few trials must not rule out that switches meddle with each other."""
SURPRISES = (0.05, 0.2)
"""Most pairs hardly meddle and a few do strongly, which no single standard deviation can say. Of pairs that were never seen together, the
first share may do as much as the second number."""
MISLED = (0.15, 2.5)
"""A strong pair distorts the other estimates. With the first number as their chance, their deviations are too small by the second."""
HOST_ERROR = 0.05
"""One block says how long issuing a step takes, and is off by about this share; two switches may do as much together to it."""


@dataclass(frozen=True)
class Observations:
    """These are values of some of the recipes that were seen: each has its column in a prior, and the variance of its noise."""

    columns: Rows
    values: Floats
    noises: Floats

    def and_also(self, other: Observations) -> Observations:
        mine, others = vars(self), vars(other)
        return Observations(**{name: np.concatenate([mine[name], others[name]]) for name in mine})


@dataclass(frozen=True)
class Prior:
    """This is a Gaussian process over every recipe."""

    mean: Floats
    own: Floats
    """This is the variance of each recipe."""
    shared: Floats
    """This is the covariance of each recipe (rows) with each that was seen (columns)."""
    seen: Rows
    """The recipes that were seen have these rows."""

    def given(self, known: Observations, rows: Rows | slice = slice(None)) -> tuple[Floats, Floats]:
        """Returns the mean and the standard deviation of every recipe, or of those in these rows, given what is known."""
        across = self.shared[rows][:, known.columns]
        inverse = np.linalg.inv(self._covariance(known))
        believed = self.mean[rows] + across @ (inverse @ self._beyond(known))
        variance = self.own[rows] - np.einsum("ij,ij->i", across @ inverse, across)
        return believed, np.sqrt(np.maximum(variance, NEAR_ENOUGH**2))

    def log_likelihood(self, known: Observations) -> float:
        factor = np.linalg.cholesky(self._covariance(known))
        scaled = np.linalg.solve(factor, self._beyond(known))
        return float(-0.5 * scaled @ scaled - np.log(np.diag(factor)).sum())

    def below(self, bounds: Mapping[int, float], known: Observations) -> Observations:
        """Returns Gaussian observations for device times, by column, that are only known to be shorter than their steps.

        Each stands for the part of the Gaussian that lies below the bound, by its mean and variance, given what else is known.
        """
        sites = [(0, 0.0, 1.0)][:0]
        means, sds = self.given(known, self.seen)
        for column, bound in bounds.items():
            mean, sd = float(means[column]), float(sds[column])
            z = min(max((bound - mean) / sd, -8.0), 60.0)  # beyond these limits nothing changes, but numbers overflow
            slope = NormalDist().pdf(z) / max(0.5 * math.erfc(-z / math.sqrt(2)), 1e-16)
            variance = sd**2 * max(1 - z * slope - slope**2, 1e-3)
            precision = 1 / variance - 1 / sd**2
            if precision > 1e-3:  # else the bound says nothing
                value = ((mean - sd * slope) / variance - mean / sd**2) / precision
                sites.append((column, value, 1 / precision))
        columns, values, noises = zip(*sites, strict=True) if sites else ((), (), ())
        return Observations(np.array(columns, dtype=np.intp), np.array(values), np.array(noises))

    def _covariance(self, known: Observations) -> Floats:
        covariance: Floats = self.shared[np.ix_(self.seen[known.columns], known.columns)] + np.diag(known.noises)
        return covariance

    def _beyond(self, known: Observations) -> Floats:
        return known.values - self.mean[self.seen[known.columns]]


@dataclass(frozen=True)
class Believed:
    """This is believed of every recipe, in logarithms of seconds."""

    device: list[tuple[float, Floats, Floats]]
    """There is one entry for each amount of meddling: its weight, the mean and the standard deviation."""
    host: tuple[Floats, Floats] | None
    """These are the mean and the standard deviation of the time to issue a step; None if that cannot be told."""


class Beliefs:
    """This class says what is believed about every recipe of a space."""

    def __init__(self, space: Space, *, on_cpu: bool, host_is_seen: bool = True) -> None:
        self.recipes = list(space.recipes)
        self.index = {recipe: row for row, recipe in enumerate(self.recipes)}
        self.host_is_seen = host_is_seen and not on_cpu
        choices, families = space.choices, list(space.families)
        holds = [[choice.switch in recipe for choice in choices] for recipe in self.recipes]
        self._switches = np.array(holds, dtype=np.float64).reshape(len(self.recipes), len(choices))
        belongs = [[choice.family == name for name in families] for choice in choices]
        self._families: Floats = self._switches @ np.array(belongs, dtype=np.float64).reshape(
            len(choices), len(families)
        )
        expected = [expectation(choice, on_cpu=on_cpu, task=space.task) for choice in choices]
        self._device, self._host = (np.array([getattr(each, of) for each in expected]) for of in ("device", "host"))
        # If host and device cannot be told apart, a switch that relieves the host will look like one that relieves the device.
        blurs = [0.0 if self.host_is_seen or each.host_sd < 0.5 else 0.2 for each in expected]
        self._device_variances = np.array([e.device_sd**2 + blur**2 for e, blur in zip(expected, blurs, strict=True)])
        self._host_variances = np.array([each.host_sd**2 for each in expected])
        # These formats were probed on the device, so that one of them says little about the others.
        measured = {choice.family for choice in choices if choice.expected_time is not None}
        common = IN_COMMON | ({"precision": IN_COMMON["precision on a CPU"]} if on_cpu else {})
        shared = [common.get("other" if name in measured else name, common["other"]) for name in families]
        self._family_variances = np.square(shared)
        self._pairs = np.zeros(len(self.recipes))
        for (at, one), (other_at, other) in combinations(enumerate(choices), 2):
            self._pairs += pair_expectation(one, other) * self._switches[:, at] * self._switches[:, other_at]
        levels = (np.arange(48) + 0.5) / 48
        self._z = np.array([NormalDist().inv_cdf(float(level)) for level in levels])
        """These are standard normal values, evenly spread; `_others` has the same in another order. Both are the same in every search."""
        self._others = np.random.default_rng(0).permutation(self._z)
        self._believe = lru_cache(maxsize=4)(self._believe_anew)  # one decision asks several times

    def promises(self, seen: Mapping[Switches, Estimate], fastest: float) -> Floats:
        """Returns for every recipe by how much it is expected to improve on the fastest so far, as a share of its time.

        It is an average over how much switches may meddle with each other; each amount is weighed by how well it explains what
        was seen.
        """
        believed, surprise = self._believe(tuple(seen.items())), self._surprises(seen)
        host = believed.host or (np.full(len(self.recipes), -np.inf), np.zeros(len(self.recipes)))
        may_gain = host[0] + host[1] * self._z.min() < fastest
        misled, gains = MISLED[0] * (1 - surprise), np.zeros(len(self.recipes))
        for weight, mean, sd in believed.device:
            cases = ((1 - surprise - misled, sd), (misled, MISLED[1] * sd), (surprise, np.hypot(sd, SURPRISES[1])))
            for share, width in cases:
                rows = np.flatnonzero(may_gain & (mean + width * self._z.min() < fastest))  # the others gain nothing
                times = mean[rows, None] + width[rows, None] * self._z
                times = np.maximum(times, host[0][rows, None] + host[1][rows, None] * self._others)
                gains[rows] += weight * share[rows] * np.maximum(fastest - times, 0.0).mean(axis=1)
        return gains

    def expected(self, seen: Mapping[Switches, Estimate]) -> Floats:
        """Returns the logarithm of every recipe's time as it is believed now, which stands in for the time of those being prepared."""
        believed = self._believe(tuple(seen.items()))
        device = sum((weight * mean for weight, mean, _ in believed.device), np.zeros(len(self.recipes)))
        return device if believed.host is None else np.maximum(device, believed.host[0])

    def _surprises(self, seen: Mapping[Switches, Estimate]) -> Floats:
        """Returns the chance that a recipe holds a strong pair, which each pair that was never seen together may be."""
        shown = self._switches[[self.index[recipe] for recipe, each in seen.items() if not each.is_host_bound]]
        unseen = np.triu(shown.T @ shown == 0, 1).astype(np.float64)
        counts = ((self._switches @ unseen) * self._switches).sum(axis=1)
        chances: Floats = 1 - (1 - SURPRISES[0]) ** counts
        return chances

    def _believe_anew(self, seen: tuple[tuple[Switches, Estimate], ...]) -> Believed:
        hosts = [(recipe, each.host_log_s) for recipe, each in seen if each.host_log_s is not None]
        return Believed(self._believe_device(seen), self._believe_host(hosts) if self.host_is_seen and hosts else None)

    def _believe_device(self, seen: tuple[tuple[Switches, Estimate], ...]) -> list[tuple[float, Floats, Floats]]:
        """Returns the weight of each amount of meddling, with the mean and the standard deviation of the logarithm under it."""
        free = {column: each for column, (_, each) in enumerate(seen) if not each.is_host_bound}
        bounds = {column: each.log_s for column, (_, each) in enumerate(seen) if each.is_host_bound}
        rows = np.array([self.index[recipe] for recipe, _ in seen], dtype=np.intp)
        known = Observations(
            np.array(list(free), dtype=np.intp),
            np.array([each.log_s for each in free.values()]),
            np.array([each.error**2 + PROCESS_SD**2 + NEAR_ENOUGH**2 for each in free.values()]),
        )
        mean = self._switches @ self._device + self._pairs
        mean += known.values.mean() - mean[rows[known.columns]].mean() if free else min(bounds.values())
        variances = self._device_variances, self._family_variances
        priors = [self._prior(mean, rows, *variances, pair_sd) for pair_sd in PAIR_SDS]
        scores = np.array([prior.log_likelihood(known) for prior in priors]) - list(PAIR_SDS.values())
        weights = np.exp(scores - scores.max())
        believed = [prior.given(known.and_also(prior.below(bounds, known))) for prior in priors]
        return [(float(weight), *each) for weight, each in zip(weights / weights.sum(), believed, strict=True)]

    def _believe_host(self, seen: list[tuple[Switches, float]]) -> tuple[Floats, Floats]:
        rows, values = (
            np.array([self.index[recipe] for recipe, _ in seen], dtype=np.intp),
            np.array([s for _, s in seen]),
        )
        mean = self._switches @ self._host
        mean = mean - mean[rows].mean() + values.mean()
        prior = self._prior(mean, rows, self._host_variances, self._family_variances * 0.1, HOST_ERROR)
        return prior.given(Observations(np.arange(len(rows)), values, np.full(len(values), HOST_ERROR**2)))

    def _prior(
        self, mean: Floats, rows: Rows, switch_variances: Floats, family_variances: Floats, pair_sd: float
    ) -> Prior:
        """Returns the prior of every recipe: it sums its switches, its families and its pairs, beside a baseline that may lie anywhere."""
        switches, families = self._switches, self._families
        count, common = switches.sum(axis=1), switches @ switches[rows].T
        own = 2.0 + switches @ switch_variances + families @ family_variances
        shared = 2.0 + (switches * switch_variances) @ switches[rows].T
        shared += (families * family_variances) @ families[rows].T
        own += pair_sd**2 * count * (count - 1) / 2
        shared += pair_sd**2 * common * (common - 1) / 2
        return Prior(mean, own, shared, rows)
