"""Are the numbers still right? Every recipe is compared with strict fp32 on fixed inputs before it is timed.

Inference compares outputs on two sets of inputs (one where the model takes no second), over the part of the output that
depends on the input: a recipe that ignores its input must not pass because the output hardly moves. Training compares the
loss over some steps, over the distance that the loss travelled. Generation compares the logits of given tokens, and the
tokens that are chosen. All are judged against a floor: what strict fp32 does to weights and inputs that are rounded to the
recipe's number format. Sound recipes sit at one to two times the floor, and four times the floor is the tolerance.

Random inputs cannot judge everything, int8 and fp8 above all. For these the user's own check computes a number from the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from redline.bench.device import open_device
from redline.bench.device.base import Device
from redline.bench.device.failure import is_out_of_memory, one_line
from redline.bench.recipe.base import without_fast_path
from redline.bench.recipe.compose import number_format_of, plain_setup, set_up
from redline.bench.recipe.difference import (
    Answer,
    Difference,
    answer_of,
    difference,
    finite_or_none,
    path_difference,
    sketch_of,
    stands_still,
)
from redline.bench.recipe.rounding import (
    own_format,
    own_unit,
    rounded_inputs,
    rounded_weights,
    unchanged_afterwards,
    unchanged_buffers,
)
from redline.bench.workload.decoder import Decoder, HfDecoder
from redline.bench.workload.generation import GenerateStep
from redline.bench.workload.inputs import Inputs, copied, input_tensors
from redline.bench.workload.ranks import Ranks
from redline.bench.workload.sources.user import load_function
from redline.bench.workload.step import InferenceStep, Setup, TrainingStep
from redline.bench.workload.workload import Second, Workload
from redline.model.errors import BenchError, SpecError
from redline.model.note import note
from redline.model.protocol import MetricAnswer
from redline.model.record import LARGEST_TOLERANCE, TOLERANCE_OVER_FLOOR, Numerics
from redline.model.spec import Recipe, RunSpec

T = TypeVar("T")
Method = Literal["outputs", "loss-path", "tokens"]
"""An inference is compared by its outputs, a training by its losses, and a generation by its tokens and their logits."""
Cause = Literal["rounding", "asking twice", "another seed", "the format of the loss"]
"""A floor has one of these causes."""

SMALLEST_TOLERANCE, SMALLEST_UNEQUAL, SMALLEST_LOSS_TOLERANCE = 1e-5, 1e-3, 0.02
"""A tolerance is at least this, however low the floor is: for outputs, for integers and for losses. Of thousands of classes, some
depend on the last bit of a score."""
UNRESOLVED_FLOOR = 0.5
"""If the floor is above this, the number format cannot resolve the signal of this model, and nothing can be judged."""
DRAWS_FOR_EQUALITY = 3
"""If integers decide, this many further roundings are drawn. Few integers flip at all, and one rounding says little about how often."""
LONGER_PATH = 4
"""A loss that stands still over the steps that were asked for is followed this many times as long."""
CHECKED_TOKENS = 32
"""At most this many tokens of a generation are compared."""
REREAD_TOKENS = 2
"""After this many tokens, the logits are compared with those of the same text read at once."""
REREAD_TOLERANCE = 1e-3
"""These logits may differ by this much. In fp32 only the order of sums differs, and a step that sees nothing of the text is off by far
more."""
ANSWER_SEED = 0
"""Every answer is computed with the random numbers of this seed, so that a model that draws some draws the same ones."""
UNRESOLVED: dict[Cause, str] = {
    "rounding": "{form} cannot resolve this model's signal: rounding alone moves it by {floor:.2g}",
    "asking twice": "the same inputs twice give outputs {floor:.2g} apart, so nothing can be compared: the model keeps state "
    "between calls, or draws random numbers that torch.manual_seed does not reach",
    "another seed": "the model draws random numbers, and this recipe draws others than strict fp32: another seed alone moves it "
    "by {floor:.2g}, so nothing can be compared",
    "the format of the loss": "the loss comes in 16 bits, which alone moves it by {floor:.2g}, so nothing can be compared: "
    "compute it in fp32, as in loss(output.float())",
}
"""If the floor is too high to judge anything, the reason says what made it so."""
SAME = 1e-3
"""Two ways to compute an output may differ by this share of its size."""
NOT_COMPARED = note(
    "masked-positions",
    "outputs at positions that the padding mask hides are not compared: nn.TransformerEncoder sets them to zero where it "
    "takes its fast path, and not where it is compiled, recorded or under autocast",
)
NOTHING_TO_COMPARE = Numerics(
    method="unchecked",
    reason=note("unchecked", "not checked: the model returns neither tensors nor numbers that could be compared"),
)


@dataclass(kw_only=True)
class Reference:
    """A reference holds what strict fp32 computes, and how far rounding to the recipe's number format alone moves it."""

    number_format: str
    floor: float
    cause: Cause = "rounding"
    seed_floor: float | None = None
    """Another seed moves the answer this far. It is None if the model draws no random numbers."""
    own_format: str = "fp32"
    """The model's own weights have this number format, and the reference computes in it."""
    method: Method = "outputs"
    sketched: Answer | None = None
    """Other commits are compared by a sketch of this. It is None if the answer is not the same each time."""

    def verdict(self, found: Difference) -> Numerics:
        """Returns whether this difference is sound. If it is not, another seed is allowed to explain it."""
        verdict = self._judged(found, self.floor, self.cause)
        if not verdict.passed and found.finite and self.seed_floor is not None and self.seed_floor > self.floor:
            # A compiler or another number format draws other numbers from the same seed, and that is sound.
            return self._judged(found, self.seed_floor, "another seed")
        return verdict

    def _judged(self, found: Difference, floor: float, cause: Cause) -> Numerics:
        """Returns whether a difference is within the tolerance of this floor, with the reason in words."""
        smallest = SMALLEST_UNEQUAL if found.by_equality else SMALLEST_TOLERANCE
        smallest = SMALLEST_LOSS_TOLERANCE if self.method == "loss-path" else smallest
        tolerance = min(LARGEST_TOLERANCE, max(smallest, TOLERANCE_OVER_FLOOR * floor))
        is_resolved, within = floor <= UNRESOLVED_FLOOR, found.rel_l2 <= tolerance
        if not found.finite:
            reason = note("not-finite", "the output is not finite")
        elif found.degenerate:
            still = "its loss stands still" if self.method == "loss-path" else "its output does not depend on the input"
            reason = note("no-signal", f"the reference carries no signal: {still}")
        elif not is_resolved:
            code: Any = "not-repeatable" if cause == "asking twice" else "unresolved"
            reason = note(code, UNRESOLVED[cause].format(form=self.number_format, floor=floor))
        else:
            error, side = f"signal error {found.rel_l2:.2g}", "within" if within else "above"
            text = f"{error}, {side} the tolerance {tolerance:.2g}"
            if floor > 0:
                moving = f"rounding to {self.number_format}" if cause == "rounding" else cause
                text = f"{side} {tolerance / floor:.2g}× of what {moving} does ({error} against {floor:.2g})"
            plain = f"rel. error {found.rel_error:.2g}; " if found.rel_error is not None else ""
            equal = f"; {found.equal_share:.2%} of the integers are equal" if found.equal_share is not None else ""
            reason = note("within-tolerance" if within else "above-tolerance", f"{plain}{text}{equal}")
        can_judge = is_resolved and not found.degenerate
        return Numerics(
            **{**found.as_fields(), "degenerate": not can_judge},
            method=self.method,
            number_format=self.number_format,
            floor=finite_or_none(floor),
            tolerance=tolerance,
            passed=found.finite and can_judge and within,
            reason=reason,
        )

    def of_itself(self, own: Difference, what: str) -> Numerics:
        """Returns the numerics of the baseline, which is the reference."""
        reason = note("not-finite", f"the {self.own_format} {what} not finite")
        if own.finite:
            text = f"the reference itself: the model as it came, in {self.own_format}"
            reason = note("reference", "the strict fp32 reference itself" if self.own_format == "fp32" else text)
        return Numerics(
            **own.as_fields(), method="reference", number_format=self.own_format, passed=own.finite, reason=reason
        )


