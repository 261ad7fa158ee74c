"""What notebooks and the command line call."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from redline.errors import BenchError, UsageError
from redline.launch import Door, open_door
from redline.launch.lock import device_lock
from redline.protocol import (
    Ask,
    AskCheck,
    AskHealth,
    AskModels,
    CheckedSpecs,
    FailureReply,
    Health,
    HealthItem,
    ModelNames,
    Progress,
    Question,
    Reply,
)
from redline.record import RunRecord
from redline.search.interleave import Journal, Observer, measure_together
from redline.spec import LaunchSpec, RunSpec, specs_from_table

if TYPE_CHECKING:
    from redline.analyze.summary import RunSummary


class RunResult(Sequence["RunSummary"]):
    """The rows of a run, with the records they were derived from."""

    def __init__(self, records: Sequence[RunRecord]) -> None:
        from redline.analyze.summary import summarize

        self.records = list(records)
        self.rows = summarize(self.records)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __str__(self) -> str:
        from redline.report.terminal import run_table_text

        return run_table_text(self.rows)

    def to_json(self) -> str:
        from redline.report.export import export_json

        return export_json(self.records)


class NoJournal:
    """Keeps nothing."""

    def begin(self, record: RunRecord) -> None: ...

    def append(self, record_id: str, block: Any) -> None: ...

    def finish(self, record: RunRecord) -> None: ...


def run(
    model: Any,
    inputs: Any | None = None,
    *,
    recipes: str | Iterable[str] = "baseline",
    loss: Any | None = None,
    door: Door | None = None,
    journal: Journal | None = None,
    observer: Observer | None = None,
    **settings: Any,
) -> RunResult:
    """Measure a model: by name (or several), or a live module with example inputs.

    `settings` are those of the command line and of TOML files: task, batch, image_size, classes, device, threads,
    effort, tail, seed. Several recipes are measured interleaved and set against the first. Without a `journal` the
    records go into the history.
    """
    specs, own_door = specs_of(model, inputs, recipes=recipes, loss=loss, **settings)
    return RunResult(run_specs(specs, door=own_door or door, journal=journal, observer=observer))


def specs_of(
    model: Any,
    inputs: Any | None = None,
    *,
    recipes: str | Iterable[str] = "baseline",
    loss: Any | None = None,
    **settings: Any,
) -> tuple[list[RunSpec], Door | None]:
    """The specs of a call, and the only door they can go through where a live model cannot travel."""
    table = {"recipe": [recipes] if isinstance(recipes, str) else list(recipes), **settings}
    if isinstance(model, str) or (isinstance(model, list | tuple) and all(isinstance(name, str) for name in model)):
        if inputs is not None or loss is not None:
            raise UsageError("inputs and loss go with a live module; a model by name brings its own")
        table["model"] = model
        return specs_from_table(table), None
    live = (model, inputs, loss)
    table |= {"model": f"live:{type(model).__name__}", "artifact": pickled(live)}
    if table["artifact"] is not None:
        return specs_from_table(table), None
    # It cannot travel: the bench comes to it, nothing is isolated, and the verdict says so.
    from redline.launch.inline import InlineDoor

    name = f"memory:{id(model)}"
    table |= {"artifact": name, "launch": {"door": "inline"}}
    return specs_from_table(table), InlineDoor(handed_over={name: live})


def run_specs(
    specs: Sequence[RunSpec],
    *,
    door: Door | None = None,
    journal: Journal | None = None,
    observer: Observer | None = None,
) -> list[RunRecord]:
    """Check all specs first, then measure those of one workload together. A mistake in any is raised before the first."""
    if not specs:
        raise UsageError("nothing to measure: name at least one model and one recipe")
    observer = observer or Observer()
    records: list[RunRecord] = []
    with ExitStack() as stack:
        door = door or stack.enter_context(opened(specs[0].launch))
        specs = checked(specs, door)
        if journal is None:
            from redline.store import History

            journal = stack.enter_context(History.open())
        for _, together in groupby(specs, key=_measured_together):
            group = list(together)
            with device_lock(group[0].device, on_wait=lambda holder: observer.waiting(holder)):
                records += measure_together(group, door, journal, observer, seed=group[0].seed)
    return records


def checked(specs: Sequence[RunSpec], door: Door) -> list[RunSpec]:
    """The specs with their devices resolved; raises the first mistake."""
    reply = ask(AskCheck(specs=tuple(specs)), door)
    assert isinstance(reply, CheckedSpecs)
    for answer in reply.answers:
        if answer.usage:
            raise UsageError(answer.usage)
    return [answer.spec for answer in reply.answers]


def models(pattern: str | None = None, door: Door | None = None) -> ModelNames:
    """Every model that goes by name."""
    reply = ask(AskModels(pattern=pattern), door)
    assert isinstance(reply, ModelNames)
    return reply


def doctor(door: Door | None = None) -> list[HealthItem]:
    """What is wrong with this machine and how to mend it."""
    from redline.doctor import examine

    reply = ask(AskHealth(), door)
    assert isinstance(reply, Health)
    return examine(reply)


def ask(question: Question, door: Door | None = None) -> Reply:
    """A question to a bench of its own."""
    with ExitStack() as stack:
        door = door or stack.enter_context(opened(LaunchSpec()))
        session = door.open()
        stack.callback(session.close)
        reply = session.ask(Ask(question=question))
    if isinstance(reply, FailureReply):
        raise BenchError(reply.failure.kind, f"{reply.failure.message}\n{reply.failure.traceback}".strip())
    return reply


@contextmanager
def opened(launch: LaunchSpec) -> Iterator[Door]:
    door = open_door(launch)
    try:
        yield door
    finally:
        door.close()


def pickled(live: Any) -> str | None:
    """The live model as a file a worker can open, named by its content; None where it cannot travel."""
    import cloudpickle
    import platformdirs

    try:
        body = cloudpickle.dumps(live)
    except Exception:
        # Whatever an object's own pickling code raises means the same: it cannot leave this process.
        return None
    folder = Path(platformdirs.user_data_path("redline")) / "artifacts"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{hashlib.sha256(body).hexdigest()[:24]}.pkl"
    if not path.exists():
        path.write_bytes(body)
    return str(path)


def _measured_together(spec: RunSpec) -> RunSpec:
    """Specs that differ in their recipe alone."""
    from redline.spec import Recipe

    return msgspec.structs.replace(spec, recipe=Recipe())


__all__ = ["Progress", "RunResult", "doctor", "models", "run", "run_specs"]
