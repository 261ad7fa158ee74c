"""The steps of a watched process are made here from what it heard: where one ends, what its time went to, how many samples it took.

The hooks write down what happened and when (`bench/watch/spool.py` lists the kinds of rows). `Reader` cuts these rows into steps,
`split` says what the time of one step went to, and `Steps` is the table of all of them, from which rates and shares follow.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from redline.analyze.ranks import LateRank
from redline.model.fields import Frozen
from redline.model.record import PHASES, RankBlock, Rates

Vector = np.ndarray[Any, np.dtype[np.float64]]

SLOTS = (*PHASES, "head", "early", "unsplit")
"""Time is charged to one of these. Until all steps are known, there are three more than there are phases: `head` passes before the
first batch is asked for, `early` before the model is first used, and `unsplit` in steps of which little was written down."""
AT = {name: number for number, name in enumerate(SLOTS)}
WHERE = {name: number * len(SLOTS) for number, name in enumerate(("step", "validation", "aside", "played"))}
"""Time belongs to the step, or to a stretch beside it in which nothing is trained. `aside` is validation only if it is rare, and
`played` is acting in an environment if the program did it before its first step."""
SLOT_OF = {
    "data": "data", "copy": "copy", "forward": "forward", "backward": "backward", "zero_grad": "optimizer", "saving": "saving",
    "replay": "forward", "upkeep": "other",
}  # fmt: skip
"""This is the slot of a call. Those that are not listed have a time of their own, or none."""
COLUMNS = ("caller", "ended", "is_full", "is_profiled", "paused", "loaded", "fed", "waited", "models")
"""These columns of the table describe a step. After them comes its time, by stretch and slot."""
BY_HAND, BY_BACKWARD, BY_BATCH = -1.0, -2.0, -3.0
"""These are the callers of steps that no optimizer ended: the program counted them, a backward pass ended them, or only a batch was
seen."""
MOST_MODELS = 50
"""Models are bits of a 64-bit float, which holds 53 of them without loss."""
MOST_VIEWS = 3
"""A model that is called so often for one backward pass sees views of the same samples, as of pairs and triplets. More calls are steps in time."""
START_UP, START_UP_S = 10.0, 0.5
"""Leading steps that take so many medians, and longer than this, compile, tune or fill caches: they are first steps."""
OUTLIER = 2.0
"""A step that takes longer than so many medians is slow."""
FIRST_STEPS = 3
"""The first steps are slower than those after them wherever memory is fetched and kernels are chosen."""
STEPS_OF_A_BATCH = 32
"""A batch of a DataLoader may serve several steps, as with truncated backpropagation, but not more than so many."""
RARELY = 0.5
"""A part of the loop that is met in fewer than half of the steps is no part of a step."""

STEPS_OF_PIECE, FEWEST_PIECES, MOST_PIECES = 20, 8, 60
"""A run is compared with itself in pieces of so many steps. With fewer pieces, noise alone may order them."""
SLOWDOWN = 1.10
"""A smaller lasting rise of the step time is within what clocks and neighbours do, and is not told."""
FEWEST_LOOKS = 12
"""Growth of memory is told by at least this many looks."""


class Heard(NamedTuple):
    """This is a row that the process wrote; `bench/watch/spool.py` says what its key and value are."""

    kind: str
    key: float
    value: float
    at: float
    number: int = 0


class Reader:
    """A reader cuts the rows that one process wrote into steps, as they come."""

    def __init__(self, *, is_by_batch: bool = False) -> None:
        self.rows = array("d")
        """These are the steps, one after the other: the columns, then their time by stretch and slot."""
        self.rest: list[Heard] = []
        """These rows came since the last step."""
        self.starts: list[float] = []
        """These are the seconds until the first batch, for every iterator whose workers end with it."""
        self.ends: list[float] = []
        """These are the seconds that ending a loader's workers took, each time."""
        self.device = DeviceClock()
        self._is_by_batch = is_by_batch
        """Each batch is a step."""
        self._since: float | None = None
        """The last step ended at this time."""
        self._bits: dict[float, int] = {}
        self._starting: float | None = None
        """An iterator was asked for then, and has not delivered yet."""
        self._with_workers = set[float]()
        """Iterators whose workers end with them."""
        self._knows_end = False
        """An optimizer ends the steps, or the program itself does."""
        self._trains = self._has_trained = False
        """A backward pass was heard in this step, and in any."""
        self._depth = 0
        """The number of optimizers that are at work, one within the other."""

    def read(self, rows: Iterable[tuple[str, float, float, float, int]]) -> None:
        """Rows as they were written: kind, key, value, time and number."""
        for row in itertools.starmap(Heard, rows):
            if row.kind == "device":
                self.device.read(row)
            elif row.kind == "restart":  # what another thread had loaded is not this one's
                self.rest, self._depth = [one for one in self.rest if not one.kind.startswith("data")], 0
                self._since = self._since if self.rest else row.at
            else:
                self._since = row.at if self._since is None else self._since
                self._see(row)

    def _see(self, row: Heard) -> None:
        if self._is_by_batch:
            if row.kind == "data" and self._has_batch:
                self.rest.append(Heard("asked", 0.0, 0.0, row.at))
                self._finish(len(self.rest), BY_BATCH)
        elif self._trains and not (self._knows_end or self._depth):
            # No optimizer was seen, so a step ends where its batch is followed, or without a loader with its last backward pass.
            is_next = row.kind == "forward" and row.value % 2 == 1
            if row.kind in ("data", "closed") or (not self._has_batch and (is_next or row.kind == "backward")):
                last = max((at for at, one in enumerate(self.rest) if one.kind == "backward ended"), default=-1)
                self._finish(len(self.rest) if is_next or row.kind == "data" else last + 1, BY_BACKWARD)
        if row.kind == "closed":
            return
        self.rest.append(row)
        match row.kind:
            case "optimizer":
                self._depth += 1
            case "optimizer ended":
                self._depth = max(self._depth - 1, 0)
                if not self._depth:
                    self._knows_end = True
                    self._finish(len(self.rest), row.key)
            case "counted":
                self._knows_end = True
                self._finish(len(self.rest), BY_HAND)
            case "backward":
                self._trains = True
            case "data" if row.value > 1:
                self._starting = row.at
            case "data ended":
                self._see_batch(row)

    def _see_batch(self, row: Heard) -> None:
        if row.value < 0 and row.key in self._with_workers:
            self._with_workers.discard(row.key)
            self.ends += [row.at - self.rest[-2].at] if len(self.rest) > 1 else []
        elif self._starting is not None and row.value == 0:
            self._with_workers.add(row.key)
        elif self._starting is not None and row.value > 0:
            self.starts.append(row.at - self._starting)
            self._starting = None

    @property
    def _has_batch(self) -> bool:
        """A batch was loaded since the last step."""
        return any(one.kind == "data ended" and one.value > 0 for one in self.rest)

    def _finish(self, end: int, caller: float) -> None:
        heard, self.rest = self.rest[:end], self.rest[end:]
        began, self._trains = self._since or 0.0, False
        if not heard:
            return
        self._since = heard[-1].at
        if not (self._has_trained or self._is_by_batch):
            heard, began = without_early_batches(heard, began)
        self._has_trained = True
        last = heard[-1]
        is_full = bool(last.key if last.kind == "counted" else last.value) or caller <= BY_BACKWARD
        step = split(heard, began, is_full=is_full)
        bits = 0
        for model in step.fed:
            bits |= self._bits.setdefault(model, 1 << (len(self._bits) % MOST_MODELS))
        fed = min(step.fed.values(), default=0.0)
        self.rows.extend(
            (caller, last.at, is_full, step.is_profiled, step.paused_s, step.loaded, fed, step.waited_s, bits)
        )
        self.rows.extend(step.spent)
        if is_full:
            self.device.await_step(heard)

    @property
    def tail(self) -> Split:
        """This came after the last step, up to what was last heard."""
        return split(self.rest, self._since or 0.0)

    @property
    def loop_tail_s(self) -> float:
        """The loader was through so long after the last step: its workers end."""
        for at, row in enumerate(self.rest):
            if row.kind == "data" and row.value >= 1:
                break
            if row.kind == "data ended" and row.value < 0:
                return sum(split(self.rest[: at + 1], self._since or 0.0).spent[: len(SLOTS)])
        return 0.0

    def table(self) -> Vector:
        """Returns one row for each step. Where neither optimizer nor backward pass was heard, each batch is one."""
        rows = self.rows
        if not rows and not self._trains:
            reader = Reader(is_by_batch=True)
            reader.read(self.rest)
            rows = reader.rows
        return np.array(rows).reshape(-1, len(COLUMNS) + len(WHERE) * len(SLOTS))


