"""`redline flops` and `roofline` from their words to their output and exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from brief import shorten_ceilings
from invoking import invoke as redline

from redline.launch.inline import InlineDoor
from redline.model.identity import device_key
from redline.model.migrations import decode
from redline.model.work import Ceilings, ModuleWork, OperatorWork, WorkCount
from redline.store import History
from redline.verbs import workspace
from redline.verbs.flops import flops
from redline.verbs.flops import result_of as flops_of
from redline.verbs.roofline import under_roofs
from redline.verbs.workspace import Workspace

MODELS = Path(__file__).parents[1] / "models" / "misbehaving.py"
TRACES = Path(__file__).parents[1] / "data" / "traces"


def document(*words: str | Path) -> dict:  # type: ignore[type-arg]
    result = redline(*words, "--json")
    assert result.exit_code == 0, result.stderr
    found: dict = json.loads(result.stdout)  # type: ignore[type-arg]
    return found


@pytest.mark.usefixtures("brief")
class TestFlops:
    def test_a_count_has_the_whole_step_and_its_modules(self) -> None:
        tables = document("flops", "simple_cnn", "-b", "4", "--task", "train")["tables"]
        (step,), (whole, *rest) = tables["step"], tables["modules"]
        assert step["flops"]["value"] == 2 * step["macs"]["value"] == whole["flops"]["value"]
        assert 1.9 < step["backward_flops"]["value"] / step["flops"]["value"] < 2.1
        for share, figure in (("params_share", "params"), ("macs_share", "macs")):
            assert whole[share]["value"] == 1.0
            assert all(
                row[share]["value"] == pytest.approx(row[figure]["value"] / whole[figure]["value"]) for row in rest
            )
            assert sum(row[share]["value"] for row in rest if row["depth"] == 1) == pytest.approx(1.0)

    def test_the_report_goes_as_deep_as_asked_and_a_long_name_is_not_broken(self) -> None:
        shallow, deep = redline("flops simple_cnn --depth 1"), redline("flops simple_cnn --depth 3")
        assert "features (Sequential)" in shallow.stdout
        assert "(Conv2d)" not in shallow.stdout
        assert "more rows with -v" in shallow.stdout
        assert "(Conv2d)" in deep.stdout

    def test_a_recipe_changes_formats_and_bytes_not_flops(self) -> None:
        (plain,), (half,) = (
            document("flops", "simple_cnn", "-r", recipe)["tables"]["step"]
            for recipe in ("baseline", "fp16+channels-last")
        )
        assert half["flops"] == plain["flops"]
        assert (half["formats"], half["fp16_flops"]) == ("fp16", plain["flops"])
        assert half["compulsory_bytes"]["value"] < 0.6 * plain["compulsory_bytes"]["value"]

    def test_latency_comes_per_module_and_for_the_phases_of_training(self) -> None:
        found = document("flops", "simple_cnn", "-b", "4", "--task", "train", "--latency", "--device", "cpu")
        whole, *rest = found["tables"]["modules"]
        assert whole["time_share"]["value"] == pytest.approx(1.0)
        first = [row["latency"]["value"] for row in rest if row["depth"] == 1 and "latency" in row]
        assert sum(first) <= whole["latency"]["value"] * 1.001
        assert found["about"]["latency_by"] == "operators"
        work = whole["flops"]["value"] + whole["backward_flops"]["value"]
        assert whole["achieved"]["value"] == pytest.approx(work / whole["latency"]["value"])
        phases = {row["phase"]: row["flops"]["value"] for row in found["tables"]["phases"]}
        forward, backward = whole["flops"]["value"], whole["backward_flops"]["value"]
        assert phases == {"forward": forward, "backward": backward, "optimizer": 0, "step": forward + backward}

    def test_of_thousands_of_modules_those_that_do_the_most_are_shown(self) -> None:
        def module(path: str, flops: int) -> ModuleWork:
            return ModuleWork(
                path=path, type="Linear", params=1, calls=1, number_format="fp32", flops=flops, backward_flops=0,
                other_flops=0, bytes=8, backward_bytes=0,
            )  # fmt: skip

        work = WorkCount(
            params=1, compulsory_bytes=8, operators=(),
            modules=(module("", 10**9), *(module(f"layer{number}", number) for number in range(1000))),
        )  # fmt: skip
        record = decode((TRACES / "h200_resnet50_fp32_b32.record").read_bytes())
        assert record.prepared is not None
        for depth, is_shown in ((None, False), (2, True)):
            rows = flops_of(record.spec, record.prepared.workload, work, depth).table("modules").rows
            shown = {row["path"] for row in rows if not row.is_detail}
            assert "layer999" in shown
            assert ("layer0" in shown) == is_shown

    def test_a_live_module_from_python(self) -> None:
        import torch

        result = flops(torch.nn.Linear(8, 4), torch.randn(3, 8))
        assert result.rows[0].value("macs") == 3 * 8 * 4
        assert "96 MACs" in str(result)


@pytest.fixture
def measured(own_history: Path) -> Ceilings:
    """A history with a record of an H200 that was counted, and the ceilings of that card."""
    record = decode((TRACES / "h200_resnet50_fp32_b32.record").read_bytes())
    assert record.prepared is not None
    product = OperatorWork(
        name="convolution",
        kind="convolution",
        number_format="fp32",
        phase="forward",
        calls=53,
        flops=int(32 * 8.18e9 / 53),
        bytes=100_000_000,
    )
    work = WorkCount(params=25_557_032, compulsory_bytes=110_000_000, operators=(product,))
    record = msgspec.structs.replace(record, prepared=msgspec.structs.replace(record.prepared, work=work), trace=None)
    environment = record.prepared.environment if record.prepared else None
    ceilings = Ceilings(
        kind="cuda",
        name=environment.device.name,
        driver=environment.device.driver,
        torch=environment.versions["torch"],
        threads=None,
        flops_per_s={"fp32": 51e12},
        copy_bytes_per_s=4.3e12,
        launch_s=4e-6,
        cache_bytes=50_000_000,
        measured_at=1.7e9,
    )
    with History.open() as history:
        history.finish(record)
        assert device_key(environment)
        history.keep_ceilings(ceilings)
    return ceilings


class TestRoofline:
    def test_of_the_last_run(self, measured: Ceilings) -> None:
        found = document("roofline --last")
        (row,) = found["tables"]["recipes"]
        assert row["roofline"]["value"] == pytest.approx(32 * 8.18e9 / 51e12, rel=1e-3)
        assert {"of_peak", "achieved_bytes"} <= set(row)
        assert found["tables"]["kinds"]
        assert found["tables"]["ceilings"][0]["measured"]["value"] == 51e12

    def test_the_answer_is_the_headroom_and_one_command(self, measured: Ceilings) -> None:
        result = redline("roofline --last")
        assert result.exit_code == 0
        assert re.match(r"baseline takes .*, \d\.\d+× the roofline time of", result.stdout)
        assert "next: redline profile" in result.stdout

    @pytest.mark.parametrize(
        ("formats", "says"),
        [
            ({"fp32": 1e12, "bf16": 2e12, "fp16": 1e10}, "-r baseline -r bf16"),
            ({"fp32": 1e12, "bf16": 1e12, "fp16": 1e10}, "redline profile"),
        ],
    )
    def test_the_next_step_follows_the_ceilings_of_the_device(
        self, measured: Ceilings, formats: dict[str, float], says: str
    ) -> None:
        with History.open() as history:
            (record,) = history.latest_group()
        prepared = msgspec.structs.replace(record.prepared, applicable=("fp16", "bf16"))
        record = msgspec.structs.replace(record, prepared=prepared)
        slow = {form: 0.6 * value * 51 for form, value in formats.items()}
        assert says in under_roofs([(record, None)], msgspec.structs.replace(measured, flops_per_s=slow)).next

    def test_a_step_above_its_roof_is_an_error(self, measured: Ceilings) -> None:
        with History.open() as history:
            (record,) = history.latest_group()
        found = under_roofs([(record, None)], msgspec.structs.replace(measured, flops_per_s={"fp32": 1e12}))
        assert found.exit_code == 5
        assert found.next == "redline roofline --fresh"
        assert "or the ceiling is wrong" in str(found)

    def test_rows_of_the_history_carry_it_too(self, measured: Ceilings) -> None:
        (row,) = json.loads(redline("history export --format json").stdout)["results"]
        assert row["headroom"]["value"] > 1
        shown = redline(f"history show {row['record_id']} -v").stdout
        assert re.search(r"\bleft\b", shown)
        assert f"{row['headroom']['value']:.2f}×" in shown
        assert "headroom" in redline("history export").stdout.splitlines()[0]


SMALL = ("simple_cnn", "-b", "4", "--image-size", "32", "--device", "cpu")


@pytest.fixture
def inline(brief: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench in this process, where its ceilings can be made small."""
    monkeypatch.setattr(workspace, "open_door", lambda launch: InlineDoor())
    shorten_ceilings(monkeypatch.setattr)


