"""`redline.roofline`: the device's ceilings, how far a model is from them, and single operators against them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack, get_args

from rich.console import RenderableType

from redline.analyze.attainable import OperatorRow, by_time, operator_row
from redline.analyze.ceilings import OF_GENERATION, RooflineRow, ceilings_summary, roofline_row
from redline.api.flops import module_profile
from redline.api.profile import profile_spec
from redline.api.settings import Settings, listed, one_spec, specs_of, takes_settings
from redline.api.workspace import Workspace, use
from redline.model.errors import BenchError, SpecError, UsageError
from redline.model.fields import MOST_ITEMS
from redline.model.identity import device_key
from redline.model.note import Note
from redline.model.questions import AskCeilings, AskOperators, CeilingsAnswer, OperatorCase, OperatorName, OperatorTimes
from redline.model.spec import RunSpec
from redline.model.work import Ceilings
from redline.report.export import JsonDocument, json_document
from redline.report.notebook import Bars, Shown
from redline.report.roofline import RooflineReport, ceilings_report, operators_report, plot_roofline


class RooflineResult(Shown, Sequence[Any]):
    """The ceilings of a device, and under them one row per recipe of a model, or one per operator."""

    def __init__(
        self,
        ceilings: Ceilings,
        rows: Sequence[RooflineRow] = (),
        failures: Mapping[str, str] | None = None,
        operators: Sequence[OperatorRow] = (),
        notes: Sequence[Note] = (),
    ) -> None:
        self.measured = ceilings
        self.ceilings = ceilings_summary(ceilings)
        self.rows = list(rows)
        self.failures = dict(failures or {})
        """Recipes that broke, and what they said."""
        self.operators = list(operators)
        self.notes = tuple(notes)

    def __len__(self) -> int:
        return len(self.operators or self.rows)

    def __getitem__(self, index: Any) -> Any:
        return (self.operators or self.rows)[index]

    def report(self) -> RenderableType:
        if self.operators:
            return operators_report(self.operators, self.ceilings.name, self.notes)
        return RooflineReport(self.rows, self.failures) if self.rows else ceilings_report(self.ceilings)

    def frame_rows(self) -> Sequence[Any]:
        return self.operators or self.rows or [self.ceilings]

    def bars(self) -> Bars | None:
        if self.operators:
            timed = [row for row in self.operators if row.seconds]
            bars = [(f"{row.operator} {row.shape}", 1e3 * (row.seconds or 0.0), None, None) for row in timed]
            return Bars(self.ceilings.name, "ms per call", bars)
        if self.rows:
            bars = [(row.recipe, row.headroom, None, None) for row in self.rows if row.headroom]
            return Bars("time over roofline time", "times slower than the roofline", bars)
        peaks = self.ceilings.tflops.items()
        bars = [(form, figure.measured, None, None) for form, figure in peaks if figure.measured]
        return Bars(self.ceilings.name, "TFLOP/s", bars)

    def to_json(self) -> JsonDocument:
        return json_document(
            "roofline",
            {
                "ceilings": self.ceilings,
                "results": self.rows,
                "failures": self.failures,
                "operators": self.operators,
                "notes": self.notes,
            },
        )

    def plot(self, path: str | Path | None = None) -> Any:
        """The rows under their roofs, both axes logarithmic: written to a path, and that path; else the figure."""
        return super().plot() if path is None else plot_roofline(self.rows, self.ceilings, Path(path))


@takes_settings
def roofline(
    model: Any = None,
    inputs: Any | None = None,
    *,
    recipes: str | Iterable[str] = "baseline",
    ops: bool = False,
    operators: str | Iterable[str] = (),
    formats: str | Iterable[str] = (),
    loss: Any | None = None,
    last: bool = False,
    fresh: bool = False,
    workspace: Workspace | None = None,
    **settings: Unpack[Settings],
) -> RooflineResult:
    """Without a model the ceilings of the device, with one how far from them each recipe is.

    The ceilings are measured once per device, driver and torch version; `fresh` measures them again. Each recipe is timed
    and profiled once. `last` takes the last run instead and measures nothing; times per kernel class need a profile and
    are then missing.

    `ops` times single operators: those the model calls; without a model all five kinds, or `operators` such as "matmul" or
    "matmul:4096x4096x4096", in each of `formats`. Sizes are M, N, K (matmul), N, C, H, W, K, R (conv: K output channels, an
    RxR kernel), batch, heads, length, width (attention), rows, width (norm), or a number (elementwise).
    """
    _refuse_mixtures(model, recipes, ops or bool(operators or formats), listed(operators) + listed(formats), settings)
    ops = ops or bool(operators or formats)
    with use(workspace) as opened:
        if last:
            return _roofline_of_last(opened)
        if model is None:
            spec = one_spec(opened, "a roofline", "simple_cnn", None, **settings)[0]
            (spec,) = opened.checked([spec])  # any model will do: it is not run
            cases = operator_cases(listed(operators), listed(formats), spec.device) if ops else []
            known = device_ceilings(spec.device, threads=spec.threads, fresh=fresh, workspace=opened)
            return _of_operators(spec, cases, known, opened) if ops else RooflineResult(known)
        specs, working = specs_of(opened, model, inputs, recipes=recipes, loss=loss, **settings)
        if len({spec.workload.model for spec in specs}) != 1 or (ops and len(specs) != 1):
            raise UsageError("a roofline is of one model, under one or more recipes; with ops under one")
        if specs[0].workload.task == "generate":
            raise UsageError(OF_GENERATION)
        specs = working.checked(specs)
        known = device_ceilings(specs[0].device, threads=specs[0].threads, fresh=fresh, workspace=working)
        return _of_operators(specs[0], [], known, working) if ops else _of_recipes(specs, known, working)


def _refuse_mixtures(
    model: Any, recipes: str | Iterable[str], ops: bool, chosen: list[str], settings: Mapping[str, Any]
) -> None:
    if model is not None and chosen:
        raise UsageError("a model brings its own operators and formats: give them or a model")
    if model is None and recipes != "baseline":
        raise UsageError("a recipe goes with a model; single operators take formats")
    of_model = sorted(settings.keys() - {"device", "threads"})
    if model is None and of_model:
        raise UsageError(f"{of_model[0].replace('_', '-')} goes with a model: name one")


def _of_recipes(specs: Sequence[RunSpec], known: Ceilings, workspace: Workspace) -> RooflineResult:
    rows, failures = [], {}
    for spec in specs:
        try:
            result = profile_spec(spec, module_profile(), workspace)
        except BenchError as error:
            if len(specs) == 1:
                raise
            failures[str(spec.recipe)] = str(error)  # the others still run
            continue
        assert result.record is not None
        rows.append(roofline_row(result.record, known, result.profile))
    if not rows:
        raise BenchError("unsupported", "; ".join(f"{recipe}: {said}" for recipe, said in failures.items()))
    return RooflineResult(known, rows, failures)


def _roofline_of_last(workspace: Workspace) -> RooflineResult:
    with workspace.reading() as history:
        records = [one for one in history.latest_group() if one.prepared is not None and one.prepared.work is not None]
        if not records:
            raise UsageError("the last run has no counted work: name a model, or run 'redline run' first")
        assert records[0].prepared is not None
        known = history.ceilings().get(device_key(records[0].prepared.environment))
    if known is None:
        raise UsageError("the ceilings of that device are not measured yet: 'redline roofline' does it")
    return RooflineResult(known, [roofline_row(record, known) for record in records])


def device_ceilings(
    device: str, *, threads: int | None = None, fresh: bool = False, workspace: Workspace | None = None
) -> Ceilings:
    """The ceilings of a device: from the history, or measured now and kept there.

    What was measured on a busy machine is measured again, and each figure is then the best that was seen.
    """
    with use(workspace) as opened:
        environment = opened.environment(device, threads)
        known = None
        if opened.keeps and not fresh:
            with opened.reading() as kept:
                known = kept.ceilings().get(device_key(environment))
        if known is not None and known.is_trusted:
            return known
        shelf = opened.history.ceilings() if opened.keeps else None
        with opened.lock(device):
            found = opened.ask(AskCeilings(device=device, threads=threads), CeilingsAnswer).ceilings
        found = found if known is None else found.with_best_of(known)
        if shelf is not None:
            shelf.put(found)
        return found


def _of_operators(
    spec: RunSpec, cases: Sequence[OperatorCase], known: Ceilings, workspace: Workspace
) -> RooflineResult:
    """The cases, or where there are none what the model of the spec calls."""
    asked = AskOperators(device=spec.device, threads=spec.threads, cases=tuple(cases), spec=None if cases else spec)
    with workspace.lock(spec.device):
        times = workspace.ask(asked, OperatorTimes, None if cases else spec.launch)
    rows = [operator_row(row, known) for row in times.rows]
    return RooflineResult(known, operators=rows if cases else by_time(rows), notes=times.notes)


SIZES: dict[OperatorName, int] = {"matmul": 3, "conv": 6, "attention": 4, "norm": 2, "elementwise": 1}
"""How many sizes an operator takes."""
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


def operator_cases(operators: Sequence[str], formats: Sequence[str], device: str) -> list[OperatorCase]:
    """What is timed for words such as matmul and matmul:4096x4096x4096; for none of them every operator."""
    kind = "cpu" if device == "cpu" else "gpu"
    for name in formats:
        if name not in FORMATS:
            raise SpecError(f"format must be one of {', '.join(FORMATS)}, got {name!r}")
    cases = []
    for word in operators or OPERATORS:
        name, _, shape = word.partition(":")
        operator = next((known for known in OPERATORS if known == name), None)
        if operator is None:
            raise SpecError(f"operator must be one of {', '.join(OPERATORS)}, got {name!r}")
        cases += [
            OperatorCase(operator=operator, shape=_shape(operator, text), number_format=form)
            for text in ([shape] if shape else DEFAULT_SHAPES[kind][operator])
            for form in (formats or (("fp32", "bf16") if kind == "cpu" else FORMATS))
            if form != "tf32" or operator in ("matmul", "conv")
        ]
    return cases


def _shape(operator: OperatorName, text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(?:[x×]\d+)*", text.strip()):
        raise SpecError(f"shape {text!r} must be numbers joined by x, such as 4096x4096x4096")
    numbers = tuple(int(word) for word in re.split("[x×]", text.strip()))
    if len(numbers) != SIZES[operator]:
        raise SpecError(f"{operator} takes {SIZES[operator]} sizes, got {len(numbers)} in {text!r}")
    if not all(0 < number <= MOST_ITEMS for number in numbers):
        raise SpecError(f"sizes of {text!r} must be from 1 to {MOST_ITEMS}")
    return numbers