@dataclass(kw_only=True)
class OutputReference(Reference):
    """The reference of an inference has strict fp32's outputs on two sets of inputs."""

    inputs: list[Inputs]
    outputs: list[Answer]
    second: Second | None
    """This is the second set of inputs. It is None if there is only one."""
    hidden: list[list[Tensor | None]]
    """Positions that these masks hide are not compared. There is one list for each set of inputs, and one mask for each output."""

    @classmethod
    def of(cls, workload: Workload, device: Device, number_format: str, seed: int) -> OutputReference:
        step = InferenceStep(_strict(workload, device))
        keep_if_written(workload, step.context)
        inputs: list[Inputs] = [workload.originals or (workload.args, workload.kwargs)]
        torch.manual_seed(ANSWER_SEED)
        fresh = device.random_state()
        outputs = [_answer(step, inputs[0])]
        draws_random_numbers = not torch.equal(fresh, device.random_state())
        second = workload.second_inputs(seed + 1)
        if second is not None and (answer := _second_answer(step, second, outputs[0], workload)) is not None:
            inputs, outputs = [*inputs, second.inputs], [*outputs, answer]
        else:
            second = None

        def moved_by(seed: int) -> float:
            return difference([_answer(step, given, seed) for given in inputs], outputs).rel_l2

        floor = max(_rounding_floor(step, inputs, outputs, number_format), own_unit(workload.model))
        repeated = moved_by(ANSWER_SEED)
        # If asking the same question twice moves the outputs as much, that is the cause, because rounding also asks once more.
        is_repeatable = repeated <= floor / 2
        return cls(
            number_format=number_format,
            floor=max(floor, repeated),
            cause="rounding" if is_repeatable else "asking twice",
            seed_floor=moved_by(ANSWER_SEED + 1) if draws_random_numbers else None,
            own_format=own_format(workload.model),
            sketched=outputs[0] if is_repeatable and not draws_random_numbers else None,
            inputs=inputs,
            outputs=outputs,
            second=second,
            hidden=[
                _hidden_positions(workload, answer, partial(_answer, step, given))
                for given, answer in zip(inputs, outputs, strict=True)
            ],
        )

    def judge(self, step: Any, setup: Setup) -> Numerics:
        found = [_answer(step, setup.prepared_inputs(*given)) for given in self.inputs]
        if [answer.form for answer in found] != [answer.form for answer in self.outputs]:
            why = note("other-structure", "the outputs have another structure than the reference's")
            return Numerics(number_format=self.number_format, reason=why)
        if self.outputs[0].is_empty:
            return NOTHING_TO_COMPARE
        for answer, reference, masks in zip(found, self.outputs, self.hidden, strict=True):
            for got, want, mask in zip(answer.numbers, reference.numbers, masks, strict=True):
                if mask is not None and got.shape == want.shape:
                    got[mask] = want[mask]
        return self.verdict(difference(found, self.outputs))

    def as_numerics(self) -> Numerics:
        if self.outputs[0].is_empty:
            return NOTHING_TO_COMPARE
        return self.of_itself(difference(self.outputs, self.outputs), "output is")


