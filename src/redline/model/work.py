"""This module says what a step has to do, what it was seen doing, and what a device can do at most: work, facts and ceilings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from redline.model.fields import Count, Figure, Frozen, Items, Moment, Seconds
from redline.model.note import Code, Note

OperatorKind = Literal[
    "convolution", "matmul", "attention", "norm", "elementwise", "reduction", "copy", "other"
]  # fmt: skip
"""The same words as for the kernels of a trace, so that work and time can be set side by side."""

PRODUCTS: frozenset[OperatorKind] = frozenset(("convolution", "matmul", "attention"))
"""A FLOP count counts the products of these kinds: multiplications with additions, two FLOPs for each. The rest has its own line."""

NOT_COUNTED: frozenset[Code] = frozenset(("work-not-counted", "work-changes"))
"""Notes of a workload that say why its work was not counted."""

WorkPhase = Literal["forward", "backward", "optimizer"]

CEILINGS_SCHEMA = 2
"""Raised when ceilings are measured in another way: older ones are then measured again."""


class OperatorWork(Frozen):
    """These are all calls of one operator that do the same amount of work."""

    name: str
    kind: OperatorKind
    number_format: str
    """It computes in this: fp32, tf32, fp16, bf16, fp8, int8 …"""
    phase: WorkPhase
    calls: Count
    flops: Count
    """This counts one call."""
    bytes: Count
    """One call moves so many bytes: every distinct input and output once. This is a lower bound, as if nothing were fused or cached."""


class ModuleWork(Frozen):
    """This is a module with everything inside it."""

    path: str
    """The path is as `named_modules` tells it; the model itself is the empty path."""
    type: str
    params: Count
    calls: Count
    number_format: str
    """Most of its products have this format."""
    flops: Count
    """These are the products of the forward pass."""
    backward_flops: Count
    other_flops: Count
    """These are norms, elementwise work and reductions, forward and backward."""
    bytes: Count
    backward_bytes: Count


class Uncounted(Frozen):
    """This is an operator without a FLOP formula; its bytes are counted."""

    name: str
    calls: Count


class WorkCount(Frozen):
    """These are the FLOPs and bytes of one step. There are two byte counts, per operator and compulsory, which are never mixed."""

    params: Count
    compulsory_bytes: Count
    """Even perfect fusion must still move these bytes: weights, inputs and outputs of the whole model once.

    Training reads and writes weights and optimizer state instead of writing outputs.
    """
    operators: tuple[OperatorWork, ...]
    uncounted: tuple[Uncounted, ...] = ()
    modules: tuple[ModuleWork, ...] = ()
    """Parents before children; only where they were asked for."""
    for_these_inputs: str | None = None
    """This is set where control flow depends on data: it says that it was counted in one real forward, and why."""
    notes: tuple[Note, ...] = ()
    seconds: Seconds = 0.0
    """Counting took so long."""

    @property
    def flops(self) -> int:
        """Returns the products of the forward pass."""
        return self._products("forward")

    @property
    def backward_flops(self) -> int:
        return self._products("backward")

    @property
    def total_flops(self) -> int:
        return self.flops + self.backward_flops

    @property
    def macs(self) -> int:
        return self.flops // 2

    @property
    def operator_bytes(self) -> int:
        """Returns what must move when every operator reads its inputs and writes its outputs: unfused, all phases."""
        return sum(one.bytes * one.calls for one in self.operators)

    def other_flops(self, kinds: Iterable[OperatorKind] | None = None) -> int:
        wanted = set(kinds) if kinds is not None else None
        return sum(
            one.flops * one.calls
            for one in self.operators
            if one.kind not in PRODUCTS and (wanted is None or one.kind in wanted)
        )

    def flops_by_format(self) -> dict[str, int]:
        """Returns products of all phases, by what they compute in."""
        found: Counter[str] = Counter()
        for one in self.operators:
            if one.kind in PRODUCTS:
                found[one.number_format] += one.flops * one.calls
        return dict(found)

    def _products(self, phase: WorkPhase) -> int:
        return sum(one.flops * one.calls for one in self.operators if one.phase == phase and one.kind in PRODUCTS)


LayerKind = Literal["convolution", "linear", "attention", "batch-norm", "norm", "recurrent", "embedding", "max-pooling"]
"""`attention` is a call of scaled_dot_product_attention; attention written out in products and softmax is not one."""


class LayerShare(Frozen):
    """These are all layers of one kind that ran in the forward pass."""

    calls: Count
    share: float
    """They took this share of the time of the operators of the forward pass."""
    kinds: Count = 0
    """Calls that differ in shapes or settings; 0 in old records."""


class OperatorShare(Frozen):
    name: str
    kind: OperatorKind
    calls: Count
    share: float
    """They took this share of the time of all operators of the step."""


class RepeatedBlock(Frozen):
    """These are modules of one class that run one after the other, none inside another: the layers of a network."""

    class_name: str
    count: int
    share: float
    """They took this share of the time of the operators of the forward pass."""
    kinds: int | None = None
    """This many of them differ in what they compute, by shapes or by constants such as the rate of a dropout. Each kind is compiled by
    itself. It is None in old records."""


class Facts(Frozen):
    """This describes one real step of a workload in strict fp32, eager. Switches say from this whether they are relevant."""

    layers: dict[LayerKind, LayerShare] = {}
    """Kinds that did not run are missing."""
    activated: LayerShare | None = None
    """This is a ReLU or GELU right behind a linear layer with a bias, which one kernel can do with it. It is None where there is none."""
    operators: tuple[OperatorShare, ...] = ()
    """Records of earlier versions have those here that took most of the time, the longest first."""
    kinds: dict[OperatorKind, float] = {}
    """These are the shares of the operators' time by kind, over the whole step."""
    launches: int = 0
    """In one step, so many operators put work on the device."""
    double_share: float = 0.0
    """Operators that compute with 64 bits take this share of the operators' time."""
    attention_backends: dict[str, tuple[str, ...]] = {}
    """For each number format (fp32, fp16, bf16), these backends can do every attention of the model here."""
    blocks: RepeatedBlock | None = None
    """Among blocks that repeat, these take most of the forward pass. It is None where nothing repeats."""
    reads: tuple[str, ...] = ()
    """Python reads the values of tensors in these places, and waits for them: `item in roi_heads (3)`."""
    synchronises: bool | None = None
    """If True, a step waits for the device by itself. It is None where nothing runs ahead of the host."""
    branches: bool = False
    """If True, other inputs of the same shapes ran other operators."""
    varies_shapes: bool = False
    """If True, other inputs of the same shapes gave the same operators other shapes."""
    mutates: tuple[str, ...] = ()
    """Buffers, and other tensors the model holds, that the forward pass writes to."""
    accumulates: tuple[str, ...] = ()
    """Among these, it has the buffers of floating-point numbers to which the model adds call by call, such as counters and moving averages.
    With few bits they stop moving. They are only looked for in inference."""
    draws_random_numbers: bool = False
    sparse_gradients: tuple[str, ...] = ()
    """Parameters whose gradients are sparse tensors in training: few optimizers and compilers take those."""
    strange_outputs: tuple[str, ...] = ()
    """Classes in its outputs that torch's pytree does not know: no program made from the model can return them."""
    step_s: float | None = None
    """One step takes so many seconds in the steady state, if it is waited for."""
    host_s: float | None = None
    """The host needs so many seconds to issue one step. It is None where nothing runs ahead of the host."""
    device_s: float | None = None
    """The device has work for so many seconds of one step, by the sum of its operators."""
    page_faults: float | None = None
    """The kernel gave so many cleared pages to one step, for memory that is freed and asked for again. It is None with a GPU."""
    peak_bytes: int | None = None
    """The process held at most so much device memory, its context included. It is None on a CPU."""
    limit_bytes: int | None = None
    """Device memory that was free, or the cap that was asked for."""
    seconds: Seconds = 0.0
    """Finding all this out took so long."""

    @property
    def products_share(self) -> float:
        """Returns the share of the operators' time that products and convolutions take."""
        return min(sum(self.kinds.get(kind, 0.0) for kind in PRODUCTS), 1.0)


