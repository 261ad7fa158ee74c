"""Hostile command lines, TOML files and documents, given to the command line within this process.

`python tests/fuzz_inputs.py --count 2000 --seed 1` tries so many and prints what is wrong: a traceback, an exit code that
does not fit what was printed, or a refusal that took longer than `--limit` seconds. `--only NUMBER` tries one again.

Every input is made of its seed and number alone, and the command lines of the commands and options that the app has. Nothing
is measured: an input that would begin to measure, to serve or to start a program is done at that moment.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import typer
from reported import captured, failed_record, race_records, sweep_records
from starlette.testclient import TestClient

from redline.cli import main
from redline.model.errors import Exit
from redline.model.protocol import Ask, AskCheck, AskEnvironment, AskModels, Request
from redline.show.export import json_document
from redline.store import History
from redline.testing.fake import FakeDoor, FakeSession
from redline.testing.landscape import Landscape
from redline.verbs import workspace
from redline.verbs.serve import make_app
from redline.verbs.workspace import Workspace

PATIENCE_S = 60.0
"""An input that takes longer is ended: it waits for something."""
MOST_MEMORY_BYTES = 6 * 2**30
"""Of addresses: whoever reads a file without an end meets this, and not the end of the machine's memory."""
GARBLED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\u202e]")
"""What a terminal would obey."""


class Started(BaseException):
    """Something would begin now: a measurement, a server, a program."""


class TooLong(BaseException):
    """The patience is over."""


# What is hostile

NUMBERS = (
    "0", "-1", "-0.0", "1", "8", "65", "1e308", "-1e308", "1e-320", "1e59", "1e400", "NaN", "inf", "-inf", "0x10", "1_000", "٣",
    "½", "2147483648", "9223372036854775808", "1" + "0" * 59, "9" * 5000, "+5", "1,5", "1.5.2", "10%", "1e308ms", "-5GiB", "9e9d",
)  # fmt: skip
RANGES = (
    "1..1000000000000", "1..9" + "9" * 400, "-5..5", "5..1", "1..", "..8", "1..8..2", "1..1000000000000x1", "1..8x0", "1-10", "1:9:0",
    "1..1e300", "1,2,,3", "1," * 50_000, ",".join(map(str, range(30_000))), "1..NaN", "8..8", "1,1,1,1",
)  # fmt: skip
TEXTS = (
    "", " ", "\n", "\t", "-", "--", "=", "'", '"', "\\", "'\"'\"'", "a b", "%s%n%d", "{}", "{0.__class__}", "$(id)", "`id`", "<script>", "\x1b[31mred",
    "\u202eabc", "模型🚀", "é" * 3000, "a" * 100_000, "../" * 2000, "[" * 5000, '{"a":' * 3000, "((" * 3000, "::", "a:b:c:d", ":", "*", "?", "~", "~nobody/x",
    "None", "null", "true", "NUL", "con", "\udcff", "a\0b", "fp16+" * 5000, "+".join(f"s{i}" for i in range(3000)), "compile=" * 500,
    "compile:" + "mode=" * 800, "baseline|" * 999, "=1+1", "http://127.0.0.1:1/x", "127.0.0.1:1", "[::1]:1", "postgresql://127.0.0.1:1/x",
)  # fmt: skip
PATHS = (
    "nowhere", "nowhere/below", "folder", "folder/", ".", "..", "/", "empty", "binary", "utf16.toml", "zero", "pipe", "loop", "deep.json",
    "deep.toml", "sparse", "digits.json", "digits.toml", "wide.toml", "records.json", "rows.json", "bench.toml", "mutated.json", "mutated.toml", "socket",
    "history.sqlite", "model.py", "model.py:make", "model.py:nothing", "bad.py:make", "zero:make", "pipe:make", "folder:make", "model.py:" + "x." * 3000,
    "records.json/x", "half.json.gz", "bomb.json.gz", "bomb.gz", "\udcff.json", "x" * 300 + ".toml",
)  # fmt: skip
PLAUSIBLE: dict[str, tuple[str, ...]] = {
    "model": ("resnet18", "simple_cnn", "model.py:make", "nosuchmodel", "timm:nosuch", "hf:nosuch", "hf:gpt2"),
    "recipe": ("baseline", "fp16", "fp16+channels-last", "bf16+compile", "nosuch", "fp16+bf16", "compile=max-autotune"),
    "batch": ("8", "1..64", "1,2,4", "1..64x2"), "device": ("cpu", "auto", "cuda:0", "cuda:99999999999", "tpu"),
    "task": ("infer", "train", "generate", "step", "sleep"), "effort": ("quick", "strict", "slow"), "door": ("fork", "inline", "torchrun", "fake"),
    "file": ("bench.toml", "mutated.toml", "mutated.json", "records.json"), "baseline": ("records.json", "mutated.json", "main", "HEAD~1", "HEAD"),
    "what": ("records.json", "mutated.json", "rows.json", "history.sqlite"), "other": ("records.json", "mutated.json"),
    "first": ("records.json", "mutated.json"), "format": ("csv", "json", "archive", "xml"), "out": ("out", "folder", "records.json/x"),
    "older_than": ("30d", "2w", "2026-01-31"), "since": ("30d", "1d"), "trace": ("mutated.json", "records.json", "bomb.json.gz"),
    "objective": ("latency", "throughput"), "rate": ("1..1000", "20"), "data": ("synthetic", "folder", "cifar10:folder"),
}  # fmt: skip
"""Values that may be taken, by the name of the option: behind the first check there is a second."""
NAMES_OF_FILES = (
    "file",
    "what",
    "other",
    "first",
    "second",
    "baseline",
    "trace",
    "path",
    "ids",
    "command",
    "model",
    "check",
    "data",
    "name",
)


