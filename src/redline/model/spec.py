"""Specs say what to measure. They are frozen, refuse unknown fields, and come from flags, from TOML files and from Python."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec

from redline.model.arrivals import LoadSpec
from redline.model.errors import SpecError
from redline.model.fields import (
    MOST_BYTES,
    MOST_ITEMS,
    MOST_PIXELS,
    MOST_RANKS,
    MOST_ROWS,
    MOST_THREADS,
    SEEDS,
    Frozen,
    require_choice,
    require_range,
    require_seconds,
    require_unicode,
    split_address,
)
from redline.model.settings import DATA, WHAT, check_settings, setting

Task = Literal["infer", "train", "step", "generate"]
"""`step`: a function of the user's, timed as it is."""
Effort = Literal["quick", "normal", "strict"]
DoorName = Literal["inline", "fork", "spawn", "torchrun", "fake"]
OptimizerName = Literal["sgd", "adam", "adamw"]
OptionValue = bool | int | float | str
Stem = Literal["imagenet", "cifar"]

BASELINE = "baseline"
"""This is the recipe without switches: strict fp32, eager."""

DEFAULT_PROMPT, DEFAULT_NEW_TOKENS = 128, 32
"""These are the defaults of generation."""


class Switch(Frozen):
    """A switch is one optimisation: `compile:reduce-overhead,fullgraph=true` is name, argument and options."""

    name: str
    argument: str | None = None
    options: dict[str, OptionValue] = {}

    def __str__(self) -> str:
        words = [self.argument] if self.argument else []
        words += [f"{key}={_option_text(value)}" for key, value in sorted(self.options.items())]
        return f"{self.name}:{','.join(words)}" if words else self.name


REMOVED_SWITCHES = {
    "fp16-bn-fp32": "use fp16, which is as fast",
    "cache-dtype": "leave it out, as it made no token faster",
    "prefill-chunk": "leave it out, as it made no prompt faster",
    "pool-gradients": "leave it out; it brought 2 to 4 %, and only where a training step has max pooling",
    "graphs:parts": "use compile:reduce-overhead, which records what lies between the reads",
    "int4": "use int8:weight-only or fp8:weight-only",
    "decode-kernels:linear": "use decode-kernels, which is just that",
    "decode-kernels:attention": "use one of sdpa:flash, sdpa:efficient and sdpa:cudnn",
    **dict.fromkeys(
        ("gradient-as-bucket-view", "static-graph", "bucket-size"),
        "leave it out, as no step was ever measured to gain by it",
    ),
    "expandable-segments": "set PYTORCH_ALLOC_CONF=expandable_segments:True in the environment",
}
"""Recipes of older records name these switches, and the text says what to use instead. `docs/results/switches.md` says why they went."""


def refuse_removed(switch: Switch) -> None:
    """Raises an error that says what to use in place of a switch that Redline once had."""
    name = f"{switch.name}:{switch.argument}"
    removed = name if name in REMOVED_SWITCHES else switch.name
    if removed in REMOVED_SWITCHES:
        raise SpecError(f"switch {removed} was removed: {REMOVED_SWITCHES[removed]}")


class Recipe(Frozen):
    """A recipe is a set of switches. The order in which they are written does not matter; the bench knows which comes first."""

    switches: tuple[Switch, ...] = ()

    def __str__(self) -> str:
        return "+".join(str(switch) for switch in self.switches) or BASELINE

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """Reads `fp16+channels-last+compile:max-autotune,fullgraph=true`; `baseline` is strict fp32, eager."""
        require_unicode("recipe", text)
        words = [word.strip() for word in text.split("+")]
        if not all(words):
            raise SpecError(f"recipe {text!r} has an empty switch: write switches joined by '+', or 'baseline'")
        switches = tuple(_parse_switch(word) for word in words)
        names = [switch.name for switch in switches]
        if BASELINE in names:
            if words != [BASELINE]:
                raise SpecError(f"recipe {text!r}: baseline means no switches, so it cannot be joined with others")
            return cls()
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise SpecError(f"recipe {text!r} names {', '.join(sorted(twice))} twice")
        return cls(switches=switches)

    def canonical(self) -> str:
        """Returns the same text for the same switches in any order."""
        return "+".join(sorted(str(switch) for switch in self.switches)) or BASELINE


