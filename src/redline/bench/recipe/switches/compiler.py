"""torch.compile, with each of its modes and with options."""

from __future__ import annotations

import sys
from typing import Any, ClassVar, Literal

import msgspec
import torch

from redline.bench.device.base import Device
from redline.bench.recipe.base import COMPILER, NEEDS_STATIC_CACHE, SWITCHES, RecipeCode, RecipeSwitch, literal
from redline.bench.recipe.fastpath import leave_fast_path, write_without_fast_path
from redline.bench.recipe.plain import compile_blocks, repeated_blocks, store_inputs
from redline.bench.workload.decoder import NextToken
from redline.bench.workload.step import Setup
from redline.model.errors import BenchError, SpecError
from redline.model.questions import SwitchNeed
from redline.model.record import Capabilities
from redline.model.spec import OptionValue, Switch, Task
from redline.model.work import Facts

_OWN_OPTIONS = ("fullgraph", "dynamic", "backend")
_GRAPHING_MODES = ("reduce-overhead", "max-autotune")
"""Modes in which inductor records CUDA graphs of its own."""
_COMBINED = {"combo_kernels": True}
_TUNED = {"coordinate_descent_tuning": True, **_COMBINED}
_BY_OPTIONS: dict[str, dict[str, Any]] = {
    "freeze": {"freezing": True},
    "combine": _COMBINED,
    "coordinate-descent": _TUNED,
    "pdl": {**_TUNED, "triton.enable_pdl": True},
}
"""Arguments that are options of inductor rather than a mode of torch.compile."""
DECODE_TUNING_S = 45.0
"""For coordinate descent on a decode step: its layers are alike, so that there are few kernels to tune. 35 to 54 s were seen, and 39 s
beside `decode-kernels`, whose own tuning takes about what they spare."""
SMALLEST_SHARE = 0.3
"""Share of the forward's time: below it, compiling blocks one by one leaves most of the model as it was."""
ALIKE = 1.5
"""The fewest blocks per kind of block: each kind is compiled once, which is what compiling by block saves."""