class Chance(random.Random):
    """Draws hostile words."""

    def word(self) -> str:
        pool = self.choice((NUMBERS, RANGES, TEXTS, PATHS))
        word = self.choice(pool)
        if self.random() < 0.05:
            word = "".join(self.sample(word[:400] + "-=\"'{}[]", 5))
        return word

    def value(self, name: str) -> str:
        likely = PLAUSIBLE.get(name) or next((words for part, words in PLAUSIBLE.items() if part in name), ())
        if name in NAMES_OF_FILES and self.random() < 0.5:
            likely = PATHS
        return self.choice(likely) if likely and self.random() < 0.6 else self.word()


@cache
def command_tree() -> Any:
    """All commands, with their options."""
    return typer.main.get_command(main.filled(*main.NAMES))


def hostile_words(chance: Chance) -> list[str]:
    """A command line of the commands and options that there are."""
    command = command_tree()
    words: list[str] = []
    while below := getattr(command, "commands", None):
        if words and chance.random() < 0.3:
            break  # a group may be a command of its own
        name = chance.choice(list(below))
        command = below[name]
        words.append(name if chance.random() < 0.98 else chance.word())
    options = [each for each in command.params if each.param_type_name == "option"]
    for each in command.params:
        if each.param_type_name == "argument" and chance.random() < 0.93:
            words += [chance.value(each.name) for _ in range(1 if each.nargs == 1 else chance.choice((1, 1, 2, 40)))]
    for each in chance.sample(options, min(len(options), chance.choice((0, 1, 1, 2, 3, 5)))):
        for _ in range(chance.choice((1, 1, 2, 2000)) if each.multiple else 1):
            option = chance.choice(each.opts)
            words += [option] if each.is_flag else [option, chance.value(each.name)]
    if chance.random() < 0.05:
        chance.shuffle(words)
    return words


# TOML files

