"""Records say what was measured. They are frozen: raw samples stay, and summaries are derived from them elsewhere."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from redline.model.arrivals import Served
from redline.model.fields import Count, Figure, Frozen, Items, Moment, Seconds
from redline.model.note import Note
from redline.model.spec import Augment, RunSpec, Stem
from redline.model.work import GenerationInfo, WorkCount

SCHEMA = 2
"""We raise this whenever a stored record of the day before would no longer decode; `MIGRATIONS` then says how to read it."""

BENCHMARK_VERSION = "1"
"""Raised whenever the way of measuring changes so that new numbers must not be set against old ones."""

FailureKind = Literal["oom", "compile", "unsupported", "numerics", "timeout", "crash", "user"]
FailureScope = Literal["switch", "pair", "recipe"]
"""A failure rules this out for this workload on this device: a switch in any recipe, two switches together, or only the recipe that
failed."""
BlockKind = Literal["latency", "throughput"]
TimeKind = Literal["latency", "throughput", "ttft", "tpot", "energy"]
"""Recipes are compared by one of these: blocks of a kind, in generation the first token or the time per further token, or the joules of a
step, which then stand where seconds do."""
BatchOrigin = Literal["asked", "scaled", "declared", "source", "unknown", "guessed"]
"""This says how the batch is known. `asked`: the factory was told. `scaled`: the model answered for twice the items. `declared`: by
batch_axis, or a factory's own default. `source`: a model by name. `guessed`: records of schema 1 took dimension 0 of the first tensor of
the user's own inputs."""
SecondInputs = Literal["drawn", "factory", "noise", "given"]
"""The second inputs of the numerics came from here: they were drawn freely, the user's factory was called again, the user's own got a
little noise, or, in older records, a function of the user's gave them."""
StopReason = Literal["target", "ceiling", "unreachable", "interrupted", "failed"]
"""`unreachable`: at the spread seen, the target would take longer than the ceiling allows."""


class Failure(Frozen, omit_defaults=True):
    """A trial that broke is data: where, how, and what it said."""

    stage: str
    kind: FailureKind
    message: str
    """It is one line, for the table."""
    where: str = ""
    """The failure came from this line of the user's own code, as `model.py:12 in forward`. It is empty where none was involved."""
    traceback: str = ""
    switches: tuple[str, ...] = ()
    """These switches caused it, as they stand in the recipe. With the scope `recipe` this is the first suspect, if there is any."""
    scope: FailureScope = "recipe"
    rank: Count | None = None
    """With several ranks, this one caused it. It is None where that is not known, or where every rank failed alike."""
    notes: tuple[Note, ...] = ()
    """They hold what the bench could tell from the error beyond its kind."""

    @property
    def told(self) -> str:
        """Returns one line with all of it that a person needs first."""
        message = " ".join(self.message.splitlines())
        return f"{message} ({self.where})" if self.where else message

    @property
    def line(self) -> str:
        """Returns what broke, where and why, as the one line of a table."""
        return f"{self.kind} at {self.stage}: {self.told}"

    def brief(self) -> Failure:
        """Returns the failure without the traceback, for a row of a table."""
        return msgspec.structs.replace(self, traceback="")


class Capabilities(Frozen):
    """This says what a switch, or a whole recipe, does to the program. The switch's own class says it; nothing is told by names."""

    compiles: bool = False
    """Builds another program from the model before the first step, which takes seconds or minutes, and fuses operators."""
    records_graph: bool = False
    """The device replays a recorded graph: the host launches one thing instead of hundreds."""
    refuses_graph: bool = False
    """If True, its program cannot be recorded into a graph of the whole step."""
    dissolves_modules: bool = False
    """If True, modules and operators no longer run one by one, so time cannot be told by module or by kind of operator."""
    folds_norms: bool = False
    """BatchNorm with fixed statistics is part of the layer before it."""
    scales_loss: bool = False
    """In training, a GradScaler asks the host whether to skip a step, unless the optimizer is fused."""
    quantizes: bool = False
    """Weights are replaced by coarser ones; only a check on real data can tell whether the accuracy is acceptable."""

    @classmethod
    def together(cls, parts: Iterable[Capabilities]) -> Capabilities:
        """Returns for a recipe what any of its switches does."""
        found = list(parts)
        return cls(**{name: any(getattr(part, name) for part in found) for name in cls.__struct_fields__})