@SWITCHES.register("compile")
class Compile(RecipeSwitch):
    name = "compile"
    summary = "torch.compile; compile:MODE, compile:regional, compile:combine, compile:freeze (inference), compile:key=value,… for options"
    stage = COMPILER
    family = "compiler"
    relieves = "both"
    does = Capabilities(compiles=True, dissolves_modules=True)
    excludes = frozenset({"torchscript"})
    arguments = (
        "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "regional", "combine", "coordinate-descent", "pdl",
        "freeze",
    )  # fmt: skip
    offered = (None, *arguments[1:])
    slow_to_prepare = frozenset({"max-autotune", "max-autotune-no-cudagraphs", "coordinate-descent", "pdl"})
    tasks: ClassVar[tuple[Task, ...]] = ("infer", "train", "generate")
    needs: ClassVar[dict[Task, tuple[SwitchNeed, ...]]] = {"generate": (NEEDS_STATIC_CACHE,)}

    def __init__(self, switch: Switch) -> None:
        super().__init__(switch)
        self.settings = self._settings()

    def accept_options(self, options: dict[str, OptionValue]) -> None:
        for name in ("fullgraph", "dynamic"):
            if name in options and not isinstance(options[name], bool):
                raise SpecError(f"compile: {name} must be true or false, got {options[name]!r}")
        backend = options.get("backend")
        if backend is not None and not isinstance(backend, str):
            raise SpecError(f"compile: backend must be a name, got {backend!r}")
        unknown = [name for name in options if name not in _OWN_OPTIONS and not _is_inductor_option(name)]
        if unknown:
            raise SpecError(
                f"compile has no option {unknown[0]!r}: give fullgraph, dynamic, backend or an inductor option"
            )

    def capabilities(self) -> Capabilities:
        options = self.settings.get("options", {})
        return msgspec.structs.replace(
            self.does,
            records_graph=self.settings.get("mode") in _GRAPHING_MODES or bool(options.get("triton.cudagraphs")),
            folds_norms=bool(options.get("freezing")),
        )

    def prepare_s(self, task: Task) -> float | None:
        return DECODE_TUNING_S if self._reads_rows(task) else None

    def refusal(self, device: Device, task: Task) -> str | None:
        if self.switch.argument == "freeze" and task != "infer":
            changed = "which training changes" if task == "train" else "the tensors of a static cache among them"
            return f"freeze turns weights into constants, {changed}; use it for inference"
        if self.switch.argument in ("combine", "coordinate-descent", "pdl") and not device.is_accelerator:
            does = "it combines small" if self.switch.argument == "combine" else "coordinate descent tunes"
            return f"{does} Triton kernels, and a CPU runs none"
        if self.switch.argument == "pdl":
            if not _is_inductor_option("triton.enable_pdl"):
                return "inductor of this torch does not know it"
            return device.early_launch_refusal()
        return None

    def caution(self, task: Task) -> str | None:
        if self.switch.argument == "pdl" and task != "generate":
            return "it shortens the gaps between hundreds of short kernels, which a decode step has; name it to try it"
        return None

    def irrelevance(self, model: torch.nn.Module, task: Task, facts: Facts | None) -> str | None:
        if self.switch.argument == "freeze" and facts is not None and facts.mutates:
            return f"freeze turns buffers into constants, and the forward writes to {facts.mutates[0]}"
        if isinstance(model, torch.jit.ScriptModule):
            return "torch.compile does not take TorchScript: give the module it was made from"
        return why_not_by_block(model, facts) if self.switch.argument == "regional" else None

    def is_doubtful(self, facts: Facts) -> bool:
        # Kernels that draw random numbers could not be combined (pytorch issue 168124).
        return bool(self.settings.get("options", {}).get("combo_kernels")) and facts.draws_random_numbers

    def apply(self, setup: Setup) -> None:
        if self.settings.get("options", {}).get("freezing"):
            # Dynamo looks at the global switch and not at the options: without it every weight stays an input.
            inductor_config().freezing = True
        leave_fast_path(setup)
        if self.switch.argument == "regional":
            setup.compiled_blocks = names = compile_blocks(setup.workload.model, **self.settings)
            kind = type(setup.workload.model.get_submodule(names[0])).__name__
            setup.notes[self.name] = f"compiled {len(names)} blocks of class {kind} one by one, and nothing around them"
        else:
            if self._reads_rows(setup.task):
                store_inputs(setup.workload.model)
            if setup.task == "generate":
                # The prompt has another shape, and is read once per text.
                setup.decode = torch.compile(NextToken(setup.model), **self.settings)
            else:
                setup.model = torch.compile(setup.model, **self.settings)
        setup.shortens_launches = True
        # Tells graph trees that the outputs of the step before may be overwritten.
        setup.before_step.append(torch.compiler.cudagraph_mark_step_begin)
        setup.after_first_call.append(self._refuse_to_have_compiled_nothing)
        if self.switch.argument == "reduce-overhead" and not setup.device.is_accelerator:
            setup.notes[self.name] = "reduce-overhead makes no graphs on a CPU"

    def write(self, code: RecipeCode) -> None:
        code.shortens_launches = True
        write_without_fast_path(code)
        settings = ", ".join(f"{name}={literal(value)}" for name, value in self.settings.items())
        if self.settings.get("options", {}).get("freezing"):
            code.imports.append("import torch._inductor.config")
            code.flags.append("torch._inductor.config.freezing = True")
        if self.switch.argument == "regional":
            code.bring_in("from typing import Any")
            code.carry(repeated_blocks, compile_blocks)
            code.model_lines.append(f"compile_blocks(model, {settings})")
        elif code.task == "generate":
            if self._reads_rows(code.task):
                code.bring_in("from typing import Any")
                code.carry(store_inputs)
                code.model_lines.append("store_inputs(model)")
            code.decode_lines.append(f"step = torch.compile(step, {settings})")
        else:
            code.model_lines.append(f"model = torch.compile(model, {settings})")

    def _refuse_to_have_compiled_nothing(self) -> None:
        """Else the model as it was would be timed under the name of the compiled one."""
        if not compilations():
            told = str(self.switch)
            raise BenchError(
                "unsupported", f"{told}: torch.compile compiled nothing of this model", switches=(told,), scope="switch"
            )

    def _reads_rows(self, task: Task) -> bool:
        """Whether products of one row become reductions, which is what inductor tunes best in a decode step."""
        return task == "generate" and self.switch.argument in ("coordinate-descent", "pdl")

    def _settings(self) -> dict[str, Any]:
        options = dict(self.switch.options)
        # One process measures one shape: let the compiler specialise on it.
        settings: dict[str, Any] = {"dynamic": options.pop("dynamic", False)}
        for name in ("fullgraph", "backend"):
            if name in options:
                settings[name] = options.pop(name)
        mode = self.switch.argument
        if mode in _BY_OPTIONS:
            options = _BY_OPTIONS[mode] | options
        elif mode not in (None, "default", "regional"):
            settings["mode"] = mode
        if options and "mode" in settings:
            raise SpecError(f"compile: mode {mode} and options ({', '.join(sorted(options))}) exclude each other")
        if options:
            settings["options"] = options
        if settings.get("backend", "inductor") != "inductor" and settings.keys() & {"mode", "options"}:
            # torch would drop them with a line in a log, and the row would claim what did not happen.
            raise SpecError(f"compile: modes and options are inductor's; backend {settings['backend']} takes none")
        return settings


