"""`redline.ceilings`: what the device can do at most."""

from __future__ import annotations

from redline.analyze.ceilings import CeilingsSummary, ceilings_summary
from redline.api.settings import specs_of
from redline.api.workspace import Workspace, use
from redline.identity import device_key
from redline.protocol import AskCeilings, CeilingsAnswer
from redline.report.ceilings import ceilings_report
from redline.report.export import JsonDocument, json_document
from redline.report.terminal import as_text
from redline.work import Ceilings


class CeilingsResult:
    def __init__(self, summary: CeilingsSummary, ceilings: Ceilings) -> None:
        self.summary = summary
        self.ceilings = ceilings

    def __str__(self) -> str:
        return as_text(ceilings_report(self.summary))

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
        shelf = opened.history.ceilings() if opened.keeps else None
        known = shelf.get(device_key(environment)) if shelf is not None and not fresh else None
        if known is not None and known.is_trusted:
            return CeilingsResult(ceilings_summary(known), known)
        with opened.lock(probe.device):
            found = opened.ask(AskCeilings(device=probe.device, threads=threads), CeilingsAnswer).ceilings
        found = found if known is None else found.with_best_of(known)
        if shelf is not None:
            shelf.put(found)
    return CeilingsResult(ceilings_summary(found), found)