class DeviceClock:
    """This clock tells how long the steps that were heard in full took on the device. Its times reach their rows later than the host's."""

    def __init__(self) -> None:
        self.spent = np.zeros(len(SLOTS))
        """These are the seconds of the device by slot."""
        self.lag_s = 0.0
        """The device was so far behind the host when it was last looked at."""
        self._began: float | None = None
        """It is the time of the host when this clock began, or None where there is none."""
        self._reached: dict[float, float] = {}
        """It says when the device reached a row, by the number of the row."""
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
            times = [one._replace(at=self._reached.pop(one.number, -1.0)) for one in heard]
            if all(one.at >= 0 for one in times):
                self.spent += split(times, times[0].at).spent[: len(SLOTS)]
                self.lag_s = max(times[-1].at - (heard[-1].at - self._began), 0.0)


def without_early_batches(heard: list[Heard], began: float) -> tuple[list[Heard], float]:
    """Leaves out what was read before the training began with a pass over its loader.

    Batches of that pass may be fetched ahead, as accelerate and the Trainer do: they stay. A validation before the first step stays too.
    """
    first = next((at for at, one in enumerate(heard) if one.kind in ("backward", "optimizer")), len(heard))
    passes = [at for at, one in enumerate(heard[:first]) if one.kind == "data" and one.value >= 1]
    if not passes or any(one.kind == "forward" for one in heard[: passes[-1]]):
        return heard, began
    return heard[passes[-1] :], heard[passes[-1]].at


