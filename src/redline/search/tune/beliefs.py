"""What is believed about recipes that were not tried.

A switch multiplies the time of the device by its effect; switches of a family have something in common; two switches together
may do more or less than both alone; every such effect is Gaussian in the logarithm, so what is known about all recipes
is one Gaussian process with the kernel of those sums. Time to issue a step has a process of its own, because a step
takes the longer of the two: `time = max(host, device)`. While the host is the limit, the device's time is only known
to be shorter, and switches that relieve the device cannot show what they are worth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from redline.search.tune.space import Space, Switches, expectation, pair_expectation, shared_sd
from redline.search.tune.standings import PROCESS_SD, Estimate

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
"""A strong pair distorts the other estimates: with this chance they are off by this factor."""
NEGLIGIBLE = 0.01
"""A prior that explains what was seen with less than this weight is left out."""
HOST_PAIR_SD = 0.08
"""How much two switches may do together to the host's time."""
RESIDUAL_SD = 0.006
"""The part of a recipe's time, as a logarithm, that no sum of effects explains."""
HOST_ERROR = 0.05
"""One block says how long issuing a step takes, and is off by about this share."""
START_SD = 1.5
"""How far the baseline may lie from what is expected, before it is measured: anywhere, in practice."""
_QUANTILES = 48
_LARGEST_Z = 60.0


@dataclass(frozen=True)
class Prior:
    """A Gaussian process over every recipe: its mean, its variance, and how it varies together with the recipes that were seen."""

    mean: Floats
    own: Floats
    """The variance of each recipe."""
    shared: Floats
    """The covariance of each recipe (rows) with each that was seen (columns)."""
    rows: NDArray[np.intp]
    """The rows of the recipes that were seen."""

    def given(self, columns: NDArray[np.intp], values: Floats, noises: Floats) -> tuple[Floats, Floats]:
        """Mean and standard deviation of every recipe, given values for some of those that were seen."""
        return self._given(slice(None), columns, values, noises)

    def given_for_seen(self, columns: NDArray[np.intp], values: Floats, noises: Floats) -> tuple[Floats, Floats]:
        """The same for the recipes that were seen only, which takes next to no time."""
        return self._given(self.rows, columns, values, noises)

    def log_likelihood(self, columns: NDArray[np.intp], values: Floats, noises: Floats) -> float:
        if not len(values):
            return 0.0
        factor = np.linalg.cholesky(self._among(columns) + np.diag(noises))
        scaled = np.linalg.solve(factor, values - self.mean[self.rows[columns]])
        return float(-0.5 * scaled @ scaled - np.log(np.diag(factor)).sum())

    def _given(
        self, which: slice | NDArray[np.intp], columns: NDArray[np.intp], values: Floats, noises: Floats
    ) -> tuple[Floats, Floats]:
        mean, own = self.mean[which], self.own[which]
        if not len(values):
            return mean, np.sqrt(own)
        across = self.shared[which][:, columns]
        inverse = np.linalg.inv(self._among(columns) + np.diag(noises))
        variance = own - np.einsum("ij,ij->i", across @ inverse, across)
        believed = mean + across @ (inverse @ (values - self.mean[self.rows[columns]]))
        return believed, np.sqrt(np.maximum(variance, RESIDUAL_SD**2))

    def _among(self, columns: NDArray[np.intp]) -> Floats:
        among: Floats = self.shared[np.ix_(self.rows[columns], columns)]
        return among


@dataclass(frozen=True)
class Believed:
    """Over every recipe, in logarithms of seconds."""

    device: list[tuple[float, Floats, Floats]]
    """Weight, mean and standard deviation under each amount of meddling."""
    host: tuple[Floats, Floats] | None
    """Mean and standard deviation of the time to issue a step; None where nobody can tell."""