SECONDS = ("import_s", "start_s", "build_s", "first_call_s", "compile_s")


class ColdStart(Frozen, rename={name: name.removesuffix("_s") for name in SECONDS}):
    """These are the seconds that passed before the steady state. Documents call the whole `cold_start_s` and its parts without the unit."""

    import_s: Seconds | None = None
    """Importing torch took so long. In a forked worker this is what the supervisor paid once."""
    start_s: Seconds | None = None
    """It took so long from the request to a worker that answers."""
    build_s: Seconds | None = None
    """Making the model and moving it to the device took so long."""
    first_call_s: Seconds | None = None
    """The first step under the recipe took so long, compiling included."""
    compile_s: Seconds | None = None
    """The compiler's share of it is this, where the recipe compiles."""
    compile_cache: Literal["cold", "warm", "mixed"] | None = None
    graph_breaks: Count | None = None
    """The compiler had to stop and begin again so often. It is None where the recipe does not compile."""
    contended: bool = False
    """Others were prepared at the same time: alone, these seconds would have been fewer."""
    shared: bool = False
    """If True, other processes compiled some of its blocks at the same time: alone, compiling would have taken longer."""


TOLERANCE_OVER_FLOOR = 4.0
"""A recipe may be off by so many times what rounding weights and inputs to its number format does; sound ones are off by one or two."""
LARGEST_TOLERANCE = 0.8
"""With a larger tolerance, a recipe that ignores its input (an error of 1 or more) would come close to passing."""


class Numerics(Frozen):
    """This says how far the recipe is from strict fp32 on fixed inputs, and whether that is near enough."""

    method: Literal["outputs", "loss-path", "tokens", "reference", "unchecked", "skipped"] = "outputs"
    """`reference`: this recipe is the strict fp32 reference itself. `unchecked`: the spec asked for no comparison.
    `skipped`: under a profiler from outside.
    """
    number_format: str = "fp32"
    rel_error: float | None = None
    """This is ‖Δ‖/‖y‖: the distance from the reference over the size of the reference. It is None in records of older versions, and
    where only integers or texts are compared."""
    rel_l2: float | None = None
    """This is the signal error: the distance over the part of the reference that depends on the input, which is stricter and what
    the verdict goes by. A value that is not finite is None here, and `finite` is False."""
    cosine: float | None = None
    top1_agreement: float | None = None
    finite: bool = True
    equal_share: float | None = None
    """This share of the integers, booleans and texts in the output equals the reference's. It is None where there are none."""
    by_equality: bool = False
    """The output holds nothing else that depends on the input: the error is the share that is unequal, over the share
    that another input changes."""
    degenerate: bool = False
    """If True, the reference carries no signal to compare with, or the number format cannot resolve it."""
    floor: float | None = None
    """This is the error of fp32 arithmetic on weights and inputs rounded to the recipe's number format."""
    tolerance: float | None = None
    passed: bool = False
    reason: Note | None = None
    second_inputs: SecondInputs | None = None
    """It is None where outputs were compared on one set of inputs alone, and for loss paths."""
    greedy_tokens: int | None = None
    """For a generation, this says how many new tokens were compared."""
    greedy_agreed: int | None = None
    """This many of those, from the first on, were the same in all sequences."""
    steps: int | None = None
    """It is the length of the loss path."""
    losses: tuple[float | None, ...] = ()
    reference_losses: tuple[float | None, ...] = ()
    sketch: tuple[float, ...] = ()
    """These are a few random projections of strict fp32's outputs, or of what a function returned, by which the outputs of two commits are
    compared. It is empty where they are not finite, or not the same when asked twice."""
    sketch_signal: float | None = None
    """This is the size of what varies in those outputs."""

    @property
    def is_compared(self) -> bool:
        """Returns whether it was compared with the reference: it was neither left out nor is it the reference itself."""
        return self.method in ("outputs", "loss-path", "tokens")

    @property
    def is_left_out(self) -> bool:
        return self.method in ("unchecked", "skipped")

    @property
    def is_wrong(self) -> bool:
        """Returns whether the outputs were found too far away; False where they were not checked."""
        return not self.passed and not self.is_left_out