class WorkloadSpec(Frozen):
    """This says which model does what, on how much."""

    model: str
    """This is a torchvision name, `timm:NAME`, `hf:NAME`, `path/to/file.py:factory` or `package.module:factory`."""
    task: Annotated[
        Task,
        setting(
            "What a step is: inference, a training step, a function of yours timed as it is, or text generation.",
            group=WHAT,
        ),
    ] = "infer"
    batch: Annotated[
        int | None,
        setting("Items per step. Default: the model's own.", short="-b", group=WHAT, least=1, most=MOST_ITEMS),
    ] = None
    batch_axis: Annotated[
        int | str | list[Any] | dict[str, Any] | None,
        setting(
            "The axis along which your own inputs hold their items. Default: found by running the model.",
            group=WHAT,
            kind=int,
        ),
    ] = None
    """Only older records hold a structure of axes."""
    items: Annotated[
        int | None,
        setting(
            "Items that one step counts as, if not the batch: packed tokens, nodes.",
            group=WHAT,
            least=1,
            most=MOST_ITEMS,
        ),
    ] = None
    image_size: Annotated[
        int | None, setting("Pixels per side. Default: the model's own size.", group=WHAT, least=1, most=MOST_PIXELS)
    ] = None
    classes: Annotated[
        int | None, setting("Output classes. Default: 1000, or the model's own.", group=WHAT, least=1, most=MOST_ITEMS)
    ] = None
    sequence_length: Annotated[
        int | None, setting("Tokens per sequence, for models that take tokens.", group=WHAT, least=1, most=MOST_ITEMS)
    ] = None
    prompt: Annotated[
        int | None,
        setting(
            f"Tokens read before the first is written. Default: {DEFAULT_PROMPT}.", group=WHAT, least=1, most=MOST_ITEMS
        ),
    ] = None
    new_tokens: Annotated[
        int | None,
        setting(f"Tokens written per sequence. Default: {DEFAULT_NEW_TOKENS}.", group=WHAT, least=1, most=MOST_ITEMS),
    ] = None
    optimizer: Annotated[OptimizerName, setting("Optimizer of a training step.", group=WHAT)] = "sgd"
    stem: Annotated[
        Stem | None,
        setting(
            "First layers of a ResNet: imagenet halves the image twice, cifar keeps small images whole. Default: imagenet; cifar for "
            "training on data of 32 pixels or less.",
            group=WHAT,
        ),
    ] = None
    artifact: str | None = None
    """A live model has the path of its cloudpickled (module, inputs, loss) here; `model` then carries its name."""

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("prompt", "new_tokens"):
            if getattr(self, name) is not None and self.task != "generate":
                raise SpecError(f"{name} is for task generate, not for {self.task}")
        if not self.model.strip():
            raise SpecError("model must not be empty")
        require_unicode("model", self.model)


