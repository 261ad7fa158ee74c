"""This writes a recipe as a file of plain PyTorch that runs without Redline."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import nn

from redline.bench.device import open_device, resolve_device
from redline.bench.device.cuda import shorten_launches
from redline.bench.recipe.base import RecipeCode
from redline.bench.recipe.compose import refuse_impossible, switches_of
from redline.bench.workload.build import source_of
from redline.bench.workload.decoder import asks_the_host, written_in_place
from redline.bench.workload.sources.user import HANDED_OVER
from redline.bench.workload.step import COUNTS_STEPS, INITIAL_GRADIENT_SCALE, OPTIMIZER_SETTINGS
from redline.model.errors import BenchError
from redline.model.spec import RunSpec, Task, WorkloadSpec

_TEMPLATES: dict[Task, str] = {
    "infer": "inference.py.j2",
    "train": "training.py.j2",
    "generate": "generation.py.j2",
}
_OPTIMIZERS = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}
"""The classes of `torch.optim` have these names."""


def snippet_of(spec: RunSpec) -> str:
    """Returns the code, with a short timing of its own if the model can be had without Redline.

    It is refused where a run would be refused: for what the device cannot do, and for what would change nothing about a model that
    was handed over for it.
    """
    device = open_device(spec.device)
    with _handed_over(spec.workload) as model:
        refuse_impossible(switches_of(spec.recipe, spec.workload.task), device, model)
    code = code_of(spec)
    writer = source_of(spec.workload).writer_code(spec.workload) if spec.workload.task == "generate" else None
    if writer is not None and writer.is_hf:
        kind = "StaticCache" if code.is_static else "DynamicCache"
        code.bring_in("import inspect", f"from transformers import {kind}")
        if code.is_static:
            code.carry(written_in_place, asks_the_host)
    example = source_of(spec.workload).example_code(spec.workload)
    # This renders code and no page, so nothing is escaped, and names go in as literals.
    environment = Environment(
        loader=PackageLoader("redline.bench.recipe"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    workload = spec.workload
    rendered = environment.get_template(_TEMPLATES[workload.task]).render(
        code=code,
        title=_title(spec),
        imports=_imports(code),
        autocast=f'torch.autocast("{code.device}", dtype={code.autocast})' if code.autocast else None,
        example=example,
        writer=writer,
        optimizer=_OPTIMIZERS[workload.optimizer],
        optimizer_options={**OPTIMIZER_SETTINGS[workload.optimizer], **code.optimizer_options},
        threads=spec.threads if code.device == "cpu" else None,
        initial_scale=INITIAL_GRADIENT_SCALE,
    )
    return rendered.rstrip() + "\n"


@contextmanager
def _handed_over(workload: WorkloadSpec) -> Iterator[nn.Module | None]:
    """Yields the live model in the mode that its task wants, or None if there is none. Afterwards each module has its old mode again."""
    parts = HANDED_OVER.get(workload.artifact or "", ())
    if not parts:
        yield None
        return
    model = parts[0]
    if not isinstance(model, nn.Module):
        raise BenchError("unsupported", f"a recipe is applied to a torch.nn.Module, got {type(model).__name__}")
    modes = {module: module.training for module in model.modules()}
    model.train(workload.task == "train")
    try:
        yield model
    finally:
        for module, training in modes.items():
            module.training = training


def code_of(spec: RunSpec) -> RecipeCode:
    """Returns the code that the switches of the recipe write, in the order in which they are applied."""
    task = spec.workload.task
    kind = resolve_device(spec.device).partition(":")[0]
    code = RecipeCode(task=task, device="cpu" if kind == "cpu" else "cuda")  # torch says cuda to ROCm as well
    switches = switches_of(spec.recipe, task)
    if code.device == "cuda" and "tf32" not in {switch.name for switch in switches}:
        # Torch allows TF32 in convolutions unless it is told otherwise, and this recipe was measured without.
        code.flags.append("torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False")
    for switch in switches:
        switch.write(code)
    code.shortens_launches = code.shortens_launches and kind == "cuda"
    if code.shortens_launches:
        code.carry(shorten_launches)
        if task == "train" and not code.is_graphed:
            code.bring_in("import itertools")
    if code.is_graphed and spec.workload.optimizer in COUNTS_STEPS and task == "train":
        code.optimizer_options["capturable"] = "True"
    return code


def _imports(code: RecipeCode) -> str:
    """Returns the imports in the order that formatters want: Python's own before torch's, and `import` before `from`."""

    def place(line: str) -> tuple[bool, bool, str]:
        return line.split()[1].partition(".")[0] not in sys.stdlib_module_names, line.startswith("from"), line

    lines = sorted({"import torch", "from torch.utils._pytree import tree_map_only", *code.imports}, key=place)
    sections = itertools.groupby(lines, key=lambda line: place(line)[0])
    return "\n\n".join("\n".join(section) for _, section in sections)


def _title(spec: RunSpec) -> str:
    workload = spec.workload
    task = {"infer": "inference", "train": "training", "generate": "generation"}[workload.task]
    batch = f", batch {workload.batch}" if workload.batch else ""
    # A name may hold anything. In a docstring only quotes could end it, and only backslashes be read as an escape.
    model = " ".join(workload.model.replace("\\", "/").replace('"', "'").split())
    return f"{model}, {task}{batch}: {spec.recipe}."
