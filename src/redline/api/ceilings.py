"""`redline.ceilings`: what the device can do at most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType

from redline.analyze.ceilings import CeilingsSummary, ceilings_summary
from redline.api.settings import specs_of
from redline.api.workspace import Workspace, use
from redline.identity import device_key
from redline.questions import AskCeilings, CeilingsAnswer
from redline.report.ceilings import ceilings_report
from redline.report.export import JsonDocument, json_document
from redline.report.notebook import Bars, Shown
from redline.work import Ceilings


class CeilingsResult(Shown):
    def __init__(self, summary: CeilingsSummary, ceilings: Ceilings) -> None:
        self.summary = summary
        self.ceilings = ceilings

    def report(self) -> RenderableType:
        return ceilings_report(self.summary)

    def frame_rows(self) -> Sequence[Any]:
        return [self.summary]

    def bars(self) -> Bars | None:
        bars = [(form, each.measured, None, None) for form, each in self.summary.tflops.items() if each.measured]
        return Bars(self.summary.name, "TFLOP/s", bars)

    def to_json(self) -> JsonDocument:
        return json_document("ceilings", self.summary)


def ceilings(
    device: str = "auto", *, threads: int | None = None, fresh: bool = False, workspace: Workspace | None = None
) -> CeilingsResult:
    """The device's ceilings: from the history, or measured now and kept there.

    What was measured on a busy machine is measured again, and each figure is then the best that was seen.
    """
    with use(workspace) as opened:
        # Any spec will do: a device that is not here is refused in one line.
        (probe,) = opened.checked(specs_of(opened, "simple_cnn", device=device)[0])
        environment = opened.environment(probe.device, threads)
        known = None
        if opened.keeps and not fresh:
            with opened.reading() as kept:
                known = kept.ceilings().get(device_key(environment))
        if known is not None and known.is_trusted:
            return CeilingsResult(ceilings_summary(known), known)
        shelf = opened.history.ceilings() if opened.keeps else None
        with opened.lock(probe.device):
            found = opened.ask(AskCeilings(device=probe.device, threads=threads), CeilingsAnswer).ceilings
        found = found if known is None else found.with_best_of(known)
        if shelf is not None:
            shelf.put(found)
    return CeilingsResult(ceilings_summary(found), found)