class Ceilings(Frozen):
    """This says how fast this device is at its best, as it was measured."""

    kind: str
    """This is `cpu`, `cuda` or `rocm`."""
    name: str
    driver: str | None
    torch: str | None
    threads: int | None
    """They set the limits of a CPU. It is None elsewhere."""
    flops_per_s: dict[str, Figure]
    """These are the rates of matrix products by number format; a format the device does not have is missing."""
    copy_bytes_per_s: Figure
    """Read and written bytes together, of buffers that no cache holds."""
    launch_s: Seconds
    """So long passes from one tiny operator to the next, issued from Python without waiting."""
    cache_bytes: int | None = None
    """This is the last cache in front of memory. It is None where the device does not tell."""
    shapes: dict[str, str] = {}
    """The figure of each format was reached by this matrix product."""
    measured_at: Moment = 0.0
    seconds: Seconds = 0.0
    usual: dict[str, float] = {}
    """Records of earlier versions have here what half of the bursts reached."""
    doubts: tuple[Note, ...] = ()
    """They say why these figures may be too low, such as a busy machine."""
    notes: tuple[Note, ...] = ()
    schema: int = CEILINGS_SCHEMA

    @property
    def is_trusted(self) -> bool:
        return not self.doubts

    def with_best_of(self, other: Ceilings) -> Ceilings:
        """Returns what both reached at their best: a ceiling is what a device can do, whichever run saw it."""
        ours = {form: self.flops_per_s.get(form, 0.0) for form in {*self.flops_per_s, *other.flops_per_s}}
        behind = [form for form, value in ours.items() if other.flops_per_s.get(form, 0.0) > value]
        better = {form: other.flops_per_s[form] for form in behind}
        return msgspec.structs.replace(
            self,
            flops_per_s={**self.flops_per_s, **better},
            shapes={**self.shapes, **{form: other.shapes[form] for form in behind if form in other.shapes}},
            copy_bytes_per_s=max(self.copy_bytes_per_s, other.copy_bytes_per_s),
            launch_s=min(self.launch_s, other.launch_s),
        )


