"""`redline watch`: your own training, unchanged: its steps, where its time goes, and what to change.

The hooks in the script write down what they hear (`bench/watch/`), `analyze/watch.py` makes steps and rates of it, and
`analyze/watch_findings.py` draws the conclusions. This file starts the script, makes the record and shows it.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

import msgspec
import numpy as np
import psutil

from redline import __version__
from redline.analyze.finding import Finding
from redline.analyze.profile import profile_of
from redline.analyze.ranks import late_rank
from redline.analyze.watch import Reader, Steps, drift_of, growth_of, main_logs, rates_of, wait_for
from redline.analyze.watch_findings import RunFacts, findings
from redline.launch.meters import BesideProgram, Meters
from redline.launch.watch import (
    ProcessLog,
    SpoolReader,
    WindowPlan,
    end_like,
    plan_text,
    run_watched,
    script_command,
    watching_environment,
)
from redline.model.errors import MissingExtra, RedlineError, StoreError, UsageError
from redline.model.identity import record_key
from redline.model.metrics import THROUGHPUT, Fact, Figure, Headline, Row, Table
from redline.model.metrics import Block as TextBlock
from redline.model.note import Note, note
from redline.model.record import (
    PHASES,
    Block,
    ColdStart,
    DeviceInfo,
    Environment,
    Failure,
    Memory,
    Numerics,
    Prepared,
    Rates,
    RunRecord,
    TelemetrySample,
    TraceRef,
    Warmup,
    Watched,
    WatchFinding,
    Window,
    WorkloadInfo,
    new_id,
)
from redline.model.settings import OUTPUT, setting
from redline.model.spec import RunSpec, WorkloadSpec
from redline.model.units import format_bytes, format_ratio, format_share, significant
from redline.show.result import Result, terminal
from redline.show.terminal import make_console
from redline.show.trackers import check_tracker, log_result
from redline.store.ledgers import Hold
from redline.system.telemetry import cpu_name
from redline.trace.decode import read_trace
from redline.verbs.verb import verb
from redline.verbs.workspace import Workspace, use

STATUS_S = 5.0
"""How often the standing of the script is read and told."""
BLOCK_STEPS, MOST_BLOCKS = 1000, 100
"""A record keeps at most so many blocks of so many steps, spread evenly over the run."""
INTERRUPTS = (-2, -15, 130, 143)
FEWEST_STEPS = 20
"""The alarm compares pieces of the run of at least so many steps."""
DELIVERY_S = 30.0
"""An alert must be delivered within this time."""

STEPS = Figure(name="steps", doc="Steps that were seen.")
STEP_RATE = Figure(name="steps_per_s", header="steps/s", better="higher", doc="Of the steps that count.")
WHOLE_RATE = Figure(name="whole_steps_per_s", header="over the run", better="higher", doc="Of all steps, over the run.")
RUN_TIME = Figure(name="run_time", unit="s", header="run", doc="From the first step's beginning to what was last seen.")
FIRST_STEP = Figure(name="first_step", unit="s", better="lower")
SLOW_STEPS = Figure(name="slow_steps", better="lower", doc="Steps of more than twice the median.")
LOSS = Figure(name="loss", doc="The last one that was seen.")
RUN_ENERGY = Figure(name="energy", unit="J", better="lower", doc="Of the GPUs in use, or of the CPU's packages.")
UTILISATION = Figure(name="utilisation", unit="share", header="GPU busy", doc="How busy the GPU said it was.")
PEAK = Figure(name="peak_memory", unit="B", better="lower", doc="Reserved on a GPU, on a CPU resident.")
PHASE_TIME = Figure(name="time", unit="s", doc="Over the whole run.")
RUN_SHARE = Figure(name="share", unit="share", header="of the run")
STEP_SHARE = Figure(name="step_share", unit="share", header="of a step", doc="Of the steps that count.")
BOUND = Figure(name="gain_bound", unit="x", header="at most", doc="How many times faster without it, at most.")


# The command


@verb(
    examples=(
        "redline watch -- python train.py --epochs 3",
        "redline watch --profile -- torchrun --nproc-per-node 2 train.py",
        "redline watch --alert 'notify-send slow' -- python train.py",
    ),
)
def watch_(
    command: Annotated[
        Any,
        setting(
            "Your command, such as python train.py, torchrun or accelerate launch.",
            kind=list[str],
            is_argument=True,
            shape="-- COMMAND",
        ),
    ] = (),
    *,
    profile: Annotated[bool, setting("Also capture a few steps with torch's profiler.")] = False,
    window: Annotated[int | None, setting("With --profile: how many steps to capture. Default: 5.", least=1)] = None,
    alert: Annotated[
        str | None, setting("Run this, or post to it, when the throughput falls.", shape="COMMAND|URL")
    ] = None,
    alert_drop: Annotated[str | None, setting("How far it must fall. Default: 20%.", shape="SHARE")] = None,
    name: Annotated[str | None, setting("What to call it in the history. Default: the script's name.")] = None,
    summary: Annotated[
        Any, setting("Write the summary as a JSON document.", group=OUTPUT, kind=Path, shape="FILE")
    ] = None,
    log: Annotated[
        str | None,
        setting("Also write the figures to this tracker.", group=OUTPUT, shape="[wandb|mlflow|tensorboard]"),
    ] = None,
    verbose: Annotated[bool, setting("Show every column, table and note.", short="-v", group=OUTPUT)] = False,
    quiet: Annotated[bool, setting("Print nothing but the script's own output.", short="-q", group=OUTPUT)] = False,
) -> int:
    """Watch your own script, unchanged: its steps, where its time goes.

    At its end Redline says what to change. Its output, exit code and signals pass through; what Redline says goes to stderr. The record goes into the history.
    """
    if window is not None and not profile:
        raise UsageError("--window says how many steps --profile captures: give --profile as well")
    if summary is not None and (summary.is_dir() or not summary.parent.is_dir()):
        why = "it is a folder" if summary.is_dir() else f"there is no folder {summary.parent}"
        raise UsageError(f"cannot write {summary}: {why}")
    if log is not None:
        check_tracker(log)
    alarm = _alarm(alert, alert_drop)

    def on_rates(rates: Rates, card: TelemetrySample | None) -> None:
        if not quiet and sys.stderr.isatty():
            print(f"redline: {status_line(rates, card)}", file=sys.stderr)  # noqa: T201  (stdout is the script's)
        if alarm is not None:
            alarm.hear(rates)

    with use(None) as workspace:
        record = run_script(command, workspace, plan=WindowPlan(steps=window or 5) if profile else None, name=name, on_rates=on_rates)  # fmt: skip
    result = result_of(record)
    complaints = []
    if not quiet:
        make_console(stderr=True).print(terminal(result, verbose=verbose))
    if summary is not None:
        try:
            summary.write_text(result.to_json(), encoding="utf-8")
        except OSError as error:
            complaints.append(f"cannot write {summary}: {error.strerror}")
    if log is not None:
        try:
            complaints.append(f"logged: {log_result(result, log)}")
        except RedlineError as error:  # the script has run, and its exit code stays
            complaints.append(str(error))
    for complaint in complaints:
        print(f"redline: {complaint}", file=sys.stderr)  # noqa: T201  (stdout is the script's)
    assert record.watched is not None
    return end_like(record.watched.exit_code or 0)


def run_script(
    words: Sequence[str],
    workspace: Workspace,
    *,
    plan: WindowPlan | None = None,
    name: str | None = None,
    on_rates: Callable[[Rates, TelemetrySample | None], None] = lambda rates, card: None,
) -> RunRecord:
    """Run a training command unchanged and watch its steps; `on_rates` is told of them and of the GPU every few seconds."""
    command = script_command(words)
    name = name or script_name(command)
    with tempfile.TemporaryDirectory(prefix="redline-watch-") as folder:
        reader, meters = SpoolReader(Path(folder), Reader), Meters()
        due = time.monotonic() + STATUS_S

        def tick(pid: int) -> None:
            nonlocal due
            meters.look(pid)
            if time.monotonic() >= due:
                due = time.monotonic() + STATUS_S
                logs = reader.refresh()
                rates, card = rates_of(logs), meters.latest(card_uuids(logs))
                on_rates(rates, card)
                if hold is not None:
                    hold.tell(rates.steps, None, status_line(rates, card))
                    if card is not None:
                        hold.observe(card)

        started_at = time.time()
        with _held(workspace, name) as hold:
            code = run_watched(command, watching_environment(Path(folder), plan, os.environ), tick)
        meters.look(os.getpid(), at_once=True)
        return keep(Seen(name, tuple(command), started_at, code, reader.refresh(), meters, plan is not None), workspace)


@contextmanager
def _held(workspace: Workspace, name: str) -> Iterator[Hold | None]:
    """Says that the script is being watched, for those who look on. It runs also where the history cannot be opened."""
    with ExitStack() as stack:
        hold: Hold | None = None
        with suppress(StoreError):
            hold = stack.enter_context(workspace.history.hold("watch", name).held()) if workspace.keeps else None
        yield hold


def script_name(command: Sequence[str]) -> str:
    """Returns what a person calls it: the script's file, the module, or the program."""
    for before, word in itertools.pairwise(command):
        if word.endswith(".py"):
            return Path(word).name
        if before == "-m" and not Path(command[0]).name.startswith("-") and "torch.distributed" not in word:
            return word
    return Path(command[0]).name


