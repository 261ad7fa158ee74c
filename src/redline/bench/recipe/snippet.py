"""A recipe as a file of plain PyTorch that runs without Redline."""

from __future__ import annotations

import sys

from jinja2 import Environment, PackageLoader, StrictUndefined

from redline.bench.device import resolve_device
from redline.bench.recipe.code import RecipeCode
from redline.bench.recipe.compose import steps_of
from redline.bench.workload.build import example_code
from redline.bench.workload.graphed import COUNTS_STEPS
from redline.bench.workload.step import INITIAL_GRADIENT_SCALE, OPTIMIZER_SETTINGS
from redline.spec import RunSpec, Task

_TEMPLATES: dict[Task, str] = {"infer": "inference.py.j2", "train": "training.py.j2"}
_OPTIMIZERS = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}


def snippet_of(spec: RunSpec) -> str:
    """The code, with a short timing of its own where the model can be had without Redline."""
    code = code_of(spec)
    # What is rendered is code, not a page: nothing is escaped, and names go in as literals.
    environment = Environment(
        loader=PackageLoader("redline.bench.recipe"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    workload = spec.workload
    rendered = environment.get_template(_TEMPLATES[workload.task]).render(
        code=code,
        title=_title(spec),
        imports=_imports(code),
        contexts=_contexts(code),
        example=example_code(workload),
        optimizer=_OPTIMIZERS[workload.optimizer],
        optimizer_options={**OPTIMIZER_SETTINGS[workload.optimizer], **code.optimizer_options},
        initial_scale=INITIAL_GRADIENT_SCALE,
    )
    return rendered.rstrip() + "\n"


def code_of(spec: RunSpec) -> RecipeCode:
    """What the recipe's steps write, in the order in which they are applied."""
    task = spec.workload.task
    kind = resolve_device(spec.device).partition(":")[0]
    code = RecipeCode(task=task, device="cpu" if kind == "cpu" else "cuda")  # torch says cuda to ROCm as well
    steps = steps_of(spec.recipe, task)
    if code.device == "cuda" and "tf32" not in {step.name for step in steps}:
        # Torch allows TF32 in convolutions unless it is told otherwise; this was measured without.
        code.flags.append("torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False")
    for step in steps:
        step.write(code)
    if code.is_graphed and spec.workload.optimizer in COUNTS_STEPS and task == "train":
        code.optimizer_options["capturable"] = "True"
    return code


def _imports(code: RecipeCode) -> str:
    """In the order formatters want: Python's own, then torch's; `import` before `from`."""
    lines = {"import torch", "from torch.utils._pytree import tree_map_only", *code.imports}
    own = {line for line in lines if line.split()[1].partition(".")[0] in sys.stdlib_module_names}
    sections = [sorted(section, key=lambda line: (line.startswith("from"), line)) for section in (own, lines - own)]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _contexts(code: RecipeCode) -> list[str]:
    autocast = [f'torch.autocast("{code.device}", dtype={code.autocast})'] if code.autocast else []
    return [*code.contexts, *autocast]


def _title(spec: RunSpec) -> str:
    workload = spec.workload
    # A name may hold anything; in a docstring only these could end it or be read as an escape.
    model = workload.model.replace("\\", "/").replace('"', "'")
    task = "inference" if workload.task == "infer" else "training"
    batch = f", batch {workload.batch}" if workload.batch else ""
    return f"{' '.join(model.split())}, {task}{batch}: {spec.recipe}."
