"""`redline flops` and `roofline` from their words to their output and exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from brief import shorten_ceilings
from invoking import invoke as redline

from redline.analyze.bound import Bound, BoundLabel
from redline.analyze.ceilings import roofline_row
from redline.api import workspace
from redline.api.flops import flops
from redline.api.workspace import Workspace
from redline.launch.inline import InlineDoor
from redline.model.identity import device_key
from redline.model.migrations import decode
from redline.model.note import Code, note
from redline.model.work import Ceilings, OperatorWork, WorkCount
from redline.report.roofline import RooflineReport
from redline.report.terminal import as_text
from redline.store import History

MODELS = Path(__file__).parents[1] / "models" / "misbehaving.py"
TRACES = Path(__file__).parents[1] / "data" / "traces"


def document(*words: str | Path) -> dict:  # type: ignore[type-arg]
    result = redline(*words, "--json")
    assert result.exit_code == 0, result.stderr
    found: dict = json.loads(result.stdout)  # type: ignore[type-arg]
    return found


@pytest.mark.usefixtures("brief")
class TestFlops:
    def test_the_document_has_what_was_promised(self) -> None:
        found = document("flops", "simple_cnn", "-b", "4")
        assert {"params", "macs", "flops", "backward_flops", "min_bytes", "uncounted", "modules"} <= set(found)
        promised = {"path", "type", "params", "macs", "flops", "min_bytes", "latency_s"}
        assert all(promised <= set(module) for module in found["modules"])
        assert found["flops"] == 2 * found["macs"] == found["modules"][0]["flops"]
        assert found["modules"][0]["latency_s"] is None
        assert 1.9 < found["backward_flops"] / found["flops"] < 2.1

    def test_the_report_goes_as_deep_as_asked(self) -> None:
        shallow, deep = redline("flops", "simple_cnn", "--depth", "1"), redline("flops", "simple_cnn", "--depth", "3")
        assert "features (Sequential)" in shallow.stdout
        assert "(Conv2d)" not in shallow.stdout
        assert "(Conv2d)" in deep.stdout
        assert "not counted" in deep.stdout

    def test_a_recipe_changes_formats_and_bytes_not_flops(self) -> None:
        plain, half = document("flops", "simple_cnn"), document("flops", "simple_cnn", "-r", "fp16+channels-last")
        assert half["flops"] == plain["flops"]
        assert half["flops_by_format"] == {"fp16": plain["flops"]}
        assert half["compulsory_bytes"] < 0.6 * plain["compulsory_bytes"]

    def test_latency_per_module(self) -> None:
        found = document("flops", "simple_cnn", "-b", "4", "--latency", "--device", "cpu")
        whole, *rest = found["modules"]
        assert whole["share"] == pytest.approx(1.0)
        assert sum(row["latency_s"] for row in rest if row["depth"] == 1) <= whole["latency_s"] * 1.001
        assert found["latency_by"] == "operators"
        assert whole["achieved_flops_per_s"] == pytest.approx(whole["flops"] / whole["latency_s"])
        assert [(phase["name"], phase["flops"]) for phase in found["phases"]] == [("forward", found["flops"])]

    def test_shares_of_modules_are_of_the_whole_model(self) -> None:
        whole, *rest = document("flops", "simple_cnn", "-b", "4")["modules"]
        for share, figure in (("params_share", "params"), ("macs_share", "macs")):
            assert whole[share] == 1.0
            assert all(row[share] == pytest.approx(row[figure] / whole[figure]) for row in rest)
            assert sum(row[share] for row in rest if row["depth"] == 1) == pytest.approx(1.0)

    def test_a_training_step_has_its_phases_apart(self) -> None:
        found = document("flops", "simple_cnn", "-b", "4", "--task", "train", "--latency", "--device", "cpu")
        phases = {phase["name"]: phase for phase in found["phases"]}
        assert list(phases) == ["forward", "backward", "optimizer", "step"]
        assert phases["backward"]["flops"] == found["backward_flops"]
        assert phases["optimizer"]["flops"] == 0
        assert phases["step"]["flops"] == found["flops"] + found["backward_flops"]
        assert all(each["flops_per_s"] == each["flops"] / each["latency_s"] for each in phases.values())

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (("flops", "resnet999"), "unknown model 'resnet999'"),
            (("flops", "simple_cnn", "--device", "cpu"), "--device goes with --latency"),
            (("flops", "simple_cnn", "--depth", "-1"), "depth must be 0 or more"),
            (("roofline", "--operator", "matmull"), "operator must be one of"),
            (("roofline", "-r", "fp16"), "a recipe goes with a model"),
            (("roofline", "--batch", "8"), "batch goes with a model: name one"),
            (("roofline", "-o", "plot.png"), "the plot shows a model under the roofs"),
            (("roofline", "simple_cnn", "--last"), "--last takes the last run"),
            (("roofline", "--last"), "no counted work"),
            (("roofline", "simple_cnn", "-o", "plot.txt"), "plot must end in .png"),
            (("roofline", "--threads", "0"), "threads must be 1 or more"),
            (("roofline", "--device", "tpu"), "unknown device 'tpu'"),
        ],
    )
    def test_a_mistake_is_one_line(self, words: tuple[str, ...], told: str) -> None:
        result = redline(*words)
        assert result.exit_code == 2
        assert told in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1

    def test_a_live_module_from_python(self) -> None:
        import torch

        result = flops(torch.nn.Linear(8, 4), torch.randn(3, 8))
        assert result.summary.macs == 3 * 8 * 4
        assert "96" in str(result)
        assert json.loads(result.to_json())["macs"] == 96


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
    assert environment is not None
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
        history.ceilings().put(ceilings)
    return ceilings


class TestRoofline:
    def test_of_the_last_run(self, measured: Ceilings, tmp_path: Path) -> None:
        found = document("roofline", "--last", "-o", tmp_path / "roof.png")
        (row,) = found["results"]
        promised = {
            "intensity",
            "attainable_s",
            "measured_s",
            "headroom",
            "bound",
            "efficiency",
            "achieved_bytes_per_s",
        }
        assert promised | {"classes"} <= set(row)
        assert row["attainable_s"] == pytest.approx(32 * 8.18e9 / 51e12, rel=1e-3)
        assert row["headroom"] == pytest.approx(row["measured_s"] / row["attainable_s"])
        assert row["bound"]["label"] == "compute"
        assert row["error"] is None
        assert (tmp_path / "roof.png").read_bytes().startswith(b"\x89PNG")

    def test_as_a_table_that_ends_in_the_next_step(self, measured: Ceilings) -> None:
        result = redline("roofline", "--last")
        assert result.exit_code == 0
        assert re.search(r"next: \d\.\d× left to the roofline under baseline", result.stdout)

    @pytest.mark.parametrize(
        ("formats", "label", "code", "says"),
        [
            ({"fp32": 1e12, "bf16": 2e12, "fp16": 1e10}, "compute", "work", "limit it: -r bf16 may help"),
            ({"fp32": 1e12, "bf16": 1e12, "fp16": 1e10}, "compute", "work", "shows where the time goes"),
            ({"fp32": 1e12, "bf16": 2e12}, "host", "outside-operators", "shows where the time goes"),
        ],
    )
    def test_the_next_step_follows_the_ceilings_of_the_device(
        self, measured: Ceilings, formats: dict[str, float], label: BoundLabel, code: Code, says: str
    ) -> None:
        with History.open() as history:
            (record,) = history.latest_group()
        prepared = msgspec.structs.replace(record.prepared, applicable=("fp16", "bf16"))
        found = roofline_row(
            msgspec.structs.replace(record, prepared=prepared), msgspec.structs.replace(measured, flops_per_s=formats)
        )
        row = msgspec.structs.replace(found, error=None, bound=Bound(label=label, evidence=note(code, "")))
        assert as_text(RooflineReport([row], {})).rstrip().endswith(says)

    def test_rows_of_the_history_carry_it_too(self, measured: Ceilings) -> None:
        with History.open() as history:
            (listed,) = history.rows()
        assert "left" in redline("history", "show", listed.id).stdout
        (row,) = json.loads(redline("history", "export", "--format", "json").stdout)["results"]
        assert row["roofline"]["headroom"] > 1
        assert "headroom" in redline("history", "export").stdout.splitlines()[0]


SMALL = ("simple_cnn", "-b", "4", "--image-size", "32", "--device", "cpu")


@pytest.fixture
def inline(brief: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench in this process, where its ceilings can be made small."""
    monkeypatch.setattr(workspace, "open_door", lambda launch: InlineDoor())
    shorten_ceilings(monkeypatch.setattr)


