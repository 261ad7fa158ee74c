"""Records for other programs: one JSON document, or a CSV table with stable columns."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NewType

import msgspec

from redline.analyze.pairs import verdict_of
from redline.analyze.summary import summarize
from redline.model.record import RunRecord

DOCUMENT_SCHEMA = 2
"""Raised whenever a field of a JSON document or a column of the CSV table changes its meaning or goes away.

In 2, reasons and notes became objects of code, about and text, and every document got its kind.
"""

DocumentKind = Literal[
    "run", "batch", "tune", "profile", "profile-diff", "flops", "roofline", "report",
    "compare", "models", "show", "export", "checklist", "workshop", "micro",
    "gate", "history", "tag", "import", "delete", "prune", "recover", "bisect", "monitor", "memory", "watch",
]  # fmt: skip
"""The command that made it, or the option that asked another question; see docs/report.md."""

JsonDocument = NewType("JsonDocument", str)
"""A text that `json_document` made; `--json` prints nothing else."""

_OBEYED = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069]")

Summarize = Callable[[Sequence[RunRecord]], Sequence[msgspec.Struct]]
"""From records to their rows, in the same order."""

_Plain = Mapping[str, Any]


def json_document(
    kind: DocumentKind, fields: Mapping[str, Any] | msgspec.Struct, *, indent: bool = True
) -> JsonDocument:
    """What `--json` prints: `schema` and `kind` at the top, then the fields. NaN and infinity become null."""
    plain = msgspec.to_builtins(fields) if isinstance(fields, msgspec.Struct) else fields
    assert not plain.keys() & {"schema", "kind"}, "the document's own"
    encoded = msgspec.json.encode({"schema": DOCUMENT_SCHEMA, "kind": kind, **plain})
    text = (msgspec.json.format(encoded, indent=2) if indent else encoded).decode()
    return safe_document(text)


def safe_document(text: str) -> JsonDocument:
    """JSON in which characters that a terminal obeys, in names that anyone may write, are escaped."""
    return JsonDocument(_OBEYED.sub(lambda found: f"\\u{ord(found.group()):04x}", text) + "\n")


def export_json(
    records: Sequence[RunRecord],
    *,
    raw: bool = False,
    summarize: Summarize | None = None,
    kind: DocumentKind = "export",
) -> JsonDocument:
    """One document with a row per record in `results`, and with `raw` everything that was measured in `records`."""
    fields: dict[str, Any] = {"results": (summarize or _summarize)(records)}
    # Raw samples are not indented: it would be one line for each.
    return json_document(kind, {**fields, "records": records} if raw else fields, indent=not raw)


def export_csv(records: Sequence[RunRecord], *, summarize: Summarize | None = None) -> str:
    """One row per record under the names of `COLUMNS`; a cell is empty where the value is unknown or not finite.

    Times in seconds, sizes in bytes, `true` and `false`. Several trust labels in `verdict` are joined by `;`.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for record, row in zip(records, (summarize or _summarize)(records), strict=True):
        plain = {**msgspec.to_builtins(row), "created_at": iso_8601(record.created_at)}
        writer.writerow(_cell(column(plain)) for column in COLUMNS.values())
    return text.getvalue()


def _summarize(records: Sequence[RunRecord]) -> Sequence[msgspec.Struct]:
    # Imported here: it loads numpy, which a caller with its own rows does not need.
    return summarize(records)


_Column = Callable[[_Plain], Any]


def _at(*path: str) -> _Column:
    """The value under a path of names; None as soon as one of them leads nowhere."""

    def look_up(row: _Plain) -> Any:
        value: Any = row
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    return look_up


def _labels(row: _Plain) -> str:
    labels: Iterable[str] = _at("verdict", "labels")(row) or ()
    return ";".join(labels)


def _passed(row: _Plain) -> bool | None:
    """None where outputs were not compared."""
    return None if _at("numerics", "method")(row) in ("unchecked", "skipped") else _at("numerics", "passed")(row)


def _inputs(row: _Plain) -> str:
    shapes: Iterable[str] = _at("conditions", "inputs")(row) or ()
    return ";".join(shapes)


def _count_of(*path: str) -> _Column:
    def count(row: _Plain) -> int | None:
        found = _at(*path)(row)
        return None if found is None else len(found)

    return count


def _ratio_verdict(row: _Plain) -> str | None:
    """Whether the ratio's interval decides the comparison."""
    if _at("vs_first")(row) is None:
        return None
    low, high = _at("vs_first", "low")(row), _at("vs_first", "high")(row)
    return "inconclusive" if low is None or high is None else verdict_of(low, high)


def _processes(row: _Plain) -> int | None:
    """How many processes its numbers are over; None of a row without any."""
    return len(_at("replicate_ids")(row) or ()) or (None if _at("failure")(row) else 1)