class MeasureSpec(Frozen):
    """This says how long to measure, and when to stop. `for_effort` fills it in; single fields may be set by hand."""

    effort: Annotated[
        Effort,
        setting(
            "How narrow the 95% interval must get, and how long to try: quick 3% (CPU 10%) within 10 s, normal 1% (CPU 5%) within "
            "60 s, strict 0.5% (CPU 3%) within 60 s."
        ),
    ] = "normal"
    target_half_width: float = 0.01
    """Stop when the 95 % interval of the median is this narrow, relative to the median."""
    cpu_target_half_width: float = 0.05
    """The same on a CPU, which is shared and never reaches 1 %."""
    min_samples: int = 30
    tail_samples: int = 130
    """Inference goes on until it has this many latency samples, within the ceiling, so that p95 (130) or p99 (662) exists."""
    max_seconds: float = 60.0
    """Timed blocks of a session take at most so long; reaching it is recorded as the reason for stopping."""
    block_seconds: float = 0.25
    settle_seconds: float = 0.02
    """Steps in this first part of a block are kept apart: a neighbour's idle threads may still spin."""
    min_rounds: int = 8
    """A ratio gets an interval only after this many interleaved rounds."""
    warmup_min_seconds: float = 1.0
    warmup_min_steps: int = 3
    warmup_max_seconds: float = 60.0
    warmup_window: int = 10
    """Two windows of at least this many steps must agree before the state counts as steady."""
    warmup_window_seconds: float = 0.5
    """The windows must also be at least this long, because a slow drift does not show in a few milliseconds."""
    loss_path_steps: int = 20
    """The numerics of a training compare the loss over this many steps."""
    check_numerics: bool = True
    """If False, the comparison with fp32 is left out."""
    sparing: bool = False
    """If True, this is a trial near the edge of memory: nothing runs on the device that a plain loop would not run."""
    squeeze_memory: bool = False
    """If True, the least memory with which the step still runs is looked for after timing. Only devices whose allocator can be capped allow
    that."""

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("target_half_width", "cpu_target_half_width"):
            if not getattr(self, name) > 0:
                raise SpecError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("max_seconds", "block_seconds", "warmup_max_seconds"):
            require_seconds(name, getattr(self, name))
        for name in ("min_samples", "tail_samples", "min_rounds", "warmup_window", "loss_path_steps"):
            require_range(name, getattr(self, name), 1, MOST_ITEMS)
        for name in ("settle_seconds", "warmup_min_seconds", "warmup_window_seconds"):
            require_seconds(name, getattr(self, name), zero_too=True)
        require_range("warmup_min_steps", self.warmup_min_steps, 0, MOST_ITEMS)

    @classmethod
    def for_effort(cls, effort: Effort = "normal", *, tail: bool = False) -> MeasureSpec:
        require_choice("effort", effort, Effort)
        presets: dict[str, MeasureSpec] = {
            "quick": cls(
                effort="quick",
                target_half_width=0.03,
                cpu_target_half_width=0.10,
                min_samples=10,
                tail_samples=10,
                max_seconds=10.0,
                min_rounds=5,
                warmup_min_seconds=0.3,
                warmup_min_steps=2,
                warmup_max_seconds=10.0,
                warmup_window=3,
                warmup_window_seconds=0.1,
                loss_path_steps=5,
            ),
            "normal": cls(),
            "strict": cls(effort="strict", target_half_width=0.005, cpu_target_half_width=0.03, min_rounds=12),
        }
        spec = presets[effort]
        return msgspec.structs.replace(spec, tail_samples=662) if tail else spec


class LaunchSpec(Frozen):
    """Through which door the bench is opened, and how long it may take to answer."""

    door: Annotated[
        DoorName, setting("How workers are started; torchrun for several ranks.", shape="[fork|spawn|inline|torchrun]")
    ] = "fork"
    prepare_timeout_s: float = 1800.0
    measure_timeout_s: float = 300.0
    """One block may take so long; a block that takes this long hangs."""
    close_timeout_s: float = 20.0
    """A worker has so many seconds to exit after Close. A profiler in front of it may still have files to write."""
    command_prefix: tuple[str, ...] = ()
    """These words are put in front of a spawned interpreter, such as a vendor profiler or numactl."""
    folder: str = ""
    """The worker stands in this other checkout, and imports its modules first. If it is empty, the worker stands where the command does."""
    python: str = ""
    """A spawned worker uses this interpreter, that of another environment. If it is empty, it uses the one that runs Redline."""
    memory_limit_bytes: int | None = None
    """We measure as if the device had this much: GPUs cap torch's allocator, CPU workers their private memory.

    With None it is what is free when the worker starts. It is part of what was measured, because it decides what fits.
    """

    port: int | None = None
    """The ranks on this machine meet at this port. With None a free port is chosen."""
    rendezvous: Annotated[
        str | None,
        setting(
            "Address to wait at for ranks that torchrun starts on other machines (docs/clusters.md).", shape="HOST:PORT"
        ),
    ] = None

    def __post_init__(self) -> None:
        check_settings(self)
        require_range("port", self.port, 1, 65535)
        if self.rendezvous is not None:
            split_address("rendezvous", self.rendezvous)
            if self.door != "torchrun":
                raise SpecError(f"rendezvous is for the torchrun door, got door {self.door!r}")
        for name in ("prepare_timeout_s", "measure_timeout_s", "close_timeout_s"):
            require_seconds(name, getattr(self, name))
        require_range("memory_limit_bytes", self.memory_limit_bytes, 1, MOST_BYTES)
        if self.command_prefix and self.door != "spawn":
            raise SpecError(f"command_prefix needs the spawn door, got door {self.door!r}")
        if self.python and self.door != "spawn":
            raise SpecError(f"another python needs the spawn door, got door {self.door!r}")
        if self.folder and self.door == "inline":
            raise SpecError("another folder needs a worker of its own: the fork or the spawn door")


