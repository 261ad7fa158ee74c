"""From the rows that a watched process wrote to its steps, rates and shares."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from redline.model.fields import Frozen
from redline.model.watching import PHASES

ASIDE = tuple(f"aside_{name}" for name in PHASES)

Table = np.ndarray[Any, np.dtype[np.float64]]

START_UP = 10.0
"""Times the median: leading steps that take longer compile, tune or fill caches, and are counted separately."""
START_UP_S = (0.5, 1.0)
"""Shorter steps are no start-up, and longer ones are; between the two it must be `FAR` times the median."""
FAR = 100.0
OUTLIER = 2.0
FIRST_STEPS = 3
"""Are slower than those after them wherever memory is fetched and kernels are chosen: no outliers."""
FEWEST_STEPS = 20
"""Of a piece of the run whose median is compared with that of others."""
FEWEST_PIECES = 8
"""With fewer, noise alone may order them; nothing is said of drift then."""
STEPS_OF_A_BATCH = 32
"""A batch of a DataLoader may serve several steps, as with truncated backpropagation, but not more than so many."""
RARELY = 0.5
"""Of the steps: what happens before fewer of them is no part of a step."""
BY_BACKWARD, BY_BATCH = -2.0, -3.0
"""Callers of rows that ended without an optimizer: with a backward pass, or with the next batch."""
SLOWDOWN = 1.10
"""A lasting change of the step time by less is not told."""


class Log(Protocol):
    """What one process wrote."""

    columns: tuple[str, ...]
    facts: dict[str, dict[str, Any]]
    pulses: list[dict[str, Any]]

    @property
    def rows(self) -> Table: ...

    @property
    def process(self) -> dict[str, Any]: ...


class Steps:
    """The steps of a loop: one row each, however many optimizers it calls."""

    def __init__(self, log: Log) -> None:
        column = {name: number for number, name in enumerate(log.columns)}
        rows = self._without_batches(log.rows, column)
        host = rows[rows[:, column["kind"]] == 0] if len(rows) and column else np.empty((0, max(len(column), 1)))
        self._of_device = rows[rows[:, column["kind"]] == 1] if len(rows) and column else host
        self._column = column
        self.is_by_batch = bool(len(host)) and bool((host[:, column["caller"]] == BY_BATCH).all())
        """Nothing but batches was heard: each of them counts as a step."""
        groups = self._groups(host) if len(host) else np.empty(0, dtype=int)
        self.count = int(groups[-1]) + 1 if len(groups) else 0
        self.phases_s = self._summed(host, groups, PHASES)
        self.paused_s = self._summed(host, groups, ("paused",))[:, 0]
        self.loaded = self._summed(host, groups, ("loaded",))[:, 0]
        self.fed = self._largest(host, groups, "fed")
        self.ended_s = self._largest(host, groups, "ended")
        self.is_profiled = self._largest(host, groups, "profiled") > 0
        self._is_fed_otherwise = ~is_loaded(self.loaded)
        self._gap_share = 0.0
        """Of `other`, what is called data although no DataLoader says so."""
        self._evaluates_rarely = True
        self._set_evaluation_aside(self._summed(host, groups, ASIDE))
        has_model = (self._largest(host, groups, "models") > 0) | (self.fed > 0)
        self._name_gaps(self._summed(host, groups, ("before",))[:, 0], has_model)
        self.wall_s: Table = self.phases_s.sum(axis=1)
        self.lag_s = self._lag_s(host)
        self.tail_s = self._tail_s(rows, host)
        """By phase: what came after the last step until its loader was through."""
        losses = host[:, column["loss"]] if len(host) else np.empty(0)
        known = losses[np.isfinite(losses)]
        self.loss: float | None = float(known[-1]) if len(known) else None

    @staticmethod
    def _without_batches(rows: Table, column: Mapping[str, int]) -> Table:
        """Batches of which nothing more was heard are steps only where nothing else is: those of a compiled function.

        All of it is called forward then. Where a training was heard, what was read before it began is left out, except by
        the pass over the loader that it goes on with: batches that are fetched ahead belong to its first step.
        """
        if not len(rows) or not column:
            return rows
        is_host = rows[:, column["kind"]] == 0
        is_batch = is_host & (rows[:, column["caller"]] == BY_BATCH)
        steps = np.flatnonzero(is_host & ~is_batch)
        if not len(steps):
            kept: Table = rows.copy()
            kept[is_batch, column["forward"]] += kept[is_batch, column["other"]]
            kept[is_batch, column["other"]] = kept[is_batch, column["before"]] = 0.0
            return kept
        is_early = np.arange(len(rows)) < steps[0]
        trained: Table = rows[~is_batch & ~is_early]
        passes = np.flatnonzero(is_early & (rows[:, column["kind"]] == 2))
        ahead = rows[is_batch & is_early & (np.arange(len(rows)) > (passes[-1] if len(passes) else -1))]
        summed = [column[name] for name in (*PHASES, "paused", "loaded")]
        trained[0, summed] += ahead[:, summed].sum(axis=0)
        return trained

    def _lag_s(self, host: Table) -> float:
        """By how much the device was behind the host when it was last looked at: work that was issued and not done yet."""
        if not len(self._of_device):
            return 0.0
        at = self._column
        last = self._of_device[-1]
        ended = host[host[:, at["step"]] == last[at["step"]], at["ended"]]
        return max(float(last[at["ended"]] - (ended[0] - last[at["paused"]])), 0.0) if len(ended) else 0.0

    def _tail_s(self, rows: Table, host: Table) -> Table:
        if not len(host):
            return np.zeros(len(PHASES))
        at = self._column
        tails = rows[(rows[:, at["kind"]] == 2) & (rows[:, at["step"]] > host[-1, at["step"]])]
        if not len(tails):
            return np.zeros(len(PHASES))
        spent: Table = tails[-1, [at[name] for name in PHASES]]
        return np.maximum(spent - tails[-1, [at[name] for name in ASIDE]], 0.0) if self._evaluates_rarely else spent

    @property
    def seconds(self) -> float:
        """That all counted steps took, with what came after the last one, by host or device, whichever took longer."""
        return float(self.wall_s[self.counted].sum()) + max(self.lag_s, float(self.tail_s.sum()))

    def _groups(self, host: Table) -> Any:
        names = ("caller", "loaded", "models")
        return groups_of(*(host[:, self._column[name]] for name in names))

    def _set_evaluation_aside(self, aside_s: Table) -> None:
        """Evaluation without a DataLoader: passes in evaluation mode that come before some of the steps.

        Before most of them they belong to the step, as when an agent plays before it learns.
        """
        has_aside = aside_s.sum(axis=1) > 0
        self._evaluates_rarely = bool(has_aside.sum() < RARELY * self.count)
        if has_aside.any() and self._evaluates_rarely:
            self.paused_s = self.paused_s + aside_s.sum(axis=1)
            self.phases_s = np.maximum(self.phases_s - aside_s, 0.0)

    def _name_gaps(self, before_s: Table, has_model: Any) -> None:
        """Without a DataLoader, what passes between a step and the next use of the model is getting the batch.

        Where no model is heard either, as with bare weights or a compiled loss, its pass lies in there as well: forward.
        """
        data, forward, other = PHASES.index("data"), PHASES.index("forward"), PHASES.index("other")
        moved = np.minimum(np.maximum(before_s, 0.0), self.phases_s[:, other]) * self._is_fed_otherwise
        whole = float(self.phases_s[:, other].sum())
        self._gap_share = float((moved * has_model).sum()) / whole if whole > 0 else 0.0
        self.phases_s[:, data] += moved * has_model
        self.phases_s[:, forward] += moved * ~has_model
        self.phases_s[:, other] -= moved

    def _summed(self, host: Table, groups: Any, names: Sequence[str]) -> Table:
        total = np.zeros((self.count, len(names)))
        if self.count:
            np.add.at(total, groups, host[:, [self._column[name] for name in names]])
        return total

    def _largest(self, host: Table, groups: Any, name: str) -> Table:
        most = np.full(self.count, -np.inf)
        if self.count:
            np.maximum.at(most, groups, host[:, self._column[name]])
        return most

    @property
    def counted(self) -> Any:
        """Which steps count for rates: not those of the start-up, and not those under the profiler."""
        kept = ~self.is_profiled
        if not kept.any():
            return np.ones(self.count, dtype=bool)
        usual, (least, most) = float(np.median(self.wall_s[kept])), START_UP_S
        slow = max(START_UP * usual, min(max(FAR * usual, least), most))
        # Waiting for the first batch, as until a loader's workers run, comes back in each epoch: that is no start-up.
        steady = np.flatnonzero(self.wall_s - self.phases_s[:, PHASES.index("data")] <= slow)
        if len(steady):
            kept[: steady[0]] = False
        return kept if kept.any() else np.ones(self.count, dtype=bool)

    @property
    def samples(self) -> Table:
        """Per step: what the loader delivered; where none does, what the model was fed."""
        return np.where(self._is_fed_otherwise, self.fed, self.loaded)

    @property
    def has_device_clock(self) -> bool:
        return bool(self._of_device[:, [self._column[name] for name in PHASES]].sum() > 0) if self.count else False

    def shares(self, *, of_host: bool = False) -> dict[str, float]:
        """Of the counted steps' time, by the device's clock where there is one."""
        if self.has_device_clock and not of_host:
            spent = self._of_device[:, [self._column[name] for name in PHASES]].sum(axis=0)
            data, other = PHASES.index("data"), PHASES.index("other")
            gaps = spent[other] * self._gap_share
            spent[data], spent[other] = spent[data] + gaps, spent[other] - gaps
        else:
            spent = self.phases_s[self.counted].sum(axis=0) + self.tail_s if self.count else np.zeros(len(PHASES))
        whole = float(spent.sum())
        return {name: float(seconds) / whole for name, seconds in zip(PHASES, spent, strict=True)} if whole > 0 else {}


def is_loaded(loaded: Table) -> Any:
    """Of each step, whether its batch came from a DataLoader, in this step or a few before it.

    Steps that go on for long without a new batch get theirs elsewhere: they repeat one, or cycle through kept ones.
    """
    found = np.ones(len(loaded), dtype=bool)
    fetched = [-1, *np.flatnonzero(loaded > 0).tolist(), len(loaded)]
    if len(fetched) == 2:
        return ~found
    for earlier, later in itertools.pairwise(fetched):
        if later - earlier > STEPS_OF_A_BATCH:
            found[earlier + 1 : later] = False
    return found


def groups_of(callers: Table, loaded: Table, models: Table) -> Any:
    """The number of the loop's step that each row belongs to.

    A step ends before an optimizer that it has already called is called again: a GAN calls two in each. Optimizers
    that take turns, each with a batch and a model of its own, take a step each; so do those that follow each other,
    as when a training goes on with a new one. Rows that ended with a backward pass belong to the first call of an
    optimizer after them, where there is one.
    """
    if len(set(callers.tolist())) <= 1:
        return np.arange(len(callers))
    if _shares_batches_unevenly(callers, loaded):
        return np.maximum(np.cumsum(loaded > 0) - 1, 0)
    has_optimizer = bool((callers != BY_BACKWARD).any())
    has_loader = bool(loaded.sum() > 0)
    groups: list[int] = []
    called, seen, number = set[float](), 0, 0
    first = {caller: at for at, caller in reversed(list(enumerate(callers.tolist())))}
    last = {caller: at for at, caller in enumerate(callers.tolist())}
    for at, (caller, batch, mask) in enumerate(zip(callers.tolist(), loaded.tolist(), models.tolist(), strict=True)):
        if caller == BY_BACKWARD and has_optimizer:
            groups.append(number)
            continue
        is_apart = seen != 0 and mask != 0 and not (int(seen) & int(mask)) and (batch > 0 or not has_loader)
        is_next = first[caller] == at and all(first[one] < last[one] < at for one in called)
        if called and (caller in called or is_apart or is_next):
            number += 1
            called, seen = set(), 0
        called.add(caller)
        seen |= int(mask)
        groups.append(number)
    return np.array(groups)


def _shares_batches_unevenly(callers: Table, loaded: Table) -> bool:
    """Whether most batches serve all optimizers, some more often than others, as a critic that takes two steps of each."""
    kinds, starts = set(callers.tolist()), np.flatnonzero(loaded > 0)
    if min(kinds) < 0 or len(set(callers[starts].tolist())) != 1:
        return False
    calls = [np.unique(part, return_counts=True)[1] for part in np.split(callers, starts)[1:]]
    uneven = sum(len(each) == len(kinds) and each.min() < each.max() for each in calls)
    return bool(2 * uneven > len(calls))


class Rates(Frozen):
    steps: int
    steps_per_s: float | None
    samples_per_s: float | None
    samples: float
    first_step_s: float | None
    median_step_s: float | None
    outliers: int
    outlier_share: float | None
    shares: dict[str, float]
    host_shares: dict[str, float]
    """Of the host's time: what it does while the device may be busy with something else."""
    device_clock: bool
    paused_s: float
    loss: float | None


