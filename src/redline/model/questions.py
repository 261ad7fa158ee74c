"""What the desk may ask of the bench that needs torch but no run: the questions, and their answers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from redline.model.environment import DeviceInfo, Environment
from redline.model.fields import Frozen
from redline.model.note import Note
from redline.model.record import Capabilities, WorkloadInfo
from redline.model.spec import RunSpec
from redline.model.work import Ceilings, Facts, MemoryUse, OperatorTime, WorkCount

Relief = Literal["host", "device", "both", "memory"]
"""What a switch relieves: a host that cannot launch fast enough, a device that is busy, both, or memory: then it makes a
step slower rather than faster, and pays where a larger batch does."""


class AskEnvironment(Frozen, tag=True):
    """What is this machine, seen from torch?"""

    device: str = "auto"
    threads: int | None = None


class AskModels(Frozen, tag=True):
    """Which models go by name?"""

    pattern: str | None = None


class AskCheck(Frozen, tag=True):
    """Could these specs run here? Resolves `auto` devices; builds nothing."""

    specs: tuple[RunSpec, ...]


class AskHealth(Frozen, tag=True):
    """What does torch say about itself: build, visible devices, a compiler that works?"""


class AskSwitches(Frozen, tag=True):
    """What does one step of this workload do, and which switches could it be given here? Runs a few steps of it on its
    device, in strict fp32; the spec's recipe is ignored."""

    spec: RunSpec


class AskCount(Frozen, tag=True):
    """How much work is one step? Builds the model without its memory where that can be; needs no device."""

    spec: RunSpec


class AskMemory(Frozen, tag=True):
    """What does one step of this workload under the spec's recipe hold in memory, and who holds it? Runs two steps."""

    spec: RunSpec
    snapshot: str | None = None
    """Where to write what was held when memory runs out, without a suffix."""


class AskSnippet(Frozen, tag=True):
    """The spec's recipe as plain PyTorch, for people who do not have Redline installed."""

    spec: RunSpec


class AskMetric(Frozen, tag=True):
    """What does the user's own check say about the workload under the spec's recipe, and about it without any?"""

    spec: RunSpec
    check: str
    """`file.py:function`, `package.module:function` or `pickle:PATH`: from a model to a number, higher is better."""
    baseline: float | None = None
    """What it says about the workload without any recipe, where that is known already."""


class AskCeilings(Frozen, tag=True):
    """How fast is this device at its best? Takes seconds, and the device to itself."""

    device: str = "auto"
    threads: int | None = None


OperatorName = Literal["matmul", "conv", "attention", "norm", "elementwise"]


class OperatorCase(Frozen):
    """One operator at one size in one number format."""

    operator: OperatorName
    shape: tuple[int, ...]
    number_format: str = "fp32"


class AskOperators(Frozen, tag=True):
    """How fast are these operators by themselves, or those that the model of a spec calls?"""

    device: str = "auto"
    threads: int | None = None
    cases: tuple[OperatorCase, ...] = ()
    spec: RunSpec | None = None
    """None: the cases. Else the operators of one forward of this model, and the cases are ignored."""


Question = (
    AskEnvironment
    | AskModels
    | AskCheck
    | AskHealth
    | AskSwitches
    | AskSnippet
    | AskCount
    | AskCeilings
    | AskMetric
    | AskOperators
    | AskMemory
)


class ModelName(Frozen):
    name: str
    source: str
    kind: str = ""


class ModelNames(Frozen, tag=True):
    models: tuple[ModelName, ...]
    missing: tuple[str, ...] = ()
    """Sources whose package is not installed, with how to get it."""


class Checked(Frozen):
    """The answer for one spec: the spec with its device resolved, or why it cannot be."""

    spec: RunSpec
    usage: str | None = None
    """A mistake of the person: nothing can run."""
    fingerprint: str = ""
    """What is known of the model before it is built: the version of its library, a hash of the user's files."""
    capabilities: Capabilities = Capabilities()
    """Of the spec's recipe."""


class CheckedSpecs(Frozen, tag=True):
    answers: tuple[Checked, ...]


class HealthItem(Frozen):
    """One thing looked at: fine or not, what was seen, how to fix it."""

    name: str
    ok: bool | None
    """None: absent, and only needed for some features."""
    seen: str
    mend: str = ""


class Health(Frozen, tag=True):
    items: tuple[HealthItem, ...]
    devices: tuple[DeviceInfo, ...] = ()


class SwitchNeed(Frozen):
    """What a switch needs, always or once another is in the recipe too."""

    wants: tuple[str, ...]
    """One of these must be in the recipe as well, each as `name` or `name:argument`."""
    reason: str
    """Why, and what to do about it."""
    beside: str | None = None
    """Only where this one is in the recipe; None: always."""

    def is_met(self, names: Collection[str]) -> bool:
        """In a recipe of switches with these names."""
        return (self.beside is not None and self.beside not in names) or any(name in names for name in self.wants)


class SwitchChoice(Frozen):
    """One switch as the tuner may put it into a recipe."""

    switch: str
    """As it stands in a recipe: `fp16`, `compile:freeze`."""
    family: str
    """A recipe has at most one switch of a family."""
    relieves: Relief = "device"
    excludes: tuple[str, ...] = ()
    """Switches (`compile`, or only `compile:reduce-overhead`) it cannot stand beside; both sides of an exclusion tell it."""
    needs: tuple[SwitchNeed, ...] = ()
    """For the task that was asked about."""
    refusal: Note | None = None
    """Why it cannot be had here, or would change nothing about this model; None: it can be tried."""
    capabilities: Capabilities = Capabilities()
    """What quantizes is never tried unless asked for."""
    leaves_program: bool = False
    """What was compiled without it serves with it too: a recipe that only adds it finds the caches warm."""
    is_slow_to_prepare: bool = False
    """Minutes rather than seconds: only for those who have them."""
    prepare_s: float | None = None
    """About how long that takes, where it is worth its time for this task; None: as usual."""
    is_doubtful: bool = False
    """It often does not run on models like this one."""
    expected_time: float | None = None
    """Time of a step with it over one without, by what the device was seen to need for products in its number format; None: not asked."""


class SwitchChoices(Frozen, tag=True):
    choices: tuple[SwitchChoice, ...]
    facts: Facts | None = None
    """None where a plain step of the workload does not fit into memory."""


class Snippet(Frozen, tag=True):
    code: str


class MetricAnswer(Frozen, tag=True):
    value: float
    baseline: float


class EnvironmentAnswer(Frozen, tag=True):
    environment: Environment


class CountAnswer(Frozen, tag=True):
    work: WorkCount
    workload: WorkloadInfo


class MemoryAnswer(Frozen, tag=True):
    use: MemoryUse
    workload: WorkloadInfo
    environment: Environment


class CeilingsAnswer(Frozen, tag=True):
    ceilings: Ceilings


class OperatorTimes(Frozen, tag=True):
    rows: tuple[OperatorTime, ...]
    notes: tuple[Note, ...] = ()
    """What a model calls and was not timed."""
