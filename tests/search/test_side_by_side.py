"""Groups whose workers prepare side by side: nothing is timed meanwhile, and what did not fit is measured again."""

from __future__ import annotations

import itertools

from reported import fake_door

from redline.model.protocol import FailureReply, Measure, Prepare, Reply, Request
from redline.model.record import Failure, RunRecord
from redline.model.spec import RunSpec
from redline.model.spec_table import specs_from_table
from redline.search.grid import Cell, Plan
from redline.search.run import Account, GridRun
from redline.testing.fake import FakeDoor, FakeSession
from redline.verbs.workspace import Workspace

RECIPES = ["baseline", "fp16", "fp16+compile"]


def groups() -> list[list[RunSpec]]:
    table = {"model": "resnet50", "recipe": RECIPES, "effort": "quick", "device": "cuda:0"}
    return [specs_from_table({**table, "batch": batch}) for batch in (1, 8, 16)]


class Watched:
    """A fake door that writes down what was asked, and refuses a batch while too many sessions are open."""

    def __init__(self, most_open: int = 99) -> None:
        self.inner: FakeDoor = fake_door()
        self.asked: list[tuple[str, int | None]] = []
        self.open_now = 0
        self.most_open = most_open

    def open(self, spec: RunSpec | None = None) -> FakeSession:
        self.open_now += 1
        session, door, batch = self.inner.open(spec), self, spec.workload.batch
        ask, wait, close, begun = session.ask, session.wait, session.close, session.begin
        crowded = door.open_now > door.most_open

        def told(request: Request) -> None:
            door.asked.append((type(request).__name__, batch))

        def asks(request: Request, on_progress: object = None) -> Reply:
            told(request)
            return ask(request)

        def begins(request: Request) -> None:
            told(request)
            begun(request)

        def waits(on_progress: object = None, timeout_s: float | None = None) -> Reply | None:
            if crowded:
                return FailureReply(failure=Failure(stage="build", kind="oom", message="out of memory"))
            return wait(None, timeout_s)

        def closes() -> object:
            door.open_now -= 1
            return close()

        session.ask, session.begin, session.wait, session.close = asks, begins, waits, closes  # type: ignore[method-assign,assignment]
        return session

    def close(self) -> None:
        self.inner.close()


def measured(door: Watched, groups: list[list[RunSpec]], jobs: int) -> list[RunRecord]:
    numbers = itertools.count()
    cells = tuple(tuple(Cell(spec=spec, key=str(next(numbers))) for spec in group) for group in groups)
    running = GridRun(Plan(name="p", groups=cells), Workspace(door=door, keep=False), Account(), jobs=jobs)
    running.go()
    return [running.records[cell.key] for group in cells for cell in group]


def test_all_of_a_chunk_are_ready_before_the_first_is_timed() -> None:
    door = Watched()
    records = measured(door, groups(), jobs=6)
    assert [(record.spec.workload.batch, str(record.spec.recipe)) for record in records] == [
        (batch, recipe) for batch in (1, 8, 16) for recipe in RECIPES
    ]
    first_timed = next(place for place, (what, _) in enumerate(door.asked) if what == Measure.__name__)
    assert [batch for what, batch in door.asked[:first_timed] if what == Prepare.__name__] == [1, 1, 1, 8, 8, 8]
    assert all(record.failure is None for record in records)
    assert len({record.group for record in records}) == 3


def test_what_runs_out_of_memory_beside_other_groups_is_measured_again_without_them() -> None:
    door = Watched(most_open=5)
    records = measured(door, groups()[:2], jobs=6)
    assert all(record.failure is None for record in records)
    assert len({record.group for record in records}) == 2


def test_a_group_larger_than_the_machine_is_prepared_one_by_one() -> None:
    door = Watched()
    measured(door, groups()[:1], jobs=1)
    assert [what for what, _ in door.asked][:2] == ["Prepare", "Measure"]
