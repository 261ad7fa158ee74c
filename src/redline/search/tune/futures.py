"""What several recipes may bring, drawn together: recipes that share steps share their luck.

Two recipes that both compile are two looks at much the same thing, and the better of them is hardly more than either;
two that share nothing are two chances. Only draws of all at once tell the one from the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from redline.analyze.tune.estimates import Estimate
from redline.search.tune.beliefs import RESIDUAL_SD, Belief, Beliefs, Floats, widths
from redline.search.tune.space import Steps

DRAWS = 256


def futures_of(places: Sequence[int], beliefs: Beliefs, seen: Mapping[Steps, Estimate], fastest: float) -> Floats:
    """By how much each improves on the fastest: a row for each recipe, a column for each draw. Always the same draws."""
    chosen, random = np.array(places, dtype=np.intp), np.random.default_rng(0)
    surprise, host = beliefs.surprises(seen)[chosen], beliefs.believe_host(seen)
    drawn = []
    for belief in beliefs.believe_device(seen):
        count = max(round(belief.weight * DRAWS), 1)
        covariance = beliefs.covariance(belief, chosen)
        times = _device_times(belief, chosen, covariance, surprise, count, random)
        if host is not None:
            mean, sd = host[0][chosen], host[1][chosen]
            times = np.maximum(times, mean[:, None] + sd[:, None] * random.standard_normal(count))
        drawn.append(np.maximum(fastest - times, 0.0))
    futures: Floats = np.concatenate(drawn, axis=1)
    return futures


def _device_times(
    belief: Belief,
    chosen: np.ndarray[tuple[int], np.dtype[np.intp]],
    covariance: Floats,
    surprise: Floats,
    count: int,
    random: np.random.Generator,
) -> Floats:
    """Logarithms. Whether what is believed is off is the luck of a whole draw, not of one recipe in it."""
    # Recipes that all but repeat others make the covariance singular, hence the little that is added.
    root = np.linalg.cholesky(covariance + RESIDUAL_SD**2 * np.eye(len(covariance)))
    (_, plain), (misled, doubted), (_, surprised) = widths(belief.sd[chosen], surprise)
    luck = random.random(count)
    width = np.where(
        luck < surprise[:, None],
        surprised[:, None],
        np.where(luck < (surprise + misled)[:, None], doubted[:, None], plain[:, None]),
    )
    normal = root @ random.standard_normal((len(chosen), count)) / plain[:, None]
    times: Floats = belief.mean[chosen][:, None] + normal * width
    return times
