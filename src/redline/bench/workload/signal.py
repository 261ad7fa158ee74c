"""Making a randomly initialised model carry signal, so that comparing its outputs means something.

Fresh from its constructor a model may answer zero to everything (ViT's head), pass its input by every block
(ConvNeXt's layer scales of 1e-6), or let activations explode through BatchNorms that have never seen data. Any
recipe would look perfect, or hopeless, on such a model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from redline.bench.device.failure import is_out_of_memory, one_line
from redline.bench.workload.batch import resize
from redline.bench.workload.inputs import Inputs, copied, redraw
from redline.model.note import Note, note
from redline.model.units import counted

if TYPE_CHECKING:
    from redline.bench.workload.workload import Workload

DORMANT = 1e-2
"""A parameter whose values are all the same and smaller than this does nothing yet."""
EMBEDDING_STD = 0.02
CALIBRATION_ROWS = 8
"""Items in the calibrating forward: a batch of one has too few values per channel to take a variance of."""
QUIET_CHANNEL = 1e-3
"""A channel that hardly varies is given at least this share of its layer's variance, lest it is blown up."""

CALM_BIAS = 1.0
"""Given to calibrated BatchNorms whose bias is still zero. With zero a ReLU cuts half of every value, which for normal
values multiplies a small error by 1.2 per layer; with 1 most values pass, and the factor is 1.06. Measured on resnet152
at 64 px: rounding its weights to fp16 moved the output by 0.8 of what depends on the input, against 0.01 with 1.
Of 0.5, 1, 1.5 and 2, tried on nine torchvision models, 1 was a compromise: more bias makes inputs matter less."""