Schedule = Literal["constant", "cosine", "one-cycle"]
Augment = Literal["none", "host", "device"]
LastBatch = Literal["run", "drop"]


class DataSpec(Frozen):
    """This says which data a training sees, and how they reach the device."""

    name: str
    """This is `cifar10`, `imagefolder`, `synthetic`, `synthetic-learnable`, or the user's own as `file.py:loaders`."""
    folder: Annotated[
        str | None,
        setting(
            "Folder of cifar10 or imagefolder. Its pickles are read, so it must be one you trust.",
            shape="DIR",
            group=DATA,
        ),
    ] = None
    train_samples: Annotated[
        int | None, setting("Train on this many samples only.", group=DATA, least=1, most=MOST_ITEMS)
    ] = None
    val_samples: Annotated[
        int | None, setting("Validate on this many samples only.", group=DATA, least=1, most=MOST_ITEMS)
    ] = None
    workers: Annotated[
        int,
        setting(
            "Processes that load batches; with 0 the training process loads them itself.",
            group=DATA,
            least=0,
            most=MOST_THREADS,
        ),
    ] = 0
    pin_memory: Annotated[
        bool, setting("Keep batches page-locked, so that a GPU copies them without waiting.", group=DATA)
    ] = True
    persistent_workers: Annotated[bool, setting("Keep the workers from one epoch to the next.", group=DATA)] = True
    prefetch_factor: Annotated[
        int, setting("Batches each worker keeps ready.", group=DATA, least=1, most=MOST_ITEMS)
    ] = 2
    prefetch: Annotated[
        bool,
        setting("Load and copy the next batch while this one computes, rather than one after the other.", group=DATA),
    ] = True
    on_device: Annotated[bool, setting("Keep the whole set in the device's memory.", group=DATA)] = False
    augment: Annotated[
        Augment, setting("Random shifts and mirror images, and where they are computed.", group=DATA)
    ] = "none"
    download: Annotated[bool, setting("Fetch CIFAR-10 into --folder first.", group=DATA)] = False
    loader_timeout_s: Annotated[
        float,
        setting(
            "Seconds without a batch after which the loader counts as hung.", option="--loader-timeout", group=DATA
        ),
    ] = 60.0

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.loader_timeout_s > 0:
            raise SpecError(f"loader_timeout_s must be above 0, got {self.loader_timeout_s}")
        if self.on_device and (self.workers or self.augment == "host"):
            raise SpecError("data on the device pass no loader: leave out workers, and augment on the device")


