"""This has torch.compile with its modes and options, what it tells of itself, and blocks that several processes compile together.

Compiling keeps one processor busy and the others idle. Blocks that are compiled one by one can be compiled in any order, even
before the first step, once their inputs are known. Each process compiles some blocks, and finds the others in inductor's cache.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from redline.bench.device.base import Device
from redline.bench.device.failure import one_line
from redline.bench.recipe.base import (
    ALL_MODELS,
    COMPILER,
    NEEDS_STATIC_CACHE,
    RecipeCode,
    RecipeSwitch,
    leave_fast_path,
    literal,
    registered,
    write_without_fast_path,
)
from redline.bench.recipe.plain import compile_blocks, repeated_blocks, store_inputs
from redline.bench.workload.decoder import NextToken
from redline.bench.workload.step import Setup
from redline.model.errors import BenchError, SpecError
from redline.model.record import Capabilities
from redline.model.spec import OptionValue, RunSpec, Switch, Task
from redline.model.work import Facts
from redline.system.locks import file_lock

GRAPHING_MODES = ("reduce-overhead", "max-autotune")
"""In these modes inductor records CUDA graphs of its own, so no other graph may be recorded around them."""
COMBINED = {"combo_kernels": True}
"""Inductor then puts independent small operators into one kernel, so that the host launches fewer."""
TUNED = {"coordinate_descent_tuning": True, **COMBINED}
"""Inductor then also tries settings of every kernel and keeps the fastest, which makes compiling much slower."""
BY_OPTIONS: dict[str, dict[str, Any]] = {
    "freeze": {"freezing": True},
    "combine": COMBINED,
    "coordinate-descent": TUNED,
    "pdl": {**TUNED, "triton.enable_pdl": True},
}
"""These arguments stand for options of inductor and not for a mode of torch.compile."""
KINDS_OF_SETTINGS: dict[str, tuple[type, str]] = {
    "fullgraph": (bool, "true or false"),
    "dynamic": (bool, "true or false"),
    "backend": (str, "a name"),
}
"""These options are torch.compile's own, with the type of their value and how a message names it. All others are inductor's."""
DECODE_TUNING_S = 45.0
"""Coordinate descent takes about this long on a decode step, whose layers are alike: 35 to 54 s were measured, and 39 s with
`decode-kernels`."""
SMALLEST_SHARE = 0.3
"""Blocks with a smaller share of the forward's time leave most of the model as it was when they are compiled one by one."""
ALIKE = 1.5
"""There must be at least this many blocks per kind. Each kind is compiled once, which is what compiling by block saves."""