def why_not_by_block(model: torch.nn.Module, facts: Facts | None) -> str | None:
    """Why compiling block by block would save nothing, or leave most of the model as it was; None where it may pay."""
    if facts is None:
        return None if repeated_blocks(model) else "no block of the model repeats"
    blocks = facts.blocks
    if blocks is None:
        return "no block of the model repeats"
    if blocks.kinds is not None and blocks.count < ALIKE * blocks.kinds:
        return f"its {blocks.count} blocks are of {blocks.kinds} kinds, and each kind is compiled separately"
    is_little = blocks.share < SMALLEST_SHARE
    return f"its blocks take only {blocks.share:.0%} of the forward's time" if is_little else None


def inductor_config() -> Any:
    from torch._inductor import config

    return config


def _is_inductor_option(name: str) -> bool:
    from torch._inductor import list_options

    return name in list_options()


def compilations() -> int:
    """Graphs compiled so far; a rise means the steady state is not reached."""
    counters = _counters()
    return int(counters["stats"]["unique_graphs"]) + int(counters["stats"]["calls_captured"]) if counters else 0


def compile_seconds() -> float | None:
    """Seconds spent compiling frames so far, or None where nothing was compiled."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    metrics = getattr(dynamo, "compilation_time_metrics", {}) if dynamo else {}
    for name in ("_compile.compile_inner", "entire_frame_compile"):
        if metrics.get(name):
            return float(sum(metrics[name]))
    return None


def graph_breaks() -> int | None:
    """How often the compiler has given up a graph in the middle and begun another; None where it is not loaded."""
    counters = _counters()
    return sum(int(count) for count in counters["graph_break"].values()) if counters is not None else None


def cache_state() -> Literal["cold", "warm", "mixed"] | None:
    """Whether inductor's on-disk cache already had what was compiled."""
    counters = _counters()
    if not counters:
        return None
    inductor = counters["inductor"]
    hits, misses = inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"]
    if not hits and not misses:
        aot = counters["aot_autograd"]
        hits, misses = aot["autograd_cache_hit"], aot["autograd_cache_miss"] + aot["autograd_cache_bypass"]
    if hits and misses:
        return "mixed"
    return "warm" if hits else "cold" if misses else None


def _counters() -> Any:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return getattr(dynamo, "counters", None) if dynamo else None