class DeviceInfo(Frozen):
    kind: str
    """This is `cpu`, `cuda` or `rocm`."""
    index: int | None = None
    name: str = ""
    uuid: str | None = None
    driver: str | None = None
    memory_bytes: Count | None = None
    capability: str | None = None
    """This is the compute capability, or the gfx architecture on AMD."""
    multiprocessors: Count | None = None
    power_limit_w: Figure | None = None
    max_clock_hz: Figure | None = None
    ecc: bool | None = None
    mig: bool | None = None


class Environment(Frozen):
    """This holds everything worth knowing about the place of a measurement."""

    device: DeviceInfo
    hostname: str = ""
    platform: str = ""
    python: str = ""
    redline: str = ""
    cpu: str = ""
    physical_cores: Count | None = None
    logical_cores: Count | None = None
    affinity: tuple[int, ...] = ()
    governor: str | None = None
    memory_bytes: Count | None = None
    threads: Count | None = None
    interop_threads: Count | None = None
    versions: dict[str, str] = {}
    """These are the versions of torch, torchvision, cuda, hip, cudnn and triton, as far as those are there."""
    flags: dict[str, str] = {}
    """These are the global switches of torch as they stood while measuring."""
    variables: dict[str, str] = {}
    """These environment variables change speed."""
    git_commit: str | None = None
    git_dirty: bool | None = None
    git_committed_at: float | None = None
    """The commit was made then, in seconds since the epoch."""
    neighbours: tuple[str, ...] = ()
    """These other processes were seen on the GPU when the bench was opened."""


class Memory(Frozen):
    """Memory has many meanings, so each figure says which it is. It is None where the device has no such figure."""

    peak_allocated_bytes: Count | None = None
    """The model's tensors took so much at most."""
    peak_reserved_bytes: Count | None = None
    """The allocator took so much from the device at most. This must fit."""
    context_bytes: int | None = None
    """This is the driver's view minus what is reserved: the context and libraries."""
    peak_rss_bytes: Count | None = None
    peak_private_bytes: Count | None = None
    """On a CPU, this is the most that the worker has held for itself since it began. A memory limit counts this."""
    allocator_retries: Count | None = None
    resident_bytes: Count | None = None
    """This much is held between two steps: weights, optimizer state, inputs."""
    limit_bytes: Count | None = None
    """No more than this was to be had: it is the cap that was asked for, or what was free."""
    needed_bytes: Count | None = None
    """This is the least with which a step still ran, where that was tried. The allocator likes to take more."""


class TelemetrySample(Frozen):
    """This is one look at the device while a block ran."""

    at_s: Seconds
    """Seconds since the block began."""
    utilisation: Figure | None = None
    memory_used_bytes: Count | None = None
    power_w: Figure | None = None
    temperature_c: Figure | None = None
    clock_hz: Figure | None = None
    memory_clock_hz: Figure | None = None
    throttle: tuple[str, ...] = ()
    """Reasons the driver gives for a lowered clock."""
    foreign: tuple[str, ...] = ()
    """Processes on the GPU that are not ours."""


