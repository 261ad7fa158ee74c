"""`redline demo`: a first look at this machine with a model that everybody knows."""

from __future__ import annotations

from dataclasses import replace

from redline.model.metrics import Block
from redline.show.charts import bar_text
from redline.show.result import Result
from redline.verbs.run import run
from redline.verbs.verb import verb
from redline.verbs.workspace import Workspace, specs_of, use

TRY = "redline tune {model}\nredline profile {model}\nredline run MODEL -r baseline -r {recipe}"

SHORT = {"max_seconds": 3.0, "warmup_max_seconds": 2.0}
"""On two processors with cold caches compiling takes about 20 s: with this much for each recipe the answer comes within 45 s."""


@verb(takes=("device",), examples=("redline demo", "redline demo --device cpu"), also=("save",))
def demo(*, device: str = "auto", workspace: Workspace | None = None) -> Result:
    """Measure a well-known model with good defaults for this machine.

    It compares the baseline, a cheap recipe and a compiled one, interleaved.
    """
    with use(workspace) as opened:
        resolved = opened.checked(specs_of(opened, "resnet18", device=device)[0])[0].device
        if resolved == "cpu":
            model, recipes = "resnet18", ["baseline", "channels-last", "channels-last+compile"]
            found = run(model, batch=4, recipes=recipes, effort="quick", device="cpu", measure=SHORT, workspace=opened)
        else:
            model, recipes = (
                "resnet50",
                ["baseline", "fp16+channels-last", "fp16+channels-last+compile:reduce-overhead"],
            )
            found = run(model, batch=32, recipes=recipes, device=resolved, workspace=opened)
    bars = Block(title="", text=bar_text(found.tables[0]))
    commands = Block(title="Try next:", text=TRY.format(model=model, recipe=recipes[-1]))
    return replace(found, verb="demo", blocks=(bars, commands), next="")