@registered
class Compile(RecipeSwitch):
    name = "compile"
    summary = "torch.compile; compile:MODE, compile:regional, compile:combine, compile:freeze (inference), compile:key=value,… for options"
    stage = COMPILER
    family = "compiler"
    relieves = "both"
    excludes = frozenset({"torchscript"})
    arguments = (
        "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "regional", "combine", "coordinate-descent", "pdl",
        "freeze",
    )  # fmt: skip
    offered = (None, *arguments[1:])
    tasks = ALL_MODELS

    def __init__(self, switch: Switch, task: Task) -> None:
        super().__init__(switch, task)
        self.settings = self._settings()
        self.options: dict[str, Any] = self.settings.get("options", {})
        self.does = Capabilities(
            compiles=True,
            dissolves_modules=True,
            records_graph=self.settings.get("mode") in GRAPHING_MODES or bool(self.options.get("triton.cudagraphs")),
            folds_norms=bool(self.options.get("freezing")),
        )
        self.needs = (NEEDS_STATIC_CACHE,) if task == "generate" else ()
        tunes = self.argument in ("coordinate-descent", "pdl")
        self.is_slow_to_prepare = tunes or (self.argument or "").startswith("max-autotune")
        # Products of one row become reductions, which is what inductor tunes best in a decode step.
        self.reads_rows = tunes and task == "generate"
        self.prepare_s = DECODE_TUNING_S if self.reads_rows else None
        if self.argument == "pdl" and task != "generate":
            self.caution = (
                "it shortens the gaps between hundreds of short kernels, which a decode step has; name it to try it"
            )

    def accept_options(self, options: dict[str, OptionValue]) -> None:
        for name, value in options.items():
            kind, words = KINDS_OF_SETTINGS.get(name, (object, ""))
            if not isinstance(value, kind):
                raise SpecError(f"compile: {name} must be {words}, got {value!r}")
            if not words and not _is_inductor_option(name):
                known = f"{', '.join(KINDS_OF_SETTINGS)} or an inductor option"
                raise SpecError(f"compile has no option {name!r}: give {known}")

    def _settings(self) -> dict[str, Any]:
        given, mode = self.switch.options, self.argument
        # One process measures one shape, so the compiler may specialise on it.
        settings: dict[str, Any] = {"dynamic": False}
        settings |= {name: value for name, value in given.items() if name in KINDS_OF_SETTINGS}
        options = BY_OPTIONS.get(mode or "", {}) | {name: given[name] for name in given.keys() - settings.keys()}
        if mode not in (None, "default", "regional", *BY_OPTIONS):
            settings["mode"] = mode
        if options and "mode" in settings:
            raise SpecError(f"compile: mode {mode} and options ({', '.join(sorted(options))}) exclude each other")
        settings |= {"options": options} if options else {}
        if settings.get("backend", "inductor") != "inductor" and settings.keys() & {"mode", "options"}:
            # torch would drop them with a line in a log, and the row would claim what did not happen.
            raise SpecError(f"compile: modes and options are inductor's; backend {settings['backend']} takes none")
        return settings

    def refused_by(self, device: Device) -> str | None:
        if self.argument == "freeze" and self.task != "infer":
            changed = "which training changes" if self.task == "train" else "the tensors of a static cache among them"
            return f"freeze turns weights into constants, {changed}; use it for inference"
        if self.argument in ("combine", "coordinate-descent", "pdl") and not device.is_accelerator:
            return f"{self.argument} is about Triton kernels, and a CPU runs none"
        if self.argument != "pdl":
            return None
        unknown = "inductor of this torch does not know it"
        return device.early_launch_refusal() if _is_inductor_option("triton.enable_pdl") else unknown

    def unsuited(self, model: nn.Module, facts: Facts | None) -> str | None:
        if self.argument == "freeze" and facts is not None and facts.mutates:
            return f"freeze turns buffers into constants, and the forward writes to {facts.mutates[0]}"
        if isinstance(model, torch.jit.ScriptModule):
            return "torch.compile does not take TorchScript: give the module it was made from"
        if self.argument != "regional":
            return None
        blocks = facts.blocks if facts is not None else None
        if blocks is None:
            return None if facts is None and repeated_blocks(model) else "no block of the model repeats"
        if blocks.kinds is not None and blocks.count < ALIKE * blocks.kinds:
            return f"its {blocks.count} blocks are of {blocks.kinds} kinds, and each kind is compiled separately"
        little = f"its blocks take only {blocks.share:.0%} of the forward's time"
        return little if blocks.share < SMALLEST_SHARE else None

    def is_doubtful(self, facts: Facts) -> bool:
        # Kernels that draw random numbers cannot be combined (pytorch issue 168124).
        return bool(self.options.get("combo_kernels")) and facts.draws_random_numbers

    def apply(self, setup: Setup) -> None:
        if self.options.get("freezing"):
            # Dynamo looks at the global switch and not at the options. Without the switch every weight stays an input.
            from torch._inductor import config

            config.freezing = True
        leave_fast_path(setup)
        model = setup.workload.model
        if self.argument == "regional":
            setup.compiled_blocks = names = compile_blocks(model, **self.settings)
            kind = type(model.get_submodule(names[0])).__name__
            setup.notes[self.name] = f"compiled {len(names)} blocks of class {kind} one by one, and nothing around them"
        elif self.task == "generate":
            if self.reads_rows:
                store_inputs(model)
            # Only the step of one token is compiled, because the prompt has another shape and is read once per text.
            setup.decode = torch.compile(NextToken(setup.model), **self.settings)
        else:
            setup.model = torch.compile(setup.model, **self.settings)
        setup.shortens_launches = True
        # This tells graph trees that the outputs of the step before may be overwritten.
        setup.before_step.append(torch.compiler.cudagraph_mark_step_begin)
        setup.after_first_call.append(self._refuse_to_have_compiled_nothing)
        if self.argument == "reduce-overhead" and not setup.device.is_accelerator:
            setup.notes[self.name] = "reduce-overhead makes no graphs on a CPU"

    def _refuse_to_have_compiled_nothing(self) -> None:
        """Raises a `BenchError` if nothing was compiled, because the plain model would be timed under the name of the compiled one."""
        if not compilations():
            name = str(self.switch)
            why = f"{name}: torch.compile compiled nothing of this model"
            raise BenchError("unsupported", why, switches=(name,), scope="switch")

    def write(self, code: RecipeCode) -> None:
        code.shortens_launches = True
        write_without_fast_path(code)
        settings = ", ".join(f"{name}={literal(value)}" for name, value in self.settings.items())
        if self.options.get("freezing"):
            code.imports.append("import torch._inductor.config")
            code.flags.append("torch._inductor.config.freezing = True")
        if self.argument == "regional":
            code.carry(compile_blocks)
            code.model_lines.append(f"compile_blocks(model, {settings})")
        elif self.task == "generate":
            if self.reads_rows:
                code.carry(store_inputs)
                code.model_lines.append("store_inputs(model)")
            code.decode_lines.append(f"step = torch.compile(step, {settings})")
        else:
            code.model_lines.append(f"model = torch.compile(model, {settings})")


def _is_inductor_option(name: str) -> bool:
    from torch._inductor import list_options

    return name in list_options()


def _dynamo(name: str) -> Any:
    """Returns dynamo's counts so far, or an empty dict if dynamo has not been loaded."""
    return getattr(sys.modules.get("torch._dynamo.utils"), name, {})


def compilations() -> int:
    """Returns the number of graphs that were compiled so far. If it rises, the steady state is not reached."""
    counters = _dynamo("counters")
    return int(counters["stats"]["unique_graphs"]) + int(counters["stats"]["calls_captured"]) if counters else 0