def status_line(rates: Rates, card: TelemetrySample | None = None) -> str:
    """How it goes, on one line; with what the GPU says of itself, `?` where it does not tell."""
    if not rates.steps:
        return "no step yet"
    shares = {name: share for name, share in rates.shares.items() if share >= 0.005}
    parts = [
        f"step {rates.steps}",
        f"{_rate(rates.steps_per_s)} steps/s",
        f"{_rate(rates.samples_per_s)} samples/s",
        " ".join(f"{name} {format_share(share)}" for name, share in shares.items()),
        *([f"loss {rates.loss:.4g}"] if rates.loss is not None else []),
        *([f"{rates.outliers} slow steps"] if rates.outliers else []),
    ]
    if card is not None:
        busy = "?" if card.utilisation is None else format_share(card.utilisation)
        held = "?" if card.memory_used_bytes is None else format_bytes(card.memory_used_bytes)
        parts.append(f"GPU {busy} {held} {'?' if card.power_w is None else f'{card.power_w:.0f} W'}")
    return " · ".join(part for part in parts if part)


def _rate(value: float | None) -> str:
    return "?" if value is None else significant(value, 4)


# The alarm


def _alarm(alert: str | None, drop: str | None) -> Alarm | None:
    if drop is not None and alert is None:
        raise UsageError("--alert-drop says when --alert is due: give --alert as well")
    if alert is None:
        return None
    if not alert.strip():
        raise UsageError("--alert needs a command or a URL, got nothing")
    if alert.startswith(("http://", "https://")) and not urlsplit(alert).hostname:
        raise UsageError(f"--alert needs a URL with a host, got {alert!r}")
    return Alarm(alert, parse_share(drop or "20%"))


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
    """Compares the pace of the newest steps with the best pace so far. It alerts once per drop, and again after a recovery."""

    def __init__(self, target: str, drop: float, deliver: Callable[[str, bytes], None] | None = None) -> None:
        self._target, self._drop = target, drop
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
        newer, took = steps - self._seen[0], seconds - self._seen[1]
        if newer < FEWEST_STEPS or took <= 0:
            return
        self._seen = (steps, seconds)
        pace = newer / took
        is_down = pace < (1 - self._drop) * self._best
        if is_down and not self._is_down:
            event = {"event": "throughput-fell", "step": steps, "steps_per_s": pace, "best_steps_per_s": self._best}
            self._deliver(self._target, msgspec.json.encode(event))
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