GRID = """
title = "one"
[[run]]
model = "resnet18"
recipe = ["baseline", "fp16"]
batch = [1, 8]
task = "infer"
effort = "quick"
device = "cpu"
[run.launch]
door = "fork"
"""
BENCH = """
effort = "quick"
[[run]]
name = "small"
model = "simple_cnn"
batch = 4
recipe = "baseline"
threshold = 0.03
fail_on = ["memory"]
memory_threshold = 0.05
[run.measure]
block_seconds = 0.05
[environment]
setup = "true"
"""
TOML_VALUES = (
    "0", "-1", "1.5", "nan", "-inf", "1e308", "9" * 400, "9" * 5000, "9223372036854775808", "0xffffffffffffffffffff", "true", '""', '"x"', "[]", "{}",
    "[[]]", "[1, 'a', {}]", "[" * 80 + "]" * 80, "[" * 5000 + "]" * 5000, "{a=" * 3000 + "1" + "}" * 3000, "1979-05-27", "07:32:00", "'''\n'''",
    '"\\u0000"', '"\\u202e"', "[" + "1," * 100_000 + "]", '"' + "fp16+" * 20_000 + '"', "['a'" + ",'a'" * 20_000 + "]", "[1, 2, 3, 4]", '"1..1000000000000"',
    "{from = 1, to = 1000000000000}", "{start = 1, stop = 1e300, step = 1e-300}", "{path = '/dev/zero'}", '"zero"', '"pipe"', '"model.py:make"', "1_0", "[1..5]",
)  # fmt: skip
TOML_KEYS = (
    "model", "batch", "recipe", "task", "device", "effort", "threads", "ranks", "seed", "items", "image_size", "sequence_length", "name", "title",
    "launch", "measure", "threshold", "metric", "checks", "check", "data", "epochs", "prompt", "new_tokens", "replicates", "file", "sweep", "study", "run", "artifact",
    "inputs", "max_memory", "nosuch", "fail_on", "memory_threshold", "environment", "setup", "python", '""', '"a.b"', "a" + ".a" * 3000, '"\\u0000"', "__class__", "optimizer", "classes", "price", "budget", "train", "load", "rate",
)  # fmt: skip


def hostile_toml(chance: Chance) -> bytes:
    lines = chance.choice((GRID, BENCH, GRID.replace("[[run]]", "[sweep]").replace("run.", "sweep."))).splitlines()
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        at, how = chance.randrange(len(lines)), chance.random()
        key = lines[at].partition(" = ")[0] if " = " in lines[at] and how < 0.5 else chance.choice(TOML_KEYS)
        line = f"{key} = {chance.choice(TOML_VALUES)}"
        if how < 0.5:
            lines[at] = line
        elif how < 0.8:
            lines.insert(at, line)
        elif how < 0.88:
            lines.insert(at, chance.choice((f"[{key}]", f"[[{key}]]", "[[run]]", "[run]", "[")))
        elif how < 0.94:
            lines += lines[:30] * chance.choice((1, 1, 1000))
        else:
            del lines[at]
        lines = lines or [""]
    text = "\n".join(lines).encode()
    if chance.random() < 0.1:
        at = chance.randrange(len(text) + 1)
        text = text[:at] + chance.choice((b"\xff", b"\x00", b"\xef\xbb\xbf", b"\r", b'"', b"#" * 10**6)) + text[at:]
    return text


# Documents

LEAVES: tuple[Any, ...] = (
    0, -1, 1e308, -1e308, 1e-320, float("nan"), float("inf"), -float("inf"), 10**59, -(10**59), 2**63, 2**64, "NaN", "1e308", "Infinity", None, True,
    "", [], {}, [[]], "<script>alert(1)</script>", "\x1b[31mred\x1b[0m", "\u202e", "a|b\nc", "=1+1", "[link](http://x)", "\ud800", "\0", "x" * 100_000, "../../etc/passwd", 0.5, 1e18, 3e8,
)  # fmt: skip

