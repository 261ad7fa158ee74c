"""The steps played again: what each cause costs on programs whose every nanosecond is known, and what no replay may claim."""

from __future__ import annotations

from pathlib import Path

import pytest
from kineto import ADD, GEMM, REDUCE, TraceMaker
from strangers import MS, Program
from troubles import CODES
from troubles import Program as Trouble
from troubles import run as simulated

from redline.analyze.profile import profile_of
from redline.trace.decode import read_traces
from redline.trace.host import HostView
from redline.trace.replay import Replay, Without, device_runs
from redline.trace.window import recorded

US = 1000


@pytest.mark.parametrize("trouble", CODES)
def test_with_nothing_taken_out_everything_ends_when_it_did(trouble: str) -> None:
    ranks = 2 if trouble == "straggler" else 1
    runs = []
    for trace in simulated(Trouble(1, {trouble: 0.5}, ranks)).read():
        one = recorded(trace)
        runs += device_runs(one, HostView(one.links))
    assert Replay(runs).saved([Without()] * len(runs)) == 0
    assert [end - run.bounds[1] for end, run in zip(Replay(runs).ends, runs, strict=True)] == [0] * len(runs)


def test_work_on_another_stream_that_waits_for_communication_moves_with_it() -> None:
    maker = TraceMaker()
    for step in range(6):
        at = 3000 * step
        maker.kernel(GEMM, at * US, 1000 * US, launched=step * 20 * US)
        maker.kernel(REDUCE, (at + 900) * US, 1100 * US, launched=(step * 20 + 5) * US, stream=20)
        maker.kernel(ADD, (at + 2002) * US, 990 * US, launched=(step * 20 + 10) * US)
    first = maker.profile().findings[0]
    assert first.code == "communication-bound"
    assert first.saves_s == pytest.approx(6 * 1.0e-3, rel=0.02)


def test_a_wait_cannot_delay_work_that_is_already_queued() -> None:
    """The stream is busy with work that nobody recorded; the host waits in a copy behind it."""
    program = Program()
    program.products(20, 100 * US)
    program.free[7] += 400 * MS
    program.work("aten::mm", GEMM, 100 * US)
    program.copy("Memcpy DtoH (Device -> Pageable)", 20 * US, blocks=True)
    found = program.profile().findings
    assert found[0].code == "dependency"
    assert all(finding.saves_s < 10e-3 for finding in found[1:])


@pytest.mark.parametrize("skew_us", [-300, 0, 200])
def test_clocks_that_disagree_are_found_and_the_host_stays_the_cause(skew_us: int) -> None:
    program = Program()
    for step in range(6):
        begin = program.now
        program.products(40, 10 * US, host=60 * US)
        waits, program.now = program.now, max(program.now, program.free[7]) + 5 * US
        program.maker.call("cudaDeviceSynchronize", waits, program.now - waits)
        program.step(step, begin)
    for event in program.maker.events:
        if event["cat"] == "kernel":
            event["ts"].nanoseconds += skew_us * US
    profile = program.profile()
    assert profile.findings[0].code == "host-bound"
    assert ("clocks-disagree" in {note.code for note in profile.notes}) == (skew_us != 0)


@pytest.mark.parametrize("cut", [False, True])
def test_a_gpu_whose_work_is_missing_is_no_cpu_program(tmp_path: Path, cut: bool) -> None:
    maker = TraceMaker()
    maker.gpu("NVIDIA H100 80GB HBM3", (9, 0))
    for number in range(50):
        maker.operator("aten::mm", number * 100 * US, 50 * US)
    path = maker.write(tmp_path / "t.json")
    if cut:
        path.write_bytes(path.read_bytes()[:-400])
    profile = profile_of(read_traces([path]))
    assert (profile.bound.label, profile.findings) == ("unknown", ())
    assert ("ends early" in str(profile.bound.evidence)) == cut


@pytest.mark.parametrize(("share", "is_diagnosed"), [(0.6, False), (0.9, False), (1.0, True)])
def test_nothing_is_concluded_from_a_file_that_was_cut(tmp_path: Path, share: float, is_diagnosed: bool) -> None:
    """Kernels stand behind operators, whatever their time: those that are gone would look like a device that waits."""
    program = Program()
    for step in range(4):
        begin = program.now
        program.products(40, 10 * US, host=60 * US)
        program.step(step, begin)
    program.maker.events.sort(key=lambda event: event["cat"] == "kernel")
    path = program.maker.write(tmp_path / "t.json")
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    profile = profile_of(read_traces([path]))
    assert [finding.code for finding in profile.findings] == (["host-bound"] if is_diagnosed else [])
    assert ("get the whole file" in str(profile.bound.evidence)) != is_diagnosed


def test_a_capture_and_its_replay_are_not_two_devices(tmp_path: Path) -> None:
    capture, replay = TraceMaker(), TraceMaker()
    capture.call("cudaStreamBeginCapture", 0, 5 * US)
    capture.call("cudaStreamEndCapture", 900 * US, 20 * US)
    capture.kernel(ADD, MS, 10 * US, launched=950 * US)
    for number in range(5):
        replay.call("cudaGraphLaunch", number * 500 * US, 20 * US, correlation=900 + number)
        replay.kernel(GEMM, (number * 500 + 30) * US, 400 * US, correlation=900 + number)
    paths = [capture.write(tmp_path / "capture.json"), replay.write(tmp_path / "replay.json")]
    profile = profile_of(read_traces(paths))
    assert len(profile.ranks) == 1
    assert {row.name for row in profile.kernels} == {GEMM}
    assert "capture-and-replay" in {note.code for note in profile.notes}