# In a program


class Watch:
    """A loop in this program, watched: `with redline.watch() as watch: …`; afterwards `watch.result`."""

    def __init__(self, name: str | None, plan: WindowPlan | None, workspace: Workspace | None) -> None:
        self._name, self._plan, self._workspace = name, plan, workspace
        self._folder: Path | None = None
        self._installed: Any = None
        self.record: RunRecord | None = None
        self.result: Result | None = None

    def __enter__(self) -> Self:
        from redline.bench.watch.hooks import install, installed  # loads torch, in a program that uses it

        if self._folder is not None:  # a training that a library's callback began has failed, and begins again
            self.__exit__(RuntimeError, None, None)
        outer = sys.modules.get("_redline_watch.hooks")  # of `redline watch`, which started this program
        around = outer.installed() if outer is not None else installed()
        if around is not None and (outer is not None or around.log is not None):
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
        logs = SpoolReader(folder, Reader).refresh()
        name = self._name or Path(sys.argv[0] or "program").name
        code = None if kind is None else 1
        seen = Seen(name, tuple(sys.argv), self._started_at, code, logs, self._meters, self._plan is not None)
        try:
            with use(self._workspace) as opened:
                self.record = keep(seen, opened)
                self.result = result_of(self.record)
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


# The record


@dataclass(frozen=True)
class Seen:
    """All that was observed of one run."""

    name: str
    command: tuple[str, ...]
    started_at: float
    exit_code: int | None
    logs: Sequence[ProcessLog]
    meters: Meters
    is_to_profile: bool = False

    @property
    def broken(self) -> str:
        """Why watching ended before the script did; empty where it did not."""
        return next((str(log.facts["broken"]["error"]) for log in self.logs if "broken" in log.facts), "")

    @property
    def out_of_memory(self) -> dict[str, Any]:
        """The first process that ran out of memory wrote this about it; empty if none did."""
        return next((log.facts["oom"] for log in self.logs if "oom" in log.facts), {})