class Piece(NamedTuple):
    """A call that was heard, or the mark of a moment, with the time between it and the piece before."""

    kind: str
    key: float
    value: float
    size: float
    """This is what its end told: its samples, or for how long a backward pass waited for the gradients of other ranks."""
    before_s: float
    own_s: float

    @property
    def is_new_pass(self) -> bool:
        """An iterator over a loader was made."""
        return self.kind == "data" and self.value >= 1

    @property
    def is_through(self) -> bool:
        """A loader had no more batches."""
        return self.kind == "data" and self.size < 0


def pieces_of(heard: Sequence[Heard], began: float) -> list[Piece]:
    """Joins the rows that begin and end a call. A call that never ended takes until the next row."""
    found: list[Piece] = []
    call, at, waits_since = None, began, 0.0
    for row in heard:
        if call is not None and row.kind == "waiting":
            waits_since = row.at
            continue
        if call is not None:
            size = row.at - waits_since if waits_since else row.value
            found.append(Piece(call.kind, row.key, call.value, size, call.at - at, row.at - call.at))
            call, at, waits_since = None, row.at, 0.0
            if row.kind == f"{found[-1].kind} ended":
                found[-1] = found[-1]._replace(key=row.key or found[-1].key)
                continue
        if row.kind in SLOT_OF or row.kind == "pause":
            call = row
        else:
            found.append(Piece(row.kind, row.key, row.value, 0.0, row.at - at, 0.0))
            at = row.at
    return found if call is None else [*found, Piece(call.kind, call.key, call.value, 0.0, call.at - at, 0.0)]


class Split(NamedTuple):
    """A split says what the time of a step went to."""

    spent: list[float]
    """Seconds by stretch and slot."""
    fed: dict[float, float]
    """Samples by model."""
    paused_s: float
    is_profiled: bool
    loaded: float
    waited_s: float
    """A rank had computed its gradients and waited for those of the others."""