def rates_of(logs: Sequence[Log]) -> Rates:
    """Of one loop: the ranks of a distributed training take the same steps, each with samples of its own."""
    ranks = [Steps(log) for log in main_logs(logs)]
    lead = ranks[0] if ranks else None
    if lead is None or not lead.count:
        return Rates(
            steps=0, steps_per_s=None, samples_per_s=None, samples=0.0, first_step_s=None, median_step_s=None,
            outliers=0, outlier_share=None, shares={}, host_shares={}, device_clock=False, paused_s=0.0, loss=None,
        )  # fmt: skip
    kept = lead.counted
    wall = lead.wall_s[kept]
    whole = lead.seconds
    middle = float(np.median(wall))
    later = wall[FIRST_STEPS:]
    slow = later[later > OUTLIER * middle] - middle
    # What the last step left behind it belongs to no row, but makes that step as slow as it would any other.
    if (tail := float(lead.tail_s.sum())) > (OUTLIER - 1) * middle:
        slow = np.append(slow, tail)
    per_s = [_samples_per_s(rank, lead) for rank in ranks]
    known = [each for each in per_s if each is not None]
    return Rates(
        steps=lead.count,
        steps_per_s=len(wall) / whole if whole > 0 else None,
        samples_per_s=sum(known) if known else None,
        samples=float(sum(rank.samples.sum() for rank in ranks)),
        first_step_s=float(lead.wall_s[0]),
        median_step_s=middle,
        outliers=len(slow),
        outlier_share=float(slow.sum()) / whole if whole > 0 else None,
        shares=lead.shares(),
        host_shares=lead.shares(of_host=True),
        device_clock=lead.has_device_clock,
        paused_s=float(lead.paused_s.sum()),
        loss=lead.loss,
    )


