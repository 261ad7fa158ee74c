"""`redline.watch`: a training script of one's own, or a loop in a program, watched while it runs; and its alarm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from rich.console import RenderableType

from redline.analyze.watch import Rates, rates_of
from redline.api.watch_record import Seen, card_uuids, keep
from redline.api.workspace import Workspace, use
from redline.launch.meters import BesideProgram, Meters
from redline.launch.watch import SpoolReader, WindowPlan, plan_text, run_watched, script_command, watching_environment
from redline.model.environment import TelemetrySample
from redline.model.errors import MissingExtra, RedlineError, StoreError, UsageError
from redline.model.record import RunRecord
from redline.model.watching import PHASES, Watched
from redline.show.export import JsonDocument, json_document
from redline.show.notebook import Bars, Shown
from redline.show.watch import status_line, watch_report
from redline.store.ledgers import Announcer


class WatchResult(Shown):
    """What was seen of a script, and the record of it."""

    def __init__(self, record: RunRecord) -> None:
        assert record.watched is not None
        self.record = record
        self.watched: Watched = record.watched

    def report(self) -> RenderableType:
        return watch_report(self.record)

    def frame_rows(self) -> Sequence[Any]:
        return [self.summary]

    def bars(self) -> Bars | None:
        shares = [(phase, 100 * self.watched.shares.get(phase, 0.0), None, None) for phase in PHASES]
        return Bars("where the time goes", "% of the time", [bar for bar in shares if bar[1]])

    @property
    def summary(self) -> dict[str, Any]:
        """What `--summary` writes."""
        watched = self.watched
        return {
            "steps": watched.steps,
            "steps_per_s": watched.steps_per_s,
            "samples_per_s": watched.samples_per_s,
            "shares": {phase: watched.shares.get(phase) for phase in PHASES},
            "gpu_utilisation": watched.gpu_utilisation,
            "energy_j": watched.energy_j,
            "findings": [msgspec.to_builtins(each) for each in watched.findings],
            "notes": [str(each) for each in self.record.notes],
            "exit_code": watched.exit_code,
            "record_id": None if any(each.code == "not-kept" for each in self.record.notes) else self.record.id,
        }

    def to_json(self) -> JsonDocument:
        """The summary as a document of its own."""
        return json_document("watch", self.summary)


def watch_command(
    words: Sequence[str],
    *,
    plan: WindowPlan | None = None,
    name: str | None = None,
    on_rates: Callable[[Rates, TelemetrySample | None], None] | None = None,
    rates_every_s: float = 5.0,
    workspace: Workspace | None = None,
) -> WatchResult:
    """Run a training command unchanged and watch its steps; `on_rates` hears every few seconds of them and of the GPU."""
    command = script_command(words)
    with use(workspace) as opened, tempfile.TemporaryDirectory(prefix="redline-watch-") as folder:
        spool = Path(folder)
        reader, meters = SpoolReader(spool), Meters()
        due = time.monotonic() + rates_every_s
        announcer = _announcer(opened, name or script_name(command))

        def tick(pid: int) -> None:
            nonlocal due
            meters.look(pid)
            if time.monotonic() >= due:
                due = time.monotonic() + rates_every_s
                logs = reader.refresh()
                rates, card = rates_of(logs), meters.latest(card_uuids(logs))
                if on_rates is not None:
                    on_rates(rates, card)
                if announcer is not None:
                    announcer.tell(rates.steps, None, status_line(rates, card))
                    if card is not None:
                        announcer.observe(card)

        started_at = time.time()
        try:
            code = run_watched(command, watching_environment(spool, plan, os.environ), tick)
        finally:
            if announcer is not None:
                announcer.end()
        meters.look(os.getpid(), at_once=True)
        called = name or script_name(command)
        seen = Seen(called, tuple(command), started_at, code, reader.refresh(), meters, plan is not None)
        return WatchResult(keep(seen, opened))


def _announcer(workspace: Workspace, name: str) -> Announcer | None:
    """For those who look on. The script runs also where the history cannot be opened."""
    with suppress(StoreError):
        return workspace.history.announcer("watch", name) if workspace.keeps else None
    return None


def script_name(command: Sequence[str]) -> str:
    """What a person calls it: the script's file, the module, or the program."""
    words = list(command)
    for number, word in enumerate(words[1:], 1):
        if word.endswith(".py"):
            return Path(word).name
        if words[number - 1] == "-m" and not Path(words[0]).name.startswith("-") and "torch.distributed" not in word:
            return word
    return Path(words[0]).name