LIKE: tuple[tuple[type, tuple[Any, ...]], ...] = (
    (bool, (True, False)),
    (int | float, (0, 0.0, 1, 2, 7, 2**31 - 1, 2**63 - 1, 2**53, 1e-320, 1e-9, 1e9, 1e18, 1e30, -1e30, -1, -0.0, 253_400_000_000, 0.5)),
    (str, tuple(leaf for leaf in LEAVES if isinstance(leaf, str))),
)  # fmt: skip
"""What passes where such a value stood: a type is no defence against these."""


def hostile_document(chance: Chance, text: str) -> bytes:
    """A sound document with some of its leaves changed, or all of the same name."""
    plain = json.loads(text)
    leaves = list(_leaves(plain))
    for _ in range(chance.choice((1, 1, 2, 5, 20))):
        where, key = chance.choice(leaves)
        own = where.get(key) if isinstance(where, dict) else where[key] if key < len(where) else None
        pool = (
            next((values for kind, values in LIKE if isinstance(own, kind)), LEAVES)
            if chance.random() < 0.7
            else LEAVES
        )
        value = chance.choice(pool)
        alike = [(there, name) for there, name in leaves if name == key] if chance.random() < 0.5 else [(where, key)]
        for there, name in alike:
            if isinstance(there, dict) and chance.random() < 0.03:
                there.pop(name, None)
            elif isinstance(there, dict) or name < len(there):
                there[name] = value
    written = json.dumps(plain).encode("utf-8", "surrogatepass")
    if chance.random() < 0.1:
        at = chance.randrange(len(written))
        written = written[:at] + chance.choice((b"\xff", b"", b"[" * 3000, b"9" * 6000)) + written[at + 1 :]
    return written


def _leaves(plain: Any) -> Iterator[tuple[Any, Any]]:
    """Every value that holds no other, as what it is in and its name there."""
    items = plain.items() if isinstance(plain, dict) else enumerate(plain)
    for name, value in list(items):
        if isinstance(value, dict | list) and value:
            yield from _leaves(value)
            if chance_of_branch(name):
                yield plain, name
        else:
            yield plain, name


def chance_of_branch(name: Any) -> bool:
    """Branches that are replaced as a whole: those with a name."""
    return isinstance(name, str)


DOCUMENT_LINES = (
    ("report", "mutated.json", "--out", "out"), ("report", "mutated.json", "--json"), ("compare", "mutated.json", "mutated.json"),
    ("compare", "records.json", "mutated.json", "--markdown"), ("compare", "records.json", "mutated.json", "--json"),
    ("gate", "bench.toml", "--baseline", "mutated.json"),
)  # fmt: skip
AFTERWARDS = (
    ("history", "show"), ("history", "show", "--json"), ("history",), ("history", "--json"), ("history", "export"), ("report", "--out", "out"),
    ("history", "export", "--format", "json", "--raw"), ("history", "prune", "--keep", "1"), ("compare", "ID", "ID"), ("history", "show", "ID"),
    ("history", "show", "ID", "--json"), ("report", "ID", "--out", "out"), ("PAGES",),
)  # fmt: skip
"""What is asked of a history into which such a document was imported."""
PAGES = ("/", "/report", "/compare?a=ID&b=ID", "/records/ID")
"""What `redline serve` is asked."""


# Trying them


class Trial(NamedTuple):
    """What one input did."""

    number: int
    words: list[str]
    code: int | None
    """None: something would have begun."""
    seconds: float
    """Without the time in which others had the processor."""
    wrong: str = ""

    def __str__(self) -> str:
        shown = " ".join(repr(word) if len(word) < 60 else f"{word[:40]!r}…({len(word)})" for word in self.words[:12])
        more = f" … {len(self.words) - 12} more" if len(self.words) > 12 else ""
        return f"{self.number}: {self.seconds:.1f} s, exit {self.code}: {shown}{more}\n    {self.wrong}"