class Beliefs:
    """What is believed about every recipe of a space."""

    def __init__(self, space: Space, *, on_cpu: bool, host_is_seen: bool = True) -> None:
        self.space = space
        self.recipes = list(space.recipes)
        self.index = {recipe: row for row, recipe in enumerate(self.recipes)}
        self.host_is_seen = host_is_seen and not on_cpu
        switches = [choice.switch for choice in space.choices]
        families = list(space.families)
        self._switches = np.array(
            [[switch in recipe for switch in switches] for recipe in self.recipes], dtype=np.float64
        )
        self._switches = self._switches.reshape(len(self.recipes), len(switches))
        belongs = np.array([[choice.family == name for name in families] for choice in space.choices], dtype=np.float64)
        self._families: Floats = self._switches @ belongs.reshape(len(switches), len(families))
        expected = [expectation(choice, on_cpu=on_cpu, task=space.task) for choice in space.choices]
        self._device = np.array([each.device for each in expected])
        self._host = np.array([each.host for each in expected])
        self._device_variances = np.array([self._device_sd(each.device_sd, each.host_sd) ** 2 for each in expected])
        self._host_variances = np.array([each.host_sd**2 for each in expected])
        measured = {choice.family for choice in space.choices if choice.expected_time is not None}
        shared = [shared_sd(name, on_cpu=on_cpu, is_measured=name in measured) for name in families]
        self._family_variances = np.square(shared)
        self._pairs = self._pair_means()
        self._z = _normal_quantiles(_QUANTILES)
        self._believe = lru_cache(maxsize=4)(self._believe_anew)  # one decision asks several times

    def _device_sd(self, device_sd: float, host_sd: float) -> float:
        # Where host and device cannot be told apart, a switch that relieves the host looks like one that relieves the device.
        return device_sd if self.host_is_seen or host_sd < 0.5 else math.hypot(device_sd, 0.2)

    def _pair_means(self) -> Floats:
        means = np.zeros(len(self.recipes))
        for (at, one), (other_at, other) in combinations(enumerate(self.space.choices), 2):
            beyond = pair_expectation(one, other)
            if beyond:
                means += beyond * self._switches[:, at] * self._switches[:, other_at]
        return means

    def promises(self, seen: Mapping[Switches, Estimate], fastest: float) -> Floats:
        """For every recipe, by how much it is expected to improve on the fastest so far, as a share of its time.

        Averaged over how much switches may meddle with each other, each weighed by how well it explains what was seen.
        """
        z, others = self._z
        believed, surprise = self._believe(tuple(seen.items())), self._surprises(seen)
        may_gain = np.full(len(self.recipes), True)
        if believed.host is not None:
            host_mean, host_sd = believed.host
            may_gain = host_mean + host_sd * others.min() < fastest
        gains = np.zeros(len(self.recipes))
        for weight, mean, sd in believed.device:
            misled = DOUBT_SHARE * (1 - surprise)
            likely = ((1 - surprise - misled, sd), (misled, DOUBT_FACTOR * sd), (surprise, np.hypot(sd, SURPRISE_SD)))
            for share, width in likely:
                rows = np.flatnonzero(may_gain & (mean + width * z.min() < fastest))  # nothing is added to the others
                times = mean[rows, None] + width[rows, None] * z
                if believed.host is not None:
                    times = np.maximum(times, host_mean[rows, None] + host_sd[rows, None] * others)
                gains[rows] += weight * share[rows] * np.maximum(fastest - times, 0.0).mean(axis=1)
        return gains

    def expected(self, seen: Mapping[Switches, Estimate]) -> Floats:
        """The logarithm of every recipe's time as it is believed now: what stands in for those being prepared."""
        believed = self._believe(tuple(seen.items()))
        device = np.zeros(len(self.recipes))
        for weight, mean, _ in believed.device:
            device += weight * mean
        times: Floats = device if believed.host is None else np.maximum(device, believed.host[0])
        return times

    def _believe_anew(self, seen: tuple[tuple[Switches, Estimate], ...]) -> Believed:
        hosts = {self.index[recipe]: each.host_log_s for recipe, each in seen if each.host_log_s is not None}
        return Believed(
            self._believe_device([(self.index[recipe], each) for recipe, each in seen]),
            self._believe_host(hosts) if self.host_is_seen and hosts else None,
        )

    def _surprises(self, seen: Mapping[Switches, Estimate]) -> Floats:
        """The chance that a recipe holds a strong pair: one of those never yet seen together may be."""
        shown = self._switches[[self.index[recipe] for recipe, each in seen.items() if not each.is_host_bound]]
        unseen = (shown.T @ shown == 0).astype(np.float64)
        np.fill_diagonal(unseen, 0.0)
        counts = ((self._switches @ unseen) * self._switches).sum(axis=1) / 2
        chances: Floats = 1 - (1 - SURPRISE_RATE) ** counts
        return chances

    def _believe_device(self, seen: list[tuple[int, Estimate]]) -> list[tuple[float, Floats, Floats]]:
        """Weight, mean and standard deviation of the logarithm under each amount of meddling."""
        free = [each for _, each in seen if not each.is_host_bound]
        bound = [each for _, each in seen if each.is_host_bound]
        rows = np.array([at for of in (False, True) for at, each in seen if each.is_host_bound is of], dtype=np.intp)
        columns = np.arange(len(free))
        values = np.array([each.log_s for each in free])
        noises = np.array([each.error**2 + PROCESS_SD**2 + RESIDUAL_SD**2 for each in free])
        mean = self._switches @ self._device + self._pairs
        mean = mean + (values.mean() - mean[rows[columns]].mean() if free else min(each.log_s for each in bound))
        priors = self._priors(mean, rows, (self._device_variances, self._family_variances), PAIR_SDS)
        believed = []
        for weight, prior in zip(_weights(priors, columns, values, noises), priors, strict=True):
            if weight < NEGLIGIBLE:
                continue
            sites = _censored(prior, columns, values, noises, bound)
            together = [np.concatenate([old, new]) for old, new in zip((columns, values, noises), sites, strict=True)]
            believed.append((float(weight), *prior.given(together[0].astype(np.intp), together[1], together[2])))
        return believed

    def _believe_host(self, seen: Mapping[int, float]) -> tuple[Floats, Floats]:
        rows, values = np.array(list(seen), dtype=np.intp), np.array(list(seen.values()))
        mean = self._switches @ self._host
        mean = mean - mean[rows].mean() + values.mean()
        variances = (self._host_variances, self._family_variances * 0.1)
        (prior,) = self._priors(mean, rows, variances, [HOST_PAIR_SD])
        return prior.given(np.arange(len(rows)), values, np.full(len(values), HOST_ERROR**2))

    def _priors(
        self, mean: Floats, rows: NDArray[np.intp], variances: tuple[Floats, Floats], pair_sds: Sequence[float]
    ) -> list[Prior]:
        """One for each amount of meddling, from the variances of switches and families; they differ in nothing else."""
        switches, families = self._switches, self._families
        count, common = switches.sum(axis=1), switches @ switches[rows].T
        own = START_SD**2 + switches @ variances[0] + families @ variances[1]
        alone = START_SD**2 + (switches * variances[0]) @ switches[rows].T
        alone += (families * variances[1]) @ families[rows].T
        own_pairs, pairs = count * (count - 1) / 2, common * (common - 1) / 2
        return [Prior(mean, own + sd**2 * own_pairs, alone + sd**2 * pairs, rows) for sd in pair_sds]


