"""This module writes records as bytes, and reads those of older schemas as records of today."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from redline.model.errors import RecordError, SpecError
from redline.model.note import notes_from_texts
from redline.model.record import SCHEMA, SECONDS, Capabilities, RunRecord
from redline.model.spec import Recipe


def _from_1_to_2(plain: dict[str, Any]) -> dict[str, Any]:
    """Schema 1 called switches steps and solo blocks alone, and had plain texts for notes.

    It said neither what switches do nor how the batch was known.
    """
    plain = {**plain, "notes": notes_from_texts(plain.get("notes", []))}
    if isinstance(plain.get("blocks"), list | tuple):
        plain["blocks"] = [_renamed(block, "alone", "solo") for block in plain["blocks"]]
    if isinstance(plain.get("prepared"), dict):
        plain["prepared"] = _with_batch(_with_notes(plain["prepared"]))
    spec = plain.get("spec")
    if isinstance(spec, dict) and isinstance(spec.get("recipe"), dict):
        recipe = _renamed(spec["recipe"], "steps", "switches")
        plain["spec"] = {**spec, "recipe": recipe}
        if isinstance(plain.get("prepared"), dict):
            plain["prepared"] = {**plain["prepared"], "switches": _capabilities_in_schema_1(recipe)}
    return plain


def _with_batch(prepared: dict[str, Any]) -> dict[str, Any]:
    workload = prepared.get("workload")
    if not isinstance(workload, dict) or "batch" in workload:
        return prepared
    origin = "guessed" if workload.get("source") in ("user", "live") else "source"
    workload = {**workload, "batch": workload.get("items_per_step"), "batch_from": origin}
    return {**prepared, "workload": workload}


def _with_notes(prepared: dict[str, Any]) -> dict[str, Any]:
    changed = dict(prepared)
    for part, name in (("workload", "notes"), ("work", "notes"), ("numerics", "reason"), ("warmup", "reason")):
        if isinstance(changed.get(part), dict) and name in changed[part]:
            texts = notes_from_texts(changed[part][name] or ([] if name == "notes" else None))
            changed[part] = {**changed[part], name: texts}
    changed["cold_start"] = _cold_start_in_schema_1(changed.get("cold_start"))
    by_switch = changed.get("recipe_notes")
    if isinstance(by_switch, dict):
        changed["recipe_notes"] = [{**notes_from_texts(text), "about": switch} for switch, text in by_switch.items()]
    return changed


def _cold_start_in_schema_1(cold: Any) -> Any:
    for name in SECONDS:
        cold = _renamed(cold, name, name.removesuffix("_s"))
    return cold


def _renamed(plain: Any, old: str, new: str) -> Any:
    if not isinstance(plain, dict) or old not in plain:
        return plain
    return {new if name == old else name: value for name, value in plain.items()}


def _capabilities_in_schema_1(recipe: dict[str, Any]) -> dict[str, Any]:
    """Returns them by name, which is all that records of then tell: these were the switches there were."""
    try:
        switches = msgspec.convert(recipe, Recipe).switches
    except (msgspec.ValidationError, SpecError):
        return {}  # a damaged record, which is told when it is converted as a whole
    found = {}
    for switch in switches:
        engine = switch.name in ("torchscript", "onnx", "tensorrt")
        does = Capabilities(
            compiles=engine or switch.name == "compile",
            records_graph=switch.name == "graphs" or switch.argument in ("reduce-overhead", "max-autotune"),
            refuses_graph=engine,
            dissolves_modules=engine or switch.name in ("compile", "graphs"),
            folds_norms=engine or switch.name == "fold-bn" or switch.argument == "freeze",
            quantizes=switch.name in ("int8", "fp8"),
        )
        found[str(switch)] = msgspec.to_builtins(does)
    return found


MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _from_1_to_2}
"""Each makes a record of the next schema, as a plain table, from one of its own."""
REMOVED_SETTINGS = frozenset({"check_inputs"})


def encode(record: RunRecord) -> bytes:
    return msgspec.msgpack.encode(record)


def decode(data: bytes) -> RunRecord:
    """Reads a stored record of this schema or an older one."""
    try:
        plain = msgspec.msgpack.decode(data)
    except (ValueError, RecursionError) as error:  # not msgpack, text that is not UTF-8, tables in tables without end
        raise RecordError(f"not a record: {error}") from None
    return record_of(plain)


def record_of(plain: Any) -> RunRecord:
    """Returns the record that a plain table holds, of this schema or an older one."""
    if not isinstance(plain, dict):
        raise RecordError("not a record: expected a table")
    try:
        return msgspec.convert(migrate(plain), RunRecord)
    except (msgspec.ValidationError, SpecError) as error:
        raise RecordError(f"record {plain.get('id')!r} is damaged: {error}") from None


def migrate(plain: dict[str, Any]) -> dict[str, Any]:
    schema = plain.get("schema")
    if not isinstance(schema, int):
        raise RecordError(f"not a record: its schema is {schema!r}")
    if schema > SCHEMA:
        raise RecordError(f"record of schema {schema}; this Redline reads up to {SCHEMA}: update Redline")
    for older in range(schema, SCHEMA):
        if older not in MIGRATIONS:
            raise RecordError(f"cannot update a record from schema {older} to {older + 1}")
        plain = {**MIGRATIONS[older](plain), "schema": older + 1}
    return {**plain, "spec": without_removed_settings(plain["spec"])} if "spec" in plain else plain


def without_removed_settings(spec: Any) -> Any:
    """Returns a spec as a plain table, without settings of the workload that Redline once had and that changed no number."""
    workload = spec.get("workload") if isinstance(spec, dict) else None
    if not isinstance(workload, dict):
        return spec
    return {**spec, "workload": {name: value for name, value in workload.items() if name not in REMOVED_SETTINGS}}