def awaken(model: nn.Module) -> list[Note]:
    """Give dormant parameters values that let signal through; says what was changed."""
    generator = torch.Generator().manual_seed(0)
    changed: dict[str, list[str]] = {}
    norms = _norm_weights(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not _is_bias(name) and is_dormant(parameter):
                what, values = _values_for(name, parameter, norms, generator)
                parameter.copy_(values)
                changed.setdefault(what, []).append(name)
    return [_note(what, names) for what, names in changed.items()]


def calibrate_batchnorm(model: nn.Module, run: Callable[[], object]) -> int:
    """Set the statistics of BatchNorms that have never seen data from one forward; says how many were set.

    The statistics are set from a layer's input before it normalises that very input, so that the layers behind
    already see normalised activations: one forward calibrates all depths. Biases of zero become `CALM_BIAS`.
    """
    untouched = _untouched(model)
    modes = {module: module.training for module in model.modules()}
    calibrated: set[nn.Module] = set()

    def set_statistics(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if module not in calibrated and isinstance(module, _BatchNorm):  # used twice: keeps what it saw first
            calibrated.add(module)
            _set_statistics(module, args[0])

    handles = [module.register_forward_pre_hook(set_statistics) for module in untouched]
    try:
        model.eval()
        if untouched:
            with torch.no_grad():
                run()
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes.items():
            module.training = training
    return len(calibrated)


def calibration_inputs(workload: Workload, seed: int = 0, *, sparing: bool = False) -> list[Callable[[], Inputs]]:
    """What BatchNorms may be calibrated on, best first: inputs drawn anew where they are free, else the user's own.

    At least `CALIBRATION_ROWS` items where more can be had, and no more when sparing; then the inputs as they are, for a
    model that is made for one size.
    """
    own, axes, again = (workload.args, workload.kwargs), workload.axes, workload.again

    def ready(inputs: Inputs) -> Inputs:
        return redraw(inputs, seed, workload.vocabulary) if workload.inputs_are_free else inputs

    choices = [lambda: ready(own)]
    if sparing or (workload.batch or CALIBRATION_ROWS) < CALIBRATION_ROWS:
        if axes is not None:
            choices.insert(0, lambda: ready(resize(own, axes, CALIBRATION_ROWS)))
        elif again is not None and workload.batch is not None:
            choices.insert(0, lambda: workload.moved(again(seed, CALIBRATION_ROWS)))
    return choices


def give_signal(workload: Workload, seed: int = 0, *, sparing: bool = False) -> list[Note]:
    """Awaken and calibrate a workload whose weights are random, where it stands; says what was done.

    `sparing` calibrates on few items: fp32 at the whole batch may not fit where the recipe does.
    """
    if not workload.weights_are_random:
        return []
    model, notes = workload.model, awaken(workload.model)
    waiting = _untouched(model)
    broken = _calibrate(model, calibration_inputs(workload, seed, sparing=sparing)) if waiting else None
    if broken is not None:
        notes.append(note("not-calibrated", f"BatchNorm is not calibrated: {one_line(broken)}"))
    count = len(waiting) - len(_untouched(model))
    if count:
        on = "random inputs" if workload.inputs_are_free else "the inputs given"
        text = f"calibrated {counted(count, 'BatchNorm layer')} on {on}"
        notes.append(note("calibrated", text))
    return notes


def _calibrate(model: nn.Module, choices: list[Callable[[], Inputs]]) -> Exception | None:
    """On the first inputs the model takes; what it said where it took none. What was set before it broke is sound.

    A model made for training alone may have no forward in evaluation mode.
    """
    broken: Exception | None = None
    for choice in choices:
        try:
            args, kwargs = copied(choice())
            calibrate_batchnorm(model, functools.partial(model, *args, **kwargs))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            broken = error
        else:
            return None
    return broken


def _set_statistics(module: _BatchNorm, inputs: Tensor) -> None:
    assert module.running_mean is not None
    assert module.running_var is not None
    values = inputs.detach().float()
    over = [dimension for dimension in range(values.ndim) if dimension != 1]
    mean = values.mean(dim=over)
    if values.numel() == values.shape[1]:
        # One value per channel: subtracting it would leave nothing, so only the scale is set, from all channels.
        mean, variance = torch.zeros_like(mean), values.square().mean().expand_as(mean)
    else:
        variance = values.var(dim=over)
    variance = variance.clamp(min=QUIET_CHANNEL * variance.mean().item())
    usable = torch.isfinite(mean) & torch.isfinite(variance) & (variance > 0)
    module.running_mean.copy_(torch.where(usable, mean, 0.0))
    module.running_var.copy_(torch.where(usable, variance, 1.0))
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.fill_(1)
    if module.bias is not None and bool((module.bias == 0).all()):
        module.bias.fill_(CALM_BIAS)


def _untouched(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm) and _is_untouched(module)]


def _is_untouched(module: _BatchNorm) -> bool:
    mean, variance = module.running_mean, module.running_var
    if mean is None or variance is None or nn.parameter.is_lazy(mean):
        return False
    # The count of batches is no witness: statistics may have been loaded from a file that does not hold it.
    return bool((mean == 0).all() and (variance == 1).all())


def _is_bias(name: str) -> bool:
    """Whatever is added rather than multiplied: zero is where it belongs, and signal passes by it."""
    last = name.rsplit(".", 1)[-1].lower()
    return "bias" in last or last in ("beta", "shift", "offset")


def is_dormant(parameter: nn.Parameter) -> bool:
    if (
        nn.parameter.is_lazy(parameter)
        or not parameter.is_floating_point()
        or parameter.numel() == 0
        or parameter.is_meta
    ):
        return False
    low, high = parameter.aminmax()
    return bool(low == high) and abs(low.item()) < DORMANT


def _values_for(name: str, parameter: nn.Parameter, norms: set[str], generator: torch.Generator) -> tuple[str, Tensor]:
    """What the parameter is, and values for it."""
    is_vector = sum(size > 1 for size in parameter.shape) <= 1
    if name in norms or (is_vector and not _is_embedding(name, parameter)):
        return "scale", torch.ones_like(parameter)
    noise = torch.randn(parameter.shape, generator=generator)
    if _is_embedding(name, parameter):
        return "embedding", noise * EMBEDDING_STD
    return "weight", noise / math.sqrt(parameter[0].numel())


def _is_embedding(name: str, parameter: nn.Parameter) -> bool:
    """Tokens and position tables: by name, or by the leading 1 with which they are spread over a batch."""
    last = name.rsplit(".", 1)[-1].lower()
    named = any(word in last for word in ("token", "embed", "pos", "query", "prompt"))
    return named or (parameter.ndim == 3 and parameter.shape[0] == 1 and parameter.shape[2] > 1)


def _norm_weights(model: nn.Module) -> set[str]:
    """Weights of normalising modules, which scale whatever their shape (LayerNorm over several axes has a matrix)."""
    return {
        f"{name}.weight".lstrip(".")
        for name, module in model.named_modules()
        if "norm" in type(module).__name__.lower()
    }


def _note(what: str, names: list[str]) -> Note:
    which = names[0] if len(names) == 1 else f"{len(names)} parameters such as {names[0]}"
    done = {
        "scale": "set to 1 (a scale that let nothing through)",
        "embedding": f"drawn with a spread of {EMBEDDING_STD} (it was constant)",
        "weight": "drawn at random (it was all zero)",
    }
    return note("signal", f"{which} {done[what]}", about=names[0])