def split(heard: Sequence[Heard], began: float, *, is_full: bool = True) -> Split:
    """Charge all time to a phase, and take out the stretches in which nothing was trained."""
    pieces = pieces_of(heard, began)
    trained = [at for at in range(len(pieces)) if is_training(pieces, at)]
    where, spent = set_apart(pieces, trained), [0.0] * (len(WHERE) * len(SLOTS))
    paused_s = loaded = waited_s = profiles = 0.0
    for at, (piece, (gap, own)) in enumerate(zip(pieces, slots_of(pieces, trained, is_full), strict=True)):
        place = where[2 * at + 1]
        spent[AT[gap] + (0 if gap == "saving" else WHERE[where[2 * at]])] += piece.before_s
        if own:
            spent[AT[own] + (0 if own == "saving" else WHERE[place])] += piece.own_s
        if piece.kind == "fetched" and is_full:  # a batch that was made between a forward and its backward pass
            spent[AT["forward"]] -= piece.value
            spent[AT["data"]] += piece.value
        elif piece.kind == "pause":
            paused_s, profiles = paused_s + piece.own_s, profiles + piece.value
        elif piece.kind == "backward":
            waited_s += piece.size
        elif piece.kind in ("data", "counted") and place == "step":
            loaded += piece.value if piece.kind == "counted" else max(piece.size, 0.0)
    return Split(spent, fed_to(pieces, trained), paused_s, profiles > 0, loaded, waited_s)


def is_training(pieces: Sequence[Piece], at: int) -> bool:
    """Returns True if a piece belongs to the training. A forward pass in evaluation mode does if a backward pass follows it."""
    piece = pieces[at]
    if piece.kind != "forward" or piece.key == 0 or piece.value % 2 == 0:
        return piece.kind in ("backward", "replay")
    following = (one.kind for one in pieces[at + 1 :] if one.kind in ("backward", "data", "forward"))
    return piece.value >= 2 or next(following, "") == "backward"


def slots_of(pieces: Sequence[Piece], trained: Sequence[int], is_full: bool) -> Iterator[tuple[str, str]]:
    """Yields the slots of the time before each piece, and of its own; empty where it is nobody's.

    Between a forward pass and its backward pass that is the loss, which is forward work. Between other pieces it is `early` until
    the model is first used (getting a batch, where no loader does) and then other work, or the optimizer's within it.
    """
    before, depth = "", 0
    loss_is_open = is_used = has_batch = False
    for at, piece in enumerate(pieces):
        kind, is_known = piece.kind, False
        gap = "optimizer" if depth else "other"
        if (loss_is_open and kind in ("backward", "zero_grad", "forward")) or (kind == "backward" and not is_used):
            gap = "forward"
        elif before == kind == "saving":
            gap, is_known = "saving", True  # a checkpoint of several files
        elif not depth and not has_batch and kind == "data":
            gap, is_known = "head", True
        elif (
            not is_used
            if depth and kind == "forward"
            else not depth and kind != "optimizer ended" and (not is_used or kind == "forward")
        ):
            gap = "early"  # also where a closure makes its batch ready
        own = "other" if piece.is_through else SLOT_OF.get(kind, "")  # nobody waits for a loader that is through
        owns = is_full or kind in ("data", "saving", "replay") or (kind == "forward" and at not in trained)
        yield gap if is_full or is_known else "unsplit", own if owns or not own else "unsplit"
        match kind:
            case "data":
                loss_is_open, is_used, has_batch = False, False, True
            case "forward":
                is_used, loss_is_open = is_used or piece.key > 0, loss_is_open or at in trained
            case "backward" | "replay":
                loss_is_open, is_used = False, True
            case "optimizer":
                depth += 1
            case "optimizer ended":
                depth = max(depth - 1, 0)
        before = kind