def _hidden_positions(workload: Workload, answer: Answer, again: Callable[[], Answer]) -> list[Tensor | None]:
    """Returns for each floating-point output the positions at which only the fast path makes it what it is, or None if there are none.

    With a padding mask, torch's encoder skips the positions that the mask hides and sets them to zero afterwards. It does not do so
    when it is compiled, recorded or under autocast, so these positions hold numbers that nobody is meant to read.
    `again` computes the answer anew. If the two ways differ at other positions too, such as in a mean over all of them,
    the model's answer itself differs, and nothing is left out.
    """
    hidden: list[Tensor | None] = [None] * len(answer.numbers)
    encoders = [module for module in workload.model.modules() if isinstance(module, nn.TransformerEncoder)]
    if not encoders or not torch.backends.mha.get_fastpath_enabled():
        return hidden
    masks: list[Tensor] = []

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None)
        if isinstance(mask, Tensor):
            masks.append(mask if mask.dtype == torch.bool else mask.isinf())

    with ExitStack() as stack:
        stack.enter_context(without_fast_path())
        for encoder in encoders:
            stack.callback(encoder.register_forward_pre_hook(look, with_kwargs=True).remove)
        plain = again()
    for number, (fast, slow) in enumerate(zip(answer.numbers, plain.numbers, strict=False)):
        mask = next((mask for mask in masks if fast.shape[: mask.dim()] == mask.shape), None)
        if mask is not None and fast.shape == slow.shape:
            differs = (fast - slow).abs() > SAME * slow.abs().max()
            hidden[number] = mask if bool(differs[mask].any()) and not bool(differs[~mask].any()) else None
    if any(mask is not None for mask in hidden) and NOT_COMPARED not in workload.notes:
        workload.notes.append(NOT_COMPARED)
    return hidden


