"""`redline.ceilings`: what the device can do at most; and `redline.ops`: single operators against that."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Unpack, get_args

from rich.console import RenderableType

from redline.analyze.attainable import OperatorRow, by_time, operator_row
from redline.analyze.ceilings import CeilingsSummary, ceilings_summary
from redline.api.settings import Settings, listed, one_spec, specs_of, takes_settings
from redline.api.workspace import Workspace, use
from redline.model.errors import SpecError, UsageError
from redline.model.fields import MOST_ITEMS
from redline.model.identity import device_key
from redline.model.note import Note
from redline.model.questions import AskCeilings, AskOperators, CeilingsAnswer, OperatorCase, OperatorName, OperatorTimes
from redline.model.work import Ceilings
from redline.report.ceilings import ceilings_report, ops_json, ops_report
from redline.report.export import JsonDocument, json_document
from redline.report.notebook import Bars, Shown


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


OPERATORS: tuple[OperatorName, ...] = get_args(OperatorName)
FORMATS = ("fp32", "tf32", "fp16", "bf16")
DEFAULT_SHAPES: dict[str, dict[OperatorName, tuple[str, ...]]] = {
    "gpu": {
        "matmul": ("1024x1024x1024", "4096x4096x4096", "8192x8192x8192"),
        "conv": ("32x64x56x56x64x3", "32x256x14x14x256x3", "64x128x28x28x128x3"),
        "attention": ("8x16x1024x64", "8x16x4096x64"),
        "norm": ("8192x1024", "65536x4096"),
        "elementwise": ("1048576", "268435456"),
    },
    "cpu": {
        "matmul": ("128x128x128", "512x512x512"),
        "conv": ("1x64x56x56x64x3", "4x128x28x28x128x3"),
        "attention": ("1x8x256x64",),
        "norm": ("1024x1024",),
        "elementwise": ("65536", "33554432"),
    },
}
"""Small enough to be quick, and on either side of the cache."""


class OpsResult(Shown, Sequence[OperatorRow]):
    """One row per operator, shape and number format."""

    def __init__(
        self, rows: Sequence[OperatorRow], device_name: str, has_ceilings: bool, notes: Sequence[Note] = ()
    ) -> None:
        self.rows = list(rows)
        self.notes = tuple(notes)
        self.device_name = device_name
        self.has_ceilings = has_ceilings

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def report(self) -> RenderableType:
        return ops_report(self.rows, self.device_name, self.has_ceilings, self.notes)

    def frame_rows(self) -> Sequence[Any]:
        return self.rows

    def bars(self) -> Bars | None:
        timed = [row for row in self.rows if row.seconds]
        bars = [(f"{row.operator} {row.shape}", 1e3 * (row.seconds or 0.0), None, None) for row in timed]
        return Bars(self.device_name, "ms per call", bars)

    def to_json(self) -> JsonDocument:
        return ops_json(self.rows, self.device_name, self.notes)


@takes_settings
def ops(
    operators: str | Iterable[str] = (),
    *,
    shapes: str | Iterable[str] = (),
    formats: str | Iterable[str] = (),
    model: Any | None = None,
    recipe: str = "baseline",
    workspace: Workspace | None = None,
    **settings: Unpack[Settings],
) -> OpsResult:
    """Time single operators: all five kinds at usual sizes, those named at the shapes given, or those a model calls.

    Shapes are written 4096x4096x4096 (matmul: M, N, K), NxCxHxWxKxR (conv: K output channels, an RxR kernel),
    batch x heads x length x width (attention), rows x width (norm) or a number (elementwise). With ceilings in the
    history each row says how near it is to the roofline.
    """
    with use(workspace) as opened:
        if model is not None:
            if listed(operators) or listed(shapes) or listed(formats):
                raise UsageError("a model brings its own operators, shapes and formats: give them or a model")
            spec, working = one_spec(opened, "ops", model, None, recipes=recipe, **settings)
            (spec,) = working.checked([spec])
            device, threads = spec.device, spec.threads
            cases: tuple[OperatorCase, ...] = ()
        else:
            if recipe != "baseline":
                raise UsageError("a recipe goes with a model; for single operators give formats")
            (probe,) = opened.checked(one_spec(opened, "ops", "simple_cnn", None, **settings)[:1])
            spec, working, device, threads = None, opened, probe.device, probe.threads
            kind = "cpu" if device == "cpu" else "gpu"
            cases = tuple(_cases(listed(operators), listed(shapes), listed(formats), kind))
        environment = working.environment(device, threads)
        with working.lock(device):
            asked = AskOperators(device=device, threads=threads, cases=cases, spec=spec)
            times = working.ask(asked, OperatorTimes, spec.launch if spec else None)
        known = None
        if working.keeps:
            with working.reading() as history:
                known = history.ceilings().get(device_key(environment))
    rows = [operator_row(row, known) for row in times.rows]
    shown = by_time(rows) if spec is not None else rows
    return OpsResult(shown, environment.device.name, known is not None, times.notes)


def _cases(operators: list[str], shapes: list[str], formats: list[str], kind: str) -> list[OperatorCase]:
    for name in operators:
        if name not in OPERATORS:
            raise SpecError(f"operator must be one of {', '.join(OPERATORS)}, got {name!r}")
    for name in formats:
        if name not in FORMATS:
            raise SpecError(f"format must be one of {', '.join(FORMATS)}, got {name!r}")
    if shapes and len(operators) != 1:
        raise UsageError("shapes belong to one operator: name it, such as 'redline ops matmul --shape 4096x4096x4096'")
    chosen: list[OperatorName] = [name for name in OPERATORS if not operators or name in operators]
    defaults = ("fp32", "bf16") if kind == "cpu" else FORMATS
    return [
        OperatorCase(operator=name, shape=_shape(name, text), number_format=form)
        for name in chosen
        for text in (shapes or DEFAULT_SHAPES[kind][name])
        for form in (formats or defaults)
        if form != "tf32" or name in ("matmul", "conv")
    ]


SIZES = {"matmul": 3, "conv": 6, "attention": 4, "norm": 2, "elementwise": 1}


def _shape(operator: str, text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(?:[x×]\d+)*", text.strip()):
        raise SpecError(f"shape {text!r} must be numbers joined by x, such as 4096x4096x4096")
    numbers = tuple(int(word) for word in re.split("[x×]", text.strip()))
    if len(numbers) != SIZES[operator]:
        raise SpecError(f"{operator} takes {SIZES[operator]} sizes, got {len(numbers)} in {text!r}")
    if not all(0 < number <= MOST_ITEMS for number in numbers):
        raise SpecError(f"sizes of {text!r} must be from 1 to {MOST_ITEMS}")
    return numbers
