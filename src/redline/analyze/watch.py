"""The steps of a watched process are made here from what it heard: where one ends, what its time went to, how many samples it took.

The hooks write down what happened and when (`bench/watch/spool.py` lists the kinds of rows). `Reader` cuts these rows into steps,
`split` says what the time of one step went to, and `Steps` is the table of all of them, from which rates and shares follow.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from redline.analyze.ranks import LateRank
from redline.model.fields import Frozen
from redline.model.record import PHASES, RankBlock, Rates

Vector = np.ndarray[Any, np.dtype[np.float64]]

SLOTS = (*PHASES, "head", "early", "unsplit")
"""An interval of a step is charged to one of these. Until all steps are known, there are three more than there are phases:
`head` passes before the first batch is asked for, `early` before the model is first used, and `unsplit` in steps of which little
was written down."""
AT = {name: number for number, name in enumerate(SLOTS)}
OF_KIND = {
    "data": "data", "copy": "copy", "forward": "forward", "backward": "backward", "optimizer": "optimizer", "zero_grad": "optimizer",
    "saving": "saving", "upkeep": "other", "replay": "forward", "pause": "pause", "capture": "pause",
}  # fmt: skip
"""The phase that a row begins."""
STRETCHES = ("validation", "aside", "played")
"""Time in which nothing is trained goes to one of these. `aside` is validation only if it is rare. `played` is acting in an environment
if the program did it before its first step."""
COLUMNS = (
    "caller", "ended", "is_full", "is_profiled", "paused", "loaded", "fed", "waited", "models", *SLOTS, *(f"{name} {slot}" for name in STRETCHES for slot in SLOTS),
)  # fmt: skip
BY_HAND, BY_BACKWARD, BY_BATCH = -1.0, -2.0, -3.0
"""Callers of steps that no optimizer ended: the program counted them, a backward pass ended them, or only a batch was seen."""
MOST_MODELS = 50
"""Models are bits of a 64-bit float, which holds 53 of them without loss."""
MOST_VIEWS = 3
"""A model that is called so often for one backward pass sees views of the same samples, as of pairs and triplets. More calls are steps in time."""
START_UP, START_UP_S = 10.0, 0.5
"""Leading steps that take so many medians, and longer than this, compile, tune or fill caches: they are first steps."""
OUTLIER = 2.0
"""Medians: a step that takes longer is slow."""
FIRST_STEPS = 3
"""Are slower than those after them wherever memory is fetched and kernels are chosen."""
STEPS_OF_A_BATCH = 32
"""A batch of a DataLoader may serve several steps, as with truncated backpropagation, but not more than so many."""
RARELY = 0.5
"""A part of the loop that is met in fewer than half of the steps is no part of a step."""
FEWEST_STEPS, FEWEST_PIECES = 20, 8
"""A run is compared with itself in pieces of so many steps; with fewer pieces, noise alone may order them."""
SLOWDOWN = 1.10
"""A lasting change of the step time by less is not told."""


class Heard(NamedTuple):
    """A row that the process wrote; `bench/watch/spool.py` says what its key and value are."""

    kind: str
    key: float
    value: float
    at: float
    number: int = 0


class Graph(NamedTuple):
    """A recorded graph: this happens each time it is replayed."""

    caller: float | None
    """Its last step is that of this optimizer."""
    backwards: int
    models: dict[float, float]
    """Samples, by the models that are fed."""


NO_GRAPH = Graph(None, 0, {})


class Reader:
    """Cuts the rows that one process wrote into steps, as they come."""

    def __init__(self) -> None:
        self.rows = array("d")
        """The steps, as many columns each as `COLUMNS` has."""
        self.rest: list[Heard] = []
        """These rows came since the last step."""
        self.starts: list[float] = []
        """Seconds until the first batch, for every iterator whose workers end with it."""
        self.ends: list[float] = []
        """Seconds that ending a loader's workers took, each time."""
        self.device = DeviceClock()
        self._since: float | None = None
        """When the last step ended."""
        self._bits: dict[float, int] = {}
        self._graphs: dict[float, Graph] = {}
        self._opened: dict[float, tuple[float, bool]] = {}
        """For iterators that have not delivered yet: when they were asked first, and whether their workers end with them."""
        self._knows_optimizer = False
        """An optimizer ends the steps, or the program itself does."""
        self._has_backward = False
        """A backward pass has been seen in this step."""
        self._depth = 0
        """The number of optimizers that are at work, one within the other."""
        self._capture: int | None = None
        """Where in `rest` the recording of a graph began that goes on; None without one."""
        self.is_by_batch = True
        """Neither optimizer nor backward pass was ever heard."""

    def read(self, rows: Iterable[tuple[str, float, float, float, int]]) -> None:
        """Rows as they were written: kind, key, value, time and number."""
        for row in itertools.starmap(Heard, rows):
            if row.kind == "device":
                self.device.read(row)
                continue
            if self._since is None:
                self._since = row.at
            if row.kind == "restart":
                kept = [one for one in self.rest if not row.value and not one.kind.startswith("data")]
                self.rest, self._depth = kept, 0
                self._since = self._since if kept else row.at
                continue
            if self._capture is None and self._begins_step(row):
                is_next = row.kind in ("data", "forward")
                self._finish(len(self.rest) if is_next else self._last_training(), BY_BACKWARD)
            if row.kind == "closed":
                continue
            self.rest.append(row)
            if self._capture is None or row.kind == "capture ended":
                self._see(row)

    def _see(self, row: Heard) -> None:
        match row.kind:
            case "optimizer":
                self._depth += 1
            case "optimizer ended":
                self._depth = max(self._depth - 1, 0)
                if not self._depth:
                    self._knows_optimizer = True
                    self._finish(len(self.rest), row.key)
            case "counted":
                self._knows_optimizer = True
                self._finish(len(self.rest), BY_HAND)
            case "backward":
                self._has_backward = True
            case "data" if row.value > 1:
                self._opened[0.0] = (row.at, True)
            case "data ended":
                self._see_batch(row)
            case "capture":
                self._capture = len(self.rest)
            case "capture ended" if self._capture is not None:
                self._graphs[row.key] = graph_of(self.rest[self._capture : -1])
                del self.rest[self._capture : -1]
                self._capture = None
            case "replay ended" if (graph := self._graphs.get(row.key)) is not None:
                if graph.caller is not None and not self._depth:
                    self._knows_optimizer = True
                    self._finish(len(self.rest), graph.caller)
                else:
                    self._has_backward = self._has_backward or graph.backwards > 0

    def _see_batch(self, row: Heard) -> None:
        if row.value == 0 and 0.0 in self._opened:
            self._opened[row.key] = self._opened.pop(0.0)
        elif row.value > 0 and row.key in self._opened and self._opened[row.key][1]:
            self.starts.append(row.at - self._opened[row.key][0])
            self._opened[row.key] = (row.at, False)
        elif row.value < 0 and self._opened.pop(row.key, None) is not None and len(self.rest) > 1:
            self.ends.append(row.at - self.rest[-2].at)  # the workers have ended

    def _begins_step(self, row: Heard) -> bool:
        """True if the step before this row has ended although no optimizer was seen: it had a backward pass.

        The next one begins where its batch is asked for, or without a loader where the model is called or gradients are asked for again.
        """
        if self._knows_optimizer or self._depth or not self._has_backward:
            return False
        if row.kind in ("data", "closed") or any(one.kind == "data ended" and one.value > 0 for one in self.rest):
            return row.kind in ("data", "closed")
        if row.kind == "replay":
            return self._graphs.get(row.key, NO_GRAPH).backwards > 0
        return row.kind == "backward" or (row.kind == "forward" and row.value % 2 == 1)

    def _last_training(self) -> int:
        """Returns where the last backward pass ended."""
        return 1 + max(
            (at for at, one in enumerate(self.rest) if one.kind in ("backward ended", "replay ended")), default=-1
        )

    def _finish(self, end: int, caller: float) -> None:
        heard, self.rest = self.rest[:end], self.rest[end:]
        began = self._since or 0.0
        self._has_backward = False
        if not heard:
            return
        self._since = heard[-1].at
        if self.is_by_batch:
            heard, began = without_early_batches(heard, began)
            self.is_by_batch = False
        last = heard[-1]
        is_full = bool(last.key if last.kind == "counted" else last.value) or caller == BY_BACKWARD
        step = split_lean(heard, began) if not is_full else None
        step = step or split(heard, began, is_full=is_full, graphs=self._graphs)
        self.rows.extend(self._row(step, caller, last.at, is_full))
        if is_full:
            self.device.await_step(heard)

    def _row(self, step: Split, caller: float, ended: float, is_full: bool) -> Iterable[float]:
        bits = 0
        for model in step.models:
            bits |= self._bits.setdefault(model, 1 << (len(self._bits) % MOST_MODELS))
        return (
            caller, ended, is_full, step.is_profiled, step.paused_s, step.loaded, step.fed, step.waited_s, bits, *step.spent,
            *itertools.chain.from_iterable(step.stretches),
        )  # fmt: skip

    @property
    def tail(self) -> Split:
        """This came after the last step, up to what was last heard."""
        return split(self.rest, self._since or 0.0, is_full=True, graphs=self._graphs)

    @property
    def loop_tail_s(self) -> float:
        """The loader was through so long after the last step: its workers end."""
        ends = [at for at, row in enumerate(self.rest) if row.kind == "data ended" and row.value < 0]
        passes = [at for at, row in enumerate(self.rest) if row.kind == "data" and row.value >= 1]
        if not ends or (passes and passes[0] < ends[0]):
            return 0.0
        step = split(self.rest[: ends[0] + 1], self._since or 0.0, is_full=True, graphs=self._graphs)
        return sum(step.spent)

    def table(self) -> Vector:
        """One row for each step. Where neither optimizer nor backward pass was heard, each batch is one."""
        rows = self.rows
        if not rows and self.is_by_batch:
            reader = Reader()
            for heard, began in batches(self.rest):
                step = split(heard, began, is_full=True, graphs={})
                for name in ("other", "early"):
                    step.spent[AT["forward"]] += step.spent[AT[name]]
                    step.spent[AT[name]] = 0.0
                reader.rows.extend(reader._row(step, BY_BATCH, heard[-1].at, True))
            rows = reader.rows
        return np.array(rows).reshape(-1, len(COLUMNS))


