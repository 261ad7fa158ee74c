"""JSON documents without raw records, read back: shown as the command that wrote them printed them.

A document of an older schema is read as far as it goes: fields that are gone are dropped, texts that became notes are notes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect
from rich.console import Group, RenderableType
from rich.text import Text

from redline.analyze.attainable import OperatorRow
from redline.analyze.batch import BatchSummary
from redline.analyze.ceilings import CeilingsSummary, RooflineRow
from redline.analyze.compare import Comparisons
from redline.analyze.flops import FlopsSummary
from redline.analyze.gate import GateRow
from redline.analyze.grid import Estimate, GridCell, GridSummary, Rung, UnderTargets
from redline.analyze.load import LoadSummary
from redline.analyze.pairs import Pair
from redline.analyze.profile import Profile
from redline.analyze.profile_diff import ProfileDiff
from redline.analyze.scale import Mode, ScaleFinding, ScalePoint
from redline.analyze.summary import RunSummary
from redline.analyze.train import LoaderSummary, TrainingSummary
from redline.model.errors import SpecError, UsageError
from redline.model.fields import Frozen
from redline.model.note import Note, notes_from_texts
from redline.report.batch import batch_report
from redline.report.ceilings import ceilings_report, ops_report
from redline.report.compare import DiffReport, compare_report
from redline.report.export import DOCUMENT_SCHEMA
from redline.report.flops import FlopsReport
from redline.report.gate import BisectStep, bisect_report, gate_report
from redline.report.grid import grid_report, pair_line
from redline.report.history import SeriesTrend, history_report
from redline.report.load import load_report
from redline.report.memory import MemoryRow, memory_report
from redline.report.notebook import Shown
from redline.report.profile import ProfileReport
from redline.report.quick import QuickResults, quick_text
from redline.report.roofline import RooflineReport
from redline.report.run import RunReport
from redline.report.scale import scale_report
from redline.report.train import loader_report, train_report
from redline.report.tune import tune_report
from redline.report.workshop import Checklist, WorkshopResult, checklist_report, results_text
from redline.search.tune.result import TuneSummary

Plain = dict[str, Any]


class Document(Shown):
    """What a document says, as the structs it was made of."""

    def __init__(
        self,
        path: Path,
        kind: str,
        schema: int,
        content: msgspec.Struct,
        *,
        name: str = "",
        left_out: tuple[str, ...] = (),
    ) -> None:
        self.path, self.kind, self.schema, self.content = path, kind, schema, content
        self.name = name
        """Under which it is in its file; empty where it is the whole file."""
        self.left_out = left_out
        """What else is in its file and is no document of Redline."""

    def report(self) -> RenderableType:
        shown: RenderableType = FORMS[self.kind].show(self.content)
        return shown

    def frame_rows(self) -> Sequence[Any]:
        return [self.content]

    def plain(self) -> Plain:
        """For `--json`: with the fields of today, whatever the schema it was written in."""
        told = {
            "path": str(self.path),
            "name": self.name,
            "kind": self.kind,
            "schema": self.schema,
            "left_out": self.left_out,
        }
        return {**told, "content": msgspec.to_builtins(self.content, str_keys=True)}


class _Rows(Frozen):
    results: tuple[RunSummary, ...]


class _Run(GridSummary, kw_only=True):
    results: tuple[RunSummary, ...]
    name: str = ""
    planned: int = 0
    done: int = 0
    failed: int = 0
    cells: tuple[GridCell, ...] = ()
    pairs: tuple[Pair, ...] = ()
    rungs: tuple[Rung, ...] = ()
    estimate: Estimate | None = None
    under_slo: UnderTargets | None = None
    columns: tuple[str, ...] = ()


class _Batch(Frozen):
    recipes: tuple[BatchSummary, ...]


class _Operators(Frozen):
    device_name: str
    results: tuple[OperatorRow, ...]
    notes: tuple[Note, ...] = ()


class _Roofline(Frozen):
    ceilings: CeilingsSummary
    results: tuple[RooflineRow, ...]
    failures: dict[str, str] = {}


class _Trainings(Frozen):
    trainings: tuple[TrainingSummary, ...]


class _Loads(Frozen):
    loads: tuple[LoadSummary, ...]


class _Gate(Frozen):
    baseline: str
    benchmarks: tuple[GateRow, ...]


class _Bisect(Frozen):
    benchmark: str
    what: str
    steps: tuple[BisectStep, ...]
    suspects: tuple[str, ...]
    about: str
    earlier: BisectStep | None = None


class _History(Frozen):
    series: tuple[SeriesTrend, ...]
    left_out: int = 0


class _Scale(Frozen):
    mode: Mode
    points: tuple[ScalePoint, ...]
    findings: tuple[ScaleFinding, ...] = ()


class _Memory(Frozen):
    results: tuple[MemoryRow, ...]
    failures: dict[str, str] = {}


def _run_report(document: _Run) -> RenderableType:
    shown = grid_report(
        document.results,
        document if document.cells else None,
        rungs=document.rungs,
        estimate=document.estimate,
        under=document.under_slo,
        columns=document.columns,
    )
    return Group(shown, *(Text(f"  {pair_line(pair)}") for pair in document.pairs))


class _Form(NamedTuple):
    type: type[msgspec.Struct]
    show: Callable[[Any], RenderableType]


FORMS: dict[str, _Form] = {
    **dict.fromkeys(("export", "show"), _Form(_Rows, lambda found: RunReport(found.results))),
    "run": _Form(_Run, _run_report),
    "batch": _Form(_Batch, lambda found: batch_report(found.recipes)),
    "tune": _Form(TuneSummary, tune_report),
    "profile": _Form(Profile, ProfileReport),
    "profile-diff": _Form(ProfileDiff, DiffReport),
    "quick": _Form(QuickResults, lambda found: Text(quick_text(found, ()))),
    "flops": _Form(FlopsSummary, FlopsReport),
    "ops": _Form(_Operators, lambda found: ops_report(found.results, found.device_name, True, found.notes)),
    "ceilings": _Form(CeilingsSummary, ceilings_report),
    "roofline": _Form(_Roofline, lambda found: RooflineReport(found.results, found.failures)),
    "compare": _Form(Comparisons, lambda found: compare_report(found, "A", "B")),
    "train": _Form(_Trainings, lambda found: train_report(found.trainings)),
    "loader": _Form(LoaderSummary, loader_report),
    "load": _Form(_Loads, lambda found: load_report(found.loads)),
    "gate": _Form(_Gate, lambda found: gate_report(found.benchmarks, found.baseline)),
    "bisect": _Form(
        _Bisect,
        lambda found: bisect_report(
            found.benchmark, found.what, found.steps, found.suspects, found.about, found.earlier
        ),
    ),
    "history": _Form(_History, lambda found: history_report(found.series, left_out=found.left_out)),
    "scale": _Form(_Scale, lambda found: scale_report(found.points, found.findings, found.mode)),
    "memory": _Form(_Memory, lambda found: memory_report(found.results, found.failures)),
    "workshop": _Form(WorkshopResult, lambda found: Text(results_text(found))),
    "checklist": _Form(Checklist, checklist_report),
}
"""By kind: what a document is read as, and what shows it. The other kinds say nothing that a table would show better."""

SHAPES: dict[str, tuple[str, ...]] = {
    "roofline": ("ceilings", "results"),
    "run": ("results",),
    "ceilings": ("tflops", "launch_s"),
    "tune": ("ranking", "winner"),
    "batch": ("recipes", "max_batch"),
    "load": ("loads",),
}
"""Documents of schema 1 have no kind; these fields tell them apart, the first that fits."""

_SINGLE = {"load": "loads", "train": "trainings"}
"""Where one row is its own document, and several are a list under this name."""


def read_documents(path: Path, plain: Any) -> list[Document]:
    """What a parsed file says: one document, or several under names of their own, as scripts write them.

    Raises `UsageError` for what Redline did not write, and for documents that no table shows.
    """
    if _kind_of(plain) is None and isinstance(plain, dict):
        named = [(name, each) for name, each in plain.items() if _kind_of(each) in FORMS]
        if named:
            left_out = tuple(name for name in plain if name not in dict(named))
            return [_read(path, each, name, left_out) for name, each in named]
    return [_read(path, plain)]


def _read(path: Path, plain: Any, name: str = "", left_out: tuple[str, ...] = ()) -> Document:
    kind, where = _kind_of(plain), f"{path}: {name}" if name else str(path)
    if kind is None:
        raise UsageError(
            f"{where} is not a JSON document of Redline: it has neither records nor the schema and kind of one that "
            f"'--json' prints{_beside(path)}"
        )
    plain = {_SINGLE[kind]: plain} if isinstance(plain, list) else plain
    schema = plain.get("schema", 1)
    if schema > DOCUMENT_SCHEMA:
        raise UsageError(f"{where} has schema {schema}, this Redline reads up to {DOCUMENT_SCHEMA}: update Redline")
    if kind not in FORMS:
        raise UsageError(
            f"{where} is what 'redline {kind} --json' printed; it has neither records nor rows that a report could "
            "show: read it as JSON"
        )
    if kind in _SINGLE and _SINGLE[kind] not in plain:
        plain = {_SINGLE[kind]: [plain]}
    form = FORMS[kind].type
    try:
        content = msgspec.convert(_fitted(_updated(plain, schema), inspect.type_info(form)), form, str_keys=True)
    except (msgspec.ValidationError, SpecError) as error:
        raise UsageError(f"{where} is what 'redline {kind} --json' printed, but it is damaged: {error}") from None
    if not any(msgspec.to_builtins(content).values()):
        raise UsageError(f"{where} is what 'redline {kind} --json' printed, and it is empty")
    return Document(path, kind, schema, content, name=name, left_out=left_out)


def _kind_of(plain: Any) -> str | None:
    """None for what is not a document of Redline."""
    if isinstance(plain, list):  # the rows alone
        rates = plain and all(isinstance(row, dict) and "sustainable_rate" in row for row in plain)
        return "load" if rates else None
    if not isinstance(plain, dict) or not isinstance(schema := plain.get("schema", 1), int):
        return None
    if schema > 1:
        return kind if isinstance(kind := plain.get("kind"), str) else None
    return next((kind for kind, names in SHAPES.items() if all(name in plain for name in names)), None)


def _beside(path: Path) -> str:
    """Where the records of a script's own file probably are."""
    archives = sorted([*path.parent.glob("*.redline"), *path.parent.glob("*.redline.gz")])
    return f"; 'redline report {archives[0]}' shows the records beside it" if archives else ""


