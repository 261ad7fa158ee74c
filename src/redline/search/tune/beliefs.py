"""What each recipe of a search takes, and what is believed about those that were not tried.

A trial is measured in turns with the fastest recipe so far, so its time is that one's time by their ratio: what drifts
over the minutes of a search cancels. The chain begins with the baseline's own time.

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
from itertools import combinations
from statistics import NormalDist, fmean

import numpy as np
from numpy.typing import NDArray

from redline.analyze.blocks import round_medians_s
from redline.analyze.bound import HOST_BOUND_SHARE, host_share
from redline.analyze.race import kind_measured, log_ratio
from redline.note import Note
from redline.record import RunRecord, TimeKind
from redline.search.tune.lessons import rejection
from redline.search.tune.record import TuneRecord
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
"""A strong pair distorts the other estimates: with this chance they are off by this factor."""
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

Records = Mapping[str, RunRecord]

SMALLEST_ERROR = 0.002
"""Two or three rounds may agree by chance."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One recipe. Logarithms of seconds per step, or of joules where those are the objective."""

    recipe: str
    record_id: str
    log_s: float
    error: float
    """Standard error within the processes that were measured."""
    host_log_s: float | None
    """Time to issue a step; None where nothing is issued ahead of the device."""
    is_host_bound: bool
    cost_s: float
    too_late: Note | None = None
    """Why it does not keep the latency target."""


def estimates(tune: TuneRecord, records: Records) -> dict[str, Estimate]:
    """Every recipe that was timed and kept its numbers, by its text; the last look at it counts."""
    kind = tune.tune.kind
    on_scale: dict[str, tuple[float, float]] = {}
    found: dict[str, Estimate] = {}
    for trial in tune.trials:
        record = records.get(trial.record_id)
        if record is None or record.failure is not None or not record.blocks:
            continue
        if kind == "energy" and not round_medians_s(record, kind):
            continue  # the device did not tell
        known = found.get(trial.recipe)
        time = _time_of(record, records.get(trial.anchor_id or ""), on_scale, kind)
        if known is not None and trial.anchor_id is None:
            time = (known.log_s, known.error)  # opened again to go on from: the scale is the one it gave
        on_scale[record.id] = time
        why = rejection(record, tune)
        if why is None or why.code == "too-late":
            share = None if kind == "energy" else _issue_share(record)
            found[trial.recipe] = _estimate(trial.recipe, record, time, trial.cost_s, why, share)
    return found


def _time_of(
    record: RunRecord, anchor: RunRecord | None, on_scale: Mapping[str, tuple[float, float]], kind: TimeKind
) -> tuple[float, float]:
    """The logarithm of a step's seconds on the scale of the search, and its standard error."""
    log = log_ratio(record, anchor, kind) if anchor is not None and anchor.id in on_scale else None
    if log is not None and anchor is not None:
        log_s, error = on_scale[anchor.id]
        return log_s + log.centre, math.hypot(max(log.error, SMALLEST_ERROR), error, log.doubt / 2)
    times = [math.log(seconds) for seconds in round_medians_s(record, kind_measured(record, kind)).values()]
    return fmean(times), 0.0


def _issue_share(record: RunRecord) -> float | None:
    """Of a step, the time to issue it; None where that is not known, or includes the device's own time."""
    synchronises = record.prepared is not None and record.prepared.step_synchronises
    return None if synchronises else host_share(record)


def _estimate(
    recipe: str, record: RunRecord, time: tuple[float, float], cost_s: float, late: Note | None, share: float | None
) -> Estimate:
    return Estimate(
        recipe=recipe,
        record_id=record.id,
        log_s=time[0],
        error=time[1],
        host_log_s=None if share is None else time[0] + math.log(max(share, 1e-3)),
        is_host_bound=share is not None and share > HOST_BOUND_SHARE,
        cost_s=cost_s,
        too_late=late,
    )


@dataclass(frozen=True)
class Gaussian:
    """One process: what switches and families may do, and what was seen."""

    switch_variances: Floats
    family_variances: Floats
    pair_variance: float
    prior: Floats
    """The expected logarithm for every recipe."""

    def kernel(self, one: Floats, other: Floats, one_families: Floats, other_families: Floats) -> Floats:
        common = one @ other.T
        added = (one * self.switch_variances) @ other.T + (one_families * self.family_variances) @ other_families.T
        product: Floats = START_SD**2 + added + self.pair_variance * common * (common - 1) / 2
        return product