class DeviceClock:
    """What the steps that were heard in full took by the clock of the device, which reaches their rows later than the host."""

    def __init__(self) -> None:
        self.spent = np.zeros(len(SLOTS))
        """Seconds of the device by slot."""
        self.lag_s = 0.0
        """How far the device was behind the host when it was last looked at."""
        self._began: float | None = None
        """The time of the host when this clock began; None where there is none."""
        self._reached: dict[float, float] = {}
        """When the device reached a row, by the number of the row."""
        self._waiting: list[list[Heard]] = []
        """Steps that it has not finished yet."""

    def await_step(self, heard: list[Heard]) -> None:
        if self._began is not None:
            self._waiting.append(heard)

    def read(self, row: Heard) -> None:
        if row.key < 0:
            self._began = row.at
            return
        self._reached[row.key] = row.value
        while self._began is not None and self._waiting and self._waiting[0][-1].number in self._reached:
            heard = self._waiting.pop(0)
            if all(one.number in self._reached for one in heard):
                times = [one._replace(at=self._reached[one.number]) for one in heard]
                self.spent += split(times, times[0].at, is_full=True, graphs={}).spent
                self.lag_s = max(times[-1].at - (heard[-1].at - self._began), 0.0)
            for one in heard:
                self._reached.pop(one.number, None)