@dataclass(frozen=True)
class Profile:
    """The steps that were profiled: their trace, which lies beside the history, and what it says."""

    findings: tuple[WatchFinding, ...] = ()
    windows: tuple[Window, ...] = ()
    trace: TraceRef | None = None


def keep(seen: Seen, workspace: Workspace) -> RunRecord:
    """Make the record of what was seen, and write it into the history.

    Where it cannot be written the record says so: the script has run, and its figures and exit code stay.
    """
    record_id, profile, trouble = new_id(), Profile(), ""
    try:
        _keep_snapshots(seen, workspace, record_id)
        profile = _profile_of(seen, workspace, record_id)
    except OSError as error:
        trouble = f"the history's folder cannot be written: {error.strerror}"
    record = record_of(seen, record_id, profile)
    if not trouble:
        try:
            workspace.journal.begin(msgspec.structs.replace(record, blocks=()))
            workspace.journal.finish(record)
        except StoreError as error:
            trouble = f"the record was not kept: {error}"
    notes = (*record.notes, note("not-kept", trouble)) if trouble else record.notes
    return msgspec.structs.replace(record, notes=notes)


def record_of(seen: Seen, record_id: str, profile: Profile | None = None) -> RunRecord:
    profile = profile or Profile()
    logs = main_logs(seen.logs)
    if not logs:
        return _empty_record(seen, record_id)
    ranks = [Steps(log.reader) for log in logs]
    rates = rates_of(logs)
    if seen.broken:  # a few steps of many: where their time went says nothing of the rest
        rates = msgspec.structs.replace(rates, shares={}, host_shares={}, run_s={})
    prepared = _prepared(seen, logs[0], ranks[0], rates)
    device = prepared.environment.device
    where = device.kind if device.index is None else f"{device.kind}:{device.index}"
    workload = WorkloadSpec(model=f"watch:{seen.name}", task="train", batch=prepared.workload.batch)
    spec = RunSpec(workload=workload, device=where)
    record = RunRecord(
        id=record_id,
        spec=spec,
        key=record_key(spec, prepared),
        created_at=seen.started_at,
        prepared=prepared,
        blocks=_blocks(seen, ranks[0]),
        trace=profile.trace,
        stopped="interrupted" if seen.exit_code else "target",
        notes=tuple(_notes(seen, ranks[0], profile)),
    )
    return msgspec.structs.replace(record, watched=_watched(seen, logs, ranks, rates, profile, record))


