"""`redline models`: the models that can be measured by name."""

from __future__ import annotations

from typing import Annotated

from redline.model.errors import UsageError, closest
from redline.model.metrics import Figure, Headline, Row, Table
from redline.model.note import note
from redline.model.protocol import AskModels, ModelNames
from redline.model.settings import setting
from redline.show.result import Result
from redline.verbs.verb import verb
from redline.verbs.workspace import Workspace, use

COUNT = Figure(name="models", unit="count", doc="How many models have such a name.")


@verb(examples=("redline models resnet", "redline models 'timm:convnext*'"))
def models(
    pattern: Annotated[str | None, setting("Part of a name, or a pattern with *.", is_argument=True)] = None,
    *,
    workspace: Workspace | None = None,
) -> Result:
    """List the models that can be measured by name.

    Those of timm and transformers need these packages; a model of your own needs no name here: give file.py:factory.
    """
    with use(workspace) as opened:
        found = opened.ask(AskModels(pattern=pattern), ModelNames)
        if pattern and not found.models:
            names = [model.name for model in opened.ask(AskModels(pattern=None), ModelNames).models]
            close = closest(pattern, names)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise UsageError(f"no model matches {pattern!r}{hint}")
    # Names without a prefix come first: most people look for those of torchvision.
    ordered = sorted(found.models, key=lambda one: ":" in one.name)
    rows = tuple(Row(facts={"name": one.name, "kind": one.kind, "source": one.source}) for one in ordered)
    matching = " match {pattern}" if pattern else " can be measured by name"
    return Result(
        verb="models",
        headline=Headline(
            template="{count} models" + matching + ".", figures={"count": COUNT(len(rows)), "pattern": pattern}
        ),
        tables=(Table(name="models", rows=rows),),
        notes=tuple(note("unavailable", line) for line in found.missing),
        next=f"redline run {rows[0]['name']}" if rows else "",
    )