def compile_seconds() -> float | None:
    """Returns the seconds spent on compiling frames so far, or None if nothing was compiled."""
    metrics = _dynamo("compilation_time_metrics")
    found = metrics.get("_compile.compile_inner") or metrics.get("entire_frame_compile")
    return float(sum(found)) if found else None


def graph_breaks() -> int | None:
    """Returns how often the compiler has given up a graph in the middle and begun another, or None if it is not loaded."""
    if "torch._dynamo.utils" not in sys.modules:
        return None
    return sum(int(count) for count in _dynamo("counters")["graph_break"].values())


def cache_state() -> Literal["cold", "warm", "mixed"] | None:
    """Returns whether inductor's cache on disk already had what was compiled, or None if nothing was looked up."""
    counters = _dynamo("counters")
    for table, prefix in (("inductor", "fxgraph_cache"), ("aot_autograd", "autograd_cache")) if counters else ():
        count = counters[table]
        hits, misses = count[f"{prefix}_hit"], count[f"{prefix}_miss"] + count[f"{prefix}_bypass"]
        if hits or misses:
            return "mixed" if hits and misses else "warm" if hits else "cold"
    return None


Call = tuple[nn.Module, Any]
"""A call consists of a block, and of the positional and named inputs of its first call in a step."""


def compile_together(setup: Setup, spec: RunSpec) -> None:
    """Compiles the blocks that compile themselves when called, beside other processes that do the same.

    If a block cannot be called by itself, the first step compiles them. What cannot be compiled breaks here as it would there.
    """
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.runtime import runtime_utils

    utilities: Any = runtime_utils
    # Processes with another cache share no programs, so they share no locks.
    folder = Path(utilities.cache_dir()) / "redline-locks"
    folder.mkdir(parents=True, exist_ok=True)
    program = msgspec.json.encode((spec.workload, spec.recipe, spec.device))
    devices = [setup.device.torch_device] if setup.device.is_accelerator else []
    works: dict[str, list[Call]] = {}
    try:
        with torch.random.fork_rng(devices):  # the first step draws the numbers that it would have drawn without this
            for call in _first_calls(setup):
                # Whoever is first compiles the first of a kind, and finds the others in the cache.
                works.setdefault(hashlib.sha256(program + _kind(call).encode()).hexdigest()[:16], []).append(call)
            in_turns([(folder / f"{kind}.lock", partial(_run, setup, calls)) for kind, calls in works.items()])
    except TorchDynamoException:
        raise
    except Exception as error:
        setup.workload.model.zero_grad(set_to_none=True)
        shared = f"they could not be shared with other processes: {one_line(error)}"
        setup.notes["compile"] = f"{setup.notes.get('compile', '')}; {shared}"


def in_turns(works: Sequence[tuple[Path, Callable[[], None]]]) -> None:
    """Does all of these works, each under its lock, and begins with those that no other process is busy with. What another process has
    done is quick to do again."""
    left = list(works)
    while left:
        count = len(left)
        for lock, work in list(left):
            with file_lock(lock) as holder:
                if holder is None:
                    work()
                    left.remove((lock, work))
        if len(left) == count:
            lock, work = left.pop(0)
            with file_lock(lock, on_wait=lambda _: None):
                work()


def _first_calls(setup: Setup) -> list[Call]:
    """Returns the first call of each block, as a step without the compiler makes it."""
    found: dict[nn.Module, Any] = {}
    with ExitStack() as stack:
        for name in setup.compiled_blocks:
            block = setup.workload.model.get_submodule(name)
            keep = lambda block, *inputs: found.setdefault(block, inputs) and None  # noqa: E731
            stack.callback(block.register_forward_pre_hook(keep, with_kwargs=True).remove)
        with torch.compiler.set_stance("force_eager"), setup.autocast():
            setup.model(*setup.args, **setup.kwargs)
    return list(found.items())


def _run(setup: Setup, calls: Sequence[Call]) -> None:
    """Runs blocks forward and, in training, backward. Each of the two is compiled when it is first needed."""
    for block, inputs in calls:
        copies = dict[int, Tensor]()
        # The inputs have the same values, and their gradients end here. A tensor that is passed twice stays one tensor.
        args, kwargs = pytree.tree_map_only(
            Tensor,
            lambda leaf: copies.setdefault(id(leaf), leaf.detach().requires_grad_(leaf.requires_grad)),  # noqa: B023
            inputs,
        )
        with setup.autocast():
            output = block(*args, **kwargs)
        results = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if setup.task == "train" and results:
            torch.autograd.backward(results, [torch.ones_like(result) for result in results])
            block.zero_grad(set_to_none=True)


def _kind(call: Call) -> str:
    """Returns the part of a call that can be seen from outside. Blocks of one kind share a compiled program, unless constants inside
    differ."""

    def described(leaf: Any) -> object:
        if isinstance(leaf, Tensor):
            return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad, leaf.is_inference()
        return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf)

    block, inputs = call
    leaves, structure = pytree.tree_flatten((inputs, dict(block.named_parameters())))
    return repr((type(block), structure, list(map(described, leaves))))
