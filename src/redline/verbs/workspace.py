"""A workspace has the door, the history and the observer of one command. They are opened when first needed and closed once."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self, TypeVar

from redline.launch import Door, open_door
from redline.launch.inline import InlineDoor
from redline.model.errors import BenchError, Interrupted, SpecError, UsageError
from redline.model.identity import device_key
from redline.model.names import refuse_impossible_device
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
from redline.model.spec_table import specs_from_table
from redline.model.work import Ceilings
from redline.search.grid import listed
from redline.search.observer import Journal, NoJournal, Observer
from redline.show.notebook import NotebookProgress, in_notebook
from redline.store import History
from redline.system.locks import device_lock
from redline.verbs.live import held_artifact

R = TypeVar("R", bound=Reply)


@dataclass
class _Opened:
    """This holds what a workspace has opened so far. Workspaces that are derived from it share this."""

    journal: Journal | None
    location: str | PathLike[str] | None
    history: History | None
    scratch: History | None = None
    """Takes the place of the history where nothing is kept."""
    traces: Path | None = None
    doors: dict[LaunchSpec, Door] = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)


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
        self._door = door
        if isinstance(history, History):
            self._opened = _Opened(journal, None, history)
        else:
            self._opened = _Opened(journal, history, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if isinstance(error, Interrupted):
            return
        history = self._opened.history
        if isinstance(error, KeyboardInterrupt) and self.keeps and history is not None and history.has_written:
            raise Interrupted().with_traceback(trace) from None

    def close(self) -> None:
        """Close what was opened here; a door or history that was handed in stays open."""
        self.observer.ended()
        self._opened.stack.close()
        self._opened.doors.clear()

    def derived(self, *, door: Door | None = None, observer: Observer | None = None) -> Workspace:
        """Returns the same history behind another door or with another observer. Only the original is closed."""
        other = copy.copy(self)
        other._door, other.observer = door or self._door, observer or self.observer
        return other

    # The door

    def door(self, launch: LaunchSpec | None = None) -> Door:
        """Returns the door that was handed in, else the one `launch` asks for; each is opened once."""
        if self._door is not None:
            return self._door
        launch, opened = launch or LaunchSpec(), self._opened
        if launch not in opened.doors:
            opened.doors[launch] = open_door(launch)
            opened.stack.callback(opened.doors[launch].close)
        return opened.doors[launch]

    def ask(self, question: Question, answer: type[R], launch: LaunchSpec | None = None) -> R:
        """Asks a bench of its own; the observer hears where it is. A failure raises `BenchError`."""
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
        """Returns what the bench says of each spec: resolved, or refused."""
        if self._door is None:  # a door that was handed in may lead to models of its own
            for spec in specs:
                refuse_impossible_device(spec.device)
        return self.ask(AskCheck(specs=tuple(specs)), CheckedSpecs, specs[0].launch).answers

    def checked(self, specs: Sequence[RunSpec]) -> list[RunSpec]:
        """Returns the specs with their devices resolved; raises the first mistake."""
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
        """Returns the history, open for writing; it is one in memory where nothing is kept."""
        opened = self._opened
        if not self.keeps:
            opened.scratch = opened.scratch or opened.stack.enter_context(History.open(":memory:"))
            return opened.scratch
        if opened.history is None:
            history = History.open(opened.location, on_note=lambda note: self.observer.noted(note))
            opened.stack.enter_context(history).require_writable()
            opened.history = history
        return opened.history

    def artifact(self, live: Any) -> str | None:
        """Returns the path of a live object as a file that workers can open until the workspace is closed.

        None where it cannot be pickled.
        """
        return self._opened.stack.enter_context(held_artifact(live))

    @property
    def traces(self) -> Path:
        """Returns the folder for traces that are captured: the history's, or one that goes with the workspace."""
        if self.keeps:
            return self.history.folder / "traces"
        opened = self._opened
        if opened.traces is None:
            opened.traces = Path(opened.stack.enter_context(TemporaryDirectory(prefix="redline-traces-")))
        return opened.traces

    @contextmanager
    def reading(self) -> Iterator[History]:
        """Returns the history, for reading: it creates no file and no table."""
        if self._opened.history is not None:
            yield self._opened.history
            return
        with History.open(self._opened.location, only_to_read=True, on_note=self.observer.noted) as history:
            yield history

    @contextmanager
    def reader(self) -> Iterator[Workspace]:
        """Yields a workspace for one request of a server: a history that was deleted or replaced since is read as it is now.

        A database server that is away is not waited for.
        """
        opened = self._opened
        if opened.history is not None:
            yield self
            return
        with History.open(opened.location, only_to_read=True, patience_s=0.0) as history:
            yield Workspace(history=history, observer=self.observer)

    @property
    def journal(self) -> Journal:
        """Returns where records go: the journal that was handed in, the history, or nowhere."""
        if self._opened.journal is not None:
            return self._opened.journal
        return self.history if self.keeps else NoJournal()

    def ceilings_of(self, records: Iterable[RunRecord]) -> Callable[[RunRecord], Ceilings | None]:
        """Returns a lookup of the ceilings kept for the devices of these records. Nothing is measured."""
        keys = {
            record.id: device_key(record.prepared.environment)
            for record in records
            if record.prepared is not None and record.prepared.work is not None
        }
        found: dict[str, Ceilings | None] = {}
        if keys and self.keeps:
            with self.reading() as history:
                found = {key: history.ceilings(key) for key in set(keys.values())}
        return lambda record: found.get(keys.get(record.id, ""))

    def device_ceilings(self, device: str, threads: int | None = None, *, fresh: bool = False) -> Ceilings:
        """Returns the ceilings of a device: from the history, or measured now and kept there.

        What was measured on a busy machine is measured again, and each figure is then the best that was seen.
        """
        environment = self.environment(device, threads)
        known = None
        if self.keeps and not fresh:
            with self.reading() as kept:
                known = kept.ceilings(device_key(environment))
        if known is not None and known.is_trusted:
            return known
        history = self.history if self.keeps else None  # opened before anything is measured
        with self.lock(device):
            found = self.ask(AskCeilings(device=device, threads=threads), CeilingsAnswer).ceilings
        found = found if known is None else found.with_best_of(known)
        if history is not None:
            history.keep_ceilings(found)
        return found


