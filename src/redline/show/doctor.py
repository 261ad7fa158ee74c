"""The doctor's table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from redline.model.questions import HealthItem
from redline.show.terminal import Fitted, make_table


def health_report(items: Sequence[HealthItem]) -> RenderableType:
    table = make_table(None)
    table.add_column("")
    table.add_column("what", no_wrap=True)
    table.add_column("seen", overflow="fold")
    table.add_column("how to fix it", overflow="fold")
    signs = {True: Text("ok", style="green"), False: Text("✗", style="red"), None: Text("–", style="dim")}
    for item in items:
        table.add_row(signs[item.ok], Text(item.name), Text(item.seen), Text(item.mend))
    return Fitted(table, ())
