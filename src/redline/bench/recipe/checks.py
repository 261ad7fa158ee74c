"""How a recipe is checked: the reference for each task, text that is written token by token, and the user's own check.

Text: logits on given tokens against fp32, and the tokens it chooses by itself. The user's check is a number the model earns
with the recipe, against the one it earns without, for what random inputs cannot show: int8 and fp8 above all. It gets a
function to call in place of the model, on inputs as the model itself would take them. Outputs and losses: `numerics.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from redline.bench.device import open_device, resolve_device
from redline.bench.device.base import Device
from redline.bench.device.failure import is_out_of_memory, one_line
from redline.bench.recipe.compose import apply_recipe, number_format_of
from redline.bench.recipe.judging import REFERENCE, judged
from redline.bench.recipe.numerics import LossReference, OutputReference, forward
from redline.bench.recipe.outputs import Answer, Difference, answer_of, difference, sketch_of
from redline.bench.recipe.rounding import rounded_weights
from redline.bench.workload.build import build_workload
from redline.bench.workload.decoder import Decoder, WholeGenerator
from redline.bench.workload.generation import GenerateStep
from redline.bench.workload.hf_decoder import HfDecoder
from redline.bench.workload.ranks import Ranks
from redline.bench.workload.sources.user import load_function
from redline.bench.workload.step import InferenceStep, Setup, TrainingStep
from redline.bench.workload.workload import Workload
from redline.model.errors import BenchError, SpecError
from redline.model.note import note
from redline.model.questions import MetricAnswer
from redline.model.record import Numerics
from redline.model.spec import Recipe, RunSpec

T = TypeVar("T")

CHECKED_TOKENS = 32
"""How many of the new tokens are compared."""
REREAD_TOKENS = 2
"""After so many, the logits are compared with those of the same text read at once."""
REREAD_TOLERANCE = 1e-3
"""In fp32 they differ by the order of sums only; a step that sees nothing of the text is off by far more."""


@dataclass
class GreedyReference:
    """What strict fp32 with a growing cache writes, and its logits on the way."""

    tokens: Tensor
    logits: list[Tensor]
    floor: float
    number_format: str

    @classmethod
    def of(cls, workload: Workload, device: Device, number_format: str) -> GreedyReference:
        device.allow_tf32(False)
        args, kwargs = workload.args, workload.kwargs
        step = GenerateStep(Setup(workload=workload, device=device, model=workload.model, args=args, kwargs=kwargs))
        if isinstance(step.decoder, WholeGenerator):
            with step.context():
                made = step.decoder.generate(step.decoder.new_tokens)[:, :CHECKED_TOKENS].clone()
            return cls(made, [], 0.0, number_format)
        with step.context():
            tokens = step.write(min(step.decoder.new_tokens, CHECKED_TOKENS))
            logits = step.forced(tokens)
            _see_that_the_cache_serves(workload, step.decoder, tokens, logits)
            with rounded_weights(workload.model, number_format):
                floor = _difference(step.forced(tokens), logits).rel_l2
        step.decoder.forget()  # in fp32, which no switch may find there
        return cls(tokens, logits, floor, number_format)

    def as_numerics(self) -> Numerics:
        finite = all(bool(torch.isfinite(each).all()) for each in self.logits)
        why = REFERENCE if finite else note("not-finite", "the fp32 logits are not finite")
        length = self.tokens.shape[1]
        return Numerics(
            method="reference", passed=finite, finite=finite, reason=why, greedy_tokens=length, greedy_agreed=length
        )

    def judge(self, step: GenerateStep) -> Numerics:
        length = self.tokens.shape[1]
        with step.context():
            if isinstance(step.decoder, WholeGenerator):
                with watching_for_nan(step.decoder) as broken:
                    own = step.decoder.generate(step.decoder.new_tokens)[:, :length]
                agreed, why = _agreed(own, self.tokens), note("unchecked", "only its tokens can be compared")
                passed = agreed == length or self.number_format != "fp32"
                if broken and agreed < length:
                    passed, why = False, note("not-finite", f"what {broken[0]} returns is not a number")
                return Numerics(
                    method="tokens", passed=passed, reason=why, greedy_tokens=length, greedy_agreed=agreed,
                    number_format=self.number_format,
                )  # fmt: skip
            found = step.forced(self.tokens)
            own = step.write(length)
        verdict = judged(_difference(found, self.logits), self.floor, self.number_format, method="tokens")
        agreed = _agreed(own, self.tokens)
        verdict = msgspec.structs.replace(verdict, greedy_tokens=length, greedy_agreed=agreed)
        if verdict.passed and not self._explained(own, found):
            text = f"token {agreed + 1} differs from fp32's, and its logits were not close"
            return msgspec.structs.replace(verdict, passed=False, reason=note("above-tolerance", text))
        text = f"{verdict.reason}; {agreed} of {length} greedy tokens agree" if verdict.reason else ""
        code = verdict.reason.code if verdict.reason else "within-tolerance"
        return msgspec.structs.replace(verdict, reason=note(code, text))

    def _explained(self, own: Tensor, found: list[Tensor]) -> bool:
        """Whether each sequence first leaves the reference's where that was undecided by the error of the logits."""
        for row in range(own.shape[0]):
            differs = (own[row] != self.tokens[row]).nonzero()
            if differs.numel() == 0:
                continue
            step = int(differs[0])
            expected = self.logits[step][row]
            margin = expected[self.tokens[row, step]] - expected[own[row, step]]
            if float(margin) > 4 * float((found[step][row] - expected).abs().max()):
                return False
        return True