class TrainSpec(Frozen):
    """This asks for a training on data, for epochs, to an accuracy."""

    data: DataSpec
    epochs: Annotated[int, setting("Number of epochs.", short="-e", least=1, most=MOST_ROWS)] = 1
    learning_rate: Annotated[
        float | None, setting("Highest learning rate. Default: SGD 0.1 per 256 samples, Adam 0.001.", short="--lr")
    ] = None
    weight_decay: Annotated[float, setting("Weight decay.")] = 5e-4
    schedule: Annotated[Schedule, setting("Schedule of the learning rate.")] = "one-cycle"
    target_accuracy: Annotated[
        float | None, setting("Stop after the epoch that reaches this accuracy, such as 0.9, and say when.")
    ] = None
    last_batch: Annotated[
        LastBatch,
        setting("What to do with the smaller last batch of an epoch; compiled and graphed recipes run it eagerly."),
    ] = "run"
    max_seconds: Annotated[
        float | None,
        setting("Stop training after this many seconds, even within an epoch, which is recorded as incomplete."),
    ] = None
    deterministic: Annotated[
        bool, setting("Use algorithms that give the same bits again, also on a GPU; some are slower.")
    ] = False

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("learning_rate", "max_seconds"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise SpecError(f"{name} must be above 0, got {value}")
        if not 0 <= self.weight_decay < math.inf:
            raise SpecError(f"weight_decay must not be negative, got {self.weight_decay}")
        if self.target_accuracy is not None and not 0 < self.target_accuracy <= 1:
            raise SpecError(f"target_accuracy must be above 0 and at most 1, got {self.target_accuracy}")


class RunSpec(Frozen):
    """A spec is one thing to measure: a workload under a recipe on a device."""

    workload: WorkloadSpec
    recipe: Recipe = Recipe()
    measure: MeasureSpec = MeasureSpec()
    launch: LaunchSpec = LaunchSpec()
    device: Annotated[
        str,
        setting(
            "Where to measure; auto is a GPU if there is one.", shape="[auto|cpu|cuda|cuda:N|rocm|rocm:N]", group=WHAT
        ),
    ] = "auto"
    threads: Annotated[
        int | None,
        setting("CPU threads inside operators. Default: torch's own choice.", group=WHAT, least=1, most=MOST_THREADS),
    ] = None
    seed: Annotated[int, setting("Seed for weights and inputs.", group=WHAT, least=SEEDS[0], most=SEEDS[1])] = 0
    train: TrainSpec | None = None
    """If given, epochs on data are run instead of timed steps on one batch."""
    load: LoadSpec | None = None
    """If given, requests arrive by themselves, instead of timed steps one after the other."""
    ranks: Annotated[
        int,
        setting(
            "Processes that work together, one per GPU: DDP for training, replicas for inference. The batch is then the total over "
            "all of them.",
            group=WHAT,
            least=1,
            most=MOST_RANKS,
        ),
    ] = 1

    def __post_init__(self) -> None:
        if self.load is not None and self.workload.task != "infer":
            raise SpecError(f"a load is served by task 'infer', got {self.workload.task!r}")
        check_settings(self)
        if self.ranks > 1:
            self._check_ranks()
        if self.train is not None and self.workload.task != "train":
            raise SpecError(f"epochs on data are for task 'train', got {self.workload.task!r}")
        require_unicode("device", self.device)

    def _check_ranks(self) -> None:
        if self.launch.door not in ("torchrun", "fork", "fake"):
            raise SpecError(f"{self.ranks} ranks need the torchrun or the fork door, got door {self.launch.door!r}")
        if self.train is not None:
            raise SpecError("epochs on data run on one rank: leave out ranks, or time steps with task 'train'")
        if self.load is not None or self.workload.task == "step":
            raise SpecError("a load, and a step of your own, run on one rank: leave out ranks")
        batch = self.workload.batch
        if batch is not None and batch < self.ranks:
            raise SpecError(f"batch {batch} leaves nothing for {self.ranks - batch} of {self.ranks} ranks")


def _parse_switch(word: str) -> Switch:
    name, colon, rest = word.partition(":")
    if not name.strip():
        raise SpecError(f"switch {word!r} has no name before ':'")
    if colon and not rest:
        raise SpecError(f"switch {word!r} ends in ':' without an argument")
    argument: str | None = None
    options: dict[str, OptionValue] = {}
    for position, part in enumerate(rest.split(",") if rest else []):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key in options:
            raise SpecError(f"switch {word!r} gives {key} twice")
        if equals and key:
            options[key] = _option_value(value)
        elif position == 0 and key:
            argument = key
        else:
            raise SpecError(f"switch {word!r}: expected key=value, got {part!r}")
    return Switch(name=name.strip(), argument=argument, options=options)


def _option_value(text: str) -> OptionValue:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        # A number stays the text that was written if no message can carry it, or if it is equal to nothing, as NaN is.
        fits = -(2**63) <= number < 2**63 if isinstance(number, int) else math.isfinite(number)
        return number if fits else text
    return text


def _option_text(value: OptionValue) -> str:
    if isinstance(value, float):
        return repr(value).replace("e+", "e")  # in a recipe '+' joins switches
    return str(value).lower() if isinstance(value, bool) else str(value)
