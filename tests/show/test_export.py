"""The documents other programs read."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from redline.analyze.summary import summarize
from redline.model.record import (
    Block,
    ColdStart,
    DeviceInfo,
    Environment,
    Failure,
    Memory,
    Numerics,
    Prepared,
    RunRecord,
    Warmup,
    WorkloadInfo,
)
from redline.model.spec import Recipe, RunSpec, WorkloadSpec
from redline.show.export import DOCUMENT_SCHEMA, export_csv, export_json, json_document


def make_record(model: str = "resnet50", step_s: float = 0.01, **fields: Any) -> RunRecord:
    """A training of ten interleaved rounds, twelve steps each, whose steps take about `step_s`."""
    samples = tuple(step_s * (1 + 0.001 * (n % 3)) for n in range(12))
    phases = {"forward": 0.3, "backward": 0.5, "optimizer": 0.2}
    blocks = tuple(
        Block(
            kind="throughput",
            clock="host",
            samples=samples,
            phases={name: tuple(share * s for s in samples) for name, share in phases.items()},
            wall_s=sum(samples),
            round=number,
            memory=Memory(peak_allocated_bytes=100, peak_reserved_bytes=200, peak_rss_bytes=300),
        )
        for number in range(10)
    )
    prepared = Prepared(
        environment=Environment(device=DeviceInfo(kind="cpu", name="Test CPU")),
        workload=WorkloadInfo(source="builtin", class_name="Net", parameters=1, items_per_step=32, batch=32),
        cold_start=ColdStart(import_s=1.5, build_s=0.25, first_call_s=0.5, compile_s=0.125, compile_cache="warm"),
        numerics=Numerics(rel_l2=1e-3, cosine=1.0, top1_agreement=0.5, tolerance=4e-3, passed=True),
        warmup=Warmup(steady=True),
        memory=Memory(),
    )
    spec = RunSpec(
        workload=WorkloadSpec(model=model, task="train", batch=32), recipe=Recipe.parse("bf16"), device="cpu"
    )
    defaults = {"id": "a1", "created_at": 1_700_000_000.25, "prepared": prepared, "blocks": blocks, "stopped": "target"}
    return RunRecord(spec=spec, **{**defaults, **fields})


def failed(message: str, **fields: Any) -> RunRecord:
    failure = Failure(stage="build", kind="oom", message=message, traceback="a\nlong\nstory")
    return make_record(**{"prepared": None, "blocks": (), "failure": failure, **fields})


def strictly(text: str) -> Any:
    """Parse as JSON proper: Python's own reader would let NaN and Infinity pass."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


class TestJson:
    def test_the_document_carries_the_summaries(self) -> None:
        records = [make_record(), failed("no room", id="b2")]
        document = strictly(export_json(records))
        assert list(document) == ["schema", "kind", "results"]
        assert (document["schema"], document["kind"]) == (DOCUMENT_SCHEMA, "export")
        assert document["results"] == json.loads(msgspec.json.encode(summarize(records)))
        first, second = document["results"]
        assert first["cold_start_s"]["import"] == 1.5
        assert second["failure"] == {"stage": "build", "kind": "oom", "message": "no room"}

    def test_raw_adds_every_sample(self) -> None:
        record = make_record()
        (raw,) = strictly(export_json([record], raw=True))["records"]
        assert msgspec.convert(raw, RunRecord) == record

    def test_what_is_not_finite_becomes_null(self) -> None:
        block = Block(kind="throughput", clock="host", samples=(math.nan, math.inf, -math.inf, 0.5))

        def summarize(records: Sequence[RunRecord]) -> list[Any]:
            return [msgspec.defstruct("Row", ["x"])(x={"deep": [math.nan, math.inf]}) for _ in records]

        document = strictly(export_json([make_record(blocks=(block,))], raw=True, summarize=summarize))
        assert document["results"] == [{"x": {"deep": [None, None]}}]
        assert document["records"][0]["blocks"][0]["samples"] == [None, None, None, 0.5]

    def test_nothing_gives_an_empty_document(self) -> None:
        assert strictly(export_json([])) == {"schema": DOCUMENT_SCHEMA, "kind": "export", "results": []}

    def test_no_field_takes_the_place_of_schema_or_kind(self) -> None:
        assert list(strictly(json_document("ceilings", {"name": "x"}))) == ["schema", "kind", "name"]
        with pytest.raises(AssertionError):
            json_document("ceilings", {"kind": "cuda"})


