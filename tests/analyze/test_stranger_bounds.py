"""No finding promises less than mending its cause brings: the same program with the cause and without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from strangers import GEMM, US, Program
from troubles import SOFTMAX

from redline.analyze.profile import Profile


def _bound(profile: Profile, code: str) -> float:
    return max(finding.gain_bound for finding in profile.findings if finding.code == code)


def _of(steps: Callable[[Program], None], count: int = 6) -> Program:
    program = Program()
    for number in range(count):
        begin = program.now
        steps(program)
        program.step(number, begin)
    return program


def _copy_in_pieces(program: Program, lasts: int) -> None:
    """Of pageable memory, as CUDA does it: the call ends when the last piece is staged, the wait after it with the copy."""
    begin, start = program.now, max(program.now + 8 * US, program.free[7] + US)
    end = program.free[7] = start + lasts
    number = program.maker.operator("aten::copy_", begin - 1, end + 20 * US - begin)
    program.maker.copy(
        "Memcpy HtoD (Pageable -> Device)", start, lasts, launched=begin, call_ns=end - 20 * US - begin,
        operator=number, caller="cudaMemcpyAsync",
    )  # fmt: skip
    program.maker.call("cudaStreamSynchronize", end - 15 * US, 20 * US)
    program.now = end + 25 * US


def test_a_copy_in_pieces_blocks_the_host_though_its_call_ends_first() -> None:
    def step(program: Program) -> None:
        _copy_in_pieces(program, 1500 * US)
        program.products(10, 200 * US)

    found = _of(step).profile().findings[0]
    assert found.code == "blocking-copy"
    assert found.saves_s == pytest.approx(6 * 1.55e-3, rel=0.05)  # the copies, and the host behind them


def test_a_short_copy_of_pinned_memory_that_is_done_at_once_blocks_nothing() -> None:
    def step(program: Program) -> None:
        program.copy("Memcpy HtoD (Pinned -> Device)", 60 * US, blocks=False, stream=13)
        program.products(10, 200 * US)

    assert _of(step).profile().findings == ()


def test_the_bound_of_copies_takes_the_gaps_beside_them() -> None:
    """Weights that are fetched before each layer, and nothing to do meanwhile."""

    def step(program: Program, fetched: bool = True) -> None:
        for _ in range(10):
            if fetched:
                program.copy("Memcpy HtoD (Pinned -> Device)", 100 * US, blocks=False, stream=13)
                program.maker.call("cudaStreamWaitEvent", program.now, 2 * US)
            program.work("aten::mm", GEMM, 50 * US, after=program.free.get(13, 0) + 2 * US if fetched else 0)
            program.free[13] = program.free[7]

    slow, fast = _of(step), _of(lambda program: step(program, fetched=False))
    assert _bound(slow.profile(), "copy-bound") >= slow.free[7] / fast.free[7]


def test_the_bound_of_a_wait_without_a_reason_is_the_whole_gap() -> None:
    def step(program: Program, pause: int = 60 * US) -> None:
        for _ in range(10):
            program.work("aten::mm", GEMM, 200 * US, after=program.free[7] + pause)

    slow, fast = _of(step), _of(lambda program: step(program, pause=0))
    assert _bound(slow.profile(), "dependency") >= slow.free[7] / fast.free[7]


def test_the_bound_of_a_late_host_takes_the_gaps_of_its_many_kernels() -> None:
    """Two hundred small kernels, or the same work in four."""

    def step(program: Program, kernels: int = 200) -> None:
        for _ in range(kernels):
            program.work("aten::mm", GEMM, 1000 * US // kernels, host=20 * US)
        program.products(4, 200 * US, host=15 * US)

    slow, fast = _of(step), _of(lambda program: step(program, kernels=4))
    assert _bound(slow.profile(), "host-bound") >= slow.free[7] / fast.free[7]


def test_attention_counts_the_launches_that_a_fused_one_spares() -> None:
    """The host is a little late with everything: that alone saves less."""

    def step(program: Program) -> None:
        for _ in range(5):
            program.work("aten::mm", GEMM, 120 * US, host=150 * US)
            for name in ("aten::bmm", "aten::div", "aten::_softmax", "aten::bmm"):
                program.work(name, SOFTMAX if name == "aten::_softmax" else GEMM, 120 * US, host=130 * US)

    assert _of(step).profile().findings[0].code == "attention"
