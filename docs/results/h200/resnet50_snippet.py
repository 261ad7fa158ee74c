"""resnet50, inference, batch 32: fp16+channels-last+fold-bn+compile+graphs.

Plain PyTorch: nothing of Redline is needed.

    fast = optimise(model, *example_inputs)  # shapes are fixed by the example
    args, kwargs = prepare_inputs(*inputs)
    output = fast(*args, **kwargs)  # in place of model(*inputs)
"""

from typing import Any

import torch
import torch.fx
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.utils._pytree import tree_leaves, tree_map_only


def symbolic_graph(model: torch.nn.Module) -> torch.fx.Graph:
    """Who takes what from whom in one call of the model, with torch's own layers, and what is made from them, as units."""

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module: torch.nn.Module, name: str) -> bool:
            units = (torch.nn.modules.batchnorm._BatchNorm, torch.nn.modules.conv._ConvNd, torch.nn.Linear)
            return isinstance(module, units) or super().is_leaf_module(module, name)

    before = set(vars(model))
    try:
        return Tracer().trace(model)
    finally:
        for name in set(vars(model)) - before:  # the tracer leaves constants on the model
            delattr(model, name)


def foldable_batchnorms(model: torch.nn.Module) -> list[tuple[str, str]]:
    """Names of (layer, BatchNorm) where the BatchNorm takes what the layer gives, and nobody else does."""
    graph, modules = symbolic_graph(model), dict(model.named_modules(remove_duplicate=False))
    owners = [id(module) for module in modules.values()]
    calls = [id(modules[node.target]) for node in graph.nodes if node.op == "call_module"]
    weights = [id(weight) for _, weight in model.named_parameters(remove_duplicate=False)]
    read = {node.target.rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}

    def is_alone(name: str) -> bool:
        """It has one name, is called once, and nobody reads its weights or listens to it."""
        module, own = modules[name], [id(weight) for weight in modules[name].parameters(recurse=False)]
        hooks = [*module._forward_hooks, *module._forward_pre_hooks]
        counts = [owners.count(id(module)), calls.count(id(module)), *map(weights.count, own)]
        return not hooks and name not in read and all(count == 1 for count in counts)

    def is_foldable(layer: Any, norm: Any) -> bool:
        # Subclasses may do more in their forward than the layer they come from.
        if type(norm).__name__ not in ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d"):
            return False
        if type(layer).__name__.startswith("ConvTranspose") and layer.groups != 1:
            return False
        kinds = ("Linear", *(f"Conv{kind}{rank}d" for kind in ("", "Transpose") for rank in (1, 2, 3)))
        stock = all(type(module).__module__.startswith("torch.nn.modules") for module in (layer, norm))
        measured = not norm.training and norm.running_mean is not None
        return stock and measured and type(layer).__name__ in kinds

    pairs = []
    for node in graph.nodes:
        sources = node.all_input_nodes
        if len(sources) == 1 and node.op == sources[0].op == "call_module" and len(sources[0].users) == 1:
            layer, norm = sources[0].target, node.target
            if is_foldable(modules[layer], modules[norm]) and is_alone(layer) and is_alone(norm):
                pairs.append((layer, norm))
    return pairs


def fold_batchnorms(model: torch.nn.Module, args: tuple, kwargs: dict) -> list[tuple[str, str]]:
    """Fold in place: the layer takes over the scale and the shift, and an Identity stands where the BatchNorm was."""
    pairs = foldable_batchnorms(model)
    ranks: dict[str, int] = {}
    linear = [layer for layer, _ in pairs if isinstance(model.get_submodule(layer), torch.nn.Linear)]
    if linear:
        # Behind more than two axes BatchNorm scales another one than the features of the layer.
        watched = {model.get_submodule(name): name for name in linear}
        watch = [
            layer.register_forward_hook(lambda layer, _, output: ranks.update({watched[layer]: output.dim()}))
            for layer in watched
        ]
        with torch.no_grad():
            model(*args, **kwargs)
        for handle in watch:
            handle.remove()
    pairs = [pair for pair in pairs if pair[0] not in linear or ranks.get(pair[0]) == 2]
    for layer_name, norm_name in pairs:
        layer: Any = model.get_submodule(layer_name)
        norm: Any = model.get_submodule(norm_name)
        layer.weight, layer.bias = fuse_conv_bn_weights(
            layer.weight, layer.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias,
            transpose=type(layer).__name__.startswith("ConvTranspose"),
        )  # fmt: skip
        parent, _, name = norm_name.rpartition(".")
        setattr(model.get_submodule(parent), name, torch.nn.Identity())
    return pairs


def prepare_inputs(*args, **kwargs):
    """Inputs where and how this recipe wants them: a tuple of arguments and a dict of keywords."""

    def change(tensor):
        tensor = tensor.to("cuda")
        tensor = tensor.to(torch.float16) if tensor.is_floating_point() else tensor
        tensor = tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
        return tensor

    return tree_map_only(torch.Tensor, change, (args, kwargs))


def optimise(model, *args, **kwargs):
    """A function to call in place of the model, on prepared inputs of the same shapes."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    args, kwargs = prepare_inputs(*args, **kwargs)
    model = model.to("cuda").eval()
    fold_batchnorms(model, args, kwargs)
    model = model.to(torch.float16)
    model = model.to(memory_format=torch.channels_last)
    model = torch.compile(model, dynamic=False)

    @torch.inference_mode()
    def call(*args, **kwargs):
        return model(*args, **kwargs)

    return recorded(call, args, kwargs)


@torch.inference_mode()
def recorded(call, args, kwargs):
    """The call as one CUDA graph. Its output is overwritten by the next call: copy what you want to keep."""
    own = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call(*own[0], **own[1])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = call(*own[0], **own[1])

    @torch.inference_mode()
    def replay(*args, **kwargs):
        for held, given in zip(tree_leaves(own), tree_leaves((args, kwargs)), strict=True):
            if isinstance(held, torch.Tensor):
                held.copy_(given)
        graph.replay()
        return output

    return replay


if __name__ == "__main__":
    import time

    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.get_model("resnet50", weights=None)
    args, kwargs = ((torch.randn(32, 3, 224, 224),), {})
    fast = optimise(model, *args, **kwargs)
    args, kwargs = prepare_inputs(*args, **kwargs)

    def seconds_per_step(steps):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            fast(*args, **kwargs)
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / steps

    rough = seconds_per_step(10)
    rough = seconds_per_step(max(10, round(1 / rough)))
    times = sorted(seconds_per_step(max(1, round(0.25 / rough))) for _ in range(12))
    print(f"{32 / times[len(times) // 2]:.1f} items/s")