def _notes(seen: Seen, steps: Steps, profile: Profile) -> Iterable[Note]:
    code = seen.exit_code
    if code and code not in INTERRUPTS:
        how = f"exit code {code}" if code > 0 else f"signal {-code}"
        yield note("failed", f"the script ended with {how}; its steps until then are reported")
    if steps.is_by_batch:
        yield note("by-batch", "neither optimizer nor backward pass was seen: each batch counts as a step")
    if seen.is_to_profile and not profile.windows:
        yield note("nothing-captured", "no steps were profiled: the loop ended before the capture did")
    if seen.broken:
        yield note("interrupted", f"watching ended before the script did: {seen.broken}")


def _empty_record(seen: Seen, record_id: str) -> RunRecord:
    """No step was seen."""
    why = (
        "no optimizer step, backward pass or batch of a DataLoader was seen: the command trains nothing with torch, or its "
        "interpreter ignores PYTHONPATH; a loop of another kind counts its steps by watch.step() in 'with redline.watch() as watch:'"
    )
    failure = Failure(stage="watch", kind="user", message=f"{why}{f' ({seen.broken})' if seen.broken else ''}")
    remarks = _kept_findings(findings(RunFacts(rates=Rates(), out_of_memory=seen.out_of_memory)))
    if remarks:
        failure = Failure(stage="watch", kind="oom", message=remarks[0].text)
    watched = Watched(
        command=seen.command, exit_code=seen.exit_code, started_at=seen.started_at, findings=remarks,
        gpu_utilisation=seen.meters.utilisation(set()), energy_j=seen.meters.energy_j(set()),
    )  # fmt: skip
    spec = RunSpec(workload=WorkloadSpec(model=f"watch:{seen.name}", task="train"))
    return RunRecord(
        id=record_id, spec=spec, created_at=seen.started_at, watched=watched, failure=failure, stopped="failed"
    )


def _kept_findings(causes: Iterable[Finding]) -> tuple[WatchFinding, ...]:
    return tuple(
        WatchFinding(code=finding.code, text=finding.evidence, change=finding.next, gain_bound=finding.gain_bound)
        for finding in causes
    )


