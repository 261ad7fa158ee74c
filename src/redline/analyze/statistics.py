"""This module computes intervals of the median, tail percentiles and paired ratios. Nothing here assumes normally distributed times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from redline.model.fields import Frozen

MIN_COMMON_ROUNDS = 5
"""Below it a paired interval rests on too few differences to say anything."""

FEWEST_FOR_MEDIAN = 6
"""With this many samples or more, their whole range brackets the median in 95 % of cases."""

_EXACT_BINOMIAL_UP_TO = 4000
"""Beyond it the normal approximation of a rank is within one rank of the exact one."""

_TAIL_DOUBT = 0.01
"""This is the chance left that a percentile lies above the second-largest sample."""

Floats = NDArray[np.float64]


class Interval(Frozen, frozen=True, kw_only=True):
    """This is a 95 % interval of the median."""

    low: float
    median: float
    high: float

    @property
    def half_width(self) -> float:
        """Returns half of the width, relative to the median."""
        return (self.high - self.low) / (2 * self.median) if self.median else math.inf


def mean_interval(values: Sequence[float]) -> Interval:
    """Returns the geometric mean of several processes, with Student's interval on the mean of the logarithms."""
    logs = np.log(values)
    half = student_t(logs.size - 1) * float(logs.std(ddof=1)) / math.sqrt(logs.size)
    low, centre, high = np.exp(float(logs.mean()) + half * np.array([-1.0, 0.0, 1.0])).tolist()
    return Interval(low=low, median=centre, high=high)


class Ratio(Frozen, frozen=True, kw_only=True):
    """A ratio is the time of the first over the time of the other: above 1 the other is faster."""

    ratio: float
    low: float
    high: float
    rounds: int


class PairedLog(Frozen, frozen=True, kw_only=True):
    """This is the logarithm of a ratio from rounds measured in turns, with its standard error within those processes."""

    mean: float
    error: float
    rounds: int
    below: float = 0.0
    """It may be less by so much on an undisturbed machine: what the first lost to other processes is not known exactly."""
    above: float = 0.0

    @property
    def centre(self) -> float:
        """Returns the middle of what it may be on an undisturbed machine."""
        return self.mean + (self.above - self.below) / 2

    @property
    def doubt(self) -> float:
        """Returns how far it may be from there because of other processes."""
        return (self.above + self.below) / 2


def median_interval(blocks: Sequence[Sequence[float]]) -> Interval | None:
    """Returns the distribution-free interval of the median, widened where samples are not independent.

    Two estimates, the wider counts: ranks of all samples with the effective number of them, and the block medians,
    which also see what changes from block to block. None with fewer than 6 samples.
    """
    filled = [block for block in blocks if len(block)]
    samples = np.fromiter(chain.from_iterable(filled), dtype=np.float64)
    if samples.size < FEWEST_FOR_MEDIAN:
        return None
    ordered = np.sort(samples)
    median = _middle(ordered)
    low, high = _rank_interval(ordered, samples.size / autocorrelation_time(samples))
    if len(filled) >= FEWEST_FOR_MEDIAN:
        block_medians = np.array([_middle(np.sort(block)) for block in filled])
        block_low, block_high = _rank_interval(np.sort(block_medians), len(filled))
        if block_high - block_low > high - low:
            low, high = block_low, block_high
    # Blocks of unequal length can put their own middle beside the pooled median.
    return Interval(low=min(low, median), median=median, high=max(high, median))