class TestCsv:
    def test_a_row_flattens_the_summary(self) -> None:
        first, second = make_record(group="g"), make_record(id="b2", step_s=0.005, group="g", position=1)
        summary = summarize([first, second])[1]
        row = rows_of(export_csv([first, second]))[1]
        assert row["record_id"] == "b2"
        assert row["created_at"] == "2023-11-14T22:13:20.250Z"
        assert (row["model"], row["task"], row["recipe"], row["batch"]) == ("resnet50", "train", "bf16", "32")
        assert (row["device"], row["device_name"]) == ("cpu", "Test CPU")
        assert float(row["throughput_per_s"]) == summary.throughput_per_s
        assert float(row["throughput_low"]) == summary.throughput_interval.low
        assert float(row["throughput_high"]) == summary.throughput_interval.high
        assert float(row["latency_p50_s"]) == summary.latency_s.p50
        assert float(row["latency_p90_s"]) == summary.latency_s.p90
        assert row["latency_p95_s"] == row["latency_p99_s"] == ""  # 120 samples are too few
        assert float(row["latency_mean_s"]) == summary.latency_s.mean
        assert float(row["latency_std_s"]) == summary.latency_s.std
        assert row["samples"] == "120"
        phases = [float(row[f"{name}_s"]) for name in ("forward", "backward", "optimizer")]
        assert phases == list(summary.phases_s.values())
        peaks = [row[f"peak_{name}_bytes"] for name in ("allocated", "reserved", "rss")]
        assert peaks == ["100", "200", "300"]
        cold = [row[name] for name in ("import_s", "build_s", "first_call_s", "compile_s", "compile_cache")]
        assert cold == ["1.5", "0.25", "0.5", "0.125", "warm"]
        numerics = [row[name] for name in ("rel_l2", "cosine", "top1_agreement", "numerics_passed", "tolerance")]
        assert numerics == ["0.001", "1.0", "0.5", "true", "0.004"]
        ratio = [float(row[name]) for name in ("ratio", "ratio_low", "ratio_high")]
        assert ratio == [summary.vs_first.ratio, summary.vs_first.low, summary.vs_first.high]
        assert row["verdict"] == ";".join(summary.verdict.labels)
        assert row["bound"] == summary.bound.label
        assert row["failure_stage"] == row["failure_kind"] == row["failure_message"] == ""

    def test_a_failure_is_a_row(self) -> None:
        (row,) = rows_of(export_csv([failed("no room")]))
        assert (row["failure_stage"], row["failure_kind"], row["failure_message"]) == ("build", "oom", "no room")
        assert row["throughput_per_s"] == row["samples"] == row["numerics_passed"] == ""

    @pytest.mark.parametrize(
        ("text", "cell"),
        [
            ("=1+1", "'=1+1"),
            ("+1", "'+1"),
            ("-1", "'-1"),
            ("@SUM(A1)", "'@SUM(A1)"),
            ("\tx", "'\tx"),
            ("\rx", "' x"),
            ("\n=x", "' =x"),
            ("  =x", "'  =x"),
            ("a\nb\r\nc\u2028d", "a b c d"),
            ('say "a,b"; =x', 'say "a,b"; =x'),
            ("模型 🏎️", "模型 🏎️"),
            ("x" * 300, "x" * 300),
        ],
    )
    def test_text_stays_text(self, text: str, cell: str) -> None:
        exported = export_csv([failed(text, model=text)])
        assert exported.count("\n") == 2
        (row,) = rows_of(exported)
        assert row["failure_message"] == row["model"] == cell

    def test_numbers_stay_numbers(self) -> None:
        def summarize(records: Sequence[RunRecord]) -> list[Any]:
            numerics = {"cosine": -0.5, "rel_l2": math.nan, "tolerance": math.inf, "passed": False}
            return [msgspec.defstruct("Row", ["numerics"])(numerics=numerics) for _ in records]

        (row,) = rows_of(export_csv([make_record()], summarize=summarize))
        assert [row[name] for name in ("cosine", "rel_l2", "tolerance", "numerics_passed")] == ["-0.5", "", "", "false"]