def _watched(
    seen: Seen, logs: Sequence[ProcessLog], ranks: Sequence[Steps], rates: Rates, profile: Profile, record: RunRecord
) -> Watched:
    log, steps, uuids = logs[0], ranks[0], card_uuids(seen.logs)
    energy_j, seconds = seen.meters.energy_j(uuids), float(steps.ended_s[-1] - steps.ended_s[0] + steps.wall_s[0])
    pulses = [pulse for pulse in log.pulses if pulse.get("operators") is not None]
    ran = pulses[-1]["step"] - pulses[0]["step"] if pulses else 0
    parts = tuple(steps.own_part(rank) for rank, steps in enumerate(ranks))
    block = Block(kind="throughput", clock="host", samples=parts[0].samples, ranks=parts)
    late = late_rank(msgspec.structs.replace(record, blocks=(block,))) if all(part.samples for part in parts) else None
    facts = RunFacts(
        rates=rates,
        process=log.process,
        models=log.facts.get("models", {}),
        usage=log.facts.get("usage", {}),
        drift=drift_of(steps),
        growth=growth_of(log.pulses, seen.meters.resident),
        starts_s=tuple(log.reader.starts),
        ends_s=tuple(log.reader.ends),
        operators=(pulses[-1]["operators"] - pulses[0]["operators"]) / ran if ran > 0 else None,
        late_rank=late,
        wait_s=wait_for(late, parts) if late is not None else 0.0,
        out_of_memory=seen.out_of_memory,
    )
    own = _kept_findings(findings(facts)) if rates.shares or seen.out_of_memory else ()
    known = {finding.code for finding in profile.findings}
    return Watched(
        **msgspec.structs.asdict(rates),
        command=seen.command,
        exit_code=seen.exit_code,
        started_at=seen.started_at,
        seconds=seconds,
        ranks=len(logs),
        paused_s=rates.run_s.get("validation", 0.0) + rates.run_s.get("profiling", 0.0),
        gpu_utilisation=seen.meters.utilisation(uuids),
        energy_j=energy_j,
        power_w=energy_j / seconds if energy_j is not None and seconds > 0 else None,
        peak_bytes=_peak_bytes(seen, logs),
        findings=(*profile.findings, *(finding for finding in own if finding.code not in known)),
        windows=profile.windows,
    )


def card_uuids(logs: Sequence[ProcessLog]) -> set[str]:
    """Returns the uuids of the GPUs that the watched processes compute on."""
    uuids = {str(log.process.get("device", {}).get("uuid") or "") for log in logs}
    return {uuid.removeprefix("GPU-") for uuid in uuids if uuid}


def _peak_bytes(seen: Seen, logs: Sequence[ProcessLog]) -> int | None:
    on_device = [pulse["memory"]["reserved"] for log in logs for pulse in log.pulses if pulse.get("memory")]
    return int(max(on_device)) if on_device else max((size for _, size in seen.meters.resident), default=None)


def _prepared(seen: Seen, log: ProcessLog, steps: Steps, rates: Rates) -> Prepared:
    models, usage, process = log.facts.get("models", {}).get("models", []), log.facts.get("usage", {}), log.process
    samples = steps.samples[steps.counted]
    samples = samples[samples > 0]  # several steps may share a batch
    batch = max(round(median(samples.tolist())), 1) if len(samples) else None
    inputs = tuple(usage.get("inputs", []))
    device = {
        "name": cpu_name(),
        "kind": "cpu",
        **process.get("device", {}),
        **seen.meters.facts(card_uuids(seen.logs)),
    }
    return Prepared(
        environment=Environment(
            device=DeviceInfo(**device),
            hostname=socket.gethostname(),
            platform=platform.platform(),
            python=str(process.get("python", "")),
            redline=__version__,
            cpu=cpu_name(),
            physical_cores=psutil.cpu_count(logical=False),
            logical_cores=psutil.cpu_count(),
            memory_bytes=psutil.virtual_memory().total,
            threads=process.get("threads"),
            versions={name: version for name, version in process.get("versions", {}).items() if version},
        ),
        workload=WorkloadInfo(
            source="a watched script",
            class_name=" and ".join(model["class_name"] for model in models[:3]) or "unknown",
            parameters=sum(int(model["parameters"]) for model in models),
            items_per_step=batch or 1,
            item="sample" if batch else "step",
            batch=batch,
            batch_from="declared" if batch else "unknown",
            input_shapes=inputs,
            model_hash=_digest(model["hash"] for model in models),
            input_hash=_digest(shape.partition("×")[2] for shape in inputs),
        ),
        cold_start=ColdStart(first_call_s=rates.first_step_s),
        numerics=Numerics(method="unchecked", passed=True, reason=note("unchecked", "a script's own arithmetic")),
        warmup=Warmup(steady=True),
        memory=Memory(),
    )