def without_early_batches(heard: list[Heard], began: float) -> tuple[list[Heard], float]:
    """Leaves out what was read before the training began with a pass over its loader.

    Batches of that pass may be fetched ahead, as accelerate and the Trainer do: they stay. A validation before the first step stays too.
    """
    first = next((at for at, one in enumerate(heard) if one.kind in ("backward", "optimizer")), len(heard))
    passes = [at for at, one in enumerate(heard[:first]) if one.kind == "data" and one.value >= 1]
    has_forward = passes and any(one.kind == "forward" for one in heard[: passes[-1]])
    return (heard, began) if not passes or has_forward else (heard[passes[-1] :], heard[passes[-1]].at)


def batches(heard: Sequence[Heard]) -> Iterator[tuple[list[Heard], float]]:
    """Each batch of a loader with what was heard until the next one is asked for, and when that began."""
    begins = [at for at, row in enumerate(heard) if row.kind == "data" and row.value < 1]
    for at, end in itertools.pairwise([*begins, len(heard)]):
        if end < len(heard) and heard[at + 1].value > 0:
            is_new = at >= 2 and heard[at - 1].kind == "data ended" and heard[at - 1].value == 0
            yield [*heard[at - 2 * is_new : end], Heard("asked", 0.0, 0.0, heard[end].at)], heard[at - 2 * is_new].at


class Split(NamedTuple):
    """A split says what the time of a step went to."""

    spent: list[float]
    stretches: tuple[list[float], ...]
    """The time of stretches beside the step in which nothing was trained."""
    paused_s: float = 0.0
    is_profiled: bool = False
    loaded: float = 0.0
    fed: float = 0.0
    waited_s: float = 0.0
    """A rank had computed its gradients and waited for those of the others."""
    models: tuple[float, ...] = ()