def _samples_per_s(rank: Steps, lead: Steps) -> float | None:
    """Of a rank that takes the same steps as the first one, by that one's time: they wait for each other."""
    paced = lead if rank.count == lead.count else rank
    whole, samples = paced.seconds, float(rank.samples[paced.counted].sum())
    return samples / whole if whole > 0 and samples > 0 else None


def main_logs(logs: Sequence[Log]) -> list[Log]:
    """Those of the training: its ranks, rank 0 first; of processes that are no ranks, the one with the most steps."""
    stepped = [log for log in logs if len(log.rows) and log.columns]
    ranked: dict[int, Log] = {}
    for log in sorted(stepped, key=lambda log: len(log.rows)):  # of a rank that was started again, the longest life
        if log.process.get("world_size", 1) > 1:
            ranked[int(log.process.get("rank", 0))] = log
    if ranked:
        return [ranked[rank] for rank in sorted(ranked)]
    return sorted(stepped, key=lambda log: -len(log.rows))[:1]


class Drift(Frozen):
    """A lasting change of the step time."""

    step: int
    """Where it began."""
    at_s: float
    """Since the first step."""
    ratio: float
    """Step time after it over before it."""


def drift_of(steps: Steps) -> Drift | None:
    """The split of the run at which the step time changed most, where that is lasting and plain to see.

    By medians of pieces, so that neither single slow steps nor noise make one.
    """
    kept = np.flatnonzero(steps.counted)
    if len(kept) < FEWEST_PIECES * FEWEST_STEPS:
        return None
    pieces = np.array_split(kept, min(60, len(kept) // FEWEST_STEPS))
    middles = np.array([np.median(steps.wall_s[piece]) for piece in pieces])
    best: tuple[float, int] | None = None
    for split in range(3, len(middles) - 2):
        before, after = middles[:split], middles[split:]
        apart = float(np.median(after) / np.median(before))
        is_plain = after.min() > before.max() if apart > 1 else False
        if is_plain and (best is None or apart > best[0]):
            best = (apart, split)
    if best is None or best[0] < SLOWDOWN:
        return None
    first = int(pieces[best[1]][0])
    return Drift(step=first, at_s=float(steps.ended_s[first] - steps.ended_s[0]), ratio=best[0])


def growth_of(pulses: Sequence[dict[str, Any]], resident: Sequence[tuple[float, int]]) -> tuple[float, float] | None:
    """Bytes held at the end over those at the first third, and bytes per second; None without steady growth.

    A GPU's allocated memory by the process's own pulses, else what the operating system says of its memory.
    """
    held = [(each["at"], each["memory"]["allocated"]) for each in pulses if each.get("memory", {}).get("allocated")]
    first = pulses[0]["at"] if pulses else -math.inf  # before the first steps it is the script that gets ready
    series = held or [look for look in resident if look[0] >= first]
    late = series[len(series) // 3 :]
    if len(late) < 12:
        return None
    parts = np.array_split(np.array([size for _, size in late], dtype=float), 4)
    lows = [float(part.min()) for part in parts]  # what is held between two steps, not what one step needs
    seconds = late[-1][0] - late[0][0]
    grows = all(later > earlier for earlier, later in itertools.pairwise(lows))
    if not grows or lows[-1] < 1.05 * lows[0] or lows[-1] - lows[0] < 16e6 or seconds <= 0:
        return None
    return lows[-1] / lows[0], (lows[-1] - lows[0]) / (seconds * 0.75)