def _weights(priors: Sequence[Prior], columns: NDArray[np.intp], values: Floats, noises: Floats) -> Floats:
    """How well each explains what was seen."""
    fits = np.array([prior.log_likelihood(columns, values, noises) for prior in priors])
    scores = fits - np.array(PAIR_SD_DOUBTS)
    weights: Floats = np.exp(scores - scores.max())
    normed: Floats = weights / weights.sum()
    return normed


def _censored(
    prior: Prior, columns: NDArray[np.intp], values: Floats, noises: Floats, bound: Sequence[Estimate]
) -> tuple[Floats, Floats, Floats]:
    """Returns Gaussian observations for device times that are only known to be shorter than their steps.

    From what the others predict for it, the part below the bound, by its mean and variance.
    """
    found: list[tuple[float, float, float]] = []
    means, sds = prior.given_for_seen(columns, values, noises)
    for column, estimate in enumerate(bound, len(columns)):
        mean, sd = means[column], sds[column]
        below, width = _truncated(mean, sd, estimate.log_s)
        precision = 1 / width**2 - 1 / sd**2
        if precision > 1e-3:
            value = (below / width**2 - mean / sd**2) / precision
            found.append((float(column), value, 1 / precision))
    sites = np.array(found, dtype=np.float64).reshape(len(found), 3)
    return sites[:, 0], sites[:, 1], sites[:, 2]


def _truncated(mean: float, sd: float, above: float) -> tuple[float, float]:
    """Returns the mean and standard deviation of the part of a Gaussian that lies below a bound."""
    z = float(np.clip((above - mean) / sd, -8.0, _LARGEST_Z))
    density = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    below = max(0.5 * math.erfc(-z / math.sqrt(2)), 1e-16)
    slope = density / below
    width = max(1 - z * slope - slope * slope, 1e-3)
    return mean - sd * slope, sd * math.sqrt(width)


def _normal_quantiles(count: int) -> tuple[Floats, Floats]:
    """Returns two columns of standard normal values that are evenly spread and independent of each other, always the same."""
    levels = (np.arange(count) + 0.5) / count
    values = np.array([NormalDist().inv_cdf(float(level)) for level in levels])
    return values, np.random.default_rng(0).permutation(values)