NOWHERE = [0.0] * len(SLOTS)


def split_lean(heard: Sequence[Heard], began: float) -> Split | None:
    """A step of which only its batches and its end were written down, as most are; None where there was more."""
    spent, loaded, at = list(NOWHERE), 0.0, began
    for row in heard[:-1]:
        if row.kind == "data" and row.value < 1:
            spent[AT["head" if at == began else "unsplit"]] += row.at - at
        elif row.kind == "data ended" and row.value > 0:
            spent[AT["data"]] += row.at - at
            loaded += row.value
        else:
            return None
        at = row.at
    spent[AT["unsplit"]] += heard[-1].at - at
    return Split(spent, (NOWHERE,) * len(STRETCHES), loaded=loaded)


def split(heard: Sequence[Heard], began: float, *, is_full: bool, graphs: Mapping[float, Graph]) -> Split:
    """Charge the time before every row to a phase, and take out the stretches in which nothing was trained."""
    trained = {at for at in range(len(heard)) if is_training(heard, at)}
    where = set_apart(heard, sorted(trained))
    totals = {name: list(NOWHERE) for name in ("spent", *STRETCHES)}
    paused_s = loaded = 0.0
    at = began
    for row, slot, name in zip(heard, slots(heard, trained, is_full), where, strict=True):
        if slot == "pause":
            paused_s += row.at - at
        else:
            totals["spent" if slot == "saving" else name][AT[slot]] += row.at - at
        at = row.at
        if row.kind == "fetched" and is_full:  # a batch that was made between a forward and its backward pass
            totals["spent"][AT["forward"]] -= row.value
            totals["spent"][AT["data"]] += row.value
        elif row.kind in ("data ended", "counted") and name == "spent":
            loaded += max(row.value, 0.0)
    is_profiled = any(row.kind == "pause" and row.value for row in heard)
    fed = fed_to(heard, trained, graphs)
    stretches = tuple(totals[name] for name in STRETCHES)
    waited_s = sum(later.at - row.at for row, later in itertools.pairwise(heard) if row.kind == "waiting")
    least = min(fed.values(), default=0.0)
    return Split(totals["spent"], stretches, paused_s, is_profiled, loaded, least, waited_s, tuple(fed))


def is_training(heard: Sequence[Heard], at: int) -> bool:
    """True if a row begins a part of the training. A forward pass in evaluation mode does if a backward pass follows it."""
    row = heard[at]
    if row.kind != "forward" or row.key == 0 or row.value % 2 == 0:
        return row.kind in ("backward", "replay", "called")
    following = (one.kind for one in heard[at + 1 :] if one.kind in ("backward", "data", "forward"))
    return row.value >= 2 or next(following, "") == "backward"


def is_quiet(heard: Sequence[Heard], at: int) -> bool:
    """True if a row begins a forward pass from which nothing is learned."""
    row = heard[at]
    return row.kind == "forward" and (row.value % 2 == 0 or (row.key > 0 and not is_training(heard, at)))


def end_of(heard: Sequence[Heard], at: int) -> int:
    """Returns the row that ends what this one begins."""
    ended = f"{heard[at].kind} ended"
    return next((later for later in range(at + 1, len(heard)) if heard[later].kind == ended), at)


def slots(heard: Sequence[Heard], trained: Collection[int], is_full: bool) -> Iterator[str]:
    """Yields the slot that the time before each row is charged to.

    Between a forward pass and its backward pass that is the loss, which is forward work. Between other rows it is `early` until
    the model is first used (getting a batch, where no loader does) and then other work.
    """
    below: list[str] = []
    loss_is_open = is_used = has_batch = is_trained = False
    for at, row in enumerate(heard):
        is_end = row.kind.endswith(" ended")
        slot = below[-1] if below else "other"
        is_known = slot in ("data", "saving", "pause") or (slot == "forward" and not is_trained)
        if slot in ("other", "optimizer"):
            is_loss = loss_is_open and row.kind in ("backward", "zero_grad", "forward")
            if is_loss or (row.kind == "backward" and not is_used):
                slot = "forward"
            elif slot == "optimizer" and row.kind == "forward" and not is_used:
                slot = "early"  # the closure makes its batch ready
            elif row.kind == "saving" and heard[at - 1].kind == "saving ended" and at:
                slot, is_known = "saving", True  # a checkpoint of several files
            elif slot == "other" and not has_batch and row.kind == "data":
                slot, is_known = "head", True
            elif slot == "other" and not is_end and (not is_used or row.kind == "forward"):
                slot = "early"
        elif row.kind == "data ended" and row.value < 0:
            slot = "other"  # nobody waited for a batch: the loader is through
        yield slot if is_full or is_known else "unsplit"
        if is_end and below:
            below.pop()
        elif row.kind in OF_KIND:
            below.append(OF_KIND[row.kind])
        match row.kind:
            case "data":
                loss_is_open, is_used, has_batch = False, False, True
            case "forward":
                is_trained = at in trained
                is_used = is_used or row.key > 0
            case "forward ended":
                loss_is_open = loss_is_open or is_trained
            case "backward" | "replay":
                loss_is_open, is_used = False, True


