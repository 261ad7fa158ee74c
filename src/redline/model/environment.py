"""Where a measurement ran and what it took there: the device, the machine, memory, and looks at the device meanwhile."""

from __future__ import annotations

from redline.model.fields import Count, Figure, Frozen, Seconds


class DeviceInfo(Frozen):
    kind: str
    """`cpu`, `cuda` or `rocm`."""
    index: int | None = None
    name: str = ""
    uuid: str | None = None
    driver: str | None = None
    memory_bytes: Count | None = None
    capability: str | None = None
    """Compute capability, or the gfx architecture on AMD."""
    multiprocessors: Count | None = None
    power_limit_w: Figure | None = None
    max_clock_hz: Figure | None = None
    ecc: bool | None = None
    mig: bool | None = None


class Environment(Frozen):
    """Everything worth knowing about the place of a measurement."""

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
    """torch, torchvision, cuda, hip, cudnn, triton: those that are there."""
    flags: dict[str, str] = {}
    """Global switches of torch as they stood while measuring."""
    variables: dict[str, str] = {}
    """Environment variables that change speed."""
    git_commit: str | None = None
    git_dirty: bool | None = None
    git_committed_at: float | None = None
    """When the commit was made, in seconds since the epoch."""
    neighbours: tuple[str, ...] = ()
    """Other processes seen on the GPU when the bench was opened."""


class Memory(Frozen):
    """Never one word for all. None where the device has no such figure."""

    peak_allocated_bytes: Count | None = None
    """What the model's tensors took."""
    peak_reserved_bytes: Count | None = None
    """What the allocator took from the device: this must fit."""
    context_bytes: int | None = None
    """The driver's view minus reserved: context and libraries."""
    peak_rss_bytes: Count | None = None
    peak_private_bytes: Count | None = None
    """CPU: the most the worker has held for itself since it began; what a memory limit counts."""
    allocator_retries: Count | None = None
    resident_bytes: Count | None = None
    """Held between two steps: weights, optimizer state, inputs."""
    limit_bytes: Count | None = None
    """The most there was to be had: the cap that was asked for, or what was free."""
    needed_bytes: Count | None = None
    """The least with which a step still ran, where that was tried; the allocator likes to take more."""


class TelemetrySample(Frozen):
    """One look at the device while a block ran."""

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