class OperatorTime(Frozen):
    """This is one operator, timed in bursts; `refusal` says why it was not."""

    operator: str
    shape: str
    number_format: str
    calls: int = 1
    """The model calls it so often in one forward."""
    kind: OperatorKind = "other"
    samples: tuple[float, ...] = ()
    """These are seconds per call, one of each burst."""
    flops: int = 0
    bytes: int = 0
    refusal: str | None = None


MemoryCategory = Literal["weights", "gradients", "optimizer state", "inputs", "activations", "temporaries", "workspace"]
"""`activations`: made by the forward pass and kept for the backward pass; in inference, whatever is not a weight.
`workspace`: what the device's allocator gave out beyond tensors, such as scratch memory of libraries."""


class MemoryHolder(Frozen):
    """A module that holds memory at the peak."""

    module: str
    """This is its path. It is empty for the model itself and for what no module made."""
    bytes: int
    category: MemoryCategory
    """Most of it belongs to this category."""
    line: str = ""
    """This line of code made most of it, where that is known: `model.py:12`."""


class MemoryPoint(Frozen):
    """This is a moment of a step."""

    at: float
    """It goes from 0 to 1, by allocations."""
    bytes: int
    phase: str
    categories: dict[MemoryCategory, int] = {}
    """They add up to the bytes; what an allocator gave out beyond tensors is in neither."""
    reserved_bytes: int | None = None
    """The allocator held so much then, given out or not. It is None without an allocator that tells."""


class MemoryUse(Frozen):
    """This is one step's memory."""

    peak_bytes: int
    """This much was allocated at most: the allocator's own figure on a GPU; on a CPU all tensors together."""
    peak_phase: str
    categories: dict[MemoryCategory, int]
    """These are parts of the peak; they add up to it."""
    holders: tuple[MemoryHolder, ...] = ()
    timeline: tuple[MemoryPoint, ...] = ()
    reserved_bytes: int | None = None
    fragments_bytes: int | None = None
    """This much was reserved but not given out when most was given out. It is None without an allocator that tells."""


class MemoryRow(Frozen):
    """This is the memory of one model under one recipe, as `profile --memory` keeps it for the dashboard."""

    model: str
    task: str
    recipe: str
    batch: int | None
    device: str
    use: MemoryUse
    saved_bytes: int | None = None
    """The peak is smaller by so much than that of the first row of the same model."""
    compared: str | None = None
    sized: str | None = None
    """These are commands that older versions wrote; nothing reads them."""


CacheKind = Literal["growing", "static", "state", "own", "unseen"]
"""This says how keys and values are kept: `state` has one size however long the text is, `own` is what the user's forward returns, `unseen`
belongs to a model that only generates as a whole."""


class GenerationInfo(Frozen):
    """This says what is generated, and what every token has to read."""

    prompt: Items
    new_tokens: Items
    weight_bytes: Count
    """These are all weights under the recipe."""
    read_bytes: Count
    """A decode step reads so much of the weights: it leaves out tables of which it takes a row, and an encoder."""
    cache_bytes: Count
    """This is the size that was allocated after one generation."""
    cache_read_bytes: Count | None = None
    """A decode step reads so much of the cache on average: the positions that are filled by then."""
    copy_bytes_per_s: Figure | None = None
    """This much was copied per second on this device just before, read and written bytes together."""
    is_static: bool = False
    cache: CacheKind | None = None
    """It is None in records made before it was told."""

    @property
    def cache_kind(self) -> CacheKind:
        return self.cache or ("static" if self.is_static else "growing")


# FLOPs of products, from sizes alone: what the count of a running model and the shapes in a trace have in common.
# A multiplication with its addition is two FLOPs.

Dims = Sequence[int]


def convolution_flops(positions: int, weight: Dims) -> int:
    """Returns the FLOPs of a convolution, in which each position meets the channels of one group and the whole kernel. Positions are
    elements of the output, or of the input where the convolution is transposed."""
    return 2 * positions * math.prod(weight[1:])


def attention_flops(
    query: Dims, key: Dims, value: Dims, *, heads_first: bool, causal: bool, backward: bool = False
) -> int:
    """Scores and their sum of values; backward the scores again, then gradients of values, probabilities, queries and keys.

    `heads_first`: batch, heads, sequence, width; else batch, sequence, heads, width. Causal attention counts what is left
    of the square, which is half of it.
    """
    sequence, head = (-2, -3) if heads_first else (-3, -2)
    queries, keys = query[sequence], key[sequence]
    square = min(queries, keys)
    pairs = square * square / 2 + max(queries - keys, 0) * keys if causal else queries * keys
    of_key, of_value = (3, 2) if backward else (1, 1)
    width = of_key * query[-1] + of_value * value[-1]
    return int(2 * math.prod(query[:-3]) * query[head] * pairs * width)