@pytest.mark.slow
def test_a_model_on_this_cpu_from_ceilings_to_plot(tmp_path: Path, inline: None) -> None:
    ceilings = document("roofline", "--device", "cpu")["ceilings"]
    assert ceilings["tflops"]["fp32"]["measured"] > 0
    assert ceilings["tflops"]["fp32"]["datasheet"] is None
    # Measured on a busy machine they are doubted, and would be measured again. And a model may well be faster than products
    # of 128 rows, which is reported as an error: these ceilings are too high for any.
    with Workspace() as opened, History.open() as history:
        shelf, key = history.ceilings(), device_key(opened.environment("cpu"))
        known = shelf.get(key)
        assert known is not None
        high = {form: 1000 * value for form, value in known.flops_per_s.items()}
        copied = 1000 * known.copy_bytes_per_s
        shelf.put(msgspec.structs.replace(known, doubts=(), flops_per_s=high, copy_bytes_per_s=copied))
    again = document("roofline", "--device", "cpu")["ceilings"]
    assert again["measured_at"] == ceilings["measured_at"]  # from the history
    timed = document("roofline", "--operator", "matmul:8x16x32", "--format", "fp32", "--device", "cpu")
    (operator,) = timed["operators"]
    assert (operator["flops"], operator["bytes"]) == (2 * 8 * 16 * 32, 4 * (8 * 32 + 32 * 16 + 8 * 16))
    assert 0 < operator["efficiency"] < 1
    called = document("roofline", *SMALL[:1], "--ops", *SMALL[1:])["operators"]
    assert "convolution" in {row["kind"] for row in called}
    assert [row["refusal"] for row in called if row["refusal"]] == []
    found = document("roofline", *SMALL, "-o", tmp_path / "roof.svg")
    (row,) = found["results"]
    assert row["points"]
    assert row["profiled"].startswith("redline profile simple_cnn --image-size 32 ")
    assert {one["name"] for one in row["classes"]} >= {"convolution", "norm", "elementwise"}
    assert (tmp_path / "roof.svg").read_text().startswith("<?xml")


@pytest.mark.slow
def test_a_recipe_that_fails_is_told_and_the_others_still_run(inline: None) -> None:
    result = redline("roofline", *SMALL, "-r", "baseline", "-r", "tf32", "--json")
    assert result.exit_code == 5
    found = json.loads(result.stdout)
    assert [row["recipe"] for row in found["results"]] == ["baseline"]
    assert "TF32" in found["failures"]["tf32"]