def _updated(plain: Plain, schema: int) -> Plain:
    """In schema 1 the kind of ceilings was that of their device, and nothing was doubted."""
    if schema > 1:
        return plain
    if isinstance(plain.get("ceilings"), dict):
        return {**plain, "ceilings": _updated(plain["ceilings"], schema)}
    if "tflops" not in plain:
        return plain
    return {"device_kind": plain.get("kind"), "trusted": True, "doubts": [], **plain}


def _fitted(plain: Any, kind: inspect.Type) -> Any:
    """Without fields that the type does not have, and with texts as notes where it has notes."""
    if isinstance(kind, inspect.UnionType):
        for each in kind.types:
            plain = _fitted(plain, each)
        return plain
    if isinstance(kind, inspect.StructType):
        if kind.cls is Note:
            return notes_from_texts(plain)
        names = {field.encode_name: field.type for field in kind.fields}
        known = plain.items() if isinstance(plain, dict) else ()
        return {key: _fitted(each, names[key]) for key, each in known if key in names} if known else plain
    if isinstance(kind, inspect.CollectionType) and isinstance(plain, list):
        return [_fitted(each, kind.item_type) for each in plain]
    if isinstance(kind, inspect.TupleType) and isinstance(plain, list):
        return [_fitted(each, type_) for each, type_ in zip(plain, kind.item_types, strict=False)]
    if isinstance(kind, inspect.DictType) and isinstance(plain, dict):
        return {key: _fitted(each, kind.value_type) for key, each in plain.items()}
    return plain