class WorkloadInfo(Frozen):
    source: str
    """This is torchvision, builtin, timm, hf, user or live."""
    class_name: str
    parameters: Count
    items_per_step: Items
    """Throughput counts so many items per step: the batch, the items that were declared, or 1 where the batch is unknown."""
    item: str = "item"
    """This is what is counted: img, seq, item, or step where the batch is unknown."""
    batch: Items | None = None
    """It is None if the batch is unknown."""
    batch_from: BatchOrigin = "unknown"
    input_shapes: tuple[str, ...] = ()
    """They are shown with their dtypes, as in `32×3×224×224 float32`."""
    image_size: int | None = None
    """The pictures Redline made have so many pixels per side. It is None for other inputs, and for pictures that are no squares."""
    sequence_length: int | None = None
    """The sequences Redline made have so many tokens or samples each."""
    loss: str = ""
    """In training, this names the loss that was trained on. It is empty where that is not known yet."""
    optimizer: str = ""
    """In training, this is the module's own optimizer, where it brings one."""
    model_hash: str = ""
    input_hash: str = ""
    notes: tuple[Note, ...] = ()


class RankInfo(Frozen):
    """This is one of several ranks that worked together."""

    rank: Items
    host: str
    local_rank: Items
    """It is counted from 0 on every machine."""
    device: DeviceInfo
    items_per_step: Items
    """This is its share of a step."""
    threads: Count | None = None


class Warmup(Frozen):
    """This is the way to the steady state, kept whole."""

    samples: tuple[Seconds, ...] = ()
    seconds: Seconds = 0.0
    steady: bool = False
    reason: Note | None = None


class Prepared(Frozen):
    """This is the reply to `Prepare`: all that is known before the first timed block."""

    environment: Environment
    workload: WorkloadInfo
    cold_start: ColdStart
    numerics: Numerics
    warmup: Warmup
    memory: Memory
    """These are the peaks of building, checking and warming up. Blocks carry their own."""
    recipe_notes: tuple[Note, ...] = ()
    """They say what switches did or could not do. Each is about its switch."""
    switches: dict[str, Capabilities] = {}
    """This says for each switch of the recipe what it does to the program."""
    step_synchronises: bool | None = None
    """If True, one step waits for the device by itself, and issue time then says nothing about the host."""
    operators_share: float | None = None
    """This share of an eager step on a CPU is spent in operators; the rest is Python. It is None where it was not looked at."""
    isolated: bool = True
    applicable: tuple[str, ...] = ()
    """Model and device allow these recipes, the most promising first. None of them was run."""
    work: WorkCount | None = None
    """These are the FLOPs and bytes of one step under this recipe's number formats. It is None where they were not counted."""
    data: DataInfo | None = None
    """A training on data has this."""
    ranks: tuple[RankInfo, ...] = ()
    """With several ranks, this has each. The batch and the items per step are those of all of them; work, times and memory are those of
    rank 0."""
    gradient_bytes: Count | None = None
    """Each rank sends so much per training step."""
    generation: GenerationInfo | None = None
    """A generation has this."""

    @property
    def capabilities(self) -> Capabilities:
        """Returns what the whole recipe does to the program."""
        return Capabilities.together(self.switches.values())


class RankBlock(Frozen):
    """This is what one of several ranks measured in a block."""

    rank: Items
    samples: tuple[Seconds, ...]
    phases: dict[str, tuple[Seconds, ...]] = {}
    alone: dict[str, tuple[Seconds, ...]] = {}
    wall_s: Seconds = 0.0
    cpu_s: Seconds | None = None
    waited_s: Seconds | None = None
    memory: Memory = Memory()