def _see_that_the_cache_serves(workload: Workload, decoder: Decoder, tokens: Tensor, logits: list[Tensor]) -> None:
    """A model that decodes as if there had been no text is refused; one of the user's own may mean it."""
    if isinstance(decoder, HfDecoder) and decoder.sees_ahead():
        raise BenchError(
            "unsupported",
            "its tokens see later ones, so that a text cannot be written token by token: ?is_decoder=true",
        )
    after = min(REREAD_TOKENS, len(logits) - 1)
    error = _difference([logits[after]], [decoder.read_at_once(tokens[:, :after]).float()]).rel_l2
    if after == 0 or error <= REREAD_TOLERANCE:
        return
    text = f"after the prompt and {after} tokens its logits are {error:.1g} off those of the same text read at once"
    if not isinstance(decoder, HfDecoder):
        workload.notes.append(note("model", f"the cache changes what the model writes: {text}"))
        return
    raise BenchError("unsupported", f"{text}: it keeps its state where Redline does not see it")


@contextmanager
def watching_for_nan(model: nn.Module) -> Iterator[list[str]]:
    """Names of the modules that returned NaN meanwhile."""
    broken: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def seen(module: nn.Module, inputs: Any, found: Any) -> None:
            if any(
                isinstance(each, Tensor) and each.is_floating_point() and bool(each.isnan().any())
                for each in pytree.tree_leaves(found)
            ):
                broken.append(name or type(module).__name__)

        return seen

    hooks = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    try:
        yield broken
    finally:
        for hook in hooks:
            hook.remove()


def _difference(found: list[Tensor], expected: list[Tensor]) -> Difference:
    """Of all logits, over what they differ by from position to position; where a text repeats itself, from token to token."""
    got, want = torch.cat(found), torch.cat(expected)
    told = difference([answer_of(got)], [answer_of(want)])
    return told if not told.degenerate else difference([answer_of(got.view(1, -1))], [answer_of(want.view(1, -1))])


def _agreed(own: Tensor, expected: Tensor) -> int:
    """Tokens from the first on that are the same in all sequences."""
    same = (own == expected).all(dim=0)
    differs = (~same).nonzero()
    return int(differs[0]) if differs.numel() else int(same.shape[0])


