"""Mistakes that traces of strangers led to once: each with a neighbour that looks like it and must be told apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kineto import GEMM, TraceMaker
from strangers import LOADER, MS, US, OnHost, Program

from redline.analyze.profile import Profile, profile_of
from redline.trace.decode import read_traces

Case = Callable[[bool], Profile]
MXFP4 = "void cutlass::device_kernel<MainloopSm100_MXFP4_f32_Fp32Accum_gemm<float> >(int)"
SGEMM = "ampere_sgemm_128x64_tn"


def work_from_before(bad: bool) -> Profile:
    """The stream is busy with what was launched before the recording, and the host sits in a copy behind it; or it was late."""
    program = Program()
    program.products(4, 50 * US)
    if bad:
        program.work("aten::mm", GEMM, 50 * US, after=300 * MS)
        program.copy("Memcpy DtoH (Device -> Pageable)", 10 * US, blocks=True)
    else:
        program.now += 300 * MS
    program.products(4, 50 * US)
    return program.profile()


def no_launch_is_known(bad: bool) -> Profile:
    maker = TraceMaker()
    for number in range(20):
        maker.kernel(GEMM, number * 100 * US, 40 * US, launched=None if bad and number else number * 100 * US - 8 * US)
    return maker.profile()


def recording_a_graph(bad: bool) -> Profile:
    program = Program()
    for number in range(4):
        begin = program.now
        if number == 0:
            program.maker.call("cudaStreamBeginCapture" if bad else "cudaStreamQuery", program.now, 5 * US)
            program.maker.call("cudaStreamEndCapture" if bad else "cudaStreamQuery", program.now + 20 * MS, 9 * US)
            program.now += 20 * MS
        program.products(10, 200 * US)
        program.step(number, begin)
    return program.profile()


def operators_behind_a_wait(bad: bool) -> Profile:
    """A short wait, and then operators that compute on the host for long; or a long wait."""
    program = Program()
    for number in range(6):
        begin = program.now
        program.products(8, 60 * US, host=20 * US)
        program.wait("cudaDeviceSynchronize")
        if bad:
            program.maker.operator("aten::sort", program.now, 5 * MS)
            program.now += 5 * MS
        program.step(number, begin)
    return program.profile()


def slow_to_start(bad: bool) -> Profile:
    """A device that takes 22 µs to start work whenever it is asked is slow, and waits for nothing."""
    maker = TraceMaker(rocm=True)
    for number in range(60):
        maker.kernel(GEMM, number * 200 * US + (22 if bad else 5) * US, 100 * US, launched=number * 200 * US - 4 * US)
    found = maker.profile()
    assert "dependency" not in {one.code for one in found.findings}
    return found


def narrow_products(bad: bool) -> Profile:
    maker = TraceMaker()
    maker.gpu("NVIDIA B200", (10, 0))
    for number in range(10):
        maker.kernel(MXFP4 if bad else SGEMM, number * 101 * US, 100 * US, launched=0)
    return maker.profile()


def loading_the_library(bad: bool) -> Profile:
    """A cudaFree of seconds inside the first convolution happens once; one in every convolution does not."""
    program = Program()
    for number in range(6):
        begin = program.now
        if number == 0 or not bad:
            program.maker.call("cudaFree", program.now, 60 * MS)
            program.maker.operator("aten::conv2d", program.now - US, 60 * MS + 2 * US)
            program.now += 61 * MS
        program.products(10, 200 * US)
        program.step(number, begin)
    return program.profile()


def a_pause_in_the_stream(bad: bool) -> Profile:
    """What nobody knows the cause of is played again like all else: work in its shadow is not saved with it."""
    program = Program()
    for _ in range(10):
        program.work("aten::mm", GEMM, 200 * US, after=program.free[7] + (60 * US if bad else 0))
    return program.profile()


def only_copies(bad: bool) -> Profile:
    program = OnHost()
    return program.steps(lambda: program.work("aten::copy_" if bad else "aten::addmm", 900 * US)).profile()


def reading_numbers(bad: bool) -> Profile:
    program = OnHost()

    def step() -> None:
        program.work("aten::addmm", 900 * US)
        for _ in range(300):
            program.work("aten::select", 2 * US)
            program.work("aten::item" if bad else "aten::view", 2 * US)

    return program.steps(step).profile()


def slow_pooling(bad: bool) -> Profile:
    program, dims, types = OnHost(), [[8, 64, 112, 112]], ["float"]

    def step() -> None:
        program.work("aten::addmm", 9000 * US)
        program.work("aten::relu", 2000 * US, dims=dims, types=types)
        lasts = (30_000 if bad else 1500) * US
        program.work("aten::max_pool2d_with_indices", lasts, dims=dims, types=types)

    return program.steps(step).profile()


def loading_once(bad: bool) -> Profile:
    """The loader is one finding, whoever asks."""
    program = Program()
    for number in range(4):
        begin = program.now
        program.maker.annotation(LOADER, program.now, (3 * MS) if bad else 20 * US)
        program.now += 3 * MS if bad else 20 * US
        program.products(10, 200 * US)
        program.step(number, begin)
    return program.profile()


@pytest.mark.parametrize(
    ("case", "first", "neighbour"),
    [
        (work_from_before, "dependency", "host-stall"),
        (no_launch_is_known, "dependency", "host-bound"),
        (recording_a_graph, "warm-up", "host-stall"),
        (operators_behind_a_wait, "host-stall", "sync-in-loop"),
        (slow_to_start, "host-bound", "host-bound"),
        (narrow_products, None, "fp32-matmul"),
        (loading_the_library, "warm-up", "allocator"),
        (a_pause_in_the_stream, "dependency", None),
        (only_copies, "copies", None),
        (reading_numbers, "sync-in-loop", "host-bound"),
        (slow_pooling, "slow-kernel", None),
        (loading_once, "data-wait", None),
    ],
)
def test_a_trouble_and_its_neighbour_are_told_apart(case: Case, first: str | None, neighbour: str | None) -> None:
    for bad, code in ((True, first), (False, neighbour)):
        findings = case(bad).findings
        assert (findings[0].code if findings else None) == code, (bad, findings[:2])
        assert [one.gain_bound for one in findings] == sorted((one.gain_bound for one in findings), reverse=True)
        assert len({one.code for one in findings}) == len(findings)


def test_a_trace_that_lost_its_device_says_so_and_a_program_on_the_cpu_does_not(tmp_path: Path) -> None:
    told = []
    for number, gpu in enumerate(("NVIDIA H100 80GB HBM3", "")):
        maker = TraceMaker()
        if gpu:
            maker.gpu(gpu, (9, 0))
        for at in range(20):
            maker.operator("aten::mm", at * 100 * US, 90 * US)
        path = maker.write(tmp_path / f"{number}.json")
        told.append(profile_of(read_traces([path])))
    assert "the header names NVIDIA H100 80GB HBM3" in told[0].missing
    assert (told[0].findings, told[0].bound.label) == ((), "unknown")
    assert told[1].missing == ""
    whole = (tmp_path / "1.json").read_bytes()
    (tmp_path / "cut.json").write_bytes(whole[: len(whole) * 6 // 10])
    cut = profile_of(read_traces([tmp_path / "cut.json"]))
    assert "the file ends in the middle of an event" in cut.missing
    assert cut.findings == ()