class Block(Frozen):
    """A block is a number of timed steps in a row."""

    kind: BlockKind
    clock: Literal["host", "device"]
    samples: tuple[Seconds, ...]
    """These are seconds per step. With the device clock they go from one step's end to the next, waiting included."""
    steps_per_sample: Items = 1
    """Above 1 each sample is the mean of so many steps: a GPU's marks would make short steps longer."""
    settling: tuple[Seconds, ...] = ()
    """These steps of the block's first moments are kept apart."""
    issue_s: tuple[Seconds, ...] = ()
    """The host took so many seconds to issue each step, settling steps first. It is empty where nothing runs asynchronously."""
    phases: dict[str, tuple[Seconds, ...]] = {}
    """For a training these are the seconds per step in forward, backward and optimizer. For a generation they are those in prefill and
    decode, one per sample. In a run these are further steps, and on data one step of ten, because marks would make the timed ones
    longer."""
    alone: dict[str, tuple[Seconds, ...]] = {}
    """For several ranks that average gradients, these are the seconds per phase of further steps in which this rank waited for no other. In all
    other steps every rank takes as long as the slowest."""
    token_s: tuple[Seconds, ...] = ()
    """For a generation, these are the seconds from each token to the next, of all samples in a row."""
    token_issue_s: tuple[Seconds, ...] = ()
    """For a generation, these are the host seconds to issue the first decode step of each sample, before the device holds the host up."""
    wall_s: Seconds = 0.0
    cpu_s: Seconds | None = None
    """The worker took so many CPU seconds meanwhile, all its threads together."""
    waited_s: Seconds | None = None
    """For so many seconds its threads were ready to run and had no processor. It is None where the system does not tell."""
    others_cpu_s: Seconds | None = None
    """Everything else on the machine took so many CPU seconds meanwhile."""
    busiest: tuple[str, ...] = ()
    """These are the busiest of the others, with their share."""
    started_at: Moment = 0.0
    round: Items = 0
    """Blocks of sibling sessions with the same round were measured next to each other."""
    solo: bool = False
    """If True, it was timed before any sibling session ran, where siblings were to come. The other blocks are contended."""
    memory: Memory = Memory()
    energy_j: Figure | None = None
    """With several ranks, this is the energy of all together."""
    telemetry: tuple[TelemetrySample, ...] = ()
    ranks: tuple[RankBlock, ...] = ()
    """With several ranks, this has each. The block itself is that of the slowest."""
    unit: Literal["s"] = "s"


class TraceRef(Frozen):
    """This says where a captured trace lies and what capturing cost, the profiler's start and the writing included."""

    path: str
    """Empty where the file is not in the folder of the history that the record came from; it is not opened then."""
    steps: Count
    capture_s: Seconds
    bytes: Count
    others: tuple[str, ...] = ()
    """These are the traces of further ranks, in their order."""


class Closed(Frozen):
    """This is the last word of a session."""

    memory: Memory = Memory()
    printed: str = ""
    """The worker, the model in it and libraries below them printed these last lines."""


DATA_PHASE = "data"
"""In this phase a step waits for its batch. The other phases are those of the training step."""
FedPart = Literal["loader", "model", "together"]
LastBatchFate = Literal["none", "run", "run eagerly", "dropped"]


class DataInfo(Frozen):
    """The data of a training as they turned out, and what was chosen because of them."""

    name: str
    train_samples: int
    val_samples: int
    classes: int | None = None
    """It is None if the targets are no classes."""
    shape: tuple[int, ...] = ()
    """One sample has this shape as the model sees it."""
    fingerprint: str = ""
    """It is made of names, sizes and the first samples, and says whether two trainings saw the same data."""
    stem: Stem | None = None
    """A ResNet has a stem. It is None for other models."""
    steps_per_epoch: int = 0
    last_batch: int = 0
    """The smaller batch that ends an epoch has so many samples. With 0 all are whole."""
    last_batch_fate: LastBatchFate = "none"
    learning_rate: float = 0.0
    """This is the highest of the schedule."""
    workers: int = 0
    augment: Augment = "none"
    random_labels: bool = False
    """Nothing can be learned: accuracy says nothing."""