class Watch:
    """A loop in this program, watched: `with redline.watch() as watch: …`; afterwards `watch.result`."""

    def __init__(self, name: str | None, plan: WindowPlan | None, workspace: Workspace | None) -> None:
        self._name = name
        self._plan = plan
        self._workspace = workspace
        self._folder: Path | None = None
        self._installed: Any = None
        self.result: WatchResult | None = None

    def __enter__(self) -> Self:
        from redline.bench.watch.hooks import install, installed  # loads torch, in a program that uses it

        if self._folder is not None:  # a training that a library's callback began has failed, and begins again
            self.__exit__(RuntimeError, None, None)
        outer = sys.modules.get("_redline_watch.hooks")  # of `redline watch`, which started this program
        around = outer.installed() if outer is not None else installed()
        if around is not None and (outer is not None or around.clock is not None):
            self._installed = around
            return self
        self._folder = Path(tempfile.mkdtemp(prefix="redline-watch-"))
        self._meters = Meters()
        self._meters.look(os.getpid())
        self._beside = BesideProgram(self._meters)
        self._started_at = time.time()
        self._beside.start()
        self._installed = install(str(self._folder), plan_text(self._plan), in_program=True)
        return self

    def step(self, samples: float | None = None) -> None:
        """Say that a step has ended, in a loop without an optimizer of torch; with its samples where no loader tells."""
        if self._installed is None:
            raise RedlineError("watch.step() counts inside 'with redline.watch() as watch:'")
        if self._folder is not None:
            self._meters.look(os.getpid())
        self._installed.manual_step(samples)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        installed, self._installed = self._installed, None
        folder, self._folder = self._folder, None
        if folder is None:
            return  # the watch around this one goes on, and tells what it saw
        installed.remove()
        self._beside.stop()
        self._meters.look(os.getpid(), at_once=True)
        logs = SpoolReader(folder).refresh()
        code = None if kind is None else 1
        name = self._name or Path(sys.argv[0] or "program").name
        wants = self._plan is not None
        seen = Seen(name, tuple(sys.argv), self._started_at, code, logs, self._meters, wants)
        try:
            with use(self._workspace) as opened:
                self.result = WatchResult(keep(seen, opened))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def __str__(self) -> str:
        return str(self.result) if self.result is not None else "a watch that has not ended, or is part of another"


def watch(
    *, name: str | None = None, profile: bool = False, window: int = 5, workspace: Workspace | None = None
) -> Watch:
    """Watch the training loop inside the `with` block; `profile` also captures `window` steps of it."""
    if window < 1:
        raise UsageError(f"window must be 1 or more, got {window}")
    return Watch(name, WindowPlan(steps=window) if profile else None, workspace)


def lightning_callback(**options: Any) -> Any:
    """A callback for Lightning's Trainer that watches `fit` and prints what it saw; `.watch.result` afterwards."""
    try:
        from lightning.pytorch import Callback
    except ImportError:
        try:
            from pytorch_lightning import Callback
        except ImportError:
            raise MissingExtra("redline.lightning_callback", "lightning", "lightning") from None

    class RedlineWatch(Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.watch = watch(**options)

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.watch.__enter__()

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            self._end(trainer)

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self._end(trainer, exception)

        def _end(self, trainer: Any, error: BaseException | None = None) -> None:
            self.watch.__exit__(type(error) if error else None, error, None)
            if trainer.is_global_zero:
                sys.stderr.write(str(self.watch))

    return RedlineWatch()


def trainer_callback(**options: Any) -> Any:
    """A callback for transformers' Trainer that watches `train` and prints what it saw; `.watch.result` afterwards."""
    try:
        from transformers import TrainerCallback
    except ImportError:
        raise MissingExtra("redline.trainer_callback", "transformers", "hf") from None

    class RedlineWatch(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.watch = watch(**options)

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.watch.__enter__()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.watch.__exit__(None, None, None)
            if state.is_world_process_zero:
                sys.stderr.write(str(self.watch))

    return RedlineWatch()


FEWEST_STEPS = 20
"""In a piece whose rate is compared."""
DELIVERY_S = 30.0


def parse_share(text: str) -> float:
    """`20%` or `0.2`."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise UsageError(f"--alert-drop must be a share such as 20% or 0.2, got {text!r}") from None
    if not 0 < share < 1:
        raise UsageError(f"--alert-drop must be between 0 and 100 %, got {text!r}")
    return share


class Alarm:
    """Compares the pace of the newest steps with the best pace so far; alerts once per drop, and again after a recovery."""

    def __init__(self, target: str, drop: float, deliver: Callable[[str, bytes], None] | None = None) -> None:
        self._target = target
        self._drop = drop
        self._deliver = deliver or deliver_alert
        self._seen: tuple[int, float] | None = None
        self._best = 0.0
        self._is_down = False

    def hear(self, rates: Rates) -> None:
        if rates.steps_per_s is None:
            return
        steps, seconds = rates.steps, rates.steps / rates.steps_per_s
        if self._seen is None:
            self._seen = (steps, seconds)
            return
        newer, took = steps - self._seen[0], seconds - self._seen[1]
        if newer < FEWEST_STEPS or took <= 0:
            return
        self._seen = (steps, seconds)
        pace = newer / took
        is_down = pace < (1 - self._drop) * self._best
        if is_down and not self._is_down:
            told = {"event": "throughput-fell", "step": steps, "steps_per_s": pace, "best_steps_per_s": self._best}
            self._deliver(self._target, msgspec.json.encode(told))
        self._is_down = is_down
        self._best = max(self._best, pace)


def deliver_alert(target: str, body: bytes) -> None:
    """Post to a URL, or run a command with the message on its stdin. A failure is reported and has no other effect."""
    try:
        if target.startswith(("http://", "https://")):
            request = urllib.request.Request(target, body, {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=DELIVERY_S).close()
        else:
            subprocess.run(target, shell=True, input=body, timeout=DELIVERY_S, check=True)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"redline: the alert was not delivered: {error}", file=sys.stderr)  # noqa: T201  (nobody else tells)