def use(workspace: Workspace | None) -> AbstractContextManager[Workspace]:
    """Returns the caller's workspace, which is left open, or a new one for this call, closed at its end."""
    return Workspace() if workspace is None else nullcontext(workspace)


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
    """Returns the specs of a call, and the workspace to run them in: a live model that cannot be pickled needs its own door."""
    described, workspace = described_model(
        workspace, model, inputs, loss, targets, setup, teardown, task=settings.get("task")
    )
    return specs_from_table({"recipe": listed(recipes), **settings, **described}), workspace


def one_spec(
    workspace: Workspace, what: str, model: Any, inputs: Any | None, **given: Any
) -> tuple[RunSpec, Workspace]:
    """Returns the one spec of a verb that takes a single model and recipe; `what` names it in the refusal."""
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
    """Returns what a spec says of a model by name, of a live one, or of a function that is timed as it is."""
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
    """Returns what hands the model over: as a file that a worker can open, or in this process."""
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
    """Returns whether it is called as it is: anything callable that is no module of torch."""
    torch = sys.modules.get("torch")  # where it was never loaded, nothing is a module
    is_module = torch is not None and isinstance(model, torch.nn.Module)
    return callable(model) and not is_module


def _described_function(
    workspace: Workspace, function: Any, inputs: Any | None, setup: Any | None, teardown: Any | None
) -> tuple[dict[str, Any], Workspace]:
    """Returns what a spec says of a function that is timed as it is."""
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
    """Returns a function by its name, or as a file that a worker can open."""
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
