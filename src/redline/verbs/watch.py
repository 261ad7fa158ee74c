"""`redline watch`: your own training, unchanged: its steps, where its time goes, and what to change.

The hooks in the script write down what they hear (`bench/watch/`), `analyze/watch.py` makes steps and rates of it, and
`analyze/watch_findings.py` draws the conclusions. This file starts the script, makes the record and shows it.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Self

import msgspec
import numpy as np
import psutil

from redline import __version__
from redline.analyze.finding import Finding
from redline.analyze.profile import profile_of
from redline.analyze.ranks import late_rank
from redline.analyze.watch import Reader, Steps, drift_of, growth_of, main_logs, rates_of, wait_for
from redline.analyze.watch_findings import RunFacts, findings
from redline.launch.watch import (
    ProcessLog,
    SpoolReader,
    end_like,
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
from redline.model.units import format_ratio, format_share, significant
from redline.show.folder import check_file, write_text
from redline.show.result import Result, terminal
from redline.show.terminal import make_console
from redline.show.trackers import check_tracker, log_result
from redline.store.ledgers import Hold
from redline.system.telemetry import cpu_name
from redline.system.telemetry.meters import Meters
from redline.trace.decode import read_trace
from redline.verbs.verb import verb
from redline.verbs.workspace import Workspace, use

STATUS_S = 5.0
"""The standing of the script is read and told this often."""
BLOCK_STEPS, MOST_BLOCKS = 1000, 100
"""A record keeps at most so many blocks of so many steps, spread evenly over the run."""
INTERRUPTS = (-2, -15, 130, 143)
"""These exit codes say that SIGINT or SIGTERM ended the script. A shell adds 128 to the number of the signal."""
FEWEST_STEPS = 20
"""The alarm compares pieces of the run that have at least so many steps."""
NOTHING_SEEN = (
    "no optimizer step, backward pass or batch of a DataLoader was seen: the command trains nothing with torch, or its "
    "interpreter ignores PYTHONPATH; a loop of another kind counts its steps by watch.step() in 'with redline.watch() as watch:'"
)
DELIVERY_S = 30.0
"""An alert must be delivered within this time."""

STEPS = Figure(name="steps", doc="Steps that were seen.")
STEP_RATE = Figure(name="steps_per_s", header="steps/s", better="higher", doc="Of the steps that count.")
WHOLE_RATE = Figure(name="whole_steps_per_s", header="over the run", better="higher", doc="Of all steps, over the run.")
RUN_TIME = Figure(name="run_time", unit="s", header="run", doc="From the first step's beginning to what was last seen.")
FIRST_STEP = Figure(name="first_step", unit="s", better="lower")
SLOW_STEPS = Figure(name="slow_steps", better="lower", doc="Steps of more than twice the median.")
RUN_ENERGY = Figure(name="energy", unit="J", better="lower", doc="Of the GPUs in use, or of the CPU's packages.")
UTILISATION = Figure(name="utilisation", unit="share", header="GPU busy", doc="How busy the GPU said it was.")
PEAK = Figure(name="peak_memory", unit="B", better="lower", doc="Reserved on a GPU, on a CPU resident.")
PHASE_TIME = Figure(name="time", unit="s", doc="Over the whole run.")
RUN_SHARE = Figure(name="share", unit="share", header="of the run")
STEP_SHARE = Figure(name="step_share", unit="share", header="of a step", doc="Of the steps that count.")
BOUND = Figure(name="gain_bound", unit="x", header="at most", doc="How many times faster without it, at most.")


def share_of(name: str, text: str) -> float:
    """Reads a share from `20%` or `0.2`."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise UsageError(f"--alert-drop must be a share between 0 and 100 %, such as 20%, got {text!r}")
    return share


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
    profile: Annotated[bool, setting("Also capture five steps with torch's profiler.")] = False,
    alert: Annotated[str | None, setting("Run this command when the throughput falls.", shape="COMMAND")] = None,
    alert_drop: Annotated[
        Any, setting("How far it must fall. Default: 20%.", kind=str, shape="SHARE", read=share_of)
    ] = None,
    name: Annotated[str | None, setting("What to call it in the history. Default: the script's name.")] = None,
    summary: Annotated[
        Any, setting("Write the summary as a JSON document.", group=OUTPUT, kind=Path, shape="FILE")
    ] = None,
    save: Annotated[
        Any,
        setting(
            "Write the record to a file for 'report' and 'history import'.",
            group=OUTPUT,
            kind=Path,
            shape="FILE.redline",
        ),
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
    if summary is not None:
        check_file(summary)
    if log is not None:
        check_tracker(log)
    if save is not None:
        check_file(save)
    if alert_drop is not None and alert is None:
        raise UsageError("--alert-drop says when --alert is due: give --alert as well")
    if alert is not None and not alert.strip():
        raise UsageError("--alert needs a command, got nothing")
    alarm = None if alert is None else Alarm(alert, alert_drop or 0.2)

    def on_rates(rates: Rates) -> None:
        if not quiet and sys.stderr.isatty():
            _say(status_line(rates))
        if alarm is not None:
            alarm.hear(rates)

    with use(None) as workspace:
        record = run_script(command, workspace, profiles=profile, name=name, on_rates=on_rates)
        if save is not None and record.key is not None:
            with save.open("wb") as file:
                workspace.history.export_archive(file, [record.id])
    result = result_of(record)
    if not quiet:
        make_console(stderr=True).print(terminal(result, verbose=verbose))
    try:  # the script has run, and its exit code stays
        if summary is not None:
            write_text(summary, result.to_json())
        if log is not None:
            _say(f"logged: {log_result(result, log)}")
    except RedlineError as error:
        _say(str(error))
    assert record.watched is not None
    return end_like(record.watched.exit_code or 0)


def _say(text: str) -> None:
    print(f"redline: {text}", file=sys.stderr)  # noqa: T201  (stdout is the script's)


def run_script(
    words: Sequence[str],
    workspace: Workspace,
    *,
    profiles: bool = False,
    name: str | None = None,
    on_rates: Callable[[Rates], None] = lambda rates: None,
) -> RunRecord:
    """Runs a training command unchanged and watches its steps. `on_rates` is told of them every few seconds."""
    command = script_command(words)
    name = name or script_name(command)
    with tempfile.TemporaryDirectory(prefix="redline-watch-") as folder, _held(workspace, name) as hold:
        reader, meters = SpoolReader(Path(folder), Reader), Meters()
        due = time.monotonic() + STATUS_S

        def tick(pid: int) -> None:
            nonlocal due
            meters.look(pid)
            if time.monotonic() >= due:
                due = time.monotonic() + STATUS_S
                rates = rates_of(reader.refresh())
                on_rates(rates)
                if hold is not None:
                    hold.tell(rates.steps, None, status_line(rates))

        started_at = time.time()
        code = run_watched(command, watching_environment(Path(folder), os.environ, profiles=profiles), tick)
        meters.look(os.getpid(), at_once=True)
        return keep(Seen(name, tuple(command), started_at, code, reader.refresh(), meters, profiles), workspace)


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


def status_line(rates: Rates) -> str:
    """Returns how it goes, on one line."""
    if not rates.steps:
        return "no step yet"
    shares = (f"{name} {format_share(share)}" for name, share in rates.shares.items() if share >= 0.005)
    paces = ((rates.steps_per_s, "steps/s"), (rates.samples_per_s, "samples/s"))
    known = (f"{significant(pace, 4)} {unit}" for pace, unit in paces if pace is not None)
    return " · ".join((f"step {rates.steps}", *known, " ".join(shares), f"{rates.outliers} slow steps"))


class Alarm:
    """Compares the pace of the newest steps with the best pace so far. It alerts once per drop, and again after a recovery."""

    def __init__(self, command: str, drop: float) -> None:
        self._command, self._drop = command, drop
        self._seen: tuple[int, float] | None = None
        self._best = 0.0
        self._is_down = False

    def hear(self, rates: Rates) -> None:
        if rates.steps_per_s is None:
            return
        steps, seconds = rates.steps, rates.steps / rates.steps_per_s
        before = self._seen = self._seen or (steps, seconds)
        if steps - before[0] < FEWEST_STEPS or seconds <= before[1]:
            return
        self._seen, pace = (steps, seconds), (steps - before[0]) / (seconds - before[1])
        was_down, self._is_down = self._is_down, pace < (1 - self._drop) * self._best
        if self._is_down and not was_down:
            event = {"event": "throughput-fell", "step": steps, "steps_per_s": pace, "best_steps_per_s": self._best}
            try:
                subprocess.run(
                    self._command, shell=True, input=msgspec.json.encode(event), timeout=DELIVERY_S, check=True
                )
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                _say(f"the alert was not delivered: {error}")
        self._best = max(self._best, pace)


# In a program


class Watch:
    """This is a loop in this program that is watched: `with redline.watch() as watch: …`; afterwards `watch.result`."""

    def __init__(self, name: str | None, profiles: bool, workspace: Workspace | None) -> None:
        self._name, self._profiles, self._workspace = name, profiles, workspace
        self._folder: Path | None = None
        self._installed: Any = None
        self.record: RunRecord | None = None
        self.result: Result | None = None

    def __enter__(self) -> Self:
        from redline.bench.watch.hooks import install, installed  # loads torch, in a program that uses it

        outer = sys.modules.get("_redline_watch.hooks")  # of `redline watch`, which started this program
        around = outer.installed() if outer is not None else installed()
        if around is not None and (outer is not None or around.log is not None):
            self._installed = around
            return self
        self._folder = Path(tempfile.mkdtemp(prefix="redline-watch-"))
        self._meters = Meters()
        self._meters.look(os.getpid())
        self._started_at = time.time()
        self._meters.begin()
        self._installed = install(str(self._folder), profiles=self._profiles, in_program=True)
        return self

    def step(self, samples: float | None = None) -> None:
        """Say that a step has ended, in a loop without an optimizer of torch; with its samples where no loader tells."""
        if self._installed is None:
            raise RedlineError("watch.step() counts inside 'with redline.watch() as watch:'")
        if self._folder is not None:
            self._meters.look(os.getpid())
        self._installed.manual_step(samples)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        installed, self._installed = self._installed, None
        folder, self._folder = self._folder, None
        if folder is None:
            return  # the watch around this one goes on, and tells what it saw
        installed.remove()
        self._meters.end()
        self._meters.look(os.getpid(), at_once=True)
        name, code = self._name or Path(sys.argv[0] or "program").name, None if kind is None else 1
        logs = SpoolReader(folder, Reader).refresh()
        try:
            with use(self._workspace) as opened:
                seen = Seen(name, tuple(sys.argv), self._started_at, code, logs, self._meters, self._profiles)
                self.record = keep(seen, opened)
                self.result = result_of(self.record)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def __str__(self) -> str:
        return str(self.result) if self.result is not None else "a watch that has not ended, or is part of another"


def watch(*, name: str | None = None, profile: bool = False, workspace: Workspace | None = None) -> Watch:
    """Watches the training loop inside the `with` block. `profile` also captures five steps of it."""
    return Watch(name, profile, workspace)


def lightning_callback(**options: Any) -> Any:
    """Returns a callback for Lightning's Trainer that watches `fit` and prints what it saw; `.watch.result` has it afterwards."""
    for package in ("lightning.pytorch", "pytorch_lightning"):
        with suppress(ImportError):
            base = importlib.import_module(package).Callback
            return _callback(base, ("on_fit_start",), ("on_fit_end", "on_exception"), options)
    raise MissingExtra("redline.lightning_callback", "lightning", "lightning")


def trainer_callback(**options: Any) -> Any:
    """Returns a callback for transformers' Trainer that watches `train` and prints what it saw; `.watch.result` has it afterwards."""
    try:
        base = importlib.import_module("transformers").TrainerCallback
    except ImportError:
        raise MissingExtra("redline.trainer_callback", "transformers", "hf") from None
    return _callback(base, ("on_train_begin",), ("on_train_end",), options)


def _callback(base: Any, begins: Sequence[str], ends: Sequence[str], options: dict[str, Any]) -> Any:
    """Returns an instance of the library's callback class that has a watch between the calls of these names."""
    own = watch(**options)

    def begin(self: Any, *_: Any, **__: Any) -> None:
        own.__enter__()

    def end(self: Any, trainer: Any, state: Any, *errors: Any, **__: Any) -> None:
        error = next((one for one in errors if isinstance(one, BaseException)), None)
        own.__exit__(type(error) if error else None, error, None)
        is_first = (getattr(one, name, None) for one, name in ((trainer, "is_global_zero"), (state, "is_world_process_zero")))  # fmt: skip
        if any(is_first):
            sys.stderr.write(str(own))

    calls = {**dict.fromkeys(begins, begin), **dict.fromkeys(ends, end)}
    return type("RedlineWatch", (base,), {"watch": own, **calls})()


# The record


@dataclass(frozen=True)
class Seen:
    """This is all that was observed of one run."""

    name: str
    command: tuple[str, ...]
    started_at: float
    exit_code: int | None
    logs: Sequence[ProcessLog]
    meters: Meters
    profiles: bool = False

    @property
    def broken(self) -> str:
        """This says why watching ended before the script did. It is empty where it did not."""
        return next((str(log.facts["broken"]["error"]) for log in self.logs if "broken" in log.facts), "")


def keep(seen: Seen, workspace: Workspace) -> RunRecord:
    """Make the record of what was seen, and write it into the history.

    Where it cannot be written the record says so: the script has run, and its figures and exit code stay.
    """
    record_id = new_id()
    try:
        record = record_of(seen, record_id, workspace.traces)
        workspace.journal.begin(msgspec.structs.replace(record, blocks=()))
        workspace.journal.finish(record)
        return record
    except OSError as error:
        trouble = f"the history's folder cannot be written: {error.strerror}"
    except StoreError as error:
        trouble = f"the record was not kept: {error}"
    record = record_of(seen, record_id)
    return msgspec.structs.replace(record, notes=(*record.notes, note("not-kept", trouble)))


def record_of(seen: Seen, record_id: str, traces: Path | None = None) -> RunRecord:
    """Makes the record; `traces` is the folder for the trace of the steps that were profiled."""
    logs, uuids, meters = main_logs(seen.logs), card_uuids(seen.logs), seen.meters
    ranks, rates = [Steps(log.reader) for log in logs], rates_of(logs)
    if seen.broken:  # a few steps of many: where their time went says nothing of the rest
        rates = msgspec.structs.replace(rates, shares={}, host_shares={}, run_s={})
    reserved = [size for log in logs if (size := log.fact("usage").get("reserved"))]
    resident = max((size for _, size in meters.resident), default=None)
    watched = Watched(
        **msgspec.structs.asdict(rates),
        command=seen.command,
        exit_code=seen.exit_code,
        started_at=seen.started_at,
        gpu_utilisation=meters.utilisation(uuids),
        energy_j=meters.energy_j(uuids),
        ranks=max(len(logs), 1),
        peak_bytes=max(reserved, default=resident),
        paused_s=rates.run_s.get("validation", 0.0) + rates.run_s.get("profiling", 0.0),
    )
    workload = WorkloadSpec(model=f"watch:{seen.name}", task="train")
    record = RunRecord(id=record_id, spec=RunSpec(workload=workload), created_at=seen.started_at, watched=watched)
    if not logs:
        failure = Failure(stage="watch", kind="user", message=f"{NOTHING_SEEN} {seen.broken}".rstrip())
        return msgspec.structs.replace(record, failure=failure, stopped="failed")
    prepared = _prepared(seen, logs[0], ranks[0], rates)
    device = prepared.environment.device
    where = device.kind if device.index is None else f"{device.kind}:{device.index}"
    spec = RunSpec(workload=msgspec.structs.replace(workload, batch=prepared.workload.batch), device=where)
    trace, windows, causes = _profiled(logs[0], ranks[0], traces, record_id)
    own = _findings(logs, ranks, rates, record, meters) if rates.shares else ()
    known = {finding.code for finding in causes}  # the profile knows more of the same causes
    blocks = _blocks(seen, ranks[0])
    last = msgspec.structs.replace(
        blocks[-1], memory=Memory(peak_rss_bytes=resident), telemetry=meters.telemetry(uuids)
    )
    seconds = float(ranks[0].ended_s[-1] - ranks[0].ended_s[0] + ranks[0].wall_s[0])
    watched = msgspec.structs.replace(
        watched,
        seconds=seconds,
        power_w=watched.energy_j / seconds if watched.energy_j is not None and seconds > 0 else None,
        findings=(*causes, *(finding for finding in own if finding.code not in known)),
        windows=windows,
    )
    return msgspec.structs.replace(
        record, spec=spec, key=record_key(spec, prepared), prepared=prepared, blocks=(*blocks[:-1], last), trace=trace,
        stopped="interrupted" if seen.exit_code else "target", notes=tuple(_notes(seen, ranks[0], watched)), watched=watched,
    )  # fmt: skip


def _notes(seen: Seen, steps: Steps, watched: Watched) -> Iterable[Note]:
    code = seen.exit_code
    if code and code not in INTERRUPTS:
        how = f"exit code {code}" if code > 0 else f"signal {-code}"
        yield note("failed", f"the script ended with {how}; its steps until then are reported")
    if steps.is_by_batch:
        yield note("by-batch", "neither optimizer nor backward pass was seen: each batch counts as a step")
    if seen.profiles and not watched.windows:
        yield note("nothing-captured", "no steps were profiled: the loop ended before the capture did")
    if seen.broken:
        yield note("interrupted", f"watching ended before the script did: {seen.broken}")


def _findings(
    logs: Sequence[ProcessLog], ranks: Sequence[Steps], rates: Rates, record: RunRecord, meters: Meters
) -> tuple[WatchFinding, ...]:
    parts = tuple(steps.own_part(rank) for rank, steps in enumerate(ranks))
    block = Block(kind="throughput", clock="host", samples=parts[0].samples, ranks=parts)
    late = late_rank(msgspec.structs.replace(record, blocks=(block,))) if all(part.samples for part in parts) else None
    held = [(at, size) for at, size in logs[0].fact("usage").get("held", [])]
    if not any(size for _, size in held):  # without a GPU, what the operating system says, from the first steps on
        held = [look for look in meters.resident if held and look[0] >= held[0][0]]
    facts = RunFacts(
        rates=rates,
        drift=drift_of(ranks[0]),
        growth=growth_of(held),
        process=logs[0].fact("process"),
        usage=logs[0].fact("usage"),
        starts_s=tuple(logs[0].reader.starts),
        ends_s=tuple(logs[0].reader.ends),
        late_rank=late,
        wait_s=wait_for(late, parts) if late is not None else 0.0,
    )
    return _kept_findings(findings(facts))


def _kept_findings(causes: Iterable[Finding]) -> tuple[WatchFinding, ...]:
    return tuple(
        WatchFinding(code=finding.code, text=finding.evidence, change=finding.next, gain_bound=finding.gain_bound)
        for finding in causes
    )


def card_uuids(logs: Sequence[ProcessLog]) -> set[str]:
    """Returns the uuids of the GPUs that the watched processes compute on."""
    uuids = {str(log.fact("process").get("device", {}).get("uuid") or "") for log in logs}
    return {uuid.removeprefix("GPU-") for uuid in uuids if uuid}


def _prepared(seen: Seen, log: ProcessLog, steps: Steps, rates: Rates) -> Prepared:
    process, inputs = log.fact("process"), tuple(log.fact("usage").get("inputs", ()))
    models = process.get("models", [])
    samples = steps.samples[steps.counted]
    samples = samples[samples > 0]  # several steps may share a batch
    batch = max(round(median(samples.tolist())), 1) if len(samples) else None
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


def _blocks(seen: Seen, steps: Steps) -> list[Block]:
    """Returns the counted steps in pieces; of a long run it returns some pieces."""
    kept = np.flatnonzero(steps.counted)
    pieces = np.array_split(kept, -(-len(kept) // BLOCK_STEPS))
    return [
        Block(
            kind="throughput",
            clock="host",
            samples=tuple(steps.wall_s[piece].tolist()),
            phases={name: tuple(steps.phases_s[piece, at].tolist()) for at, name in enumerate(PHASES)},
            wall_s=float(steps.wall_s[piece].sum()),
            started_at=seen.started_at,
            round=number,
        )
        for number, piece in enumerate(pieces[:: -(-len(pieces) // MOST_BLOCKS)])
    ]


def _profiled(
    log: ProcessLog, steps: Steps, traces: Path | None, record_id: str
) -> tuple[TraceRef | None, tuple[Window, ...], tuple[WatchFinding, ...]]:
    """Returns the trace of the steps that were profiled, which lies beside the history, and what it says."""
    fact = log.fact("window")
    if not fact or traces is None:
        return None, (), ()
    traces.mkdir(parents=True, exist_ok=True)
    path = Path(shutil.move(fact["path"], traces / f"watch-{record_id}-0.pt.trace.json"))
    try:
        causes = _kept_findings(profile_of([read_trace(path)]).findings)
    except RedlineError as error:
        unread = f"the capture cannot be read: {error}"
        causes = (WatchFinding(code="no-profile", text=unread, change="", gain_bound=1.0),)
    count, last = int(fact["steps"]), int(fact["ended_with"])
    at_s = float(steps.ended_s[min(last, steps.count) - 1] - steps.ended_s[0])
    top = tuple(finding.code for finding in causes[:3])
    window = Window(at_s=max(at_s, 0.0), step=last, steps=count, trace=path.name, top=top)
    return TraceRef(path=str(path), steps=count, capture_s=0.0, bytes=path.stat().st_size), (window,), causes


# What it shows


def result_of(record: RunRecord) -> Result:
    """Shows the rates, where the time of the run went, and what to change."""
    watched = record.watched
    assert watched is not None
    name = record.spec.workload.model.removeprefix("watch:")
    is_kept = not any(note.code == "not-kept" for note in record.notes)
    device = record.prepared.environment.device.name if record.prepared else None
    figures = (
        STEPS(watched.steps),
        STEP_RATE(watched.steps_per_s),
        WHOLE_RATE(watched.whole_steps_per_s),
        THROUGHPUT(watched.samples_per_s, item="sample"),
        RUN_TIME(sum(watched.run_s.values()) or None),
        FIRST_STEP(watched.first_step_s),
        SLOW_STEPS(watched.outliers),
        UTILISATION(watched.gpu_utilisation),
        RUN_ENERGY(watched.energy_j),
        PEAK(watched.peak_bytes),
    )
    facts: dict[str, Fact] = {"script": name, "exit_code": watched.exit_code, "device_clock": watched.device_clock}
    failure = record.failure.message if record.failure else ""
    run = Row(facts=facts, metrics=figures, failure=failure, record_id=record.id)
    causes = tuple(
        Row(facts={"code": one.code, "text": one.text, "change": one.change}, metrics=(BOUND(one.gain_bound),))
        for one in watched.findings
    )
    nothing = (TextBlock(title="", text="nothing stands out"),) if watched.shares else ()
    return Result(
        verb="watch",
        headline=_headline(watched, run),
        tables=(
            Table(name="run", rows=(run,), columns=("script", "steps", "steps_per_s", "whole_steps_per_s", "throughput", "run_time", "first_step")),
            _phase_table(watched),
            Table(name="findings", rows=causes, is_detail=True),
        ),
        about={"script": name, "device": device, "ranks": watched.ranks, "exit_code": watched.exit_code},
        notes=(*record.notes, *_remarks(watched)),
        blocks=tuple(map(_finding_block, watched.findings)) or nothing,
        next=f"redline history show {record.id}" if is_kept else "",
        record_ids=(record.id,) if is_kept else (),
    )  # fmt: skip


def _phase_table(watched: Watched) -> Table:
    whole = sum(watched.run_s.values())
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
        if seconds > 0 or name in ("data", "forward", "backward", "optimizer", "other")
    )
    clock = ", by the GPU's clock" if watched.device_clock else ""
    return Table(name="phases", title=f"where the time goes{clock}", rows=rows)


def _finding_block(finding: WatchFinding) -> TextBlock:
    bound = f" (up to {format_ratio(finding.gain_bound)})" if finding.gain_bound > 1 else ""
    return TextBlock(title=f"{finding.code}: {finding.text}{bound}", text=f"  change: {finding.change}")


def _headline(watched: Watched, run: Row) -> Headline | None:
    if not watched.steps:
        return None
    figures: dict[str, Any] = {
        name: run[name] for name in ("script", "steps", "steps_per_s", "whole_steps_per_s", "throughput")
    }
    rate = "{script} takes {steps_per_s} steps/s" + (", {throughput}" if watched.samples_per_s else "")
    left_out = sum(watched.run_s.get(name, 0.0) for name in ("first steps", "validation", "saving", "profiling"))
    is_apart = left_out > 0.01 * sum(watched.run_s.values()) > 0
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
