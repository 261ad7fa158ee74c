"""Damaged and hostile files: a clear message or what is whole in them, never a hang, a crash or a traceback."""

from __future__ import annotations

import gzip
import json
import os
import random
import threading
from collections import Counter
from pathlib import Path

import pytest
from kineto import GEMM, TraceMaker

from redline.analyze.profile import profile_of
from redline.model.errors import TraceError
from redline.show.profile import kernel_csv
from redline.trace import events, names
from redline.trace.decode import read_file, read_trace, read_traces
from redline.trace.names import class_of, short_name
from redline.verbs.profile import result_of

GOOD = '{"ph":"X","cat":"kernel","name":"k","ts":1.5,"dur":2.25,"args":{"device":0,"stream":7,"correlation":3}}'


def trace_of(tmp_path: Path, *events: str, text: str | None = None):
    path = tmp_path / "a.json"
    path.write_text(text if text is not None else f'{{"traceEvents": [{",".join(events)}]}}')
    return read_trace(path)


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    maker = TraceMaker()
    for number in range(300):
        maker.kernel(GEMM, number * 1000, 900, launched=number * 1000 - 500)
    return maker.write(tmp_path / "whole.json").read_bytes()


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_gives_what_is_whole_and_says_what_was_lost(tmp_path: Path, whole: bytes, keep: float) -> None:
    cut = int(len(whole) * keep)
    (tmp_path / "cut.json").write_bytes(whole[:cut])
    trace = read_trace(tmp_path / "cut.json")
    assert trace.lost.truncated
    complete = whole[:cut].count(b'"cat": "kernel"')
    assert complete - 1 <= len(trace.work) <= complete
    assert f"after {cut:,} bytes" in trace.lost.reasons[0]
    assert 0 <= trace.lost.bytes < 1000


def test_a_file_cut_after_its_last_event_has_lost_nothing(tmp_path: Path, whole: bytes) -> None:
    (tmp_path / "cut.json").write_bytes(whole[: whole.rindex(b"]") + 1])
    trace = read_trace(tmp_path / "cut.json")
    assert len(trace.work) == 300
    assert not trace.lost


