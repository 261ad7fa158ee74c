"""Every row says what it measured: threads, sizes, optimizer, loss, versions; rows of one name can be told apart."""

from __future__ import annotations

import io
import re
from typing import Any

import msgspec
from reported import race_records
from rich.console import Console

from redline.analyze.measurement import measurements
from redline.analyze.rows import row_of
from redline.model.identity import subjects_of
from redline.model.record import RunRecord
from redline.show.result import terminal
from redline.store import History
from redline.verbs.history import show
from redline.verbs.run import Measured, result_of

replace = msgspec.structs.replace


def measured(
    name: str = "resnet18",
    *,
    task: str = "infer",
    threads: int = 2,
    torch: str = "2.11",
    kind: str = "cpu",
    **workload: Any,
) -> RunRecord:
    (record,) = race_records(("baseline",))
    prepared = record.prepared
    device = replace(prepared.environment.device, kind=kind, index=None if kind == "cpu" else 0, driver="570.1")
    environment = replace(prepared.environment, threads=threads, versions={"torch": torch}, device=device)
    info = replace(prepared.workload, **{"image_size": 224, "input_shapes": ("32×3×224×224 float32",), **workload})
    spec = replace(record.spec, workload=replace(record.spec.workload, model=name, task=task), device=kind)
    return replace(record, spec=spec, prepared=replace(prepared, environment=environment, workload=info))


def text_of(*records: RunRecord, width: int = 200) -> str:
    found = terminal(result_of(Measured(records=list(records))))
    text = io.StringIO()
    Console(file=text, width=width, highlight=False).print(found)
    return text.getvalue()


def test_a_row_carries_the_conditions() -> None:
    record = measured(task="train", loss="cross_entropy on random targets")
    expected = {
        "threads": 2, "image_size": 224, "optimizer": "sgd", "loss": "cross_entropy on random targets", "torch": "2.11",
        "driver": "570.1", "effort": record.spec.measure.effort, "inputs": "32×3×224×224 float32",
    }  # fmt: skip
    (row,) = measurements([record])
    assert expected.items() <= row_of(row).facts.items()


def test_the_title_says_what_matters_on_the_device() -> None:
    on_cpu = text_of(measured(task="train", loss="output.loss")).splitlines()[1]
    assert "224 px · sgd · output.loss · 2 threads" in on_cpu
    on_gpu = text_of(measured(kind="cuda")).splitlines()[1]
    assert "threads" not in on_gpu
    assert "sgd" not in on_gpu
    own = text_of(measured(image_size=None, input_shapes=("20×8×6 float32", "8 int64"))).splitlines()[1]
    assert "20×8×6 float32, 8 int64" in own


def test_a_run_across_models_is_one_table_with_what_tells_its_rows_apart() -> None:
    records = [measured("resnet18"), measured("vit_b_16"), measured("bert", image_size=None, sequence_length=128)]
    records = [replace(record, id=f"{number}", group=None) for number, record in enumerate(records)]
    told = text_of(*records)
    for words in ("resnet18", "vit_b_16", "bert", "image size", "224", "sequence length", "128"):
        assert words in told
    assert told.count("2 threads") == 1, "what all have stands in the title"
    assert all(len(line) <= 60 for line in text_of(*records, width=60).splitlines())


def test_an_unknown_batch_is_said() -> None:
    text = text_of(measured(batch=None, batch_from="unknown", items_per_step=1, item="step"))
    assert "the batch is unknown" in text
    assert "step/s" in text
    assert "add --batch-axis N" in text


def test_records_of_one_name_are_set_apart_by_what_differs() -> None:
    records = [measured(threads=1), measured(threads=2), measured(torch="2.15"), measured("vgg11")]
    first, second, third, other = (str(subject) for subject in subjects_of(records))
    assert len({first, second, third}) == 3
    assert "1 thread" in first
    assert "torch 2.15" in third
    assert "thread" not in other, "nothing differs from its neighbours"


def test_the_list_and_the_detail_of_the_history_say_it_too() -> None:
    record = measured(task="train", loss="output.loss", batch_from="scaled")
    with History.open() as history:
        history.finish(record)
    listed, one = show().rows[0]["conditions"], str(show(record.id))
    for text in (str(listed), one):
        assert "output.loss" in text
        assert "2 threads" in text
    assert re.search(r"batch from +scaled", one)
    assert show().rows[0]["model"] == "resnet18"