def set_apart(heard: Sequence[Heard], trained: Sequence[int]) -> list[str]:
    """Says of the time before each row whether it belongs to the step or to a stretch in which nothing was trained.

    With a loader of its own such a stretch is validation. Without one it is acting if the model saw fewer samples at a time than
    it learns from, and else what is rare is validation, as a pass over a loader is in which no model was heard.
    """
    where = ["spent"] * len(heard)
    size = next((heard[end_of(heard, at)].value for at in trained if heard[at].kind == "forward"), 0.0)
    begin = 0
    for at in [*trained, len(heard)]:
        stretch = range(begin, at)
        quiet = [one for one in stretch if is_quiet(heard, one)]
        asked = [one for one in stretch if heard[one].kind == "data"]
        through = [one for one in stretch if heard[one].kind == "data ended" and heard[one].value < 0]
        if quiet and asked:
            before = [one for one in asked if one < quiet[0]]
            first = before[-1] if before else begin
            is_new = first >= 2 and heard[first - 1].value == 0 and heard[first - 2].value >= 1
            # A validation ends with its loader, or where the training asks for its next batch.
            ends = [one for one in through if one > quiet[-1]] + [asked[-1]]
            last = ends[0] if at < len(heard) or len(ends) > 1 else len(heard) - 1
            _set(where, first + 1 - 2 * is_new, last, "validation")
        elif quiet:
            sizes = {one: heard[end_of(heard, one)].value for one in quiet}
            small = [one for one in quiet if sizes[one] < size or sizes[one] == 1]
            played = end_of(heard, small[-1]) + 1 if size and small[:1] == quiet[:1] else begin - 1
            _set(where, begin, played, "played")
            _set(where, played + 1, end_of(heard, quiet[-1]), "aside")
        elif through and (passes := [one for one in asked if heard[one].value >= 1 and one < through[-1]]):
            _set(where, passes[0] + 1, through[-1], "aside")
        if at < len(heard):
            begin = max(end_of(heard, at) + 1, begin)
    return where


def _set(where: list[str], first: int, last: int, name: str) -> None:
    for at in range(max(first, 0), min(last + 1, len(where))):
        where[at] = name


def fed_to(heard: Sequence[Heard], trained: Collection[int], graphs: Mapping[float, Graph]) -> dict[float, float]:
    """Samples by model. A closure that an optimizer calls again, as LBFGS does, sees the same samples again."""
    fed: dict[float, float] = {}
    called: dict[float, float] = {}
    sizes: dict[float, list[float]] = {}
    in_closure = is_again = False
    for at, row in enumerate(heard):
        match row.kind:
            case "optimizer":
                in_closure, is_again = True, False
            case "optimizer ended":
                in_closure = False
            case "forward" if at in trained:
                sizes.setdefault(row.key, []).append(heard[end_of(heard, at)].value)
            case "called":
                called[row.key] = called.get(row.key, 0.0) + row.value
            case "replay" if row.key in graphs:
                for model, samples in graphs[row.key].models.items():
                    fed[model] = fed.get(model, 0.0) + samples
        if row.kind == "backward" or at == len(heard) - 1:
            for model, many in sizes.items() if not is_again else ():
                are_views = 1 < len(many) <= MOST_VIEWS and len(set(many)) == 1 and many[0] > 1
                fed[model] = fed.get(model, 0.0) + (many[0] if are_views else sum(many))
            sizes, is_again = {}, in_closure
    return fed or called