class Epoch(Frozen):
    """An epoch is one pass over the training set, and over the held-out set after it."""

    number: int
    """Epochs are counted from 1."""
    seconds: float
    """This is the time of training and validation, by the wall clock."""
    train_s: float
    steps: int
    samples: int
    """It was trained on so many samples."""
    train_loss: float | None
    """This is the mean over the epoch. It is None if it is not finite."""
    validation_s: float = 0.0
    val_loss: float | None = None
    val_accuracy: float | None = None
    val_judged: int = 0
    """The accuracy is a share of so many held-out targets."""
    val_most_frequent: float | None = None
    """This is the share of the most frequent class among them: the accuracy of always naming that one."""
    val_batches: int = 0
    val_batches_not_finite: int = 0
    """This many held-out batches had a loss that was no number. The validation loss is then unknown."""
    trainable: int = 0
    """The optimizer may change so many tensors."""
    unchanged: int = 0
    """This many of them were the same after the epoch as before."""
    learning_rate: float = 0.0
    """This is that of the last step."""
    phases_s: dict[str, float] = {}
    """These are the seconds of all steps together, by phase; `data` is waiting for batches. The other phases are timed in some of the
    steps, and divide the time of all."""
    host_wait_s: float = 0.0
    """The host was blocked on the loader for so long. On a GPU this need not hold the device up."""
    gradient_scale: float | None = None
    """This is GradScaler's scale at the end. It is None where gradients are not scaled."""
    peak_bytes: int | None = None
    """This much must fit: on a GPU what the allocator reserved, on a CPU the resident memory."""
    utilisation: float | None = None
    """This is the mean of the looks at the device."""
    energy_j: float | None = None
    """It was measured during training only, as was the utilisation."""
    is_cut: bool = False
    """If True, the epoch ended before its last batch, because the time was over."""

    @property
    def samples_per_s(self) -> float | None:
        """Returns samples per second of training, without validation."""
        return self.samples / self.train_s if self.train_s > 0 else None

    @property
    def samples_per_s_with_validation(self) -> float | None:
        """Returns samples per second, with the time of validation."""
        return self.samples / self.seconds if self.seconds > 0 else None

    @property
    def data_wait_share(self) -> float | None:
        """Returns the share of the training time in which no batch was there to work on."""
        whole = sum(self.phases_s.values())
        return self.phases_s[DATA_PHASE] / whole if whole > 0 and DATA_PHASE in self.phases_s else None


def steady_epochs(epochs: Sequence[Epoch]) -> list[Epoch]:
    """Epochs that speeds are computed from: not the first, which pays for start-up, nor an incomplete one."""
    whole = [epoch for epoch in epochs if not epoch.is_cut]
    return whole[1:] or whole or list(epochs)


def wait_share(epochs: Sequence[Epoch]) -> float | None:
    """Returns the share of the training time of all epochs."""
    whole = sum(sum(epoch.phases_s.values()) for epoch in epochs)
    return sum(epoch.phases_s.get(DATA_PHASE, 0.0) for epoch in epochs) / whole if whole > 0 else None


class Fed(Frozen):
    """A stretch of loading alone, of the model alone on batches that are there already, or of both."""

    part: FedPart
    samples: int
    seconds: float
    wait_s: float = 0.0
    """With both together, the device had no batch for so many seconds."""
    workers: int = 0
    prefetch: bool = True

    @property
    def per_s(self) -> float:
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def wait_share(self) -> float:
        return self.wait_s / self.seconds if self.seconds > 0 else 0.0


PHASES = ("data", "copy", "forward", "backward", "optimizer", "acting", "saving", "other")
"""The time of a watched step is split into these. Together they are all of it."""


class WatchFinding(Frozen):
    """This is something that costs time or memory in a watched script, with what to change about it."""

    code: str
    text: str
    change: str
    """This is to be changed in the script."""
    gain_bound: Figure
    """The steps can become at most so many times faster. It is 1 where it is not about speed."""


class Window(Frozen):
    """A few steps that were profiled while the script ran."""

    at_s: Seconds
    """It is counted from the first step."""
    step: Count
    steps: Count
    step_s: Seconds | None = None
    """This is the median of the steps around it, without the profiler."""
    trace: str = ""
    """The path is relative to the history's folder. It is empty where the trace was not kept."""
    top: tuple[str, ...] = ()
    """These are the codes of its findings, the most costly first."""


