"""A spec says what to measure: it reads back what it writes, refuses what cannot be, and has one key for one thing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import redline.analyze.measurement
import redline.model.protocol
import redline.model.record  # noqa: F401  (their messages and records are specs too)
from redline.model.errors import SpecError
from redline.model.fields import Frozen
from redline.model.spec import LaunchSpec, MeasureSpec, Recipe, RunSpec, Switch, WorkloadSpec
from redline.model.spec_table import read_runs, specs_from_table
from redline.search.grid import grid_from_tables


def load_specs(path: Path, overrides: dict[str, Any] | None = None, *, trust: bool = False) -> list[RunSpec]:
    _, tables = read_runs(path, overrides, trust=trust)
    return grid_from_tables(tables, where=str(path)).cells


class TestRecipeText:
    def test_steps_arguments_and_options_are_told_apart(self) -> None:
        recipe = Recipe.parse("fp16+compile:max-autotune,fullgraph=true,depth=3,share=0.5,backend=inductor")
        assert recipe.switches == (
            Switch(name="fp16"),
            Switch(
                name="compile",
                argument="max-autotune",
                options={"fullgraph": True, "depth": 3, "share": 0.5, "backend": "inductor"},
            ),
        )

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("true", True),
            ("False", False),
            ("3", 3),
            ("-1", -1),
            ("0.25", 0.25),
            ("1e-7", 1e-7),
            ("1e20", 1e20),
            ("inductor", "inductor"),
            ("", ""),
            # Equal to nothing, or to everything too large: these stay what was written.
            ("nan", "nan"),
            ("inf", "inf"),
            ("1" * 400, "1" * 400),
            ("9223372036854775807", 2**63 - 1),
        ],
    )
    def test_an_option_has_the_type_it_looks_like(self, text: str, value: Any) -> None:
        (step,) = Recipe.parse(f"compile:key={text}").switches
        found = step.options["key"]
        assert (found, type(found)) == (value, type(value))

    @pytest.mark.parametrize(
        "text",
        [
            "baseline",
            "fp16",
            "fp16+channels-last+compile:reduce-overhead",
            "compile:fullgraph=true",
            "compile:max-autotune,a=1,b=2.5,c=text,d=false",
            "compile:large=1e20,small=1e-07",
        ],
    )
    def test_what_is_written_is_read_back(self, text: str) -> None:
        recipe = Recipe.parse(text)
        assert str(recipe) == text
        assert Recipe.parse(str(recipe)) == recipe

    def test_the_order_of_steps_and_options_does_not_matter_to_the_canonical_form(self) -> None:
        words = ("fp16", "channels-last", "compile:max-autotune,a=1,b=2")
        texts = {Recipe.parse("+".join(order)).canonical() for order in itertools.permutations(words)}
        texts.add(Recipe.parse("compile:max-autotune,b=2,a=1+fp16+channels-last").canonical())
        assert len(texts) == 1
        assert texts.isdisjoint({Recipe.parse("fp16+channels-last+compile:max-autotune,a=1,b=3").canonical()})

    def test_baseline_is_no_step_at_all(self) -> None:
        assert Recipe.parse("baseline") == Recipe.parse(" baseline ") == Recipe()
        assert str(Recipe()) == Recipe().canonical() == "baseline"

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "empty switch"),
            ("fp16+", "empty switch"),
            ("+fp16", "empty switch"),
            ("fp16++compile", "empty switch"),
            ("baseline+fp16", "cannot be joined"),
            ("baseline+baseline", "cannot be joined"),
            ("baseline:strict", "cannot be joined"),
            ("fp16+compile+fp16", "fp16 twice"),
            ("compile+compile:max-autotune", "compile twice"),
            ("compile:", "without an argument"),
            ("compile: ", "without an argument"),
            (":max-autotune", "no name"),
            ("compile:max-autotune,fullgraph", "expected key=value, got 'fullgraph'"),
            ("compile:max-autotune,", "expected key=value"),
            ("compile:,a=1", "expected key=value"),
            ("compile:=1", "expected key=value"),
            ("compile:a=1,a=2", "a twice"),
        ],
    )
    def test_what_cannot_be_read_is_named(self, text: str, words: str) -> None:
        with pytest.raises(SpecError, match=words) as error:
            Recipe.parse(text)
        assert "\n" not in str(error.value)


def every_spec(kind: type = Frozen) -> Iterator[type]:
    for below in kind.__subclasses__():
        yield below
        yield from every_spec(below)


class TestEverySpecRecordAndMessage:
    kinds = pytest.mark.parametrize("kind", list(every_spec()), ids=lambda kind: kind.__name__)

    def test_is_looked_at(self) -> None:
        names = {kind.__name__ for kind in every_spec()}
        assert {"RunSpec", "RunRecord", "Block", "Measure", "FailureReply", "VersusFirst"} <= names

    @kinds
    def test_refuses_a_field_it_does_not_know(self, kind: Any) -> None:
        with pytest.raises(TypeError, match="no_such_field"):
            kind(no_such_field=1)
        with pytest.raises(msgspec.ValidationError, match="unknown field `no_such_field`"):
            msgspec.convert({"no_such_field": 1}, kind)

    def test_cannot_be_changed_after_the_fact(self) -> None:
        spec = RunSpec(workload=WorkloadSpec(model="resnet50"))
        with pytest.raises(AttributeError, match="immutable"):
            spec.seed = 1  # type: ignore[misc]


class TestRanges:
    @pytest.mark.parametrize(
        ("kind", "field", "value", "words"),
        [
            (WorkloadSpec, "batch", 0, "batch must be 1 or more, got 0"),
            (WorkloadSpec, "batch", -4, "batch must be 1 or more, got -4"),
            (WorkloadSpec, "image_size", 0, "image_size must be 1 or more"),
            (WorkloadSpec, "classes", 0, "classes must be 1 or more"),
            (WorkloadSpec, "sequence_length", 0, "sequence_length must be 1 or more"),
            (WorkloadSpec, "task", "sleep", "task must be one of infer, train, step, generate, got 'sleep'"),
            (WorkloadSpec, "optimizer", "lbfgs", "optimizer must be one of sgd, adam, adamw, got 'lbfgs'"),
            (WorkloadSpec, "model", " ", "model must not be empty"),
            (RunSpec, "threads", 0, "threads must be 1 or more, got 0"),
            (WorkloadSpec, "batch", 10**20, "batch must be 2147483647 or less, got 100000000000000000000"),
            (WorkloadSpec, "image_size", 10**6, "image_size must be 65536 or less, got 1000000"),
            (WorkloadSpec, "classes", 10**10, "classes must be 2147483647 or less"),
            (WorkloadSpec, "sequence_length", 10**10, "sequence_length must be 2147483647 or less"),
            (RunSpec, "threads", 99999999999, "threads must be 4096 or less, got 99999999999"),
            (RunSpec, "seed", 2**64 - 1, "seed must be 18446744073709551614 or less, got 18446744073709551615"),
            (RunSpec, "seed", -(10**20), "seed must be -9223372036854775808 or more"),
            (MeasureSpec, "min_samples", 10**20, "min_samples must be 2147483647 or less"),
            (MeasureSpec, "warmup_min_steps", 10**20, "warmup_min_steps must be 2147483647 or less"),
            (LaunchSpec, "memory_limit_bytes", 10**20, "memory_limit_bytes must be 1152921504606846976 or less"),
            (MeasureSpec, "effort", "huge", "effort must be one of quick, normal, strict, got 'huge'"),
            (MeasureSpec, "max_seconds", 0.0, "max_seconds must be above 0"),
            (MeasureSpec, "max_seconds", float("nan"), "max_seconds must be above 0"),
            (MeasureSpec, "block_seconds", -1.0, "block_seconds must be above 0"),
            (MeasureSpec, "max_seconds", float("inf"), "max_seconds must be 10000000 seconds or less, got inf"),
            (MeasureSpec, "warmup_window_seconds", 1e10, "warmup_window_seconds must be 10000000 seconds or less"),
            (MeasureSpec, "settle_seconds", float("nan"), "settle_seconds must not be negative, got nan"),
            (LaunchSpec, "prepare_timeout_s", float("inf"), "prepare_timeout_s must be 10000000 seconds or less"),
            (LaunchSpec, "measure_timeout_s", 1e10, "measure_timeout_s must be 10000000 seconds or less"),
            (LaunchSpec, "close_timeout_s", 10000000.1, "close_timeout_s must be 10000000 seconds or less"),
            (LaunchSpec, "close_timeout_s", 0, "close_timeout_s must be above 0, got 0"),
            (WorkloadSpec, "model", "caf\udce9", "is not Unicode in this locale"),
            (WorkloadSpec, "model", "a\0b", "has a NUL character in it"),
            (RunSpec, "device", "cuda\udce9", "is not Unicode in this locale"),
            (MeasureSpec, "target_half_width", 0.0, "target_half_width must be above 0"),
            (MeasureSpec, "min_samples", 0, "min_samples must be 1 or more"),
            (MeasureSpec, "settle_seconds", -0.1, "settle_seconds must not be negative"),
            (LaunchSpec, "door", "window", "door must be one of inline, fork, spawn, torchrun, fake, got 'window'"),
            (LaunchSpec, "prepare_timeout_s", 0.0, "prepare_timeout_s must be above 0"),
            (LaunchSpec, "memory_limit_bytes", 0, "memory_limit_bytes must be 1 or more, got 0"),
            (LaunchSpec, "command_prefix", ("numactl",), "command_prefix needs the spawn door, got door 'fork'"),
        ],
    )
    def test_name_the_field_the_rule_and_the_value(self, kind: Any, field: str, value: Any, words: str) -> None:
        needed = {WorkloadSpec: {"model": "resnet50"}, RunSpec: {"workload": WorkloadSpec(model="resnet50")}}
        with pytest.raises(SpecError, match=words):
            kind(**{**needed.get(kind, {}), field: value})

    def test_let_the_smallest_through(self) -> None:
        workload = WorkloadSpec(model="resnet50", batch=1, image_size=1, classes=1, sequence_length=1)
        spec = RunSpec(workload=workload, threads=1, launch=LaunchSpec(door="spawn", command_prefix=("numactl",)))
        assert (spec.workload.batch, spec.workload.image_size, spec.threads) == (1, 1, 1)
        assert spec.launch.command_prefix == ("numactl",)
        measure = MeasureSpec(settle_seconds=0.0, warmup_min_seconds=0.0, warmup_min_steps=0)
        assert (measure.settle_seconds, measure.warmup_min_seconds, measure.warmup_min_steps) == (0.0, 0.0, 0)


class TestEfforts:
    def test_more_effort_asks_for_more(self) -> None:
        quick, normal, strict = (MeasureSpec.for_effort(effort) for effort in ("quick", "normal", "strict"))  # type: ignore[arg-type]
        assert (quick.effort, normal.effort, strict.effort) == ("quick", "normal", "strict")
        assert quick.target_half_width > normal.target_half_width > strict.target_half_width
        assert quick.cpu_target_half_width > normal.cpu_target_half_width > strict.cpu_target_half_width
        assert quick.min_rounds < normal.min_rounds < strict.min_rounds
        assert quick.max_seconds < normal.max_seconds
        assert quick.warmup_max_seconds < normal.warmup_max_seconds


class TestFiles:
    @pytest.fixture
    def write(self, tmp_path: Path) -> Any:
        def write(text: str) -> Path:
            path = tmp_path / "runs.toml"
            path.write_text(text, encoding="utf-8")
            return path

        return write

    def test_settings_at_the_top_hold_for_every_run_unless_it_says_otherwise(self, write: Any) -> None:
        path = write(
            """
            device = "cpu"
            batch = 8
            effort = "quick"

            [[run]]
            model = "resnet18"

            [[run]]
            model = "resnet50"
            batch = 2
            task = "train"
            threads = 4
            seed = 7
            """
        )
        first, second = load_specs(path)
        assert first == RunSpec(
            workload=WorkloadSpec(model="resnet18", batch=8), measure=MeasureSpec.for_effort("quick"), device="cpu"
        )
        assert second == RunSpec(
            workload=WorkloadSpec(model="resnet50", batch=2, task="train"),
            measure=MeasureSpec.for_effort("quick"),
            device="cpu",
            threads=4,
            seed=7,
        )

    def test_a_file_without_run_tables_is_one_run(self, write: Any) -> None:
        (spec,) = load_specs(write('model = "resnet18"'))
        assert spec == RunSpec(workload=WorkloadSpec(model="resnet18"))

    def test_flags_override_the_file(self, write: Any) -> None:
        path = write('batch = 8\n[[run]]\nmodel = "a"\nbatch = 4\n[[run]]\nmodel = "b"')
        found = load_specs(path, {"batch": 1, "recipe": ["fp16"]})
        assert [(spec.workload.batch, str(spec.recipe)) for spec in found] == [(1, "fp16"), (1, "fp16")]
        (spec,) = load_specs(write('model = "a"'), {"model": ["c"]})
        assert spec.workload.model == "c"

    def test_inside_measure_and_launch_single_values_are_overridden(self, write: Any) -> None:
        path = write(
            """
            model = "resnet18"
            [measure]
            max_seconds = 5.0
            min_rounds = 20
            [launch]
            prepare_timeout_s = 60.0
            [[run]]
            measure = {min_rounds = 3}
            """
        )
        (spec,) = load_specs(path, {"effort": "quick", "launch": {"door": "spawn"}})
        expected = msgspec.structs.replace(MeasureSpec.for_effort("quick"), max_seconds=5.0, min_rounds=3)
        assert spec.measure == expected
        assert spec.launch == LaunchSpec(door="spawn", prepare_timeout_s=60.0)

    def test_an_effort_inside_the_table_measure_is_refused(self) -> None:
        with pytest.raises(SpecError, match="effort stands beside the table measure"):
            specs_from_table({"model": "a", "measure": {"effort": "normal"}})

    def test_an_optimizer_for_all_goes_to_the_runs_that_train(self, write: Any) -> None:
        text = 'model = "a"\noptimizer = "adam"\n[[run]]\n[[run]]\ntask = "train"'
        infer, train = load_specs(write(text))
        assert (infer.workload.optimizer, train.workload.optimizer) == ("sgd", "adam")

    @pytest.mark.parametrize(
        ("table", "says"),
        [
            ({}, "name at least one model"),
            (
                {"model": "a", "batch_axis": [0, None]},
                r"batch_axis must be a number, got \[0, None\]; for other inputs let",
            ),
            ({"model": "a", "max_memory": "lots"}, "max_memory: expected a size such as 16GiB"),
            ({"model": "a", "measure": {"nosuch": 1}}, "measure: .*unknown field `nosuch`"),
        ],
    )
    def test_a_mistake_in_flags_names_no_file(self, table: dict[str, Any], says: str) -> None:
        with pytest.raises(SpecError, match=f"^{says}"):
            specs_from_table(table)

    def test_tail_asks_for_p99(self, write: Any) -> None:
        (spec,) = load_specs(write('model = "resnet18"\neffort = "quick"\ntail = true'))
        assert spec.measure == MeasureSpec.for_effort("quick", tail=True)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("model = ", "is not TOML"),
            ('model = "a"\nmodel = "b"', "is not TOML"),
            ("batch = 8", "name at least one model"),
            ("model = []", "name at least one model"),
            ('model = "a"\nrecipe = []', "name at least one recipe"),
            ('model = "a"\nbathc = 8', "unknown setting 'bathc'; did you mean batch?"),
            ('modell = "a"', "unknown setting 'modell'; did you mean model?"),
            ('model = "a"\noptimizer = "adam"', "optimizer adam is for training"),
            ('model = "a"\n[measure]\nmax_secs = 8', "measure: .*unknown field `max_secs`"),
            ('model = "a"\n[launch]\nwindow = 8', "launch: .*unknown field `window`"),
            ('model = "a"\nbatch = "eight"', "batch must be a number, a list such as 1,8,16"),
            ('model = "a"\nbatch = 2.5', "Expected `int .*got `float`.*batch"),
            ('model = "a"\ndevice = 0', "Expected `str`, got `int`.*device"),
            ('model = "a"\ntail = "no"', "tail must be true or false, got 'no'"),
            ('model = "a"\nmeasure = 3', "measure must be a table, got 3"),
            ('model = "a"\nlaunch = "fork"', "launch must be a table, got 'fork'"),
            ("model = 3", "model must be a name or a list of names, got 3"),
            ("model = [3]", "model must be a name or a list of names"),
            ('model = "a"\nrecipe = 16', "recipe must be a name or a list of names, got 16"),
            ('model = "a"\nrecipe = {step = "fp16"}', "recipe must be a name or a list of names"),
            # What a class refuses by itself, it refuses here too.
            ('model = "a"\nbatch = 0', "batch must be 1 or more, got 0"),
            ('model = "a"\nthreads = 0', "threads must be 1 or more, got 0"),
            ('model = "a"\neffort = "huge"', "effort must be one of"),
            ('model = "a"\ntask = "sleep"', "sleep"),
            ('model = "a"\nrecipe = "fp16++compile"', "empty switch"),
            ('model = "a"\n[measure]\nmin_rounds = 0', "min_rounds must be 1 or more"),
            ('model = "a"\n[launch]\ndoor = "window"', "window"),
            ('run = "resnet18"', r"write each run as a \[\[run\]\] table"),
            ("run = []", r"write each run as a \[\[run\]\] table"),
            ('run = ["resnet18"]', r"write each run as a \[\[run\]\] table"),
        ],
    )
    def test_a_mistake_is_told_in_one_line_with_the_name_of_the_file(self, write: Any, text: str, words: str) -> None:
        path = write(text)
        with pytest.raises(SpecError, match=words) as error:
            load_specs(path)
        said = str(error.value)
        assert said.startswith(str(path))
        assert said.count(str(path)) == 1
        assert "\n" not in said

    def test_a_file_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(SpecError, match=r"no such file: .*nowhere\.toml"):
            load_specs(tmp_path / "nowhere.toml")

    def test_a_folder_is_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(SpecError, match="cannot read"):
            load_specs(tmp_path)

    def test_bytes_that_are_no_text_are_told_of(self, tmp_path: Path) -> None:
        path = tmp_path / "runs.toml"
        path.write_bytes(b'model = "\xff\xfe"')
        with pytest.raises(SpecError, match=r"cannot read .*runs\.toml"):
            load_specs(path)

    @pytest.mark.parametrize(
        ("line", "says"),
        [
            ('task = "foo"', "task must be one of infer, train, step, generate, got 'foo'"),
            ('optimizer = "foo"', "optimizer must be one of sgd, adam, adamw, got 'foo'"),
            ('launch = {door = "foo"}', "door must be one of inline, fork, spawn, torchrun, fake, got 'foo'"),
        ],
    )
    def test_an_unknown_word_is_answered_with_the_choices(self, write: Any, line: str, says: str) -> None:
        path = write(f'model = "resnet18"\n{line}')
        with pytest.raises(SpecError) as error:
            load_specs(path)
        assert str(error.value) == f"{path}: {says}"

    @pytest.mark.parametrize("name", ["batch", "seed", "threads", "image_size", "classes", "max_memory"])
    def test_a_number_that_no_message_carries_is_refused(self, write: Any, name: str) -> None:
        with pytest.raises(SpecError, match=f"{name} must be .* or less, got 99999999999999999999"):
            load_specs(write(f'model = "resnet18"\n{name} = 99999999999999999999'))

    @pytest.mark.parametrize("sign", [1, -1])
    def test_a_number_of_thousands_of_digits_is_one_short_line(self, sign: int) -> None:
        for kind, name in ((WorkloadSpec, "batch"), (RunSpec, "seed")):
            required = {"model": "m"} if kind is WorkloadSpec else {"workload": WorkloadSpec(model="m")}
            with pytest.raises(SpecError, match=rf"^{name} must be .*, got a number of more than 30 digits$"):
                kind(**required, **{name: sign * 10**5000})
        with pytest.raises(SpecError, match=r"prepare_timeout_s must be .*, got a number of more than 30 digits"):
            LaunchSpec(prepare_timeout_s=sign * 10**5000)

    @pytest.mark.parametrize(
        "text",
        [
            f'model = "resnet18"\nbatch = {"9" * 5000}',
            f"x = {'[' * 3000}{']' * 3000}",
            f"x = {'{a = ' * 3000}1{'}' * 3000}",
        ],
        ids=["a number of 5 000 digits", "lists in lists", "tables in tables"],
    )
    def test_what_python_itself_cannot_read_is_one_line(self, write: Any, text: str) -> None:
        path = write(text)
        with pytest.raises(SpecError) as error:
            load_specs(path)
        assert str(error.value).startswith(f"{path} is not TOML: ")
        assert "\n" not in str(error.value)

    CODE = (
        'model = "a"\nartifact = "model.pkl"',
        'model = "a"\n[launch]\ndoor = "spawn"\ncommand_prefix = ["rm", "-rf"]',
        'model = "/tmp/evil.py:build"',
        '[[run]]\nmodel = ["a", "evil.py:build"]',
    )

    @pytest.mark.parametrize("text", CODE)
    def test_a_file_of_somebody_else_that_runs_code_needs_trust(
        self, write: Any, text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write(text)
        mine = load_specs(path)
        monkeypatch.setattr("redline.model.spec_table._owner", lambda descriptor: 12345)
        with pytest.raises(SpecError, match=r"belongs to another user \(id 12345\) and runs code .* with --trust$"):
            load_specs(path)
        assert load_specs(path, trust=True) == mine

    def test_the_administrators_files_are_trusted(self, write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write(self.CODE[0])
        monkeypatch.setattr("os.getuid", lambda: 12345)
        monkeypatch.setattr("redline.model.spec_table._owner", lambda descriptor: 0)
        assert len(load_specs(path)) == 1