def graph_of(heard: Sequence[Heard]) -> Graph:
    """Sums up what was recorded while a graph was captured."""
    trained = {at for at in range(len(heard)) if is_training(heard, at)}
    callers = [row.key for row in heard if row.kind == "optimizer ended"]
    backwards = sum(row.kind == "backward" for row in heard)
    return Graph(callers[-1] if callers else None, backwards, fed_to(heard, trained, {}))


class Log(Protocol):
    """A log holds what one process wrote."""

    facts: dict[str, dict[str, Any]]
    pulses: list[dict[str, Any]]
    reader: Reader

    @property
    def process(self) -> dict[str, Any]: ...


L = TypeVar("L", bound=Log)


class Steps:
    """The steps of a loop: one row each, however many optimizers it calls."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        rows = reader.table()
        column = dict(zip(COLUMNS, rows.T, strict=True))
        callers, full = column["caller"], column["is_full"] > 0
        self.is_by_batch = bool(len(rows)) and bool((callers == BY_BATCH).all())
        """Nothing but batches was heard: each of them counts as a step."""
        models, fed = _filled(column["models"], callers, full), _filled(column["fed"], callers, full)
        first, width = COLUMNS.index(SLOTS[0]), len(SLOTS)
        spent, validation, aside, played = (rows[:, first + at * width : first + (at + 1) * width] for at in range(4))
        spent = spent.copy()
        groups = groups_of(callers, column["loaded"], models)
        self.count = int(groups[-1]) + 1 if len(groups) else 0

        def of_group(values: Vector, add: Any = np.add) -> Vector:
            total = np.zeros((self.count, *values.shape[1:]))
            add.at(total, groups, values)
            return total

        if played[:1].any():  # an agent acts before it first learns
            spent[:, AT["acting"]] += played.sum(axis=1)
        else:
            aside = aside + played
        if of_group(aside).any(axis=1).sum() < RARELY * self.count:
            validation = validation + aside
        else:
            spent += aside
        _distribute(spent, callers, full)
        self._early = np.where(
            is_loaded(column["loaded"]), AT["other"], np.where((models > 0) | (fed > 0), AT["data"], AT["forward"])
        )
        spent[np.arange(len(rows)), self._early] += spent[:, AT["early"]]
        spent[:, AT["other"]] += spent[:, AT["head"]]
        self.saving_s = of_group(spent[:, AT["saving"]])
        spent[:, AT["saving"]] = 0.0
        self.phases_s = of_group(spent[:, : len(PHASES)])
        self.wall_s: Vector = self.phases_s.sum(axis=1)
        self.validation_s, self.paused_s = of_group(validation.sum(axis=1)), of_group(column["paused"])
        loaded = of_group(column["loaded"])
        # Optimizers share the samples of a step. Passes before the first optimizer's step have accumulated theirs.
        is_pass = callers == BY_BACKWARD
        fed = of_group(fed * is_pass) + of_group(fed * ~is_pass, np.maximum)
        self.samples: Vector = np.where(is_loaded(loaded), loaded, fed)
        """Per step: what the loader delivered; where none does, what the model was fed."""
        self.is_profiled = of_group(column["is_profiled"]) > 0
        self.ended_s = of_group(column["ended"], np.maximum)
        self._waited_s, self._is_full = of_group(column["waited"]), of_group(~full) == 0

    @property
    def counted(self) -> Any:
        """Marks the steps that count for rates: the first ones do not if they are far slower, nor do those under the profiler."""
        kept = ~self.is_profiled
        if not kept.any():
            return np.ones(self.count, dtype=bool)
        slow = max(START_UP * float(np.median(self.wall_s[kept])), START_UP_S)
        # The wait until a loader's workers run comes back in each epoch, so it is no start-up.
        steady = np.flatnonzero(self.wall_s - self.phases_s[:, AT["data"]] <= slow)
        if len(steady):
            kept[: steady[0]] = False
        return kept if kept.any() else np.ones(self.count, dtype=bool)

    @property
    def seconds(self) -> float:
        """The time of all counted steps, with the end of the loader after the last one, or with the device's work if that lasted longer."""
        return float(self.wall_s[self.counted].sum()) + max(self._reader.device.lag_s, self._reader.loop_tail_s)

    @property
    def tail_s(self) -> float:
        """The loader was through so long after the last step."""
        return self._reader.loop_tail_s

    @property
    def has_device_clock(self) -> bool:
        return bool(self._reader.device.spent.any())

    def shares(self, *, of_host: bool = False) -> dict[str, float]:
        """Returns shares of the counted steps' time, by the device's clock where there is one."""
        if not self.count:
            return {}
        if self.has_device_clock and not of_host:
            slots = self._reader.device.spent.copy()
            slots[int(np.median(self._early))] += slots[AT["early"]]
            slots[AT["other"]] += slots[AT["head"]]
            spent = slots[: len(PHASES)]
        else:
            spent = self.phases_s[self.counted].sum(axis=0)
            spent[AT["other"]] += self.tail_s
        whole = float(spent.sum())
        return {name: float(seconds) / whole for name, seconds in zip(PHASES, spent, strict=True)} if whole > 0 else {}

    def own_part(self, rank: int) -> RankBlock:
        """Returns what this process did by itself in the steps that were heard in full, as one of several ranks."""
        known = self.counted & self._is_full
        phases = {name: tuple(self.phases_s[known, at].tolist()) for at, name in enumerate(PHASES)}
        computed = self.phases_s[known, AT["backward"]] - self._waited_s[known]
        alone = {"backward": tuple(computed.tolist())}
        return RankBlock(rank=rank, samples=tuple(self.wall_s[known].tolist()), phases=phases, alone=alone)

    def run_s(self) -> dict[str, float]:
        """Says where the time of the whole run went, in seconds, from the first step's beginning to what was last heard."""
        if not self.count:
            return {}
        left_out = ~self.counted
        spent = {name: share * self.seconds for name, share in self.shares().items()}
        spent["first steps"] = float(self.wall_s[left_out & ~self.is_profiled].sum())
        spent["profiling"] = float(self.paused_s.sum() + self.wall_s[left_out & self.is_profiled].sum())
        spent["validation"], spent["saving"] = float(self.validation_s.sum()), float(self.saving_s.sum())
        if self.is_by_batch:
            return spent
        tail = self._reader.tail
        spent["validation"] += sum(map(sum, tail.stretches))
        for name in PHASES:
            spent[name] += tail.spent[AT[name]]
        spent["other"] = max(spent["other"] + tail.spent[AT["head"]] + tail.spent[AT["early"]] - self.tail_s, 0.0)
        return spent