class Playground:
    """A folder with all that the inputs name, and this process in it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.sound = documents()
        records = race_records()
        self.ids = [record.id for record in records]
        self.sources = folder / "sources"
        self.sources.mkdir()
        _fill(self.sources)
        with History.open(self.sources / "history.sqlite") as history:
            for record in (*records, failed_record(), *sweep_records()):
                history.finish(record)
        self._number = 0

    def fresh(self, number: int) -> Path:
        """A folder as it was before any input did something to it."""
        there = self.folder / f"{number}"
        there.mkdir()
        for path in self.sources.iterdir():
            if path.is_file() and not path.is_symlink():
                os.link(path, there / path.name) if path.stat().st_size > 10**6 else shutil.copy(path, there)
        (there / "folder").mkdir()
        (there / "loop").symlink_to("loop")
        (there / "zero").symlink_to("/dev/zero")
        os.mkfifo(there / "pipe")
        with socket.socket(socket.AF_UNIX) as listening:
            os.chdir(there)  # such a name has at most 107 characters
            listening.bind("socket")
        return there

    def attempt(self, number: int) -> list[Trial]:
        """One input, and what is asked afterwards where it was a document."""
        chance = Chance(f"{self.seed}/{number}")
        there = self.fresh(number)
        try:
            os.environ["REDLINE_STORE"] = str(there / "own.sqlite")
            Path("mutated.toml").write_bytes(hostile_toml(chance))
            Path("mutated.json").write_bytes(hostile_document(chance, chance.choice(self.sound)))
            kind = number % 4
            if kind == 0:
                shutil.copy("history.sqlite", "own.sqlite")
                return [self._tried(number, list(chance.choice(DOCUMENT_LINES))), *self._imported(number, chance)]
            if kind == 1:
                line = chance.choice((("run", "--file"), ("gate",), ("run", "--file"), ("run",)))
                extra = (
                    ["--baseline", "records.json"]
                    if line == ("gate",)
                    else chance.choice(([], [], ["resnet18"], ["--json"]))
                )
                return [self._tried(number, [*line, "mutated.toml", *extra])]
            if chance.random() < 0.5:
                shutil.copy("history.sqlite", "own.sqlite")
            return [self._tried(number, hostile_words(chance))]
        finally:
            self.leave()

    def leave(self) -> None:
        there = Path.cwd()
        os.chdir(self.folder)
        shutil.rmtree(there)

    def _imported(self, number: int, chance: Chance) -> list[Trial]:
        first = self._tried(number, ["history", "import", "mutated.json"])
        if first.code != Exit.DONE:
            return [first]
        with History.open(only_to_read=True) as history:
            ids = [row.id for row in history.rows()]
        line = [chance.choice(ids) if word == "ID" else word for word in chance.choice(AFTERWARDS)]
        return [first, self._pages(number, chance.choice(ids)) if line == ["PAGES"] else self._tried(number, line)]

    def _pages(self, number: int, record_id: str) -> Trial:
        """The pages of `redline serve`; what is answered to a browser is no text of a record as it was."""
        began, wrong = time.perf_counter(), ""
        browser = TestClient(make_app(Workspace()), base_url="http://127.0.0.1:8765", raise_server_exceptions=False)
        for path in PAGES:
            answer = browser.get(path.replace("ID", record_id))
            if answer.status_code >= 500 or "<script>alert" in answer.text:
                wrong = f"{path} is answered with {answer.status_code}"
        return Trial(number, ["serve"], 0, time.perf_counter() - began, wrong)

    def _tried(self, number: int, words: list[str]) -> Trial:
        return self.tried(number, words)[0]

    def tried(self, number: int, words: list[str]) -> tuple[Trial, str]:
        """A command line in the folder that this process is in, and what it complained of."""
        began, delayed = time.perf_counter(), _delay_s()
        code, out, told = _called(words)
        seconds = time.perf_counter() - began - (_delay_s() - delayed)
        return Trial(number, words, code, seconds, _wrong(words, code, out, told)), told


def _delay_s() -> float:
    """Seconds that this thread was ready to run and others had the processor."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def _called(words: list[str]) -> tuple[int | None, str, str]:
    """The exit code, and what was printed; a bug as its traceback instead."""
    out, told = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="replace") for _ in range(2))
    code: int | None = None
    try:
        with (
            patch.object(sys, "argv", ["redline", *words]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(told),
        ):
            signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
            try:
                code = int(main._run())
            except Started:
                pass
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    except (Exception, TooLong) as error:
        told.write("".join(traceback.format_exception(error)))
        code = -1
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    texts = []
    for stream in (out, told):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8", "replace"))  # type: ignore[attr-defined]
    return code, texts[0], texts[1]


def _wrong(words: list[str], code: int | None, out: str, told: str) -> str:
    """What must not be, in a line or two; empty where all is well."""
    if code == -1 or "Traceback (most recent call last)" in told:
        lines = told.strip().splitlines()
        frames = [line.strip() for line in lines if "/redline/" in line]
        return f"traceback: {lines[-1][:200]}\n    " + "\n    ".join(frames[-3:])
    if code is not None and code not in set(Exit):
        return f"no exit code of ours: {code}"
    complaints = [
        line for line in told.splitlines() if line.startswith(("redline: ", "micro_benchmarking_pytorch.py: "))
    ]
    if code == Exit.USAGE and words and not complaints and "Usage:" not in told:
        return f"refused without a line that says why: {told[:200]!r}"
    if code == Exit.USAGE and sum(map(len, complaints)) > 4000:
        return f"a complaint of {sum(map(len, complaints))} characters"
    if found := GARBLED.search(told) or GARBLED.search(out if "--format" not in words else ""):
        return f"prints {found.group()!r}"
    if code == Exit.DONE and "--json" in words and "-h" not in words and "--help" not in words and out.strip():
        try:
            json.loads(out, parse_constant=lambda word: 1 / 0)
        except (ValueError, ZeroDivisionError):
            return f"no JSON: {out[:100]!r}"
    page = Path("out/report.md")
    if page.is_file() and ("<script" in page.read_text() or GARBLED.search(page.read_text())):
        return "a text that is not escaped in report.md"
    if (
        found := re.search(r"\d{40}|\b(nan|inf)\b", out)
        if code == Exit.DONE and words[0] in ("history", "compare") and "export" not in words
        else None
    ):
        return f"prints {found.group()}"
    return ""


class _Waiting(FakeSession):
    """Answers questions, and ends where it should measure."""

    def begin(self, request: Request) -> None:
        if not isinstance(request, Ask) or not isinstance(request.question, AskCheck | AskEnvironment | AskModels):
            raise Started
        super().begin(request)


class _Door(FakeDoor):
    def open(self, spec: Any = None) -> FakeSession:
        session = super().open(spec)
        session.__class__ = _Waiting
        return session


@contextlib.contextmanager
def nothing_begins() -> Iterator[None]:
    """What would measure, serve, sleep for long or start a program raises `Started`."""

    def starts(*_: Any, **__: Any) -> Any:
        raise Started

    def serves(_: Any, sockets: list[socket.socket]) -> Any:
        for listening in sockets:
            listening.close()
        raise Started

    class Program(subprocess.Popen[Any]):
        def __init__(self, command: Any, *rest: Any, **settings: Any) -> None:
            if not isinstance(command, list | tuple) or str(command[0]) != "git":
                raise Started
            super().__init__(command, *rest, **settings)

    def sleep(seconds: float, real: Callable[[float], None] = time.sleep) -> None:
        if 0.5 < seconds < 9e9:
            raise Started
        real(seconds)

    def too_long(*_: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, too_long)
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            patch.object(workspace, "open_door", lambda launch: _Door(Landscape(step_s=0.01, memory_bytes=2**30)))
        )
        stack.enter_context(patch.object(subprocess, "Popen", Program))
        stack.enter_context(patch.object(time, "sleep", sleep))
        stack.enter_context(patch("uvicorn.Server.run", serves))
        stack.enter_context(patch("redline.verbs.mcp.server_of", starts))
        stack.enter_context(patch("ray.init", starts))
        stack.enter_context(patch("redline.verbs.monitor.Machine.look", starts))
        stack.enter_context(patch.dict(os.environ))
        try:
            yield
        finally:
            signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def playground(seed: int) -> Iterator[Playground]:
    here = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="redline-fuzz-") as folder, nothing_begins():
        os.environ.update(HOME=folder, XDG_DATA_HOME=f"{folder}/data", XDG_CACHE_HOME=f"{folder}/cache", COLUMNS="100")
        try:
            yield Playground(Path(folder), seed)
        finally:
            os.chdir(here)