@pytest.mark.slow
def test_a_model_on_this_cpu_from_ceilings_to_plot(tmp_path: Path, inline: None) -> None:
    found = document("roofline", "--device", "cpu")
    assert found["tables"]["ceilings"][0]["measured"]["value"] > 0
    assert "datasheet" not in found["tables"]["ceilings"][0]
    # Measured on a busy machine they are doubted, and would be measured again. And a model may well be faster than products
    # of 128 rows, which is reported as an error: these ceilings are too high for any.
    with Workspace() as opened, History.open() as history:
        key = device_key(opened.environment("cpu"))
        known = history.ceilings(key)
        high = {form: 1000 * value for form, value in known.flops_per_s.items()}
        copied = 1000 * known.copy_bytes_per_s
        history.keep_ceilings(msgspec.structs.replace(known, doubts=(), flops_per_s=high, copy_bytes_per_s=copied))
    again = document("roofline", "--device", "cpu")["tables"]["ceilings"][0]
    assert again["measured"]["value"] == pytest.approx(1000 * found["tables"]["ceilings"][0]["measured"]["value"])
    called = document("roofline", *SMALL[:1], "--ops", *SMALL[1:])["tables"]["operators"]
    assert "convolution" in {row["kind"] for row in called}
    assert [row["failure"] for row in called if "failure" in row] == []
    found = document("roofline", *SMALL, "--plot", tmp_path / "roof.svg")
    assert found["tables"]["modules"]
    assert found["next"].startswith("redline profile simple_cnn --image-size 32 ")
    assert {row["kind"] for row in found["tables"]["kinds"]} >= {"convolution", "norm", "elementwise"}
    assert (tmp_path / "roof.svg").read_text().startswith("<?xml")


@pytest.mark.slow
def test_a_recipe_that_fails_is_told_and_the_others_still_run(inline: None) -> None:
    result = redline("roofline", *SMALL, "-r", "baseline", "-r", "tf32", "--json")
    assert result.exit_code == 5
    rows = json.loads(result.stdout)["tables"]["recipes"]
    # On a busy machine the ceilings may be found too low, which makes an error of the baseline as well.
    assert [("measured" in row, "TF32" in row.get("failure", "")) for row in rows] == [(True, False), (False, True)]