def test_a_truncated_gzip_gives_what_is_whole(tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "BLOCK_BYTES", 4096)
    packed = gzip.compress(whole)
    (tmp_path / "cut.json.gz").write_bytes(packed[: len(packed) // 2])
    trace = read_trace(tmp_path / "cut.json.gz")
    assert trace.lost.truncated
    assert 10 < len(trace.work) < 300
    assert "gzip data end early" in trace.lost.reasons[0]


def test_damaged_gzip_gives_what_came_before(tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "BLOCK_BYTES", 1024)
    packed = bytearray(gzip.compress(whole, 1))
    packed[len(packed) // 2 : len(packed) // 2 + 200] = bytes(200)
    (tmp_path / "bad.json.gz").write_bytes(packed)
    trace = read_trace(tmp_path / "bad.json.gz")
    assert trace.lost.truncated
    assert "damaged" in trace.lost.reasons[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty"),
        ("   \n ", "it is empty"),
        ("<html><body>Sign in</body></html>", "it begins with '<html>"),
        ("{}", "no list 'traceEvents'"),
        ('{"traceEvents": 5}', "no list 'traceEvents'"),
        ('{"traceEvents": []}', "no whole event"),
        ('{"traceEvents": [', "no whole event"),
        ('{"traceEvents": [1, "two", null, [3], true]}', "no whole event"),
        ('{"traceEvents": [{"ph": "M", "name": "process_name"}]}', "neither operators nor device work"),
        ('{"traceEvents": ' + "[" * 1_000_000, "no whole event"),
        ("[" * 1_000_000, "no whole event"),
        ('{"traceEvents": [' + ', {"a":[1' * 30_000, "no whole event"),
        ("[" * 1_000_000 + "]" * 1_000_000, "no whole event"),
        ('{"a":' * 100_000, "no list 'traceEvents'"),
    ],
)
def test_what_is_no_trace_is_told_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        trace_of(tmp_path, text=text)
    assert "\n" not in str(caught.value)
    assert "a.json" in str(caught.value)


@pytest.mark.parametrize("cut", [0.3, 0.6])
def test_damage_within_one_block_of_gzip_costs_only_what_comes_after(tmp_path: Path, whole: bytes, cut: float) -> None:
    packed = gzip.compress(whole, mtime=0)  # its header is read as data, and must not change with the clock
    assert len(packed) < events.BLOCK_BYTES
    (tmp_path / "bad.json.gz").write_bytes(packed[: int(cut * len(packed))] + packed)
    trace = read_trace(tmp_path / "bad.json.gz")
    assert trace.lost.reasons
    assert len(trace.work) > 10


@pytest.mark.parametrize("path", ["nowhere.json", "."])
def test_a_path_that_cannot_be_read(tmp_path: Path, path: str) -> None:
    with pytest.raises(TraceError, match=r"no such file|cannot read"):
        read_trace(tmp_path / path)


def test_binary_noise_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(bytes(range(256)) * 100)
    with pytest.raises(TraceError, match="is not a Chrome or Kineto trace"):
        read_trace(tmp_path / "a.json")


@pytest.mark.parametrize(
    "bad",
    [
        '{"ph":"X","cat":"kernel","name":5,"ts":1,"dur":1}',
        '{"ph":"X","cat":"kernel","name":"n","ts":"soon","dur":1}',
        '{"ph":"X","cat":"kernel","name":"n","ts":[1],"dur":1}',
        '{"ph":"X","cat":"kernel","name":"n","ts":NaN,"dur":1}',
        '{"ph":"X","cat":"kernel","name":"n","ts":1,"dur":Infinity}',
        '{"ph":"X","cat":"kernel","name":"n","ts":1e300,"dur":1}',
        '{"ph":"X","cat":"kernel","name":"n","ts":1e999,"dur":1}',
        '{"ph":"X","cat":"kernel","name":"n","ts":1,"dur":-5}',
        '{"ph":"X","cat":"kernel","name":"n","ts":1}',
        '{"ph":"X","cat":"kernel","name":"n","dur":1}',
        '{"ph":"X","cat":"kernel","name":"n","ts":null,"dur":null}',
        "17",
        '"a string, with, commas"',
        "nonsense",
        '{"ph":"X","cat":"kernel","name":"n","args":' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
)
def test_one_bad_event_costs_no_other(tmp_path: Path, bad: str) -> None:
    trace = trace_of(tmp_path, GOOD, bad, GOOD)
    assert trace.work.duration.tolist() == [2250, 2250]
    assert trace.lost.events >= 1
    assert not trace.lost.truncated
    assert trace.lost.reasons


@pytest.mark.parametrize(
    "args",
    [
        '{"device":"zero","stream":null,"correlation":{"a":1}}',
        '{"correlation":99999999999999999999999999,"bytes":"N/A"}',
        '{"External id":1.5,"note":NaN}',
        "[1, 2]",
        '"none"',
        "null",
    ],
)
def test_wrong_arguments_cost_only_themselves(tmp_path: Path, args: str) -> None:
    odd = f'{{"ph":"X","cat":"kernel","name":"odd","pid":{{"x":1}},"tid":1.5,"ts":9,"dur":1,"args":{args}}}'
    trace = trace_of(tmp_path, GOOD, odd)
    assert trace.work.duration.tolist() == [2250, 1000]
    assert not trace.lost


def test_markup_in_names_is_just_a_name(tmp_path: Path) -> None:
    name = "<script>alert('x')</script>&\u0000\u001b[31m"
    trace = trace_of(tmp_path, json.dumps({"ph": "X", "cat": "kernel", "name": name, "ts": 1, "dur": 1}))
    assert list(trace.names) == [name]


@pytest.mark.parametrize("number", [1419116107474, 2**62, -(2**40)])
def test_a_device_number_out_of_range_says_nothing(tmp_path: Path, number: int) -> None:
    maker = TraceMaker(device=number)
    maker.kernel(GEMM, 0, 50_000)
    maker.device = 1
    maker.kernel(GEMM, 100_000, 50_000)
    (trace,) = read_file(maker.write(tmp_path / "a.json"))
    assert sorted(trace.work.device.tolist()) == [-1, 1]


def test_a_device_for_every_kernel_is_refused(tmp_path: Path) -> None:
    rows = [f'{{"ph":"X","cat":"kernel","name":"k","ts":{n},"dur":1,"args":{{"device":{n}}}}}' for n in range(5000)]
    with pytest.raises(TraceError, match="5,000 devices"):
        trace_of(tmp_path, *rows)


@pytest.mark.parametrize("name", ["Functor" * 200_000, "Cijk_" * 200_000, "a" * 1_000_000, "<" * 1_000_000])
def test_absurdly_long_names_are_looked_at_only_so_far(name: str) -> None:
    assert len(short_name(f"void k<{name}>(int)")) <= 57
    assert class_of(name)


def test_an_endless_event_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LONGEST_EVENT_BYTES", 1 << 20)
    text = '{"traceEvents": [' + GOOD + ', {"ph": "X", "name": "' + "x" * (5 << 20) + '"}]}'
    with pytest.raises(TraceError, match="no event ends within"):
        trace_of(tmp_path, text=text)
    with pytest.raises(TraceError, match="is not a Chrome or Kineto trace"):
        trace_of(tmp_path, text='{"padding": "' + "x" * (5 << 20) + '"}')


def test_a_gzip_bomb_is_refused_before_it_fills_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LONGEST_EVENT_BYTES", 1 << 20)
    (tmp_path / "bomb.json.gz").write_bytes(gzip.compress(b'{"traceEvents": [ "' + b"a" * (64 << 20), 1))
    with pytest.raises(TraceError, match="no event ends within"):
        read_trace(tmp_path / "bomb.json.gz")


BROKEN_NAMES = {
    "bytes that are not UTF-8": b"a\xff\xfeb",
    "a lone surrogate": rb"a\ud800b",
    "the other half of a surrogate": rb"a\udc00\ud800b",
    "control bytes": b"a\x01\x02b",
}


@pytest.mark.parametrize("name", BROKEN_NAMES.values(), ids=BROKEN_NAMES.keys())
@pytest.mark.parametrize("category", ["kernel", "python_function", "cpu_op"])
def test_a_broken_name_costs_no_event_and_no_output(tmp_path: Path, name: bytes, category: str) -> None:
    """Seen in real traces: names of Python functions written from memory that was freed."""
    body = b'{"ph":"X","cat":"%s","name":"%s","ts":1,"dur":500,"args":{}}' % (category.encode(), name)
    (tmp_path / "a.json").write_bytes(b'{"traceEvents": [' + GOOD.encode() + b"," + body + b"]}")
    trace = read_trace(tmp_path / "a.json")
    rows = {"kernel": trace.work, "python_function": trace.frames, "cpu_op": trace.operators}[category]
    assert len(rows) == (2 if category == "kernel" else 1)
    assert not trace.lost
    profile = profile_of([trace])
    result = result_of(profile)
    for text in (result.to_json(), kernel_csv(profile), result.to_html(), str(result)):
        text.encode()


def test_a_whole_surrogate_pair_stays_what_it_is(tmp_path: Path) -> None:
    body = b'{"ph":"X","cat":"kernel","name":"\\ud83d\\ude00 \xff","ts":1,"dur":1}'
    (tmp_path / "a.json").write_bytes(b'{"traceEvents": [' + body + b"]}")
    assert list(read_trace(tmp_path / "a.json").names) == ["\U0001f600 \ufffd"]


def test_a_header_that_is_not_utf8_is_still_read(tmp_path: Path) -> None:
    head = b'{"note": "\xff", "distributedInfo": {"rank": 3, "world_size": "many"}, "deviceProperties": [{"name": "A"}, 7],'
    (tmp_path / "a.json").write_bytes(head + b'"traceEvents": [' + GOOD.encode() + b"]}")
    trace = read_trace(tmp_path / "a.json")
    assert (trace.rank, trace.world_size) == (3, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ts", "18446744073709551.615"),  # below zero, in 64 bits without a sign
        ("dur", "18446744073709551.615"),
        ("dur", "18446744073709551615"),
        ("dur", "3155760000000000"),  # a century
        ("ts", "9" * 400),
        ("ts", "1e400"),
    ],
)
@pytest.mark.parametrize("base", ["5.25", "1755000000000000.001"])
def test_times_that_wrapped_around_cost_their_event_only(tmp_path: Path, field: str, value: str, base: str) -> None:
    good = GOOD.replace("1.5", base)
    times = {"ts": base, "dur": "1"} | {field: value}
    bad = f'{{"ph":"X","cat":"kernel","name":"bad","ts":{times["ts"]},"dur":{times["dur"]}}}'
    trace = trace_of(tmp_path, good, bad, good)
    assert trace.work.duration.tolist() == [2250, 2250]
    assert trace.lost.events == 1


def test_sums_that_would_overflow_are_refused(tmp_path: Path) -> None:
    month = '{"ph":"X","cat":"kernel","name":"k","ts":1,"dur":2600000000000,"args":{"stream":%d}}'
    with pytest.raises(TraceError, match="add up to more than a century"):
        trace_of(tmp_path, *(month % number for number in range(3000)))


def test_a_damaged_head_hides_no_events(tmp_path: Path) -> None:
    assert list(trace_of(tmp_path, text='{"a": "b, "c": {"traceEvents": [' + GOOD + "]}").names) == ["k"]


def test_a_pipe_is_read_like_a_file(tmp_path: Path) -> None:
    for text in (b'{"traceEvents": [' + GOOD.encode() + b"]}", gzip.compress(b"[" + GOOD.encode() + b"]")):
        pipe = tmp_path / "pipe"
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)
        writer = threading.Thread(target=pipe.write_bytes, args=(text,))
        writer.start()
        (trace,) = read_traces([pipe])
        writer.join()
        assert trace.work.duration.tolist() == [2250]


def test_many_names_are_not_looked_at_by_every_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 000 names took minutes when every table asked again what each of them is."""
    looked: Counter[str] = Counter()
    original = names.parts_of

    def counting(name: str) -> object:
        looked[name] += 1
        return original(name)

    monkeypatch.setattr(names, "parts_of", counting)
    chance = random.Random(0)
    made = ["".join(chance.choices("abcdefghijklmnop", k=30)) for _ in range(500)]
    rows = [f'{{"ph":"X","cat":"kernel","name":"{name}","ts":{10 * n},"dur":9}}' for n, name in enumerate(made)]
    profile_of([trace_of(tmp_path, *rows)])
    assert {looked[name] for name in made} == {2}, "once for its class, once for its short name"
