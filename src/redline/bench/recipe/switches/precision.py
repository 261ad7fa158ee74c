"""Number formats: TF32 inside fp32, autocast (AMP), and models cast whole."""

from __future__ import annotations

import torch

from redline.bench.device.base import Device
from redline.bench.recipe.base import ALL_MODELS, FLAGS, PRECISION, SWITCHES, RecipeCode, RecipeSwitch
from redline.bench.recipe.fastpath import leave_fast_path, write_without_fast_path
from redline.bench.recipe.rounding import DTYPES
from redline.bench.workload.decoder import cast_weights, rotary_frequencies
from redline.bench.workload.step import Setup
from redline.model.record import Capabilities
from redline.model.spec import Switch, Task
from redline.model.work import PRODUCTS, Facts


@SWITCHES.register("tf32")
class Tf32(RecipeSwitch):
    name = "tf32"
    summary = "fp32 products and convolutions in TF32 on tensor cores"
    stage = FLAGS
    family = "tf32"
    number_format = "tf32"
    tasks = ("infer", "train", "step", "generate")
    excludes = frozenset({"fp16", "bf16"})  # nothing is left in fp32 for it to speed up

    def refusal(self, device: Device) -> str | None:
        return device.tf32_refusal()

    def irrelevance(self, model: torch.nn.Module, facts: Facts | None) -> str | None:
        has_products = facts is None or any(facts.kinds.get(kind) for kind in PRODUCTS)
        return None if has_products else "no matrix product or convolution runs in this model"

    def apply(self, setup: Setup) -> None:
        setup.device.allow_tf32(True)

    def write(self, code: RecipeCode) -> None:
        code.flags.append("torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True")


class _Precision(RecipeSwitch):
    stage = PRECISION
    tasks = ALL_MODELS
    family = "precision"
    excludes = frozenset({"amp", "amp-bf16", "fp16", "bf16"})
    number_format = "bf16"

    def __init__(self, switch: Switch, task: Task) -> None:
        super().__init__(switch, task)
        assert self.number_format is not None
        self.dtype = DTYPES[self.number_format]

    def refusal(self, device: Device) -> str | None:
        return device.refusal_of(self.dtype)


@SWITCHES.register("amp-bf16")
class AmpBf16(_Precision):
    name = "amp-bf16"
    summary = "automatic mixed precision in bf16"

    def apply(self, setup: Setup) -> None:
        leave_fast_path(setup)
        setup.autocast_dtype = self.dtype
        setup.scales_gradients = self.does.scales_loss

    def write(self, code: RecipeCode) -> None:
        write_without_fast_path(code)
        code.autocast = str(self.dtype)
        code.scales_gradients = self.task == "train" and self.does.scales_loss


@SWITCHES.register("amp")
class AmpFp16(AmpBf16):
    name = "amp"
    summary = "automatic mixed precision in fp16, with GradScaler when training"
    does = Capabilities(scales_loss=True)  # fp16 gradients underflow without it; bf16 has fp32's range
    number_format = "fp16"


@SWITCHES.register("bf16")
class Bf16(_Precision):
    name = "bf16"
    summary = "weights, inputs and arithmetic in bf16"

    def __init__(self, switch: Switch, task: Task) -> None:
        super().__init__(switch, task)
        if task == "train":
            self.caution = (
                "weights kept in 16 bits drop small updates, which shows later than a short comparison of losses"
            )

    def irrelevance(self, model: torch.nn.Module, facts: Facts | None) -> str | None:
        """A short comparison cannot see it: in bf16 a count stops at 256, in fp16 at 2048."""
        if facts is None or not facts.accumulates:
            return None
        name = facts.accumulates[0]
        return f"the forward adds to {name} call by call, and in 16 bits that stops moving; amp keeps it as it is"

    def apply(self, setup: Setup) -> None:
        setup.workload.model = setup.model = setup.workload.model.to(self.dtype)
        setup.change_inputs(lambda leaf: leaf.to(self.dtype) if leaf.is_floating_point() else leaf)

    def write(self, code: RecipeCode) -> None:
        if self.task == "generate":
            code.carry(rotary_frequencies, cast_weights)
            code.model_lines.append(f"model = cast_weights(model, {self.dtype})")
            return
        code.model_lines.append(f"model = model.to({self.dtype})")
        code.input_changes.append(f"tensor.to({self.dtype}) if tensor.is_floating_point() else tensor")


@SWITCHES.register("fp16")
class Fp16(Bf16):
    name = "fp16"
    summary = "weights, inputs and arithmetic in fp16"
    number_format = "fp16"