def autocorrelation_time(samples: Sequence[float] | Floats, q: float = 0.5) -> float:
    """Returns how many successive samples say as much as one independent sample about the q-quantile; 1 or more.

    Taken from the above/below-quantile signs, which is what the ranks of a quantile rest on, so that one outlier cannot
    hide a correlation. Lags are summed in pairs while their sum stays positive and does not grow (Geyer's initial
    monotone sequence): for a reversible process noise begins where that ends.
    """
    values = np.asarray(samples, dtype=np.float64)
    count = values.size
    if count < 4:
        return 1.0
    border = _middle(np.sort(values)) if q == 0.5 else float(np.quantile(values, q))
    covariances = _autocovariances(np.sign(values - border))
    if covariances[0] <= 0:
        return 1.0
    pairs = covariances[0 : count // 2 * 2 : 2] + covariances[1 : count // 2 * 2 : 2]
    ends = np.flatnonzero(pairs <= 0)
    positive = np.minimum.accumulate(pairs[: ends[0] if ends.size else None])
    time = 2 * float(positive.sum()) / float(covariances[0]) - 1
    # Centring on the series' own middle takes about time/count away from every lag that was summed, on both sides of 0.
    lags = 4 * positive.size - 1
    return float(np.clip(time * (1 + lags / count), 1.0, count))


def percentile(samples: Sequence[float] | Floats, q: float) -> float | None:
    """Returns the q-quantile (q between 0 and 1), or None where so few samples would make it up."""
    if len(samples) < fewest_for_percentile(q):
        return None
    return float(np.quantile(np.asarray(samples, dtype=np.float64), q))


@lru_cache(maxsize=256)
def fewest_for_percentile(q: float) -> int:
    """Samples a percentile needs: 64 for p90, 130 for p95, 662 for p99; the median needs one.

    The smallest n for which the second-largest sample is an upper bound at 99 %: at most one sample beyond the
    percentile then has a chance of 1 % or less. With the largest instead, a single hiccup would be the tail.
    """
    if not 0 < q < 1:
        raise ValueError(f"a percentile lies between 0 and 1, got {q}")
    if q == 0.5:
        return 1
    beyond = min(q, 1 - q)

    def doubt(count: int) -> float:
        return float((1 - beyond) ** count + count * beyond * (1 - beyond) ** (count - 1))

    high = 2
    while doubt(high) > _TAIL_DOUBT:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if doubt(middle) > _TAIL_DOUBT else (low, middle)
    return high


def percentile_ceiling(blocks: Sequence[Sequence[float]], q: float, confidence: float = 0.95) -> float | None:
    """The q-quantile is at or below this, with so much confidence; None where too few samples could say so.

    An order statistic, so no shape of the distribution is assumed; correlated samples count for fewer.
    """
    samples = np.fromiter(chain.from_iterable(blocks), dtype=np.float64)
    if not samples.size:
        return None
    effective = int(samples.size / autocorrelation_time(samples, q))
    rank = _ceiling_rank(effective, q, confidence)
    if rank is None:
        return None
    # The rank leaves so many of the effective samples above it, so we leave the same share of the real ones.
    above = int((effective - rank) * samples.size / effective)
    return float(np.sort(samples)[samples.size - 1 - above])


@lru_cache(maxsize=4096)
def _ceiling_rank(count: int, q: float, confidence: float) -> int | None:
    """Returns the smallest k for which the k-th smallest of `count` samples lies above the q-quantile often enough."""
    log_ways, below = 0.0, 0.0
    # The k-th smallest is too low when k or more samples lie below the quantile: sum that tail from the top.
    for k in range(count, 0, -1):
        below += math.exp(log_ways + k * math.log(q) + (count - k) * math.log(1 - q))
        if below > 1 - confidence:
            return k + 1 if k < count else None
        log_ways += math.log(k / (count - k + 1))
    return 1


def paired_log(first: Mapping[int, float], other: Mapping[int, float]) -> PairedLog | None:
    """Returns the mean log of first over other, over the rounds both have, or None with fewer than two of them.

    A round in which a clock read nothing carries no ratio.
    """
    common = sorted(first.keys() & other.keys())
    rounds = [key for key in common if all(math.isfinite(side[key]) and side[key] > 0 for side in (first, other))]
    if len(rounds) < 2:
        return None
    logs = np.log([first[key] / other[key] for key in rounds])
    error = float(logs.std(ddof=1)) * math.sqrt(autocorrelation_inflation(logs) / len(rounds))
    return PairedLog(mean=float(logs.mean()), error=error, rounds=len(rounds))


def spread(samples: Sequence[float]) -> float | None:
    """Returns the standard deviation over the mean, or None with fewer than two samples."""
    if len(samples) < 2:
        return None
    values = np.asarray(samples, dtype=np.float64)
    mean = float(values.mean())
    return float(values.std(ddof=1)) / mean if mean else None


def between_processes(first_s: Sequence[float], other_s: Sequence[float]) -> Ratio:
    """Returns the ratio of the geometric means over processes, with Welch's interval on the difference of their logarithms."""
    ours, theirs = [math.log(seconds) for seconds in first_s], [math.log(seconds) for seconds in other_s]
    low, middle, high = _welch(ours, theirs, 0.95)
    rounds = min(len(ours), len(theirs))
    return Ratio(ratio=math.exp(middle), low=math.exp(low), high=math.exp(high), rounds=rounds)


def _welch(
    ours: Sequence[float] | Floats, theirs: Sequence[float] | Floats, confidence: float
) -> tuple[float, float, float]:
    """Returns low, middle and high of the difference of two means."""
    errors = [float(np.var(side, ddof=1)) / len(side) for side in (ours, theirs)]
    whole = sum(errors)
    # Rounded down: fewer degrees of freedom make a wider interval.
    degrees = min(len(ours), len(theirs)) - 1
    if whole > 0:
        shares = sum(each**2 / (len(side) - 1) for each, side in zip(errors, (ours, theirs), strict=True))
        degrees = max(degrees, math.floor(whole**2 / shares))
    middle, half = float(np.mean(ours) - np.mean(theirs)), student_t(degrees, confidence) * math.sqrt(whole)
    return middle - half, middle, middle + half


def shift_between(
    ours: Sequence[float] | Floats, theirs: Sequence[float] | Floats, confidence: float
) -> tuple[float, float, float]:
    """Returns low, middle and high of how far the first values lie above the others, by ranks, which outliers and modes do not move.

    Where so few values cannot have the confidence by ranks, Welch's interval stands in.
    """
    differences = np.subtract.outer(np.asarray(ours), np.asarray(theirs)).ravel()
    spread = len(ours) * len(theirs) * (len(ours) + len(theirs) + 1) / 12
    return by_ranks(differences, spread, confidence) or _welch(ours, theirs, confidence)


def by_ranks(values: Sequence[float] | Floats, spread: float, confidence: float) -> tuple[float, float, float] | None:
    """Returns low, middle and high of a shift: order statistics of averages, or of differences, of every two observations.

    `spread` is the variance of the rank statistic when nothing changed. Returns None where so few values cannot have the confidence. The
    normal approximation of the rank is on the safe side that far out.
    """
    ordered = np.sort(values)
    rank = math.floor(ordered.size / 2 - NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(spread))
    return None if rank < 1 else (float(ordered[rank - 1]), _middle(ordered), float(ordered[-rank]))


@lru_cache(maxsize=1024)
def student_t(degrees: int, confidence: float = 0.95) -> float:
    """Returns the two-sided quantile of Student's t for whole degrees of freedom, by bisection on its closed form."""
    low, high = 0.0, 1.0
    while _student_within(high, degrees) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_within(middle, degrees) < confidence else (low, middle)
    return (low + high) / 2


def _student_within(t: float, degrees: int) -> float:
    """Returns P(|T| <= t) by the finite trigonometric sums for odd and even degrees (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2 == 1
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(3 if odd else 2, degrees - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def autocorrelation_inflation(logs: Floats) -> float:
    """Returns by how much positive autocorrelation of successive values multiplies the variance of their mean."""
    centred = logs - logs.mean()
    power = float(centred @ centred)
    if power <= 0:
        return 1.0
    seen = float(centred[1:] @ centred[:-1]) / power
    if seen <= 0:
        return 1.0
    # Centring on their own mean makes few values look less alike than they are, by about (1 + 3 rho)/n.
    correlation = min(seen + (1 + 3 * seen) / logs.size, 0.9)
    return (1 + correlation) / (1 - correlation)


def _middle(ordered: Floats) -> float:
    """Returns the median of sorted values. `np.median` takes ten times as long for a block, and this is asked after every round."""
    half = ordered.size // 2
    return float(ordered[half] if ordered.size % 2 else (ordered[half - 1] + ordered[half]) / 2)


def _rank_interval(ordered: Floats, n_effective: float) -> tuple[float, float]:
    """Returns the order statistics that bracket the median, ranks scaled from the effective to the real number of samples."""
    # With fewer effective samples than any interval needs, the whole range is the most that can be said.
    effective = max(int(n_effective), FEWEST_FOR_MEDIAN)
    rank = _median_rank(effective) * (ordered.size + 1) / (effective + 1)
    index = max(int(rank), 1) - 1
    return float(ordered[index]), float(ordered[ordered.size - 1 - index])


@lru_cache(maxsize=4096)
def _median_rank(count: int) -> int:
    """Returns the largest k for which the k-th smallest and k-th largest of `count` samples bracket the median in 95 % of cases."""
    miss = 0.025
    if count > _EXACT_BINOMIAL_UP_TO:
        return int((count - NormalDist().inv_cdf(1 - miss) * math.sqrt(count)) / 2)
    k = np.arange(1, count // 2 + 1)
    log_terms = np.concatenate(([0.0], np.cumsum(np.log((count - k + 1) / k)))) - count * math.log(2)
    return int(np.searchsorted(np.cumsum(np.exp(log_terms)), miss, side="right"))


def _autocovariances(values: Floats) -> Floats:
    """Returns those of all lags at once, by the power spectrum, padded so that the end does not meet the beginning."""
    centred = values - values.mean()
    size = 1 << (2 * values.size - 1).bit_length()
    spectrum = np.fft.rfft(centred, size)
    power = spectrum.real**2 + spectrum.imag**2
    return np.fft.irfft(power, size)[: values.size] / values.size