COLUMNS: dict[str, _Column] = {
    "record_id": _at("record_id"),
    "created_at": _at("created_at"),
    "model": _at("model"),
    "task": _at("task"),
    "recipe": _at("recipe"),
    "batch": _at("batch"),
    "device": _at("device"),
    "device_name": _at("device_name"),
    "throughput_per_s": _at("throughput_per_s"),
    "throughput_low": _at("throughput_interval", "low"),
    "throughput_high": _at("throughput_interval", "high"),
    "latency_p50_s": _at("latency_s", "p50"),
    "latency_p90_s": _at("latency_s", "p90"),
    "latency_p95_s": _at("latency_s", "p95"),
    "latency_p99_s": _at("latency_s", "p99"),
    "latency_mean_s": _at("latency_s", "mean"),
    "latency_std_s": _at("latency_s", "std"),
    "samples": _at("latency_s", "n"),
    "forward_s": _at("phases_s", "forward"),
    "backward_s": _at("phases_s", "backward"),
    "optimizer_s": _at("phases_s", "optimizer"),
    "peak_allocated_bytes": _at("memory", "peak_allocated_bytes"),
    "peak_reserved_bytes": _at("memory", "peak_reserved_bytes"),
    "peak_rss_bytes": _at("memory", "peak_rss_bytes"),
    "import_s": _at("cold_start_s", "import"),
    "build_s": _at("cold_start_s", "build"),
    "first_call_s": _at("cold_start_s", "first_call"),
    "compile_s": _at("cold_start_s", "compile"),
    "compile_cache": _at("cold_start_s", "compile_cache"),
    "rel_l2": _at("numerics", "rel_l2"),
    "cosine": _at("numerics", "cosine"),
    "top1_agreement": _at("numerics", "top1_agreement"),
    "numerics_passed": _passed,
    "tolerance": _at("numerics", "tolerance"),
    "loss_steps": _at("numerics", "steps"),
    "ratio": _at("vs_first", "ratio"),
    "ratio_low": _at("vs_first", "low"),
    "ratio_high": _at("vs_first", "high"),
    "verdict": _labels,
    "bound": _at("bound", "label"),
    "failure_stage": _at("failure", "stage"),
    "failure_kind": _at("failure", "kind"),
    "failure_message": _at("failure", "message"),
    "flops": _at("flops"),
    "compulsory_bytes": _at("roofline", "compulsory_bytes"),
    "roofline_s": _at("roofline", "attainable_s"),
    "headroom": _at("roofline", "headroom"),
    "efficiency": _at("roofline", "efficiency"),
    "equal_share": _at("numerics", "equal_share"),
    "items_per_step": _at("items_per_step"),
    "item": _at("item"),
    "batch_from": _at("batch_from"),
    "inputs": _inputs,
    "image_size": _at("conditions", "image_size"),
    "sequence_length": _at("conditions", "sequence_length"),
    "classes": _at("conditions", "classes"),
    "optimizer": _at("conditions", "optimizer"),
    "loss": _at("conditions", "loss"),
    "threads": _at("conditions", "threads"),
    "max_memory_bytes": _at("conditions", "max_memory_bytes"),
    "seed": _at("conditions", "seed"),
    "effort": _at("conditions", "effort"),
    "torch": _at("conditions", "torch"),
    "driver": _at("conditions", "driver"),
    "redline": _at("conditions", "redline"),
    "data": _at("training", "data"),
    "stem": _at("training", "stem"),
    "epochs": _count_of("training", "epochs"),
    "epoch_s": _at("training", "epoch_s"),
    "train_loss": _at("training", "train_loss"),
    "val_loss": _at("training", "val_loss"),
    "val_accuracy": _at("training", "accuracy"),
    "best_accuracy": _at("training", "best_accuracy"),
    "time_to_target_s": _at("training", "time_to_target_s"),
    "data_wait_share": _at("training", "data_wait_share"),
    "utilisation": lambda row: _at("training", "utilisation")(row) if row.get("training") else row.get("utilisation"),
    "sustained_per_s": _at("sustained_per_s"),
    "processes": _processes,
    "ratio_verdict": _ratio_verdict,
    "energy_per_item_j": lambda row: (
        _at("training", "energy_per_sample_j")(row) if row.get("training") else row.get("energy_per_item_j")
    ),
    "power_w": _at("power_w"),
    "cost_per_million": lambda row: (
        _at("training", "cost_per_million")(row) if row.get("training") else row.get("cost_per_million")
    ),
    "energy_too_short": lambda row: row.get("energy_too_short") or None,
    "prompt": _at("conditions", "prompt"),
    "new_tokens": _at("conditions", "new_tokens"),
    "ttft_s": _at("generation", "ttft_s"),
    "tpot_s": _at("generation", "tpot_s", "p50"),
    "tpot_p95_s": _at("generation", "tpot_s", "p95"),
    "tpot_p99_s": _at("generation", "tpot_s", "p99"),
    "prefill_tokens_per_s": _at("generation", "prefill_tokens_per_s"),
    "decode_tokens_per_s": _at("generation", "decode_tokens_per_s"),
    "weight_bytes": _at("generation", "weight_bytes"),
    "cache_bytes": _at("generation", "cache_bytes"),
    "bandwidth_share": _at("generation", "bandwidth_share"),
    "cache": _at("generation", "cache"),
}
"""The table's columns, in order, and where each comes from. New ones go to the end."""


def iso_8601(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return harmless(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else ""
    return str(value)


def harmless(text: str) -> str:
    """Text on one line that no spreadsheet takes for a formula: file names and error messages are not trusted."""
    one_line = " ".join(text.splitlines())
    # Spreadsheets trim what they import, so a formula behind blanks is one too.
    formula = text[:1] in ("\t", "\r", "\n") or one_line.lstrip().startswith(("=", "+", "-", "@"))
    return f"'{one_line}" if formula else one_line