def exported(records: Any) -> str:
    return json_document("export", {"results": [], "records": records})


def documents() -> list[str]:
    """Sound documents, which become hostile by what is changed in them."""
    records = race_records()
    return [
        exported([*records, failed_record()]),
        json_document("export", {"results": []}),
        exported([captured()]),
        exported(sweep_records(task="train", batches=[8])),
    ]


def _fill(folder: Path) -> None:
    import gzip

    records = race_records()
    for name, body in {
        "empty": b"", "binary": bytes(range(256)) * 40, "utf16.toml": GRID.encode("utf-16"), "deep.json": b"[" * 100_000, "deep.toml": b"a = " + b"[" * 50_000,
        "digits.json": b"9" * 2_000_000, "digits.toml": b"a = " + b"9" * 2_000_000, "wide.toml": b"[[run]]\nmodel = 'resnet18'\n" * 30_000,
        "records.json": exported(records).encode(), "rows.json": json_document("export", {"results": []}).encode(), "bench.toml": BENCH.encode(),
        "model.py": b"def make(batch=4):\n    raise SystemExit(3)\n", "bad.py": b"def make(:\n", "half.json.gz": gzip.compress(b"[1]" * 1000)[:40],
    }.items():  # fmt: skip
        (folder / name).write_bytes(body)
    bomb = gzip.compress(b" " * 10**6, 9) * 3000  # 3 GB out of 3 MB
    (folder / "bomb.json.gz").write_bytes(bomb)
    (folder / "bomb.gz").write_bytes(bomb)
    with (folder / "sparse").open("wb") as file:
        file.truncate(3 * 2**30)


