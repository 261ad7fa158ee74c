"""Groups whose workers prepare side by side: nothing is timed meanwhile, and what did not fit is measured again."""

from __future__ import annotations

import msgspec
from reported import fake_door

from redline.model.protocol import FailureReply, Measure, Prepare, Reply, Request
from redline.model.record import Failure
from redline.model.spec import MeasureSpec, RunSpec
from redline.model.spec_table import specs_from_table
from redline.search.observer import NoJournal, Observer
from redline.search.study import measure_groups, study_measure
from redline.testing.fake import FakeDoor, FakeSession

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
        assert spec is not None
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


def test_all_of_a_chunk_are_ready_before_the_first_is_timed() -> None:
    door = Watched()
    records = measure_groups(groups(), door, NoJournal(), Observer(), workers=6)
    assert [(record.spec.workload.batch, str(record.spec.recipe)) for record in records] == [
        (batch, recipe) for batch in (1, 8, 16) for recipe in RECIPES
    ]
    first_timed = next(place for place, (what, _) in enumerate(door.asked) if what == Measure.__name__)
    assert [batch for what, batch in door.asked[:first_timed] if what == Prepare.__name__] == [1, 1, 1, 8, 8, 8]
    assert all(record.failure is None for record in records)
    assert len({record.group for record in records}) == 3


def test_what_runs_out_of_memory_beside_other_groups_is_measured_again_without_them() -> None:
    door = Watched(most_open=5)
    records = measure_groups(groups()[:2], door, NoJournal(), Observer(), workers=6)
    assert all(record.failure is None for record in records)
    assert len({record.group for record in records}) == 2


def test_a_group_larger_than_the_machine_is_prepared_one_by_one() -> None:
    door = Watched()
    measure_groups(groups()[:1], door, NoJournal(), Observer(), workers=1)
    assert [what for what, _ in door.asked][:2] == ["Prepare", "Measure"]


def test_only_a_quick_study_is_shortened() -> None:
    assert study_measure(MeasureSpec()) == MeasureSpec()
    quick = study_measure(MeasureSpec.for_effort("quick"))
    assert (quick.block_seconds, quick.tail_samples) == (0.1, 130)
    assert msgspec.structs.replace(quick, block_seconds=0.25) != quick
