"""A record comes back whole, old ones too; what cannot be understood says so in one line."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from redline.model import migrations, record
from redline.model.arrivals import Served
from redline.model.environment import DeviceInfo, Environment, Memory, TelemetrySample
from redline.model.errors import RecordError
from redline.model.identity import series_of
from redline.model.migrations import decode, encode, migrate
from redline.model.note import note
from redline.model.record import (
    SCHEMA,
    Block,
    Capabilities,
    Closed,
    ColdStart,
    Failure,
    Numerics,
    Prepared,
    RankBlock,
    RankInfo,
    RunRecord,
    TraceRef,
    Warmup,
    WorkloadInfo,
    new_id,
)
from redline.model.spec import LaunchSpec, MeasureSpec, Recipe, RunSpec, WorkloadSpec
from redline.model.training import DataInfo, DataSpec, Epoch, Fed, TrainSpec
from redline.model.watching import Watched, WatchFinding, Window
from redline.model.work import GenerationInfo, ModuleWork, OperatorWork, Uncounted, WorkCount

SAMPLES = (0.1, 1 / 3, 5e-324, 999_999_999.9999999, 0.010000000000000002)
"""Seconds that lose something wherever a double is not kept as it is."""


def whole_record(**changes: Any) -> RunRecord:
    """No part left at its default, so that none can be lost unseen."""
    memory = Memory(
        peak_allocated_bytes=1,
        peak_reserved_bytes=2**40,
        context_bytes=3,
        peak_rss_bytes=4,
        allocator_retries=5,
        peak_private_bytes=6,
        resident_bytes=7,
        limit_bytes=8,
        needed_bytes=9,
    )
    environment = Environment(
        device=DeviceInfo(
            kind="cuda",
            index=1,
            name="Some GPU",
            uuid="GPU-1",
            driver="570.1",
            memory_bytes=2**37,
            capability="9.0",
            multiprocessors=132,
            power_limit_w=700.0,
            max_clock_hz=1.98e9,
            ecc=True,
            mig=False,
        ),
        hostname="bench",
        platform="Linux",
        python="3.12",
        redline="0.1",
        cpu="Some CPU",
        physical_cores=8,
        logical_cores=16,
        affinity=(0, 1, 5),
        governor="performance",
        memory_bytes=2**38,
        threads=8,
        interop_threads=4,
        versions={"torch": "2.9.0"},
        flags={"tf32": "off"},
        variables={"OMP_NUM_THREADS": "8"},
        git_commit="abc",
        git_committed_at=1.7e9,
        git_dirty=True,
        neighbours=("somebody",),
    )
    prepared = Prepared(
        environment=environment,
        generation=GenerationInfo(
            prompt=512,
            new_tokens=128,
            weight_bytes=2**31,
            read_bytes=2**30,
            cache_bytes=2**24,
            cache_read_bytes=2**23,
            copy_bytes_per_s=4e12,
            is_static=True,
            cache="static",
        ),
        workload=WorkloadInfo(
            source="torchvision",
            class_name="ResNet",
            parameters=25_000_000,
            items_per_step=32,
            item="img",
            optimizer="AdamW",
            batch=32,
            batch_from="scaled",
            input_shapes=("32x3x224x224",),
            image_size=224,
            sequence_length=5,
            loss="cross_entropy",
            model_hash="m1",
            input_hash="i1",
            notes=(note("signal", "a zero head got random weights", about="head"),),
        ),
        cold_start=ColdStart(
            import_s=4.0,
            start_s=0.02,
            build_s=0.5,
            first_call_s=30.0,
            compile_s=29.0,
            compile_cache="mixed",
            graph_breaks=2,
            contended=True,
            shared=True,
        ),
        numerics=Numerics(
            method="loss-path",
            greedy_tokens=32,
            greedy_agreed=30,
            number_format="fp16",
            rel_l2=1e-3,
            cosine=0.999,
            top1_agreement=0.5,
            finite=False,
            equal_share=0.75,
            rel_error=0.002,
            by_equality=True,
            degenerate=True,
            floor=8e-4,
            tolerance=3.2e-3,
            passed=True,
            reason=note("within-tolerance", "near enough", about="x"),
            second_inputs="noise",
            steps=3,
            losses=(2.3, None, math.inf),
            reference_losses=(2.3, 2.2, 2.1),
            sketch=(0.5, -1.5),
            sketch_signal=2.0,
        ),
        warmup=Warmup(samples=SAMPLES, seconds=1.5, steady=True, reason=note("steady", "two windows agree", about="x")),
        memory=memory,
        recipe_notes=(note("switch", "no graphs", about="compile"),),
        applicable=("channels-last",),
        switches={
            "compile": Capabilities(
                compiles=True,
                records_graph=True,
                refuses_graph=True,
                dissolves_modules=True,
                folds_norms=True,
                quantizes=True,
            )
        },
        step_synchronises=False,
        operators_share=0.75,
        isolated=False,
        work=WorkCount(
            params=25_000_000,
            compulsory_bytes=2**27,
            operators=(
                OperatorWork(
                    name="convolution",
                    kind="convolution",
                    number_format="fp16",
                    phase="forward",
                    calls=3,
                    flops=2**40,
                    bytes=2**33,
                ),
            ),
            uncounted=(Uncounted(name="nms", calls=2),),
            modules=(
                ModuleWork(
                    path="layer1",
                    type="Sequential",
                    params=7,
                    calls=1,
                    number_format="fp16",
                    flops=8,
                    backward_flops=16,
                    other_flops=3,
                    bytes=9,
                    backward_bytes=10,
                ),
            ),
            for_these_inputs="nonzero needs the values of its inputs",
            notes=(note("backward-not-counted", "backward not counted", about="relu"),),
            seconds=0.3,
        ),
        data=DataInfo(
            name="cifar10",
            train_samples=5000,
            val_samples=1000,
            classes=10,
            shape=(3, 32, 32),
            fingerprint="d1",
            stem="cifar",
            steps_per_epoch=156,
            last_batch=8,
            last_batch_fate="run eagerly",
            learning_rate=0.1,
            workers=4,
            augment="device",
            random_labels=True,
        ),
        ranks=(RankInfo(rank=1, host="node2", local_rank=0, device=environment.device, items_per_step=16, threads=2),),
        gradient_bytes=4096,
    )
    epoch = Epoch(
        number=1,
        seconds=2.5,
        train_s=2.0,
        validation_s=0.5,
        steps=157,
        samples=5000,
        train_loss=1.5,
        val_loss=1.25,
        val_accuracy=0.625,
        val_judged=100,
        val_most_frequent=0.2,
        val_batches=4,
        val_batches_not_finite=1,
        trainable=6,
        unchanged=1,
        learning_rate=0.05,
        phases_s={"data": 0.25, "forward": 0.5},
        host_wait_s=0.125,
        gradient_scale=1024.0,
        peak_bytes=2**33,
        utilisation=0.5,
        energy_j=300.5,
        is_cut=True,
    )
    look = TelemetrySample(
        at_s=0.1,
        utilisation=0.97,
        memory_used_bytes=2**30,
        power_w=650.5,
        temperature_c=61.0,
        clock_hz=1.7e9,
        memory_clock_hz=3.2e9,
        throttle=("sw_power_cap",),
        foreign=("4711 somebody",),
    )
    block = Block(
        kind="throughput",
        clock="device",
        samples=SAMPLES,
        steps_per_sample=2,
        settling=SAMPLES[:2],
        token_s=SAMPLES,
        token_issue_s=SAMPLES,
        issue_s=SAMPLES,
        phases={"forward": SAMPLES, "backward": SAMPLES, "optimizer": SAMPLES},
        alone={"backward": SAMPLES},
        wall_s=0.26,
        started_at=1.7e9,
        round=3,
        solo=True,
        memory=memory,
        energy_j=150.25,
        telemetry=(look, look),
        cpu_s=0.25,
        waited_s=0.01,
        others_cpu_s=0.125,
        busiest=("python3 (pid 4711): 0.50 cores",),
        ranks=(
            RankBlock(
                rank=1,
                samples=SAMPLES,
                phases={"forward": SAMPLES},
                alone={"backward": SAMPLES},
                wall_s=0.25,
                cpu_s=0.5,
                waited_s=0.125,
                memory=memory,
            ),
        ),
    )
    parts: dict[str, Any] = {
        "id": "0123",
        "spec": RunSpec(
            workload=WorkloadSpec(
                model="live:Net",
                task="train",
                batch=32,
                batch_axis={"x": 1, "rest": [None, "list"]},
                items=320,
                image_size=64,
                classes=10,
                sequence_length=5,
                optimizer="adamw",
                stem="cifar",
                artifact="net.pkl",
            ),
            train=TrainSpec(
                data=DataSpec(
                    name="cifar10",
                    folder="/data",
                    train_samples=5000,
                    val_samples=1000,
                    workers=4,
                    pin_memory=False,
                    persistent_workers=False,
                    prefetch_factor=4,
                    prefetch=False,
                    augment="device",
                    download=True,
                    loader_timeout_s=5.0,
                ),
                epochs=10,
                learning_rate=0.2,
                weight_decay=1e-4,
                schedule="cosine",
                target_accuracy=0.9,
                last_batch="drop",
                max_seconds=60.0,
                deterministic=True,
            ),
            recipe=Recipe.parse("fp16+compile:max-autotune,fullgraph=true,depth=3,share=0.5,backend=inductor"),
            measure=msgspec.structs.replace(
                MeasureSpec.for_effort("quick", tail=True),
                block_seconds=0.5,
                settle_seconds=0.1,
                check_numerics=False,
                sparing=True,
                squeeze_memory=True,
            ),
            launch=LaunchSpec(
                door="spawn",
                command_prefix=("numactl",),
                folder="/elsewhere",
                python="/elsewhere/bin/python",
                memory_limit_bytes=2**30,
                prepare_timeout_s=5.0,
                measure_timeout_s=7.0,
                close_timeout_s=9.0,
                port=29500,
            ),
            device="cuda:1",
            threads=3,
            seed=9,
        ),
        "key": "k1",
        "created_at": 1.7e9,
        "group": "g1",
        "position": 2,
        "prepared": prepared,
        "epochs": (epoch,),
        "feeds": (Fed(part="together", samples=512, seconds=2.0, wait_s=0.5, workers=4, prefetch=False),),
        "blocks": (block, msgspec.structs.replace(block, kind="latency", clock="host", phases={}, round=4)),
        "loads": (
            Served(
                rate=2.0,
                arrivals_s=(0.0, 0.5),
                sizes=(2,),
                started_s=(0.5,),
                finished_s=(0.75,),
                ended_s=0.75,
                seed=1,
                padded=2,
            ),
        ),
        "watched": Watched(
            command=("python", "train.py"),
            exit_code=-9,
            started_at=1.7e9,
            seconds=12.5,
            steps=100,
            samples=3200.0,
            ranks=2,
            steps_per_s=8.0,
            samples_per_s=256.0,
            shares={"data": 0.25, "forward": 0.75},
            device_clock=True,
            paused_s=0.5,
            first_step_s=2.0,
            outliers=3,
            outlier_share=0.1,
            loss=0.7,
            gpu_utilisation=0.9,
            energy_j=4000.0,
            power_w=320.0,
            peak_bytes=2**30,
            findings=(WatchFinding(code="data-wait", text="waits", change="workers", gain_bound=1.3),),
            windows=(Window(at_s=1.0, step=15, steps=5, step_s=0.1, trace="a.json", top=("sync-bound",)),),
        ),
        "trace": TraceRef(path="trace.json.gz", steps=3, capture_s=1.5, bytes=4096, others=("rank1.json.gz",)),
        "closed": Closed(memory=memory, printed="a line of the model"),
        "stopped": "ceiling",
        "failure": Failure(
            where="net.py:3 in forward",
            stage="measure",
            kind="oom",
            message="out of memory",
            traceback="Traceback…",
            switches=("compile",),
            scope="switch",
            rank=3,
            notes=(note("fragmented", "in pieces", about="x"),),
        ),
        "notes": (note("measured-separately", "measured alone", about="memory"),),
    }
    return RunRecord(**{**parts, **changes})


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
            "Block.phases",  # of the latency block
            "Switch.argument",  # of fp16
            "Switch.options",
            "DataSpec.on_device",  # goes with no workers
            "RunSpec.load",  # does not go with a training
            "RunSpec.ranks",  # goes with no training on data
            "LaunchSpec.rendezvous",  # goes with the torchrun door
            "WorkloadSpec.prompt",  # of generation
            "WorkloadSpec.new_tokens",
        }

    def test_every_part_comes_back(self) -> None:
        assert decode(encode(whole_record())) == whole_record()

    def test_one_from_before_work_was_counted_comes_back(self) -> None:
        plain = plain_record()
        del plain["prepared"]["work"]
        found = decode(msgspec.msgpack.encode(plain))
        assert found.prepared is not None
        assert found.prepared.work is None

    def test_raw_samples_come_back_to_the_last_bit(self) -> None:
        (block, _) = decode(encode(whole_record())).blocks
        for samples in (block.samples, block.issue_s, block.phases["backward"]):
            assert [sample.hex() for sample in samples] == [sample.hex() for sample in SAMPLES]
        assert [sample.hex() for sample in block.settling] == [sample.hex() for sample in SAMPLES[:2]]

    @pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 1e308])
    def test_what_cannot_be_a_time_is_refused(self, seconds: float) -> None:
        (block, _) = whole_record().blocks
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

    def test_an_old_one_is_mended_step_by_step(self) -> None:
        seen: list[int] = []

        def rename(plain: dict[str, Any]) -> dict[str, Any]:
            seen.append(plain["schema"])
            return {**{name: value for name, value in plain.items() if name != "speed"}, "step_s": 1 / plain["speed"]}

        def to_milliseconds(plain: dict[str, Any]) -> dict[str, Any]:
            seen.append(plain["schema"])
            return {**plain, "step_s": 1000 * plain["step_s"]}

        old = {"schema": 1, "speed": 4}
        assert migrate(old, {1: rename, 2: to_milliseconds}, to=3) == {"schema": 3, "step_s": 250.0}
        assert seen == [1, 2]
        assert old == {"schema": 1, "speed": 4}

    def test_each_starts_where_it_stands(self) -> None:
        steps = {1: lambda plain: {**plain, "one": True}, 2: lambda plain: {**plain, "two": True}}
        assert migrate({"schema": 2}, steps, to=3) == {"schema": 3, "two": True}
        assert migrate({"schema": 3}, steps, to=3) == {"schema": 3}

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

    def test_a_gap_in_the_chain_is_named(self) -> None:
        with pytest.raises(RecordError, match="cannot update a record from schema 2 to 3"):
            migrate({"schema": 1}, {1: lambda plain: plain}, to=3)

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
        assert found.prepared is not None
        assert found.spec == today.spec
        # Of a block, `alone` meant something else then.
        assert found.blocks == tuple(msgspec.structs.replace(block, alone={}) for block in today.blocks)
        assert today.prepared is not None
        assert found.prepared.cold_start == msgspec.structs.replace(
            today.prepared.cold_start, compile_cache=None, contended=False, shared=False, graph_breaks=None
        )
        assert found.notes == (note("note", "measured alone"),)
        assert found.prepared.recipe_notes == (note("note", "no graphs", about="compile"),)
        assert found.prepared.workload.notes == (note("note", "a zero head got random weights"),)
        assert found.prepared.numerics.reason == note("note", "near enough")
        assert found.prepared.warmup.reason is None

    def test_the_chain_reaches_today(self) -> None:
        oldest = min(migrations.MIGRATIONS, default=SCHEMA)
        assert sorted(migrations.MIGRATIONS) == list(range(oldest, SCHEMA))

    def test_decode_takes_the_same_way(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def drop(plain: dict[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in plain.items() if name != "remarks"}

        monkeypatch.setitem(migrations.MIGRATIONS, SCHEMA - 1, drop)
        old = msgspec.msgpack.encode(plain_record(schema=SCHEMA - 1, remarks=["old"]))
        assert decode(old) == whole_record()

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
        assert prepared is not None
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
        assert read.prepared is not None
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

    def test_are_unique_within_one_moment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(record.time, "time_ns", lambda: 1_700_000_000_000_000_000)
        ids = {new_id() for _ in range(5000)}
        assert len(ids) == 5000
        assert len({found[:11] for found in ids}) == 1