class Rates(Frozen):
    """This says how fast a training goes, and where its time goes. Some steps do not count: those that compile or are profiled."""

    steps: Count = 0
    samples: Figure = 0.0
    """They are counted over all ranks."""
    steps_per_s: Figure | None = None
    """This is the rate of the steps that count."""
    whole_steps_per_s: Figure | None = None
    """This is the rate of all steps, over the whole run."""
    samples_per_s: Figure | None = None
    counted_s: Seconds = 0.0
    """The steps that count took so long."""
    shares: dict[str, Figure] = {}
    """These are shares of the time of the steps that count."""
    host_shares: dict[str, Figure] = {}
    """These are the same by the host's clock, while the device may be busy with something else."""
    run_s: dict[str, Figure] = {}
    """These are the seconds of the whole run: by phase for the steps that count, with validation, first steps and profiling."""
    device_clock: bool = False
    """If True, the shares are of the device's time, not of the host's."""
    first_step_s: Seconds | None = None
    first_steps: Count = 0
    """This many leading steps are left out of the rate."""
    outliers: Count = 0
    """This many steps took more than twice the median."""
    outlier_share: Figure | None = None
    """This is the share of the time that they took beyond the median."""
    loss: Figure | None = None
    """This is the last one seen."""


class Watched(Rates):
    """This is a training script that ran under `redline watch`, or a loop inside `redline.watch()`."""

    command: tuple[str, ...] = ()
    exit_code: int | None = None
    """It is minus the signal's number where a signal ended the script, and None within a program that goes on."""
    started_at: Moment = 0.0
    seconds: Seconds = 0.0
    """It lasted so long from the first step's beginning to the last one's end."""
    ranks: Count = 1
    paused_s: Seconds = 0.0
    """Evaluation between steps and profiling took so long."""
    gpu_utilisation: Figure | None = None
    energy_j: Figure | None = None
    power_w: Figure | None = None
    peak_bytes: Count | None = None
    """On a GPU this is what was reserved, on a CPU the resident memory of all its processes."""
    findings: tuple[WatchFinding, ...] = ()
    windows: tuple[Window, ...] = ()


class RunRecord(Frozen):
    """A record is one measured thing, whole."""

    id: str
    spec: RunSpec
    schema: int = SCHEMA
    benchmark_version: str = BENCHMARK_VERSION
    key: str | None = None
    """It is None when the bench broke before it could say what it measures."""
    created_at: Moment = 0.0
    group: str | None = None
    """Records measured interleaved share it; the first of a group is what the others are set against."""
    position: Items = 0
    prepared: Prepared | None = None
    blocks: tuple[Block, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    """A training on data has these. The steps of an epoch are the block whose round is its number."""
    feeds: tuple[Fed, ...] = ()
    """Loader and model, apart and together, where that was asked for."""
    loads: tuple[Served, ...] = ()
    """For a load, this is what was served at each rate."""
    watched: Watched | None = None
    """A script that was watched has this. The steps are its own, found while it ran."""
    trace: TraceRef | None = None
    closed: Closed | None = None
    stopped: StopReason | None = None
    failure: Failure | None = None
    notes: tuple[Note, ...] = ()


def new_id() -> str:
    """Sorts by time, unique across writers: hexadecimal milliseconds and 40 random bits."""
    return f"{time.time_ns() // 1_000_000:011x}{secrets.token_hex(5)}"


def device_of(record: RunRecord) -> str:
    """Returns the device as it was asked for; `auto` is what it turned out to be, once the bench has said so."""
    if record.spec.device != "auto" or record.prepared is None:
        return record.spec.device
    device = record.prepared.environment.device
    return device.kind if device.index is None else f"{device.kind}:{device.index}"


def device_name(record: RunRecord) -> str:
    """Returns the device's own name, as its driver gives it. It is empty where the bench never said it."""
    return record.prepared.environment.device.name if record.prepared else ""