def _filled(values: Vector, callers: Vector, full: Any) -> Vector:
    """Fills in for the other steps what is known of the last step of the same optimizer that was heard in full."""
    filled = values.copy()
    for caller in set(callers.tolist()):
        own = np.flatnonzero(callers == caller)
        last = np.maximum.accumulate(np.where(full[own], np.arange(len(own)), -1))
        filled[own] = np.where(last >= 0, values[own[np.maximum(last, 0)]], 0.0)
    return filled


def _distribute(spent: Vector, callers: Vector, full: Any) -> None:
    """Split what is not known of some steps as it is split in those of the same optimizer that were heard in full."""
    unsplit = AT["unsplit"]
    known = np.array([AT[name] for name in ("copy", "forward", "backward", "optimizer", "other", "early")])
    for caller in set(callers.tolist()):
        own = np.flatnonzero(callers == caller)
        usual = own[full[own]]
        usual = usual[FIRST_STEPS:] if len(usual) > 2 * FIRST_STEPS else usual
        weights = np.maximum(spent[np.ix_(usual, known)].sum(axis=0), 0.0)
        if weights.sum() > 0:
            spent[np.ix_(own, known)] += np.outer(spent[own, unsplit], weights / weights.sum())
            spent[own, unsplit] = 0.0
    spent[:, AT["other"]] += spent[:, unsplit]


def is_loaded(loaded: Vector) -> Any:
    """Says of each step whether its batch came from a DataLoader, in this step or a few before it.

    Steps that go on for long without a new batch get theirs elsewhere: they repeat one, or cycle through kept ones.
    """
    has_batch = np.ones(len(loaded), dtype=bool)
    fetched = [-1, *np.flatnonzero(loaded > 0).tolist(), len(loaded)]
    if len(fetched) == 2:
        return ~has_batch
    for earlier, later in itertools.pairwise(fetched):
        if later - earlier > STEPS_OF_A_BATCH:
            has_batch[earlier + 1 : later] = False
    return has_batch