def set_apart(pieces: Sequence[Piece], trained: Sequence[int]) -> list[str]:
    """Says of the time before each piece, and of its own, whether it belongs to the step or to a stretch in which nothing was trained.

    With a loader of its own such a stretch is validation. Without one it is acting if the model saw fewer samples at a time than
    it learns from, and else what is rare is validation, as a pass over a loader is in which no model was heard.
    """
    where = ["step"] * (2 * len(pieces) + 1)
    if not any(piece.kind == "forward" or piece.is_through for piece in pieces):
        return where[:-1]

    def put(first: int, last: int, name: str) -> None:
        where[first : last + 1] = [name] * (min(last + 1, len(where)) - first)

    size = next((pieces[at].size for at in trained if pieces[at].kind == "forward"), 0.0)
    for begin, end in itertools.pairwise([-1, *trained, len(pieces)]):
        stretch = range(begin + 1, end)
        quiet = [at for at in stretch if pieces[at].kind == "forward" and (pieces[at].value % 2 == 0 or pieces[at].key)]
        asked = [at for at in stretch if pieces[at].kind == "data"]
        through = [at for at in asked if pieces[at].is_through]
        if quiet and asked:
            first = max((at for at in asked if at < quiet[0]), default=begin + 1)
            first -= first > 0 and pieces[first - 1].is_new_pass
            # A validation ends with its loader, or when the training asks for its next batch.
            ends = [2 * at + 1 for at in through if at > quiet[-1]]
            ends += [2 * asked[-1]] if end < len(pieces) else [len(where)]
            put(2 * first + (pieces[first].kind == "data"), ends[0], "validation")
        elif quiet:
            small = [at for at in quiet if pieces[at].size < size or pieces[at].size == 1]
            played = 2 * small[-1] + 2 if size and small[:1] == quiet[:1] else 2 * begin + 1
            put(2 * begin + 2, played, "played")
            put(played + 1, 2 * quiet[-1] + 1, "aside")
        elif through and (passes := [at for at in asked if pieces[at].is_new_pass and at < through[-1]]):
            put(2 * passes[0] + 1, 2 * through[-1] + 1, "aside")
    return where[:-1]


def fed_to(pieces: Sequence[Piece], trained: Sequence[int]) -> dict[float, float]:
    """Samples by model. A closure that an optimizer calls again, as LBFGS does, sees the same samples again."""
    fed: dict[float, float] = {}
    sizes: dict[float, list[float]] = {}
    in_closure = is_again = False
    for at, piece in enumerate(pieces):
        if piece.kind in ("optimizer", "optimizer ended"):
            in_closure, is_again = piece.kind == "optimizer", False
        elif piece.kind == "forward" and at in trained:
            sizes.setdefault(piece.key, []).append(piece.size)
        if piece.kind == "backward" or at == len(pieces) - 1:
            for model, many in sizes.items() if not is_again else ():
                are_views = 1 < len(many) <= MOST_VIEWS and len(set(many)) == 1 and many[0] > 1
                fed[model] = fed.get(model, 0.0) + (many[0] if are_views else sum(many))
            sizes, is_again = {}, in_closure
    return fed


class Log(Protocol):
    """A log holds what one process wrote."""

    reader: Reader

    def fact(self, kind: str) -> dict[str, Any]: ...


L = TypeVar("L", bound=Log)