Reference = OutputReference | LossReference | GreedyReference
Timed = InferenceStep | TrainingStep | GenerateStep


def reference_of(spec: RunSpec, workload: Workload, device: Device, ranks: Ranks) -> Reference:
    """What strict fp32 gives: the text of a generation, the outputs of an inference, the losses of a training."""
    number_format = number_format_of(spec.recipe, workload.task, workload.model)
    if workload.task == "generate":
        return GreedyReference.of(workload, device, number_format)
    if workload.task == "infer":
        return perhaps_differentiating(
            workload, device, lambda: OutputReference.of(workload, device, number_format, spec.seed)
        )
    steps, optimizer = spec.measure.loss_path_steps, spec.workload.optimizer
    return LossReference.of(
        workload, device, number_format, spec.seed, steps, optimizer, ranks.distribute, ranks.any_of
    )


def judge(reference: Reference, step: Timed, setup: Setup) -> Numerics:
    """How far the step under the recipe is from its reference, and whether that is acceptable."""
    if isinstance(reference, GreedyReference):
        assert isinstance(step, GenerateStep)
        return reference.judge(step)
    if isinstance(reference, OutputReference):
        assert isinstance(step, InferenceStep)
        return reference.judge(step, setup)
    assert isinstance(step, TrainingStep)
    return reference.judge(step, setup)


def sketched(found: Numerics, reference: Reference) -> Numerics:
    """With a sketch of what strict fp32 computes, for comparing it with other commits; of training the losses are kept."""
    if isinstance(reference, GreedyReference):
        answer = Answer(numbers=reference.logits, exact=[reference.tokens])
    elif isinstance(reference, OutputReference) and reference.is_repeatable:
        answer = reference.outputs[0]
    else:
        return found
    sketch, signal = sketch_of(answer)
    return msgspec.structs.replace(found, sketch=sketch, sketch_signal=signal)


def perhaps_differentiating(workload: Workload, device: Device, call: Callable[[], T]) -> T:
    """What `call` gives, with gradients possible where the model turns out to need them for its forward pass."""
    try:
        return call()
    except Exception as error:
        if is_out_of_memory(error) or not workload.differentiates(lambda: forward(workload, device)):
            raise
    return call()


Check = Callable[[Callable[..., Any]], Any]


def metric_of(spec: RunSpec, check: str, baseline: float | None = None) -> MetricAnswer:
    if spec.workload.task != "infer":
        raise SpecError("check needs the outputs of a model: it works with inference only")
    own = load_function(check, "check")
    if baseline is None:
        baseline = _earned(spec, Recipe(), own, check)
    value = _earned(spec, spec.recipe, own, check) if spec.recipe.switches else baseline
    return MetricAnswer(value=value, baseline=baseline)


def _earned(spec: RunSpec, recipe: Recipe, check: Check, name: str) -> float:
    """What the user's check gives for the model under a recipe."""
    device = open_device(resolve_device(spec.device))
    torch.manual_seed(spec.seed)
    workload = build_workload(spec.workload, spec.seed)
    workload.to(device.torch_device)
    # As the person made it: calibrating on random inputs would undo what training taught.
    setup = apply_recipe(recipe, workload, device)
    try:
        value = float(check(_as_a_function(InferenceStep(setup), setup)))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise BenchError("user", f"check {name} raised {one_line(error)}") from error
    if not math.isfinite(value):
        raise BenchError("user", f"check {name} gave {value}")
    return value


def _as_a_function(step: InferenceStep, setup: Setup) -> Callable[..., Any]:
    """On inputs as the model itself takes them, wherever they lie."""

    def model(*args: Any, **kwargs: Any) -> Any:
        device = setup.device.torch_device
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.to(device), (args, kwargs))
        return step.on(*setup.prepared_inputs(args, kwargs))

    return model
