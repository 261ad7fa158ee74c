"""A record comes back whole, old ones too; what cannot be understood says so in one line."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from filled import SAMPLES, filled

from redline.model import record
from redline.model.errors import RecordError
from redline.model.identity import series_of
from redline.model.migrations import decode, encode
from redline.model.note import note
from redline.model.record import (
    BENCHMARK_VERSION,
    SCHEMA,
    Capabilities,
    Failure,
    Numerics,
    Prepared,
    RunRecord,
    new_id,
)
from redline.model.spec import Recipe, RunSpec, WorkloadSpec


def whole_record(**changes: Any) -> RunRecord:
    parts = {"id": "0123", "schema": SCHEMA, "benchmark_version": BENCHMARK_VERSION}
    return filled(RunRecord, **{**parts, **changes})  # type: ignore[no-any-return]


def plain_record(**changes: Any) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.msgpack.decode(encode(whole_record()))
    return {**plain, **changes}


def parts_at_their_default(value: Any) -> Iterator[str]:
    if isinstance(value, tuple):
        for item in value:
            yield from parts_at_their_default(item)
    if not isinstance(value, msgspec.Struct):
        return
    for field in msgspec.structs.fields(value):
        held = getattr(value, field.name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if held == default:
            yield f"{type(value).__name__}.{field.name}"
        yield from parts_at_their_default(held)


class TestRoundTrip:
    def test_the_whole_record_leaves_no_part_at_its_default(self) -> None:
        """Else the next test could not see that a part was lost."""
        assert set(parts_at_their_default(whole_record())) == {
            "RunRecord.schema",
            "RunRecord.benchmark_version",
            "Block.unit",  # there is only one
            "Switch.argument",  # of fp16
            "Switch.options",
            "DataSpec.on_device",  # goes with no workers
            "RunSpec.load",  # does not go with a training
            "RunSpec.ranks",  # goes with no training on data
            "LaunchSpec.rendezvous",  # goes with the torchrun door
            "WorkloadSpec.prompt",  # of generation
            "WorkloadSpec.new_tokens",
        }

    def test_every_part_comes_back_also_losses_that_are_no_numbers(self) -> None:
        numerics = filled(Numerics, losses=(2.3, None, math.inf))
        whole = whole_record(prepared=filled(Prepared, numerics=numerics))
        assert decode(encode(whole)) == whole

    def test_one_from_before_work_was_counted_comes_back(self) -> None:
        plain = plain_record()
        del plain["prepared"]["work"]
        found = decode(msgspec.msgpack.encode(plain))
        assert found.prepared.work is None

    def test_raw_samples_come_back_to_the_last_bit(self) -> None:
        (block,) = decode(encode(whole_record())).blocks
        for samples in (block.samples, block.issue_s, *block.phases.values()):
            assert [sample.hex() for sample in samples] == [sample.hex() for sample in SAMPLES]

    @pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 1e308])
    def test_what_cannot_be_a_time_is_refused(self, seconds: float) -> None:
        (block,) = whole_record().blocks
        strange = msgspec.structs.replace(block, samples=(0.1, seconds))
        with pytest.raises(RecordError, match=r"record '0123' is damaged: .*samples\[1\]"):
            decode(encode(whole_record(blocks=(strange,))))

    def test_one_that_broke_before_it_began_comes_back_too(self) -> None:
        bare = RunRecord(
            id="x",
            spec=RunSpec(workload=WorkloadSpec(model="resnet50")),
            stopped="failed",
            failure=Failure(stage="build", kind="user", message="no such dataset"),
        )
        assert decode(encode(bare)) == bare


class TestSchema:
    def test_a_newer_one_is_refused_with_what_to_do(self) -> None:
        newer = msgspec.msgpack.encode(plain_record(schema=SCHEMA + 1, something_new=1))
        with pytest.raises(RecordError, match=f"schema {SCHEMA + 1}; this Redline reads up to {SCHEMA}: update"):
            decode(newer)

    def test_settings_and_switches_that_were_removed_share_a_series_with_what_is_measured_today(self) -> None:
        before: dict[str, Any] = msgspec.to_builtins(whole_record())
        before["spec"]["workload"]["check_inputs"] = "file.py:again"
        old = decode(msgspec.msgpack.encode(before))
        assert old == whole_record()
        recipe = Recipe.parse("fp16-bn-fp32+channels-last")
        one = msgspec.structs.replace(whole_record(), spec=msgspec.structs.replace(old.spec, recipe=recipe))
        assert decode(encode(one)) == one
        turned = msgspec.structs.replace(old.spec, recipe=Recipe.parse("channels-last+fp16-bn-fp32"))
        assert series_of(one) == series_of(msgspec.structs.replace(one, spec=turned))

    def test_one_of_schema_1_loads_with_its_words_of_then(self) -> None:
        """Switches were steps, solo blocks were alone, and notes were plain texts."""
        plain = plain_record(schema=1, notes=["measured alone"])
        plain["spec"]["recipe"] = {"steps": plain["spec"]["recipe"]["switches"]}
        for block in plain["blocks"]:
            block["alone"] = block.pop("solo")
        prepared = plain["prepared"]
        prepared["recipe_notes"] = {"compile": "no graphs"}
        prepared["workload"]["notes"] = ["a zero head got random weights"]
        prepared["work"]["notes"] = []
        prepared["numerics"]["reason"] = "near enough"
        prepared["warmup"]["reason"] = ""
        cold = {"compile_cache": None, "contended": False, "shared": False, "graph_breaks": None}
        prepared["cold_start"] = {
            f"{name}_s": value for name, value in prepared["cold_start"].items() if name not in cold
        }
        plain["failure"].pop("notes")
        found, today = decode(msgspec.msgpack.encode(plain)), whole_record()
        assert found.spec == today.spec
        # Of a block, `alone` meant something else then.
        assert found.blocks == tuple(msgspec.structs.replace(block, alone={}) for block in today.blocks)
        assert found.prepared.cold_start == msgspec.structs.replace(
            today.prepared.cold_start, compile_cache=None, contended=False, shared=False, graph_breaks=None
        )
        assert found.notes == (note("note", "measured alone"),)
        assert found.prepared.recipe_notes == (note("note", "no graphs", about="compile"),)
        assert found.prepared.workload.notes == (note("note", "a zero head got random weights"),)
        assert found.prepared.numerics.reason == note("note", "near enough")
        assert found.prepared.warmup.reason is None

    def test_records_of_schema_1_get_what_their_switches_do(self) -> None:
        """They told it by name only; records of today carry what the switches say of themselves."""
        plain = msgspec.msgpack.decode(encode(whole_record()))
        switches = [
            {"name": "compile", "argument": "reduce-overhead", "options": {}},
            {"name": "int8", "argument": None, "options": {}},
            {"name": "onnx", "argument": None, "options": {}},
            {"name": "fp16", "argument": None, "options": {}},
        ]
        del plain["prepared"]["switches"]
        old = {**plain, "schema": 1, "spec": {**plain["spec"], "recipe": {"steps": switches}}}
        prepared = decode(msgspec.msgpack.encode(old)).prepared
        assert prepared.switches == {
            "compile:reduce-overhead": Capabilities(compiles=True, records_graph=True, dissolves_modules=True),
            "int8": Capabilities(quantizes=True),
            "onnx": Capabilities(compiles=True, refuses_graph=True, dissolves_modules=True, folds_norms=True),
            "fp16": Capabilities(),
        }
        assert prepared.capabilities.records_graph
        assert prepared.capabilities.quantizes

    def test_a_damaged_recipe_of_schema_1_is_told_as_damage(self) -> None:
        plain = msgspec.msgpack.decode(encode(whole_record()))
        old = {**plain, "schema": 1, "spec": {**plain["spec"], "recipe": {"steps": [7]}}}
        with pytest.raises(RecordError, match="is damaged"):
            decode(msgspec.msgpack.encode(old))

    @pytest.mark.parametrize(("source", "origin"), [("user", "guessed"), ("live", "guessed"), ("timm", "source")])
    def test_schema_1_did_not_say_how_the_batch_was_known(self, source: str, origin: str) -> None:
        plain = plain_record(schema=1)
        workload = plain["prepared"]["workload"]
        plain["prepared"]["workload"] = {
            **{name: value for name, value in workload.items() if not name.startswith("batch")},
            "source": source,
            "items_per_step": 20,
        }
        read = decode(msgspec.msgpack.encode(plain))
        assert (read.prepared.workload.batch, read.prepared.workload.batch_from) == (20, origin)

    @pytest.mark.parametrize("schema", [None, "1", 1.0])
    def test_without_a_number_it_is_no_record(self, schema: Any) -> None:
        with pytest.raises(RecordError, match="not a record"):
            decode(msgspec.msgpack.encode(plain_record(schema=schema)))


class TestDamage:
    @pytest.mark.parametrize(
        ("data", "words"),
        [
            (b"", "not a record"),
            (b"\xc1", "not a record"),
            (encode(whole_record())[:-1], "not a record"),
            (encode(whole_record()) + b"\x00", "not a record"),
            (msgspec.msgpack.encode([1, 2]), "expected a table"),
            (msgspec.msgpack.encode({}), "not a record"),
            (b"\x91" * 100_000, "not a record"),
            (b"\x81\xa6schem\xff\x01", "not a record"),
        ],
        ids=["nothing", "reserved byte", "cut", "too long", "a list", "empty table", "bottomless", "not text"],
    )
    def test_bytes_that_are_no_record(self, data: bytes, words: str) -> None:
        with pytest.raises(RecordError, match=words) as error:
            decode(data)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"surprise": 1}, "unknown field `surprise`"),
            ({"spec": None}, "spec"),
            ({"stopped": "bored"}, "bored"),
            ({"blocks": [{"kind": "throughput"}]}, "missing required field"),
            ({"created_at": "yesterday"}, "created_at"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_a_record_with_a_wrong_part_names_itself_and_the_part(self, changes: dict[str, Any], words: str) -> None:
        with pytest.raises(RecordError, match=f"record '0123' is damaged: .*{words}"):
            decode(msgspec.msgpack.encode(plain_record(**changes)))

    @pytest.mark.parametrize(
        ("part", "field", "value", "words"),
        [
            ("workload", "batch", 0, "batch must be 1 or more, got 0"),
            ("measure", "max_seconds", -1.0, "max_seconds must be above 0"),
            ("launch", "prepare_timeout_s", 0.0, "prepare_timeout_s must be above 0"),
        ],
    )
    def test_a_stored_spec_out_of_range_is_damage_not_a_mistake_of_the_person(
        self, part: str, field: str, value: Any, words: str
    ) -> None:
        plain = plain_record()
        plain["spec"][part][field] = value
        with pytest.raises(RecordError, match=f"record '0123' is damaged: .*{words}"):
            decode(msgspec.msgpack.encode(plain))

    def test_whatever_bytes_are_wrong_only_one_error_comes(self) -> None:
        data, chance = encode(whole_record()), random.Random(0)
        refused = 0
        for _ in range(3000):
            broken = bytearray(data)
            for _ in range(chance.choice((1, 1, 2, 8))):
                broken[chance.randrange(len(broken))] = chance.randrange(256)
            try:
                decode(bytes(broken))
            except RecordError:
                refused += 1
        assert refused > 1000


class TestIds:
    def test_sort_by_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ids = []
        # A clock that was never set, today, a millisecond later, a second later, past the year 2100.
        for milliseconds in (1, 1_700_000_000_000, 1_700_000_000_001, 1_700_000_001_000, 4_200_000_000_000):
            monkeypatch.setattr(record.time, "time_ns", lambda now=milliseconds: now * 1_000_000)
            ids.append(min(new_id() for _ in range(20)))
            assert ids == sorted(ids)
            ids.append(max(new_id() for _ in range(20)))
        assert ids == sorted(ids)
        assert len({len(found) for found in ids}) == 1
