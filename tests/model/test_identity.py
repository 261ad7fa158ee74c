"""What makes two measurements the same, asked in each of the ways there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from reported import sweep_records

from redline.model.identity import benchmark_of, question_key, record_key, setting_text, spec_key, subjects_of
from redline.model.migrations import decode
from redline.model.record import DeviceInfo, Prepared, RunRecord, WorkloadInfo
from redline.model.spec import LaunchSpec, MeasureSpec, Recipe, RunSpec, WorkloadSpec

RECORDED = Path(__file__).parents[1] / "data" / "traces"


def measured() -> RunRecord:
    (record,) = sweep_records(recipe="baseline", batches=[32])
    return record


@pytest.mark.parametrize("name", ["h200_resnet50_fp16_b256", "h200_resnet50_fp16_b32", "h200_resnet50_fp32_b32"])
def test_keys_of_records_measured_long_ago_stay_what_they_were(name: str) -> None:
    record = decode((RECORDED / f"{name}.record").read_bytes())
    assert record.prepared is not None
    assert record.key == record_key(record.spec, record.prepared)


class TestSpecKey:
    identity = {
        "model": "m1",
        "inputs": "i1",
        "device": "cuda Some GPU",
        "driver": "570.1",
        "torch": "2.9.0",
        "benchmark": "1",
    }

    @staticmethod
    def spec_of(recipe: str = "fp16+channels-last", **changes: Any) -> RunSpec:
        workload = {"model": "resnet50", "batch": 32, **changes.pop("workload", {})}
        return RunSpec(workload=WorkloadSpec(**workload), recipe=Recipe.parse(recipe), **changes)

    def key(self, spec: RunSpec, **identity: str | None) -> str:
        return spec_key(spec, {**self.identity, **identity})

    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"recipe": "channels-last+fp16"},
            {"launch": LaunchSpec(door="spawn", command_prefix=("numactl", "-N0"))},
            {"launch": LaunchSpec(prepare_timeout_s=5.0, measure_timeout_s=7.0)},
            {"workload": {"artifact": "somewhere/else.pkl"}},
        ],
        ids=str,
    )
    def test_is_one_however_the_same_thing_was_asked_for(self, changes: dict[str, Any]) -> None:
        assert self.key(self.spec_of(**changes)) == self.key(self.spec_of())

    @pytest.mark.parametrize(
        "changes",
        [
            {"workload": {"batch": 33}},
            {"workload": {"batch": None}},
            {"workload": {"model": "resnet18"}},
            {"workload": {"task": "train"}},
            {"workload": {"image_size": 64}},
            {"recipe": "fp16"},
            {"recipe": "bf16+channels-last"},
            {"measure": MeasureSpec.for_effort("quick")},
            {"measure": MeasureSpec(check_numerics=False)},
            {"device": "cpu"},
            {"threads": 1},
            {"seed": 1},
            {"launch": LaunchSpec(memory_limit_bytes=2**30)},
        ],
        ids=str,
    )
    def test_is_another_for_another_thing(self, changes: dict[str, Any]) -> None:
        assert self.key(self.spec_of(**changes)) != self.key(self.spec_of())

    @pytest.mark.parametrize("what", list(identity))
    def test_is_another_where_the_place_or_the_model_is_another(self, what: str) -> None:
        spec = self.spec_of()
        assert len({self.key(spec), self.key(spec, **{what: "other"}), self.key(spec, **{what: None})}) == 3


class TestRecordKey:
    @staticmethod
    def prepared(**changes: Any) -> Prepared:
        prepared = measured().prepared
        device = {name: value for name, value in changes.items() if name in DeviceInfo.__struct_fields__}
        workload = {name: value for name, value in changes.items() if name in WorkloadInfo.__struct_fields__}
        environment = msgspec.structs.replace(
            prepared.environment,
            device=msgspec.structs.replace(prepared.environment.device, **device),
            versions=changes.get("versions", {"torch": "2.9.0"}),
            hostname=changes.get("hostname", "bench"),
        )
        info = msgspec.structs.replace(prepared.workload, **workload)
        return msgspec.structs.replace(prepared, environment=environment, workload=info)

    @pytest.mark.parametrize(
        "changes",
        [
            {"model_hash": "m2"},
            {"input_hash": "i2"},
            {"name": "Another GPU"},
            {"kind": "rocm"},
            {"driver": "580.2"},
            {"versions": {"torch": "2.10.0"}},
            {"versions": {}},
        ],
        ids=str,
    )
    def test_changes_with_what_the_bench_found(self, changes: dict[str, Any]) -> None:
        spec = measured().spec
        assert record_key(spec, self.prepared(**changes)) != record_key(spec, self.prepared())

    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"hostname": "elsewhere"},
            {"uuid": "GPU-2"},
            {"index": 0},
            {"power_limit_w": 500.0},
            {"versions": {"torch": "2.9.0", "triton": "9"}},
        ],
        ids=str,
    )
    def test_stays_where_only_the_circumstances_differ(self, changes: dict[str, Any]) -> None:
        spec = measured().spec
        assert record_key(spec, self.prepared(**changes)) == record_key(spec, self.prepared())


class TestSettings:
    """Whatever a spec has besides model, task, batch and recipe, and decides what is computed or how fast."""

    @staticmethod
    def spec_of(task: str = "infer", **changes: Any) -> RunSpec:
        own = {name: changes.pop(name) for name in list(changes) if name in WorkloadSpec.__struct_fields__}
        return RunSpec(workload=WorkloadSpec(model="net", task=task, **own), **changes)

    @pytest.mark.parametrize(
        ("spec", "words"),
        [
            (spec_of(), ""),
            (spec_of(batch=3, artifact="x.pkl", seed=7), ""),
            (spec_of(image_size=64, classes=10), "64 px, 10 classes"),
            (spec_of(sequence_length=5, threads=2), "length 5, 2 threads"),
            (spec_of(optimizer="adamw"), ""),
            (spec_of("train", optimizer="adamw"), "adamw"),
            (spec_of(launch=LaunchSpec(memory_limit_bytes=2**30)), "within 1.00 GiB"),
            (spec_of(batch_axis=1, items=40), "batch axis 1, items 40"),
        ],
        ids=lambda each: each if isinstance(each, str) else "",
    )
    def test_are_told_in_words(self, spec: RunSpec, words: str) -> None:
        assert setting_text(spec) == words

    def test_keep_benchmarks_and_subjects_apart(self) -> None:
        record = measured()
        packed = msgspec.structs.replace(record.spec.workload, items=40)
        other = msgspec.structs.replace(record, spec=msgspec.structs.replace(record.spec, workload=packed))
        assert benchmark_of(record) != benchmark_of(other)
        assert len(set(subjects_of([record, other]))) == 2


def test_a_question_is_the_same_whatever_field_came_later() -> None:
    spec = RunSpec(workload=WorkloadSpec(model="net"))
    assert question_key(spec, {"objective": "latency", "without": ["fp16"]}) == question_key(
        spec, {"without": ["fp16"], "objective": "latency"}
    )
    assert question_key(spec, {}) != question_key(spec, {"objective": "latency"})