def _rounding_floor(step: InferenceStep, inputs: list[Inputs], outputs: list[Answer], number_format: str) -> float:
    """Returns how far rounding to the number format alone moves the outputs. It is infinite if the outputs change their form."""
    floors = []
    for draw in range(1 + DRAWS_FOR_EQUALITY):
        with rounded_weights(step.workload.model, number_format, draw=draw):
            rounded = [_rounded_answer(step, given, number_format) for given in inputs]
        if [answer.form for answer in rounded] != [answer.form for answer in outputs]:
            return math.inf
        found = difference(rounded, outputs)
        floors.append(found.rel_l2)
        if not found.by_equality:
            break
    return max(floors)


def _answer(step: InferenceStep, inputs: Inputs, seed: int = ANSWER_SEED) -> Answer:
    """Returns the answer to copies of the inputs, with the same random numbers each time. A model may write into its inputs."""
    torch.manual_seed(seed)
    with unchanged_buffers(step.workload.model):
        return answer_of(step.on(*copied(inputs)))


def _rounded_answer(step: InferenceStep, inputs: Inputs, number_format: str) -> Answer:
    """Returns the answer to rounded inputs. If the model refuses them, as with shares that no longer sum to one, exact ones are used."""
    try:
        return _answer(step, rounded_inputs(inputs, number_format))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return _answer(step, inputs)


def _second_answer(step: InferenceStep, second: Second, first: Answer, workload: Workload) -> Answer | None:
    """Returns the answer to the second inputs, or None with a note if the model does not take them or answers in another form."""
    try:
        answer = _answer(step, second.inputs)
        if answer.form == first.form and (answer.is_finite or not first.is_finite):
            return answer
        what = "are not finite" if answer.form == first.form else "have another structure"
        why = f"the outputs of a second one {what}"
    except Exception as error:
        if is_out_of_memory(error):
            raise
        why = f"the model fails on a second one: {one_line(error)}"
    workload.notes.append(note("one-input-set", f"outputs are compared on one set of inputs: {why}"))
    return None


@dataclass(kw_only=True)
class LossReference(Reference):
    """The reference of a training has strict fp32's losses over some steps, and how far rounding the start moves them."""

    losses: list[float]
    run: Callable[[TrainingStep], Tensor] = field(repr=False)
    method: Method = "loss-path"

    @classmethod
    def of(cls, spec: RunSpec, workload: Workload, device: Device, number_format: str, ranks: Ranks) -> LossReference:
        """Returns the reference. Several ranks are compared with as many ranks, and agree on how many steps they take."""
        count, model = spec.measure.loss_path_steps, workload.model

        def run(step: TrainingStep, seed: int = spec.seed) -> Tensor:
            torch.manual_seed(seed)
            with step.context():
                # The loss is cloned, because a graph's next replay overwrites it.
                return torch.stack([step().clone() for _ in range(count)]).detach()

        def strict(seed: int = spec.seed) -> list[float]:
            setup = _strict(workload, device)
            ranks.distribute(setup)
            with unchanged_afterwards(model):
                values: list[float] = run(TrainingStep(setup, spec.workload.optimizer), seed).float().tolist()
            return values

        keep_if_written(workload, torch.enable_grad)
        torch.manual_seed(spec.seed)
        fresh = device.random_state()
        losses = strict()
        draws_random_numbers = ranks.any_of(not torch.equal(fresh, device.random_state()))
        if ranks.any_of(stands_still(losses)):  # a model that learns slowly at first may move on a longer way
            count *= LONGER_PATH
            losses = strict()
        with rounded_weights(model, number_format):
            floor = path_difference(strict(), losses).rel_l2
        return cls(
            number_format=number_format,
            floor=floor,
            seed_floor=path_difference(strict(spec.seed + 1), losses).rel_l2 if draws_random_numbers else None,
            own_format=own_format(model),
            losses=losses,
            run=run,
        )

    def judge(self, step: Any, setup: Setup) -> Numerics:
        path = self.run(step)
        # A loss of the user's own stays in the model's format. This alone moves it by up to half a unit.
        half_unit = torch.finfo(path.dtype).eps / 2
        bits, reference = path_difference([loss * (1 + half_unit) for loss in self.losses], self.losses).rel_l2, self
        if bits > self.floor:
            reference = replace(self, floor=bits, cause="the format of the loss")
        losses = path.float().tolist()
        return self._with_losses(reference.verdict(path_difference(losses, self.losses)), losses)

    def as_numerics(self) -> Numerics:
        own = path_difference(self.losses, self.losses)
        return self._with_losses(self.of_itself(own, "loss is"), self.losses)

    def _with_losses(self, numerics: Numerics, losses: list[float]) -> Numerics:
        return msgspec.structs.replace(
            numerics,
            steps=len(losses),
            losses=tuple(map(finite_or_none, losses)),
            reference_losses=tuple(map(finite_or_none, self.losses)),
        )