class Steps:
    """These are the steps of a loop: one row each, however many optimizers it calls."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        rows = reader.table()
        column = dict(zip(COLUMNS, rows.T, strict=False))
        spent, validation, aside, played = (
            rows[:, len(COLUMNS) :].reshape(-1, len(WHERE), len(SLOTS)).transpose(1, 0, 2).copy()
        )
        callers, full = column["caller"], column["is_full"] > 0
        self.is_by_batch = bool(len(rows)) and bool((callers == BY_BATCH).all())
        """Nothing but batches was heard: each of them counts as a step, whose time is forward work as far as is known."""
        models, fed = _filled(column["models"], callers, full), _filled(column["fed"], callers, full)
        groups = groups_of(callers, column["loaded"], models)
        self.count = int(groups[-1]) + 1 if len(groups) else 0

        def of_group(values: Vector, add: Any = np.add) -> Vector:
            total = np.zeros((self.count, *values.shape[1:]))
            add.at(total, groups, values)
            return total

        if played[:1].any():  # an agent acts before it first learns
            spent[:, AT["acting"]] += played.sum(axis=1)
        else:
            aside += played
        if of_group(aside).any(axis=1).sum() < RARELY * self.count:
            validation += aside
        else:
            spent += aside
        _distribute(spent, callers, full)
        if self.is_by_batch:
            spent[:, AT["early"]] += spent[:, AT["other"]]
            spent[:, AT["other"]] = 0.0
        usual = np.where((models > 0) | (fed > 0), AT["data"], AT["forward"])
        self._early = np.where(is_loaded(column["loaded"]) & (not self.is_by_batch), AT["other"], usual)
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
        """For each step this is what the loader delivered, or where none does, what the model was fed."""
        self.is_profiled = of_group(column["is_profiled"]) > 0
        self.ended_s = of_group(column["ended"], np.maximum)
        self._waited_s, self._is_full = of_group(column["waited"]), of_group(~full) == 0

    @property
    def counted(self) -> Any:
        """Marks the steps that count for rates: the first ones do not if they are far slower, nor do those under the profiler."""
        kept = ~self.is_profiled
        if kept.any():
            slow = max(START_UP * float(np.median(self.wall_s[kept])), START_UP_S)
            # The wait until a loader's workers run comes back in each epoch, so it is no start-up.
            steady = np.flatnonzero(self.wall_s - self.phases_s[:, AT["data"]] <= slow)
            kept[: steady[0] if len(steady) else 0] = False
        return kept if kept.any() else np.ones(self.count, dtype=bool)

    @property
    def seconds(self) -> float:
        """Returns the time of all counted steps, with the end of the loader after the last one, or with the device's work if that lasted
        longer."""
        return float(self.wall_s[self.counted].sum()) + max(self._reader.device.lag_s, self.tail_s)

    @property
    def tail_s(self) -> float:
        """The loader was through so long after the last step."""
        return self._reader.loop_tail_s

    @property
    def has_device_clock(self) -> bool:
        return bool(self._reader.device.spent.any())

    def shares(self, *, of_host: bool = False) -> dict[str, float]:
        """Returns shares of the counted steps' time, by the device's clock where there is one."""
        if self.has_device_clock and not of_host and self.count:
            spent = self._reader.device.spent.copy()
            spent[int(np.median(self._early))] += spent[AT["early"]]
            spent[AT["other"]] += spent[AT["head"]]
            spent = spent[: len(PHASES)]
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
        left_out = ~self.counted
        spent = {name: share * self.seconds for name, share in self.shares().items()}
        spent["first steps"] = float(self.wall_s[left_out & ~self.is_profiled].sum())
        spent["profiling"] = float(self.paused_s.sum() + self.wall_s[left_out & self.is_profiled].sum())
        spent["validation"], spent["saving"] = float(self.validation_s.sum()), float(self.saving_s.sum())
        if not self.is_by_batch:
            tail = self._reader.tail.spent
            spent["validation"] += sum(tail[len(SLOTS) :])
            for name in PHASES:
                spent[name] = spent.get(name, 0.0) + tail[AT[name]]
            spent["other"] = max(spent["other"] + tail[AT["head"]] + tail[AT["early"]] - self.tail_s, 0.0)
        return spent


def _filled(values: Vector, callers: Vector, full: Any) -> Vector:
    """Fills in for the other steps what is known of the step of the same optimizer that was heard in full before, or as the first."""
    filled = np.zeros(len(values))
    for caller in np.unique(callers):
        own = np.flatnonzero(callers == caller)
        if full[own].any():
            last = np.maximum.accumulate(np.where(full[own], np.arange(len(own)), np.argmax(full[own])))
            filled[own] = values[own[last]]
    return filled


def _distribute(spent: Vector, callers: Vector, full: Any) -> None:
    """Split what is not known of some steps as it is split in those of the same optimizer that were heard in full."""
    known = np.array([AT[name] for name in ("copy", "forward", "backward", "optimizer", "other", "early")])
    for caller in np.unique(callers):
        own = np.flatnonzero(callers == caller)
        usual = own[full[own]]
        usual = usual[FIRST_STEPS:] if len(usual) > 2 * FIRST_STEPS else usual
        weights = np.maximum(spent[np.ix_(usual, known)].sum(axis=0), 0.0)
        if weights.sum() > 0:
            spent[np.ix_(own, known)] += np.outer(spent[own, AT["unsplit"]], weights / weights.sum())
            spent[own, AT["unsplit"]] = 0.0
    spent[:, AT["other"]] += spent[:, AT["unsplit"]]


def is_loaded(loaded: Vector) -> Any:
    """Says of each step whether its batch came from a DataLoader, in this step or a few before it.

    Steps that go on for long without a new batch get theirs elsewhere: they repeat one, or cycle through kept ones.
    """
    at, fetched = np.arange(len(loaded)), loaded > 0
    last = np.maximum.accumulate(np.where(fetched, at, -1))
    following = np.minimum.accumulate(np.where(fetched, at, len(loaded))[::-1])[::-1]
    return (following - last <= STEPS_OF_A_BATCH) & fetched.any()


def groups_of(callers: Vector, loaded: Vector, models: Vector) -> Any:
    """Returns the number of the loop's step that each row belongs to.

    A step ends before an optimizer that it has already called is called again: a GAN calls two in each. Optimizers
    that take turns, each with a batch and a model of its own, take a step each; so do those that follow each other,
    as when a training goes on with a new one. Rows that ended with a backward pass belong to the first call of an
    optimizer after them, where there is one.
    """
    kinds = set(callers.tolist())
    if len(kinds) <= 1:
        return np.arange(len(callers))
    if _shares_batches_unevenly(callers, loaded):
        return np.maximum(np.cumsum(loaded > 0) - 1, 0)
    passes = {BY_BACKWARD} if kinds > {BY_BACKWARD} else set()
    has_loader = bool(loaded.any())
    numbers = {caller: np.flatnonzero(callers == caller) for caller in kinds}
    groups: list[int] = []
    called, seen, number = set[float](), 0, 0
    for at, (caller, batch, mask) in enumerate(zip(callers.tolist(), loaded.tolist(), models.tolist(), strict=True)):
        if caller not in passes:
            is_apart = seen and mask and not seen & int(mask) and (batch > 0 or not has_loader)
            is_next = numbers[caller][0] == at and all(
                len(numbers[one]) > 1 and numbers[one][-1] < at for one in called
            )
            if called and (caller in called or is_apart or is_next):
                number, called, seen = number + 1, set(), 0
            called.add(caller)
            seen |= int(mask)
        groups.append(number)
    return np.array(groups)


def _shares_batches_unevenly(callers: Vector, loaded: Vector) -> bool:
    """Returns True if most batches serve all optimizers, some more often than others, as a critic that takes two steps of each."""
    kinds, starts = set(callers.tolist()), np.flatnonzero(loaded > 0)
    if min(kinds) < 0 or len(set(callers[starts].tolist())) != 1:
        return False
    calls = [np.unique(part, return_counts=True)[1] for part in np.split(callers, starts)[1:]]
    uneven = sum(len(counts) == len(kinds) and counts.min() < counts.max() for counts in calls)
    return bool(2 * uneven > len(calls))


def rates_of(logs: Sequence[Log]) -> Rates:
    """Returns the rates of all logs, which are of one loop: the ranks of a distributed training take the same steps, each with samples of
    its own."""
    ranks = [Steps(log.reader) for log in main_logs(logs)]
    if not ranks or not ranks[0].count:
        return Rates()
    lead = ranks[0]
    kept, whole = lead.counted, lead.seconds
    wall = lead.wall_s[kept]
    middle = float(np.median(wall))
    # The end of the loader after the last step belongs to no row, but makes that step as slow as it would any other.
    later = np.append(wall[FIRST_STEPS:] - lead.phases_s[kept][FIRST_STEPS:, AT["acting"]], lead.tail_s + middle)
    slow = later[later > OUTLIER * middle] - middle
    # A rank that takes the same steps as the first one goes by that one's time: they wait for each other.
    paced = [(rank, lead if rank.count == lead.count else rank) for rank in ranks]
    samples = [float(rank.samples[pace.counted].sum()) / pace.seconds for rank, pace in paced if pace.seconds > 0]
    run_s = lead.run_s()
    run = sum(run_s.values()) - run_s["profiling"]
    return Rates(
        steps=lead.count,
        steps_per_s=len(wall) / whole if whole > 0 else None,
        whole_steps_per_s=int((~lead.is_profiled).sum()) / run if run > 0 else None,
        samples_per_s=sum(samples) or None,
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
    )


def wait_for(late: LateRank, parts: Iterable[RankBlock]) -> float:
    """Returns how long the rank that waits longest for the late one does so in a step."""
    others = [part for part in parts if part.rank != late.rank]
    return max(float(np.median(np.subtract(part.phases["backward"], part.alone["backward"]))) for part in others)


class Drift(Frozen):
    """This is a lasting change of the step time."""

    step: int
    """The change began at this step."""
    at_s: float
    """Seconds after the first step."""
    ratio: float
    """This is the step time after the change over the step time before it."""
    share_before: float
    """It is the share of the counted time that the steps before the change took."""


def drift_of(steps: Steps) -> Drift | None:
    """Returns the split of the run at which the step time rose most, if the rise lasts and is plain to see.

    It compares medians of pieces: every piece after the split is slower than every piece before it, so that neither single slow steps nor
    noise make one.
    """
    kept = np.flatnonzero(steps.counted)
    if len(kept) < FEWEST_PIECES * STEPS_OF_PIECE:
        return None
    pieces = np.array_split(kept, min(MOST_PIECES, len(kept) // STEPS_OF_PIECE))
    middles = np.array([np.median(steps.wall_s[piece]) for piece in pieces])
    rises = {
        split: float(np.median(middles[split:]) / np.median(middles[:split]))
        for split in range(3, len(middles) - 2)
        if middles[split:].min() > middles[:split].max()
    }
    split = max(rises, key=lambda at: rises[at], default=0)
    if rises.get(split, 0.0) < SLOWDOWN:
        return None
    first = int(pieces[split][0])
    before = float(steps.wall_s[kept[kept < first]].sum() / steps.wall_s[kept].sum())
    return Drift(
        step=first, at_s=float(steps.ended_s[first] - steps.ended_s[0]), ratio=rises[split], share_before=before
    )


def growth_of(looks: Sequence[tuple[float, int]]) -> float | None:
    """Returns by how many bytes per second the held memory grows, by times and bytes, or None without steady growth.

    The first third of the run fills caches. After it the least that was held rises from quarter to quarter, by 5 % and 16 MB at least.
    """
    late = looks[len(looks) // 3 :]
    if len(late) < FEWEST_LOOKS:
        return None
    lows = [min(size for _, size in late[at * len(late) // 4 : (at + 1) * len(late) // 4]) for at in range(4)]
    seconds = late[-1][0] - late[0][0]
    grows = all(later > earlier for earlier, later in itertools.pairwise(lows))
    if not grows or lows[-1] < 1.05 * lows[0] or lows[-1] - lows[0] < 16e6 or seconds <= 0:
        return None
    return (lows[-1] - lows[0]) / (0.75 * seconds)  # from the first quarter to the last


def main_logs(logs: Sequence[L]) -> list[L]:
    """Returns the logs of the training: its ranks, rank 0 first; of processes that are no ranks, the one with the most steps."""
    counts = {id(log): len(log.reader.table()) for log in logs}
    stepped = sorted((log for log in logs if counts[id(log)]), key=lambda log: counts[id(log)])
    # If a rank was started again, its longest life counts.
    processes = [(log.fact("process"), log) for log in stepped]
    ranked = {int(process["rank"]): log for process, log in processes if process.get("world_size", 1) > 1}
    return [ranked[rank] for rank in sorted(ranked)] if ranked else stepped[-1:]