class Beliefs:
    """Over every recipe of a space."""

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

    def _device_sd(self, device_sd: float, host_sd: float) -> float:
        # Where nobody can tell host from device, a switch that relieves the host shows as one that relieves the device.
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

    def expected(self, seen: Mapping[Switches, Estimate]) -> Floats:
        """The logarithm of every recipe's time as it is believed now: what stands in for those being prepared."""
        device = np.zeros(len(self.recipes))
        for weight, mean, _ in self._believe_device(seen):
            device += weight * mean
        hosts = {recipe: estimate for recipe, estimate in seen.items() if estimate.host_log_s is not None}
        if not self.host_is_seen or not hosts:
            return device
        times: Floats = np.maximum(device, self._believe_host(hosts)[0])
        return times

    def _surprises(self, seen: Mapping[Switches, Estimate]) -> Floats:
        """The chance that a recipe holds a strong pair: one of those never yet seen together may be."""
        shown = self._switches[[self.index[recipe] for recipe, each in seen.items() if not each.is_host_bound]]
        unseen = (shown.T @ shown == 0).astype(np.float64)
        np.fill_diagonal(unseen, 0.0)
        counts = ((self._switches @ unseen) * self._switches).sum(axis=1) / 2
        chances: Floats = 1 - (1 - SURPRISE_RATE) ** counts
        return chances

    def _believe_device(self, seen: Mapping[Switches, Estimate]) -> list[tuple[float, Floats, Floats]]:
        """Weight, mean and standard deviation of the logarithm under each amount of meddling."""
        free = [(self.index[recipe], each) for recipe, each in seen.items() if not each.is_host_bound]
        bound = [(self.index[recipe], each) for recipe, each in seen.items() if each.is_host_bound]
        rows = np.array([at for at, _ in free], dtype=np.intp)
        values = np.array([each.log_s for _, each in free])
        noises = np.array([each.error**2 + PROCESS_SD**2 + RESIDUAL_SD**2 for _, each in free])
        prior = self._switches @ self._device + self._pairs
        prior = prior + (values.mean() - prior[rows].mean() if free else min(each.log_s for _, each in bound))
        processes = [Gaussian(self._device_variances, self._family_variances, sd**2, prior) for sd in PAIR_SDS]
        weights = self._weights(processes, rows, values, noises)
        believed = []
        for weight, process in zip(weights, processes, strict=True):
            if weight < NEGLIGIBLE:
                continue
            sites = self._censored(process, rows, values, noises, bound)
            together = [np.concatenate([old, new]) for old, new in zip((rows, values, noises), sites, strict=True)]
            mean, sd = self._posterior(process, together[0].astype(np.intp), together[1], together[2])
            believed.append((float(weight), mean, sd))
        return believed

    def _weights(self, processes: list[Gaussian], rows: NDArray[np.intp], values: Floats, noises: Floats) -> Floats:
        fits = np.array([self._log_likelihood(process, rows, values, noises) for process in processes])
        scores = fits - np.array(PAIR_SD_DOUBTS)
        weights: Floats = np.exp(scores - scores.max())
        normed: Floats = weights / weights.sum()
        return normed

    def _believe_host(self, seen: Mapping[Switches, Estimate]) -> tuple[Floats, Floats]:
        rows = np.array([self.index[recipe] for recipe in seen], dtype=np.intp)
        values = np.array([each.host_log_s for each in seen.values()], dtype=np.float64)
        prior = self._switches @ self._host
        prior = prior - prior[rows].mean() + values.mean()
        process = Gaussian(self._host_variances, self._family_variances * 0.1, HOST_PAIR_SD**2, prior)
        return self._posterior(process, rows, values, np.full(len(values), HOST_ERROR**2))

    def _log_likelihood(self, process: Gaussian, rows: NDArray[np.intp], values: Floats, noises: Floats) -> float:
        if not len(values):
            return 0.0
        factor = np.linalg.cholesky(self._among(process, rows) + np.diag(noises))
        scaled = np.linalg.solve(factor, values - process.prior[rows])
        return float(-0.5 * scaled @ scaled - np.log(np.diag(factor)).sum())

    def _among(self, process: Gaussian, rows: NDArray[np.intp]) -> Floats:
        switches, families = self._switches[rows], self._families[rows]
        return process.kernel(switches, switches, families, families)

    def _posterior(
        self, process: Gaussian, rows: NDArray[np.intp], values: Floats, noises: Floats
    ) -> tuple[Floats, Floats]:
        own = self._own_variances(process)
        if not len(values):
            return process.prior, np.sqrt(own)
        across = process.kernel(self._switches, self._switches[rows], self._families, self._families[rows])
        inverse = np.linalg.inv(self._among(process, rows) + np.diag(noises))
        mean = process.prior + across @ (inverse @ (values - process.prior[rows]))
        variance = own - np.einsum("ij,jk,ik->i", across, inverse, across)
        return mean, np.sqrt(np.maximum(variance, RESIDUAL_SD**2))

    def _own_variances(self, process: Gaussian) -> Floats:
        count = self._switches.sum(axis=1)
        own: Floats = (
            START_SD**2
            + self._switches @ process.switch_variances
            + self._families @ process.family_variances
            + process.pair_variance * count * (count - 1) / 2
        )
        return own

    def _censored(
        self,
        process: Gaussian,
        rows: NDArray[np.intp],
        values: Floats,
        noises: Floats,
        bound: list[tuple[int, Estimate]],
    ) -> tuple[Floats, Floats, Floats]:
        """A device time known to be shorter than the step: the Gaussian observation that says as much.

        From what the others predict for it, the part below the bound, by its mean and variance.
        """
        found: list[tuple[float, float, float]] = []
        if bound:  # what the others predict takes most of a search's own time
            mean, sd = self._posterior(process, rows, values, noises)
        for row, estimate in bound:
            below, width = _truncated(mean[row], sd[row], estimate.log_s)
            precision = 1 / width**2 - 1 / sd[row] ** 2
            if precision > 1e-3:
                value = (below / width**2 - mean[row] / sd[row] ** 2) / precision
                found.append((float(row), value, 1 / precision))
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
    levels = (np.arange(count) + 0.5) / count
    values = np.array([NormalDist().inv_cdf(float(level)) for level in levels])
    return values, np.random.default_rng(0).permutation(values)