@dataclass(kw_only=True)
class GreedyReference(Reference):
    """This reference is the text that strict fp32 writes with a growing cache, with its logits on the way."""

    tokens: Tensor
    logits: list[Tensor]
    """There is one tensor for each token."""
    method: Method = "tokens"

    @classmethod
    def of(cls, workload: Workload, device: Device, number_format: str) -> GreedyReference:
        step = GenerateStep(_strict(workload, device))
        with step.context():
            tokens = step.write(min(step.decoder.new_tokens, CHECKED_TOKENS))
            logits = step.forced(tokens)
            _refuse_a_useless_cache(workload, step.decoder, tokens, logits)
            with rounded_weights(workload.model, number_format):
                floor = _logit_difference(step.forced(tokens), logits).rel_l2
        step.decoder.forget()  # no switch may find the cache in fp32
        sketched = Answer(numbers=logits, exact=[tokens])
        return cls(number_format=number_format, floor=floor, sketched=sketched, tokens=tokens, logits=logits)

    def as_numerics(self) -> Numerics:
        is_finite, length = all(bool(row.isfinite().all()) for row in self.logits), self.tokens.shape[1]
        own = self.of_itself(Difference(rel_l2=0.0, finite=is_finite, degenerate=False), "logits are")
        return msgspec.structs.replace(own, greedy_tokens=length, greedy_agreed=length)

    def judge(self, step: Any, setup: Setup) -> Numerics:
        length = self.tokens.shape[1]
        with step.context():
            found, tokens = step.forced(self.tokens), step.write(length)
        # Tokens count from the first one on, as long as they are the same in all sequences.
        agreed = int((tokens == self.tokens).all(dim=0).int().cumprod(0).sum())
        numerics = self.verdict(_logit_difference(found, self.logits))
        assert numerics.reason is not None
        why = note(numerics.reason.code, f"{numerics.reason}; {agreed} of {length} greedy tokens agree")
        if numerics.passed and not self._explains(tokens, found):
            text = f"token {agreed + 1} differs from fp32's, and its logits were not close"
            numerics, why = msgspec.structs.replace(numerics, passed=False), note("above-tolerance", text)
        return msgspec.structs.replace(numerics, reason=why, greedy_tokens=length, greedy_agreed=agreed)

    def _explains(self, tokens: Tensor, found: list[Tensor]) -> bool:
        """Returns whether each sequence first leaves the reference's at a token that the error of the logits left undecided."""
        for row, differs in enumerate((tokens != self.tokens).int()):
            step = int(differs.argmax())
            expected = self.logits[step][row]
            margin = expected[self.tokens[row, step]] - expected[tokens[row, step]]
            if differs.any() and float(margin) > 4 * float((found[step][row] - expected).abs().max()):
                return False
        return True


def _refuse_a_useless_cache(workload: Workload, decoder: Decoder, tokens: Tensor, logits: list[Tensor]) -> None:
    """Refuses a model that decodes as if there had been no text. A model of the user's own only gets a note, because it may do so on
    purpose."""
    if isinstance(decoder, HfDecoder) and decoder.sees_ahead():
        why = "its tokens see later ones, so that a text cannot be written token by token: ?is_decoder=true"
        raise BenchError("unsupported", why)
    after = min(REREAD_TOKENS, len(logits) - 1)
    error = _logit_difference([logits[after]], [decoder.read_at_once(tokens[:, :after]).float()]).rel_l2
    if after == 0 or error <= REREAD_TOLERANCE:
        return
    text = f"after the prompt and {after} tokens its logits are {error:.1g} off those of the same text read at once"
    if isinstance(decoder, HfDecoder):
        raise BenchError("unsupported", f"{text}: it keeps its state where Redline does not see it")
    workload.notes.append(note("model", f"the cache changes what the model writes: {text}"))


