"""The messages of the door, answered: what was asked is prepared, measured, profiled, trained or served, and closed.

A failure is an answer too. How a step is prepared is in `prepare.py`.
"""

from __future__ import annotations

import statistics
from typing import Any

import msgspec

from redline.bench.capture import capture
from redline.bench.device.failure import failure_from
from redline.bench.measure.blocks import least_memory, measure_block
from redline.bench.measure.generation import measure_generations
from redline.bench.prepare import Workbench
from redline.bench.questions import answer
from redline.bench.workload.generation import GenerateStep
from redline.bench.workload.ranks import Ranks, where_is_main_thread
from redline.bench.workload.sources.user import HANDED_OVER
from redline.model.errors import BenchError, RedlineError
from redline.model.protocol import (
    AllReduce,
    Ask,
    BlockReply,
    Close,
    ClosedReply,
    FailureReply,
    Feed,
    Load,
    LoadReply,
    Measure,
    OnProgress,
    Position,
    Prepare,
    PreparedReply,
    Profile,
    Progress,
    Reply,
    Request,
    Squeeze,
    SqueezeReply,
    TraceReply,
    TrainEpoch,
)
from redline.model.record import Closed, Failure


class BenchSession:
    """One workload under one recipe, from `Prepare` to `Close`."""

    def __init__(
        self,
        on_progress: OnProgress,
        *,
        import_s: float | None = None,
        start_s: float | None = None,
        isolated: bool = True,
        handed_over: dict[str, Any] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._on_progress = on_progress
        self._isolated = isolated
        self._handed_over = handed_over or {}
        HANDED_OVER.update(self._handed_over)
        self._ranks = ranks or Ranks()
        self._stage = "start"
        self._entered = 0
        cold = {"import_s": import_s, "start_s": start_s}
        self._bench = Workbench(self._enter, on_progress, self._ranks, cold, isolated=isolated)

    def handle(self, request: Request) -> Reply:
        """Any exception becomes a `Failure` with the stage it happened in, `sys.exit` too.

        Only Ctrl-C goes through, where the bench runs in the person's own process.
        """
        try:
            return self._answer(request)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and not self._isolated:
                raise
            failure = failure_from(error, self._stage)
            if not isinstance(error, RedlineError) and failure.kind == "user":
                failure = self._with_inputs(failure)
            if not isinstance(request, Ask):
                self._bench.forget()
            return FailureReply(failure=failure)

    def _with_inputs(self, failure: Failure) -> Failure:
        """A text may be too long for the model, and the default batch, which nobody asked for, too small."""
        by_code = {each.code: each for each in self._bench.notes}
        default = by_code.get("default-batch")
        about = by_code.get("prompt") or (None if default is None else f"{default}; --batch sets another")
        return msgspec.structs.replace(failure, message=f"{failure.message} ({about})") if about else failure

    def position(self) -> Position:
        """How far it has come; asked by another thread, while this session is busy."""
        waits, where = where_is_main_thread()
        return Position(stage=self._stage, entered=self._entered, steps=self._ranks.steps, waits=waits, where=where)

    def _answer(self, request: Request) -> Reply:
        if isinstance(request, Ask):
            self._enter("ask")
            return answer(request.question, self._on_progress)
        if isinstance(request, Prepare):
            return self._prepare(request)
        if isinstance(request, Close):
            return ClosedReply(closed=self._close())
        self._stage = type(request).__name__.lower()
        bench, step, device = self._bench, self._bench.step, self._bench.device
        if step is None or device is None:
            raise BenchError("crash", f"asked to {self._stage} before anything was prepared")
        if isinstance(request, TrainEpoch | Feed):
            return self._train(request)
        if isinstance(request, Load):
            if bench.load_runner is None:
                raise BenchError("crash", "asked for a load where no load was prepared")
            return LoadReply(served=bench.load_runner.run(request))
        if isinstance(request, Profile):
            return TraceReply(trace=capture(step, device, request, bench.eager_model))
        if isinstance(request, Squeeze):
            return SqueezeReply(needed_bytes=least_memory(step, device, bench.memory_limit_bytes))
        if isinstance(request, AllReduce):
            return self._ranks.probe(request, device)
        assert isinstance(request, Measure)  # `Where` is answered beside the session
        if isinstance(step, GenerateStep):
            return BlockReply(block=measure_generations(step, device, request, bench.step_estimate_s))
        block = measure_block(step, device, request, bench.step_estimate_s, self._ranks)
        bench.step_estimate_s = statistics.median(block.samples)
        return BlockReply(block=block)

    def _prepare(self, request: Prepare) -> PreparedReply:
        if request.spec.train is not None:
            return self._bench.prepare_training(request)
        if request.bare:
            return PreparedReply(prepared=self._bench.prepare_bare(request.spec))
        if request.sharing == "helps":
            return PreparedReply(prepared=self._bench.prepare_blocks(request.spec))
        shares = request.sharing == "shares"
        return PreparedReply(prepared=self._bench.prepare(request.spec, modules=request.modules, shares=shares))

    def _train(self, request: TrainEpoch | Feed) -> Reply:
        if self._bench.training is None:
            raise BenchError("crash", f"asked to {self._stage} where no training was prepared")
        if isinstance(request, Feed):
            return self._bench.training.feed(request)
        self._enter("epoch", str(request.number))
        return self._bench.training.epoch(request.number)

    def _close(self) -> Closed:
        closed = self._bench.put_back()
        for name in self._handed_over:
            HANDED_OVER.pop(name, None)
        return closed

    def _enter(self, stage: str, detail: str = "") -> None:
        self._stage = stage
        self._entered += 1
        self._on_progress(Progress(stage=stage, detail=detail))
