"""The workspace: the door, the history and the observer of one command, opened when first needed and closed once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from redline.launch import Door, open_door
from redline.model.errors import BenchError, Interrupted, UsageError
from redline.model.identity import device_key
from redline.model.names import refuse_impossible_device, refuse_impossible_name
from redline.model.protocol import (
    Ask,
    AskCeilings,
    AskCheck,
    AskEnvironment,
    CeilingsAnswer,
    Checked,
    CheckedSpecs,
    EnvironmentAnswer,
    FailureReply,
    Progress,
    Question,
    Reply,
)
from redline.model.record import Environment, RunRecord
from redline.model.spec import LaunchSpec, RunSpec
from redline.search.grid import Grid, make_plan
from redline.search.observer import Journal, NoJournal, Observer
from redline.search.run import Account, GridRun
from redline.show.notebook import NotebookProgress, in_notebook
from redline.store import History
from redline.system.locks import device_lock
from redline.verbs.live import held_artifact

if TYPE_CHECKING:
    from collections.abc import Iterator

    from redline.model.work import Ceilings
import functools
import sys
from typing import ParamSpec

from redline.launch.inline import InlineDoor
from redline.model.errors import SpecError
from redline.model.spec_table import specs_from_table

R = TypeVar("R", bound=Reply)


class Workspace:
    """Owns what a command uses: `with Workspace() as workspace: redline.run("resnet50", workspace=workspace)`.

    Nothing is opened until it is needed. `history` is a path or a URL (by default `REDLINE_STORE`, else this user's),
    or a `History` that stays the caller's. `journal` receives the records instead of the history; `keep=False` stores
    nothing. With either no file is created, and a sweep or a search keeps its account in memory.
    """

    def __init__(
        self,
        *,
        door: Door | None = None,
        history: History | str | PathLike[str] | None = None,
        journal: Journal | None = None,
        keep: bool = True,
        observer: Observer | None = None,
    ) -> None:
        self.observer = observer or (NotebookProgress() if in_notebook() else Observer())
        self.keeps = keep and journal is None
        self._journal = journal
        self._door = door
        self._doors: dict[LaunchSpec, Door] = {}
        self._history = history if isinstance(history, History) else None
        self._location = None if isinstance(history, History) else history
        self._scratch: History | None = None
        self._passing: Path | None = None
        self._parent: Workspace | None = None
        self._reader: History | None = None
        self._opening = Lock()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if isinstance(error, Interrupted):
            return
        if isinstance(error, KeyboardInterrupt) and self.keeps and self._history and self._history.has_written:
            raise Interrupted().with_traceback(trace) from None

    def close(self) -> None:
        """Close what was opened here; a door or history that was handed in stays open."""
        self.observer.ended()
        self._stack.close()
        self._doors.clear()
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def derived(self, *, door: Door | None = None, observer: Observer | None = None) -> Workspace:
        """The same history behind another door or with another observer. Only the original is closed."""
        other = Workspace(door=door or self._door, keep=self.keeps, observer=observer or self.observer)
        other._parent = self
        return other

    # The door

    def door(self, launch: LaunchSpec | None = None) -> Door:
        """The door that was handed in, else the one `launch` asks for; each is opened once."""
        if self._door is not None:
            return self._door
        if self._parent is not None:
            return self._parent.door(launch)
        launch = launch or LaunchSpec()
        if launch not in self._doors:
            door = open_door(launch)
            self._stack.callback(door.close)
            self._doors[launch] = door
        return self._doors[launch]

    def ask(self, question: Question, answer: type[R], launch: LaunchSpec | None = None) -> R:
        """Ask a bench of its own; the observer hears where it is. A failure raises `BenchError`."""
        session = self.door(launch).open()
        try:
            reply = session.ask(Ask(question=question), self._tell_asked)
        except BaseException:
            session.kill()  # closing would wait for an answer that nobody wants any more
            raise
        session.close()
        if isinstance(reply, FailureReply):
            raise BenchError(reply.failure.kind, reply.failure.told, reply.failure.traceback)
        assert isinstance(reply, answer)
        return reply

    def _tell_asked(self, progress: Progress) -> None:
        if progress.stage != "ask":
            self.observer.asked(progress)

    def answers(self, specs: Sequence[RunSpec]) -> tuple[Checked, ...]:
        """What the bench says of each spec: resolved, or refused."""
        if self._door is None:  # a door that was handed in may lead to models of its own
            for spec in specs:
                refuse_impossible_name(spec.workload)
                refuse_impossible_device(spec.device)
        return self.ask(AskCheck(specs=tuple(specs)), CheckedSpecs, specs[0].launch).answers

    def checked(self, specs: Sequence[RunSpec]) -> list[RunSpec]:
        """The specs with their devices resolved; raises the first mistake."""
        if not specs:
            raise UsageError("nothing to measure: name at least one model and one recipe")
        answers = self.answers(specs)
        for answer in answers:
            if answer.usage:
                raise UsageError(answer.usage)
        return [answer.spec for answer in answers]

    def environment(self, device: str, threads: int | None = None) -> Environment:
        refuse_impossible_device(device)
        return self.ask(AskEnvironment(device=device, threads=threads), EnvironmentAnswer).environment

    @contextmanager
    def lock(self, device: str, ranks: int = 1) -> Iterator[None]:
        """Hold the device, or that of each rank, while it is measured; the observer is told of any wait."""
        kind = device.partition(":")[0]
        devices = [device] if ranks == 1 else [f"{kind}:{index}" for index in range(ranks if kind != "cpu" else 0)]
        with ExitStack() as held:
            for each in devices:
                held.enter_context(device_lock(each, on_wait=self.observer.waiting, on_note=self.observer.noted))
            yield

    # The history

    @property
    def history(self) -> History:
        """The history, open for writing; one in memory where nothing is kept."""
        if self._parent is not None:
            return self._parent.history
        if not self.keeps:
            self._scratch = self._scratch or self._stack.enter_context(History.open(":memory:"))
            return self._scratch
        if self._history is None:
            opened = History.open(self._location, on_note=lambda note: self.observer.noted(note))
            self._stack.enter_context(opened).require_writable()
            self._history = opened
        return self._history

    def artifact(self, live: Any) -> str | None:
        """The path of a live object as a file that workers can open until the workspace is closed.

        None where it cannot be pickled.
        """
        if self._parent is not None:
            return self._parent.artifact(live)
        return self._stack.enter_context(held_artifact(live))

    @property
    def traces(self) -> Path:
        """The folder for traces that are captured: the history's, or one that goes with the workspace."""
        if self._parent is not None:
            return self._parent.traces
        if self.keeps:
            return self.history.folder / "traces"
        if self._passing is None:
            self._passing = Path(self._stack.enter_context(TemporaryDirectory(prefix="redline-traces-")))
        return self._passing

    @contextmanager
    def reading(self) -> Iterator[History]:
        """The history, for reading: creates no file and no table."""
        if self._parent is not None:
            with self._parent.reading() as history:
                yield history
            return
        if self._history is not None:
            yield self._history
            return
        with History.open(self._location, only_to_read=True, on_note=self.observer.noted) as history:
            yield history

    @contextmanager
    def reader(self) -> Iterator[Workspace]:
        """A workspace for one request of a server, on a history that stays open for reading between requests.

        It is opened anew when the file was deleted or replaced. A database server that is away is not waited for.
        """
        if self._parent is not None or self._history is not None:
            yield self
            return
        with self._opening:
            if self._reader is not None and not self._reader.is_current():
                self._reader.close()
                self._reader = None
            opened = self._reader or History.open(self._location, only_to_read=True, patience_s=0.0)
            if opened.is_current() and self._reader is None:
                self._reader = opened
        try:
            yield Workspace(history=opened, observer=self.observer)
        finally:
            if opened is not self._reader:
                opened.close()

    @property
    def journal(self) -> Journal:
        """Where records go: the journal that was handed in, the history, or nowhere."""
        if self._parent is not None:
            return self._parent.journal
        if self._journal is not None:
            return self._journal
        return self.history if self.keeps else NoJournal()

    def ceilings_of(self, records: Iterable[RunRecord]) -> Callable[[RunRecord], Ceilings | None]:
        """A lookup of the ceilings kept for the devices of these records. Nothing is measured."""
        keys = {
            record.id: device_key(record.prepared.environment)
            for record in records
            if record.prepared is not None and record.prepared.work is not None
        }
        found: dict[str, Ceilings | None] = {}
        if keys and self.keeps:
            with self.reading() as history:
                shelf = history.ceilings()
                found = {key: shelf.get(key) for key in set(keys.values())}
        return lambda record: found.get(keys.get(record.id, ""))

    def device_ceilings(self, device: str, threads: int | None = None, *, fresh: bool = False) -> Ceilings:
        """The ceilings of a device: from the history, or measured now and kept there.

        What was measured on a busy machine is measured again, and each figure is then the best that was seen.
        """
        environment = self.environment(device, threads)
        known = None
        if self.keeps and not fresh:
            with self.reading() as kept:
                known = kept.ceilings().get(device_key(environment))
        if known is not None and known.is_trusted:
            return known
        shelf = self.history.ceilings() if self.keeps else None
        with self.lock(device):
            found = self.ask(AskCeilings(device=device, threads=threads), CeilingsAnswer).ceilings
        found = found if known is None else found.with_best_of(known)
        if shelf is not None:
            shelf.put(found)
        return found


def use(workspace: Workspace | None) -> AbstractContextManager[Workspace]:
    """The caller's workspace, left open; or a new one for this call, closed at its end."""
    return Workspace() if workspace is None else nullcontext(workspace)


def measure_specs(specs: Sequence[RunSpec], workspace: Workspace, replicates: int = 1) -> list[RunRecord]:
    """Check all specs first, then measure those of one workload together. Any mistake is raised before the first."""
    checked = workspace.checked(specs)
    answers = [Checked(spec=spec) for spec in checked]
    plan = make_plan(Grid(cells=checked), answers, workspace.environment, replicates=replicates, is_kept=False)
    running = GridRun(plan, workspace, Account(), live=workspace.journal)
    running.go()
    cells = sorted(plan.cells, key=lambda cell: int(cell.key.partition("-")[0]))
    return [running.records[cell.key] for cell in cells]


P = ParamSpec("P")
T = TypeVar("T")


def listed(value: str | Iterable[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def specs_of(
    workspace: Workspace,
    model: Any = None,
    inputs: Any | None = None,
    *,
    recipes: str | Iterable[str] = "baseline",
    loss: Any | None = None,
    targets: Any | None = None,
    setup: Any | None = None,
    teardown: Any | None = None,
    **settings: Any,
) -> tuple[list[RunSpec], Workspace]:
    """The specs of a call, and the workspace to run them in: a live model that cannot be pickled needs its own door."""
    described, workspace = described_model(
        workspace, model, inputs, loss, targets, setup, teardown, task=settings.get("task")
    )
    return specs_from_table({"recipe": listed(recipes), **settings, **described}), workspace


def one_spec(
    workspace: Workspace, what: str, model: Any, inputs: Any | None, **given: Any
) -> tuple[RunSpec, Workspace]:
    """The one spec of a verb that takes a single model and recipe; `what` names it in the refusal."""
    specs, workspace = specs_of(workspace, model, inputs, **given)
    if len(specs) != 1:
        raise UsageError(f"{what} takes one model under one recipe, got {len(specs)}")
    return specs[0], workspace


def described_model(
    workspace: Workspace,
    model: Any,
    inputs: Any | None,
    loss: Any | None,
    targets: Any | None = None,
    setup: Any | None = None,
    teardown: Any | None = None,
    *,
    task: Any = None,
) -> tuple[dict[str, Any], Workspace]:
    """What a spec says of a model by name, of a live one, or of a function that is timed as it is."""
    export = sys.modules.get("torch.export")
    if export is not None and isinstance(model, export.ExportedProgram):  # it can be called, but refuses to run
        model = model.module()
    if is_function(model):
        if loss is not None or targets is not None or task not in (None, "step", ["step"]):
            raise UsageError("a function is timed as it is: leave out loss, targets and task")
        return _described_function(workspace, model, inputs, setup, teardown)
    if setup is not None or teardown is not None:
        raise UsageError("setup and teardown go with a function: redline.run(step, setup=..., teardown=...)")
    if model is None:
        return {}, workspace
    if isinstance(model, str) or (isinstance(model, list | tuple) and all(isinstance(name, str) for name in model)):
        if inputs is not None or loss is not None or targets is not None:
            raise UsageError("inputs, loss and targets go with a live module; a model by name brings its own")
        return {"model": model}, workspace
    if task in ("step", ["step"]):
        raise UsageError("task step is for a function of yours, and this is a module: leave task out")
    return _handed_over(workspace, (model, inputs, loss, targets), f"live:{type(model).__name__}", model)


def _handed_over(workspace: Workspace, live: Any, name: str, model: Any) -> tuple[dict[str, Any], Workspace]:
    """As a file that a worker can open, or in this process."""
    artifact = workspace.artifact(live)
    if artifact is not None:
        return {"model": name, "artifact": artifact}, workspace
    # It cannot be pickled: the bench runs in this process, nothing is isolated, and the verdict says so.
    address = f"memory:{id(model)}"
    return (
        {"model": name, "artifact": address, "launch": {"door": "inline"}},
        workspace.derived(door=InlineDoor(handed_over={address: live})),
    )


def is_function(model: Any) -> bool:
    """Whether it is called as it is: anything callable that is no module of torch."""
    torch = sys.modules.get("torch")  # where it was never loaded, nothing is a module
    is_module = torch is not None and isinstance(model, torch.nn.Module)
    return callable(model) and not is_module


def _described_function(
    workspace: Workspace, function: Any, inputs: Any | None, setup: Any | None, teardown: Any | None
) -> tuple[dict[str, Any], Workspace]:
    """What a spec says of a function that is timed as it is."""
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    name: str = (getattr(inner, "__name__", "") or type(inner).__name__).strip("<>")
    if isinstance(function, type):
        raise UsageError(f"{name} is a class: pass an instance of it")
    for what, given in (("setup", setup), ("teardown", teardown)):
        if given is not None and not callable(given):
            raise UsageError(f"{what} must be a function, got {type(given).__name__}")
    live = {"step": function, "name": name, "inputs": inputs, "setup": setup, "teardown": teardown}
    described, workspace = _handed_over(workspace, live, f"live:{name}", function)
    return {**described, "task": "step"}, workspace


def named_function(workspace: Workspace, what: str, given: Any) -> str:
    """A function by its name, or as a file that a worker can open."""
    if not isinstance(given, str):
        artifact = workspace.artifact(given)
        if artifact is None:
            raise UsageError(f"{what} cannot be pickled: give it as 'file.py:function'")
        return f"pickle:{artifact}"
    origin, _, function = given.rpartition(":")
    if not origin or not function.isidentifier():
        raise SpecError(f"{what} {given!r} does not name a function: write path/to/file.py:function")
    if origin.endswith(".py") and not Path(origin).expanduser().is_file():
        raise SpecError(f"{what} {given!r}: no such file: {origin}")
    return given