def _logit_difference(found: list[Tensor], expected: list[Tensor]) -> Difference:
    """Returns the difference over what changes from position to position, or from token to token if a text repeats itself."""
    got, want = torch.cat(found), torch.cat(expected)
    by_position = difference([answer_of(got)], [answer_of(want)])
    if not by_position.degenerate:
        return by_position
    return difference([answer_of(got.view(1, -1))], [answer_of(want.view(1, -1))])


AnyReference = OutputReference | LossReference | GreedyReference
Timed = InferenceStep | TrainingStep | GenerateStep
"""A step of each of these kinds is timed and compared."""


def reference_of(spec: RunSpec, workload: Workload, device: Device, ranks: Ranks) -> AnyReference:
    """Returns what strict fp32 computes: the text of a generation, the outputs of an inference, or the losses of a training."""
    form = number_format_of(spec.recipe, workload.task, workload.model)
    if workload.task == "generate":
        return GreedyReference.of(workload, device, form)
    if workload.task == "train":
        return LossReference.of(spec, workload, device, form, ranks)
    return perhaps_differentiating(workload, device, lambda: OutputReference.of(workload, device, form, spec.seed))


def numerics_of(reference: AnyReference, step: Timed, setup: Setup) -> Numerics:
    """Returns how far the step under its recipe is from the reference, with a sketch of the reference to compare with other commits."""
    numerics = reference.judge(step, setup) if setup.switches else reference.as_numerics()
    if isinstance(reference, OutputReference) and reference.second is not None:
        numerics = msgspec.structs.replace(numerics, second_inputs=reference.second.how)
    return numerics if reference.sketched is None else with_sketch(numerics, reference.sketched)


def with_sketch(numerics: Numerics, answer: Answer) -> Numerics:
    """Returns the numerics with a sketch of this answer, by which other commits are compared with it."""
    sketch, signal = sketch_of(answer)
    return msgspec.structs.replace(numerics, sketch=sketch, sketch_signal=signal)


def perhaps_differentiating(workload: Workload, device: Device, call: Callable[[], T]) -> T:
    """Returns what `call` returns. If it fails because the forward pass needs gradients, it is called again with them enabled."""
    try:
        return call()
    except Exception as error:
        inputs = workload.args, workload.kwargs
        if is_out_of_memory(error) or not workload.differentiates(
            lambda: _answer(InferenceStep(_strict(workload, device)), inputs)
        ):
            raise
    return call()


def _strict(workload: Workload, device: Device) -> Setup:
    """Returns the workload as it is: in fp32 and eager."""
    setup = plain_setup(workload, device)
    setup.begin_with_originals()
    return setup


def keep_if_written(workload: Workload, context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Keeps the inputs of a model that writes into them. Otherwise a second step would see others than the first."""
    args, kwargs = copied((workload.args, workload.kwargs))
    tensors = [tensor for _, tensor in input_tensors((args, kwargs)) if not tensor.is_leaf or not tensor.requires_grad]
    before = [tensor._version for tensor in tensors]
    with unchanged_buffers(workload.model), context():
        workload.model(*args, **kwargs)
    if [tensor._version for tensor in tensors] != before:
        workload.keep_originals()


# What follows runs the user's own check.


def metric_of(spec: RunSpec, check: str, baseline: float | None = None) -> MetricAnswer:
    """Returns what the user's check says of the model under its recipe, and of the baseline unless that is known already."""
    if spec.workload.task != "infer":
        raise SpecError("check needs the outputs of a model: it works with inference only")
    function = load_function(check, "check")

    def checked(recipe: Recipe) -> float:
        """Returns the check's number for a recipe. The model is as the person made it, because calibration would undo its training."""
        device = open_device(spec.device)
        torch.manual_seed(spec.seed)
        setup = set_up(msgspec.structs.replace(spec, recipe=recipe), device, ask=False)
        step = InferenceStep(setup)

        def model(*args: Any, **kwargs: Any) -> Any:
            """Takes inputs as the model itself takes them, wherever they lie."""
            given = pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device.torch_device), (args, kwargs))
            return step.on(*setup.prepared_inputs(*given))

        try:
            value = float(function(model))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise BenchError("user", f"check {check} raised {one_line(error)}") from error
        if not math.isfinite(value):
            raise BenchError("user", f"check {check} gave {value}")
        return value

    if baseline is None:
        baseline = checked(Recipe())
    return MetricAnswer(value=checked(spec.recipe) if spec.recipe.switches else baseline, baseline=baseline)