def _digest(words: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def _blocks(seen: Seen, steps: Steps) -> tuple[Block, ...]:
    """The counted steps in pieces; of a long run some pieces. The last piece carries what was metered."""
    kept = np.flatnonzero(steps.counted)
    pieces = np.array_split(kept, max(1, -(-len(kept) // BLOCK_STEPS)))
    chosen = [pieces[number] for number in sorted({round(x) for x in np.linspace(0, len(pieces) - 1, MOST_BLOCKS)})]
    blocks = [
        Block(
            kind="throughput",
            clock="host",
            samples=tuple(steps.wall_s[piece].tolist()),
            phases={name: tuple(steps.phases_s[piece, at].tolist()) for at, name in enumerate(PHASES)},
            wall_s=float(steps.wall_s[piece].sum()),
            started_at=seen.started_at,
            round=number,
        )
        for number, piece in enumerate(chosen)
    ]
    memory, telemetry = Memory(peak_rss_bytes=_peak_bytes(seen, [])), seen.meters.telemetry(card_uuids(seen.logs))
    return (*blocks[:-1], msgspec.structs.replace(blocks[-1], memory=memory, telemetry=telemetry))


def _keep_snapshots(seen: Seen, workspace: Workspace, record_id: str) -> None:
    """The allocator's snapshots, beside the history: the folder they lie in goes away."""
    for number, log in enumerate(seen.logs):
        out_of_memory = log.facts.get("oom", {})
        if out_of_memory.get("snapshot") and Path(out_of_memory["snapshot"]).is_file():
            workspace.traces.mkdir(parents=True, exist_ok=True)
            kept = workspace.traces / f"watch-{record_id}-oom-{number}.pickle"
            out_of_memory["snapshot"] = str(shutil.move(out_of_memory["snapshot"], kept))


def _profile_of(seen: Seen, workspace: Workspace, record_id: str) -> Profile:
    logs = main_logs(seen.logs)
    if not logs or not logs[0].windows:
        return Profile()
    steps, fact = Steps(logs[0].reader), logs[0].windows[-1]
    workspace.traces.mkdir(parents=True, exist_ok=True)
    path = workspace.traces / f"watch-{record_id}-0.pt.trace.json"
    shutil.move(fact["path"], path)
    try:
        causes = _kept_findings(profile_of([read_trace(path)]).findings)
    except RedlineError as error:
        causes = (
            WatchFinding(code="no-profile", text=f"the capture cannot be read: {error}", change="", gain_bound=1.0),
        )
    around = np.flatnonzero(steps.counted & (np.abs(np.arange(steps.count) - fact["ended_with"]) < 100))
    at = min(int(fact["ended_with"]), steps.count) - 1
    window = Window(
        at_s=max(float(steps.ended_s[at] - steps.ended_s[0]), 0.0),
        step=int(fact["ended_with"]),
        steps=int(fact["steps"]),
        step_s=float(np.median(steps.wall_s[around])) if len(around) else None,
        trace=path.name,
        top=tuple(finding.code for finding in causes[:3]),
    )
    trace = TraceRef(path=str(path), steps=window.steps, capture_s=0.0, bytes=path.stat().st_size)
    return Profile(causes, (window,), trace)


# What it shows


def result_of(record: RunRecord) -> Result:
    """Shows the rates, where the time of the run went, and what to change."""
    watched = record.watched
    assert watched is not None
    name = record.spec.workload.model.removeprefix("watch:")
    is_kept = not any(note.code == "not-kept" for note in record.notes)
    device = record.prepared.environment.device.name if record.prepared else None
    run = _run_row(record, watched, name)
    return Result(
        verb="watch",
        headline=_headline(watched, run),
        tables=(
            Table(name="run", rows=(run,), columns=("script", "steps", "steps_per_s", "whole_steps_per_s", "throughput", "run_time", "first_step")),
            _phase_table(watched),
            Table(name="findings", rows=tuple(map(_finding_row, watched.findings)), is_detail=True),
        ),
        about={"script": name, "device": device, "ranks": watched.ranks, "exit_code": watched.exit_code},
        notes=(*record.notes, *_remarks(watched)),
        blocks=tuple(map(_finding_block, watched.findings)) or _nothing_found(watched),
        next=f"redline history show {record.id}" if is_kept else "",
        record_ids=(record.id,) if is_kept else (),
    )  # fmt: skip


def _run_row(record: RunRecord, watched: Watched, name: str) -> Row:
    figures = (
        STEPS(watched.steps),
        STEP_RATE(watched.steps_per_s),
        WHOLE_RATE(watched.whole_steps_per_s),
        THROUGHPUT(watched.samples_per_s, item="sample"),
        RUN_TIME(sum(watched.run_s.values()) or None),
        FIRST_STEP(watched.first_step_s),
        SLOW_STEPS(watched.outliers),
        LOSS(watched.loss),
        UTILISATION(watched.gpu_utilisation),
        RUN_ENERGY(watched.energy_j),
        PEAK(watched.peak_bytes),
    )
    facts: dict[str, Fact] = {"script": name, "exit_code": watched.exit_code, "device_clock": watched.device_clock}
    return Row(
        facts=facts, metrics=figures, failure=record.failure.message if record.failure else "", record_id=record.id
    )


def _phase_table(watched: Watched) -> Table:
    whole = sum(watched.run_s.values())
    on_gpu = watched.run_s.get("copy", 0.0) > 0
    rows = tuple(
        Row(
            facts={"phase": name},
            metrics=(
                PHASE_TIME(seconds),
                RUN_SHARE(seconds / whole if whole else None),
                *([STEP_SHARE(watched.shares[name])] if watched.shares.get(name) else []),
            ),
        )
        for name, seconds in watched.run_s.items()
        if seconds > 0 or (name != "copy" and name in ("data", "forward", "backward", "optimizer", "other")) or on_gpu
    )
    clock = ", by the GPU's clock" if watched.device_clock else ""
    return Table(name="phases", title=f"where the time goes{clock}", rows=rows)


def _finding_row(finding: WatchFinding) -> Row:
    facts: dict[str, Fact] = {"code": finding.code, "text": finding.text, "change": finding.change}
    return Row(facts=facts, metrics=(BOUND(finding.gain_bound),))


def _finding_block(finding: WatchFinding) -> TextBlock:
    bound = f" (up to {format_ratio(finding.gain_bound)})" if finding.gain_bound > 1 else ""
    return TextBlock(title=f"{finding.code}: {finding.text}{bound}", text=f"  change: {finding.change}")


def _nothing_found(watched: Watched) -> tuple[TextBlock, ...]:
    return (TextBlock(title="", text="nothing stands out"),) if watched.shares else ()


def _headline(watched: Watched, run: Row) -> Headline | None:
    if not watched.steps:
        return None
    figures: dict[str, Any] = {name: run[name] for name in ("steps", "steps_per_s", "whole_steps_per_s", "throughput")}
    figures["script"] = run["script"]
    rate = "{script} takes {steps_per_s} steps/s" + (", {throughput}" if watched.samples_per_s else "")
    left_out = sum(watched.run_s.get(name, 0.0) for name in ("first steps", "validation", "saving", "profiling"))
    is_apart = bool(watched.run_s) and left_out > 0.01 * sum(watched.run_s.values())
    return Headline(
        template=f"{rate}{'; {whole_steps_per_s} steps/s over the whole run' if is_apart else ''}.", figures=figures
    )


def _remarks(watched: Watched) -> Iterable[Note]:
    if watched.first_steps:
        taken_s = watched.run_s.get("first steps", 0.0)
        what = "step is" if watched.first_steps == 1 else f"{watched.first_steps} steps are"
        yield note(
            "left-out",
            f"the first {what} left out of the rate: {significant(taken_s, 3)} s, compiling or filling caches",
        )
    for window in watched.windows:
        top = ", ".join(window.top) or "nothing stands out"
        yield note("captured", f"profiled {window.steps} steps after step {window.step - window.steps}: {top}")