def groups_of(callers: Vector, loaded: Vector, models: Vector) -> Any:
    """Returns the number of the loop's step that each row belongs to.

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


def _shares_batches_unevenly(callers: Vector, loaded: Vector) -> bool:
    """True if most batches serve all optimizers, some more often than others, as a critic that takes two steps of each."""
    kinds, starts = set(callers.tolist()), np.flatnonzero(loaded > 0)
    if min(kinds) < 0 or len(set(callers[starts].tolist())) != 1:
        return False
    calls = [np.unique(part, return_counts=True)[1] for part in np.split(callers, starts)[1:]]
    uneven = sum(len(counts) == len(kinds) and counts.min() < counts.max() for counts in calls)
    return bool(2 * uneven > len(calls))


def rates_of(logs: Sequence[Log]) -> Rates:
    """All logs are of one loop: the ranks of a distributed training take the same steps, each with samples of its own."""
    logs = main_logs(logs)
    ranks = [Steps(log.reader) for log in logs]
    if not ranks or not ranks[0].count:
        return Rates()
    lead = ranks[0]
    kept, whole = lead.counted, lead.seconds
    wall = lead.wall_s[kept]
    middle = float(np.median(wall))
    later = wall[FIRST_STEPS:] - lead.phases_s[kept][FIRST_STEPS:, AT["acting"]]
    slow = later[later > OUTLIER * middle] - middle
    # The end of the loader after the last step belongs to no row, but makes that step as slow as it would any other.
    if lead.tail_s > (OUTLIER - 1) * middle:
        slow = np.append(slow, lead.tail_s)
    known = [rate for rank in ranks if (rate := _samples_per_s(rank, lead)) is not None]
    losses = [
        pulse["loss"] for pulse in logs[0].pulses if pulse.get("loss") is not None and math.isfinite(pulse["loss"])
    ]
    run_s = lead.run_s()
    run = sum(run_s.values()) - run_s["profiling"]
    return Rates(
        steps=lead.count,
        steps_per_s=len(wall) / whole if whole > 0 else None,
        whole_steps_per_s=lead.count / run if run > 0 else None,
        samples_per_s=sum(known) if known else None,
        samples=float(sum(rank.samples.sum() for rank in ranks)),
        counted_s=whole,
        first_step_s=float(lead.wall_s[0]),
        first_steps=int((~kept & ~lead.is_profiled).sum()),
        outliers=len(slow),
        outlier_share=float(slow.sum()) / whole if whole > 0 else None,
        shares=lead.shares(),
        host_shares=lead.shares(of_host=True),
        run_s=run_s,
        device_clock=lead.has_device_clock,
        loss=losses[-1] if losses else None,
    )


def _samples_per_s(rank: Steps, lead: Steps) -> float | None:
    """A rank that takes the same steps as the first one goes by that one's time: they wait for each other."""
    paced = lead if rank.count == lead.count else rank
    whole, samples = paced.seconds, float(rank.samples[paced.counted].sum())
    return samples / whole if whole > 0 and samples > 0 else None


def wait_for(late: LateRank, parts: Iterable[RankBlock]) -> float:
    """Returns how long the rank that waits longest for the late one does so in a step."""
    others = [part for part in parts if part.rank != late.rank]
    return max(float(np.median(np.subtract(part.phases["backward"], part.alone["backward"]))) for part in others)


def main_logs(logs: Sequence[L]) -> list[L]:
    """Those of the training: its ranks, rank 0 first; of processes that are no ranks, the one with the most steps."""
    counts = {id(log): len(log.reader.table()) for log in logs}
    stepped = sorted((log for log in logs if counts[id(log)]), key=lambda log: counts[id(log)])
    # If a rank was started again, its longest life counts.
    ranked = {int(log.process.get("rank", 0)): log for log in stepped if log.process.get("world_size", 1) > 1}
    return [ranked[rank] for rank in sorted(ranked)] if ranked else stepped[-1:]


class Drift(Frozen):
    """A lasting change of the step time."""

    step: int
    """It began here."""
    at_s: float
    """Since the first step."""
    ratio: float
    """Step time after it over before it."""
    share_before: float
    """Share of the counted time that the steps before it took."""


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
    share_before = float(steps.wall_s[kept[kept < first]].sum() / steps.wall_s[kept].sum())
    return Drift(
        step=first, at_s=float(steps.ended_s[first] - steps.ended_s[0]), ratio=best[0], share_before=share_before
    )


def growth_of(pulses: Sequence[dict[str, Any]], resident: Sequence[tuple[float, int]]) -> tuple[float, float] | None:
    """Returns the bytes held at the end over those after the first third, and bytes per second; None without steady growth.

    A GPU's allocated memory by the process's own pulses, else what the operating system says of its memory.
    """
    held = [(pulse["at"], pulse["memory"]["allocated"]) for pulse in pulses if pulse.get("memory", {}).get("allocated")]
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