def run(count: int, seed: int, limit_s: float, first: int = 0) -> int:
    """Try them and print what is wrong; how many are."""
    codes: Counter[str] = Counter()
    wrong: list[Trial] = []
    worst = Trial(-1, [], None, 0.0)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    with playground(seed) as ground:
        for number in range(first, first + count):
            for trial in ground.attempt(number):
                codes["begins" if trial.code is None else str(trial.code)] += 1
                worst = max(worst, trial, key=lambda one: one.seconds)
                if trial.wrong or trial.seconds > limit_s:
                    wrong.append(trial)
                    tell(trial)
    told = ", ".join(f"{name}: {number}" for name, number in sorted(codes.items()))
    slow = sum(trial.seconds > limit_s for trial in wrong)
    tell(f"{count} inputs, {len(wrong)} wrong, {slow} over {limit_s:g} s; exit codes {told}; the slowest:\n{worst}")
    return len(wrong)


def tell(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def main_program() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="Number of the first input.")
    parser.add_argument("--limit", type=float, default=5.0, help="Seconds that a refusal may take.")
    parser.add_argument("--only", type=int, help="Try the input with this number alone.")
    asked = parser.parse_args()
    if asked.only is not None:
        asked.first, asked.count = asked.only, 1
    sys.exit(min(run(asked.count, asked.seed, asked.limit, asked.first), 1))


if __name__ == "__main__":
    main_program()
