"""This module makes a randomly initialised model carry signal, so that comparing its outputs means something.

Fresh from its constructor a model may answer zero to everything (ViT's head), pass its input by every block (ConvNeXt's
layer scales of 1e-6), or let activations explode through BatchNorms that have never seen data. Any recipe would look
perfect, or hopeless, on such a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from redline.bench.device.failure import is_out_of_memory, one_line
from redline.bench.workload.batch import resize
from redline.bench.workload.inputs import Inputs, copied, redraw
from redline.bench.workload.workload import Workload
from redline.model.note import Note, note
from redline.model.units import counted

DORMANT = 1e-2
"""A parameter does nothing yet if its values are all the same and smaller than this."""
TOKEN_STD = 0.02
"""Tokens and positions of transformers are usually drawn with this spread."""
CALIBRATION_ROWS = 8
"""The calibrating forward has at least this many items, because a batch of one has too few values per channel for a variance."""
QUIET_CHANNEL = 1e-3
"""A channel that hardly varies is given at least this share of its layer's variance, so that it is not blown up."""
CALM_BIAS = 1.0
"""Calibrated BatchNorms whose bias is still zero get this one. With zero a ReLU cuts half of every value, which for normal
values multiplies a small error by 1.2 per layer. With 1 most values pass, and the factor is 1.06. This was measured on
resnet152 at 64 px: rounding its weights to fp16 moved the output by 0.8 of what depends on the input, against 0.01 with 1.
We tried 0.5, 1, 1.5 and 2 on nine torchvision models. 1 was a compromise, because more bias makes inputs matter less."""


def give_signal(workload: Workload, seed: int = 0, *, sparing: bool = False) -> list[Note]:
    """Awakens and calibrates a workload whose weights are random, in place. The notes say what was done.

    `sparing` calibrates on few items, because fp32 at the whole batch may not fit where the recipe does.
    """
    if not workload.weights_are_random:
        return []
    notes, waiting = awaken(workload.model), len(_untouched(workload.model))
    broken = None
    for inputs in calibration_inputs(workload, seed, sparing=sparing) if waiting else []:
        try:
            args, kwargs = copied(inputs())
            calibrate_batchnorm(workload.model, partial(workload.model, *args, **kwargs))
        # A model that is made for training alone may have no forward in evaluation mode.
        except Exception as error:
            if is_out_of_memory(error):
                raise
            broken = error
        else:
            broken = None
            break
    if broken is not None:
        notes.append(note("not-calibrated", f"BatchNorm is not calibrated: {one_line(broken)}"))
    if count := waiting - len(_untouched(workload.model)):
        on = "random inputs" if workload.inputs_are_free else "the inputs given"
        notes.append(note("calibrated", f"calibrated {counted(count, 'BatchNorm layer')} on {on}"))
    return notes


def awaken(model: nn.Module) -> list[Note]:
    """Gives dormant parameters values that let signal through: a vector scales, a matrix mixes, a table holds tokens.

    Parameters that are added rather than multiplied, such as a bias, stay as they are. Zero is right for them, and signal
    passes by them.
    """
    generator = torch.Generator().manual_seed(0)
    changed: dict[str, list[str]] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name.rpartition(".")[2] or not is_dormant(parameter):
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 3 and len(parameter) == 1:  # the leading 1 is spread over the batch
                what, values = f"drawn with a spread of {TOKEN_STD} (it was constant)", noise * TOKEN_STD
            elif sum(size > 1 for size in parameter.shape) <= 1:
                what, values = "set to 1 (a scale that let nothing through)", torch.ones_like(parameter)
            else:
                what, values = "drawn at random (it was all zero)", noise / math.sqrt(parameter[0].numel())
            parameter.copy_(values)
            changed.setdefault(what, []).append(name)
    return [note("signal", f"{_listed(names)} {what}", about=names[0]) for what, names in changed.items()]


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} parameters such as {names[0]}"


def is_dormant(parameter: nn.Parameter) -> bool:
    if (
        nn.parameter.is_lazy(parameter)
        or parameter.is_meta
        or not parameter.is_floating_point()
        or not parameter.numel()
    ):
        return False
    low, high = parameter.aminmax()
    return bool(low == high) and abs(low.item()) < DORMANT


def calibration_inputs(workload: Workload, seed: int = 0, *, sparing: bool = False) -> list[Callable[[], Inputs]]:
    """Returns inputs that BatchNorms may be calibrated on, the best first. They are drawn anew if the inputs are free, else
    they are the user's own.

    They hold at least `CALIBRATION_ROWS` items where more can be had, and no more when sparing. The unchanged inputs
    follow, for a model that is made for one size.
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


def calibrate_batchnorm(model: nn.Module, run: Callable[[], object]) -> int:
    """Sets the statistics of BatchNorms that have never seen data from one forward. Returns how many were set.

    The statistics are set from a layer's input before it normalises that very input, so that the layers behind already see
    normalised activations: one forward calibrates all depths. Biases of zero become `CALM_BIAS`.
    """
    modes = {module: module.training for module in model.modules()}
    calibrated: set[nn.Module] = set()

    def set_statistics(module: Any, args: tuple[Tensor, ...]) -> None:
        # A layer that is used twice keeps what it saw first.
        if module not in calibrated:
            calibrated.add(module)
            _set_statistics(module, args[0])

    handles = [module.register_forward_pre_hook(set_statistics) for module in _untouched(model)]
    try:
        model.eval()
        if handles:
            with torch.no_grad():
                run()
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes.items():
            module.training = training
    return len(calibrated)


def _set_statistics(module: _BatchNorm, inputs: Tensor) -> None:
    assert module.running_mean is not None
    assert module.running_var is not None
    values = inputs.detach().float()
    over = [dimension for dimension in range(values.ndim) if dimension != 1]
    mean = values.mean(dim=over)
    if values.numel() == values.shape[1]:
        # With one value per channel, subtracting it would leave nothing, so only the scale is set, from all channels.
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
    """Returns the BatchNorms whose statistics are as they were made.

    The count of batches does not prove it, because statistics may have been loaded from a file without that count.
    """
    return [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm)
        and (mean := module.running_mean) is not None
        and (variance := module.running_var) is not None
        and not nn.parameter.is_lazy(mean)
        and bool((mean == 0).all() and (variance == 1).all())
    ]
