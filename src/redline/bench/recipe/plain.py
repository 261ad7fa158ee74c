"""Plain PyTorch that switches apply and snippets contain, unchanged: parts of a model that a switch is about, other ways
to call a model, folding BatchNorm into the layer before it, and ONNX Runtime with torch's tensors in and out.

Nothing here knows of Redline (nor in `products.py`, which has matrix products in better forms). Every function or class works by itself, given the imports that its switch names and the
other functions of this file that its switch copies along with it.
"""

from __future__ import annotations

import functools
import os
import tempfile
from typing import Any

import torch
import torch.fx
import torch.utils.checkpoint
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.utils._pytree import tree_flatten, tree_unflatten

SIDES = {"int8": 8, "int8-weights": 8, "fp8": 16, "fp8-weights": 16, "int4": 128, "int4-weights": 128}
"""Both sides of a weight must be a multiple of this number for the GPU's product in that format."""


def is_plain_linear(module: torch.nn.Module, sides: int) -> bool:
    """A layer whose weight nobody reads past it (as MultiheadAttention does), with sides of multiples of `sides`."""
    return type(module) is torch.nn.Linear and all(side % sides == 0 for side in module.weight.shape)


def plain_linears(model: torch.nn.Module, number_format: str) -> list[torch.nn.Linear]:
    """All that would be quantized."""
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    return [layer for layer in layers if is_plain_linear(layer, SIDES[number_format])]


def repeated_blocks(model: torch.nn.Module) -> list[str]:
    """Names of the blocks a network is made of: modules of one class, none inside another, with most of the weights.

    Of classes that hold about the same share of the weights, the one with more instances: the layers, not the stages.
    """
    whole = max(sum(weight.numel() for weight in model.parameters()), 1)
    names: dict[type, list[str]] = {}
    for name, module in model.named_modules():
        containers = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
        if not name or isinstance(module, containers) or not any(True for _ in module.children()):
            continue
        others = names.setdefault(type(module), [])
        if not any(name.startswith(f"{other}.") for other in others):
            others.append(name)
    shares = {
        kind: sum(weight.numel() for name in found for weight in model.get_submodule(name).parameters()) / whole
        for kind, found in names.items()
        if len(found) > 1
    }
    most = max(shares.values(), default=0.0)
    near = [kind for kind, share in shares.items() if share >= max(0.9 * most, 0.3)]
    return names[max(near, key=lambda kind: (len(names[kind]), shares[kind]))] if near else []


def compile_blocks(model: torch.nn.Module, **settings: Any) -> list[str]:
    """Compile every repeated block by itself, in place: blocks that are alike share one compiled program."""
    names = repeated_blocks(model)
    # Blocks of a class share their code, and beyond this many versions of it torch would run the rest uncompiled.
    # (Since torch 2.7 this is another name of recompile_limit.)
    torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, len(names))

    def passing_on(call: Any) -> Any:
        return lambda *args, **kwargs: call(*args, **kwargs)

    for block in map(model.get_submodule, names):
        if type(block).__module__.startswith("torch."):
            # Before torch 2.15 its own modules are compiled only as parts of something else.
            block._compiled_call_impl = torch.compile(passing_on(block._call_impl), **settings)
        else:
            block.compile(**settings)
    return names


def store_inputs(model: torch.nn.Module) -> None:
    """Have a compiler store what each linear layer reads, in place.

    Where a product of one row becomes a reduction, the compiler would compute that row anew for every row of the
    weight: the exponentials of a gated layer cost as much time there as reading the weight.
    """

    def stored(layer: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not torch.compiler.is_compiling():
            return None
        # Inductor must have stored what it is asked to see with other strides; the view itself costs nothing.
        return (inputs[0].as_strided(inputs[0].shape, inputs[0].stride()), *inputs[1:])

    for module in model.modules():
        # A forward of its own is a kernel of its own, which reads what was stored in any case.
        if isinstance(module, torch.nn.Linear) and "forward" not in vars(module):
            module.register_forward_pre_hook(stored)


def recompute_blocks(model: torch.nn.Module) -> list[str]:
    """Let every repeated block keep its inputs only, in place: the backward computes its insides again."""
    names = repeated_blocks(model)
    for name in names:
        block: Any = model.get_submodule(name)
        block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)
    return names


BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
"""The backends of scaled_dot_product_attention are known by these names."""


class CallForm:
    """How the example was called. Later calls may write their keywords, and the keys of dicts, in any order; what went in
    by position goes in by position again, and what went in by name by name."""

    def __init__(self, args: tuple, kwargs: dict) -> None:
        leaves, self.structure = tree_flatten((args, kwargs))
        self.count, self.names = len(args), list(kwargs)
        self.indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        plain = (bool, int, float, str, type(None))
        self.fixed = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, plain)}

    def tensors(self, args: tuple, kwargs: dict) -> list[torch.Tensor]:
        """The tensors of a call in the order of the example's."""
        if len(args) != self.count or kwargs.keys() != set(self.names):
            raise TypeError(
                f"made for {self.count} positional inputs and the keywords {self.names}, "
                f"called with {len(args)} and {list(kwargs)}"
            )
        leaves = self.structure.flatten_up_to((args, kwargs))
        for index, value in self.fixed.items():
            # Their texts are compared, because nan is not equal to itself.
            if type(leaves[index]) is not type(value) or repr(leaves[index]) != repr(value):
                raise ValueError(f"made for an input that is {value!r}, which a later call cannot change")
        return [leaves[index] for index in self.indices]


class WithAttention(torch.nn.Module):
    """The model, with every scaled_dot_product_attention in it done by one backend."""

    def __init__(self, model: torch.nn.Module, backend: SDPBackend) -> None:
        super().__init__()
        self.model, self.backend = model, backend

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(self.backend):
            return self.model(*args, **kwargs)


def symbolic_graph(model: torch.nn.Module) -> torch.fx.Graph:
    """The graph of one call of the model, in which torch's own layers, and layers made from them, are units."""

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


class OnnxModel:
    """Called like the model it was made from, with inputs of the same shapes. Inputs and outputs are not copied."""

    ELEMENT_TYPES = {
        torch.float32: 1, torch.uint8: 2, torch.int8: 3, torch.int16: 5, torch.int32: 6, torch.int64: 7,
        torch.bool: 9, torch.float16: 10, torch.float64: 11, torch.bfloat16: 16,
    }  # fmt: skip

    def __init__(self, model: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        with torch.no_grad():
            # The leaves say what to make room for at each call; those that are no tensors stay as they are.
            self.leaves, self.structure = tree_flatten(model(*args, **kwargs))
        self.form = CallForm(args, kwargs)
        given = self.form.tensors(args, kwargs)
        self.device = given[0].device
        self.stream: Any = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        with torch.no_grad():
            program: Any = torch.onnx.export(model, args, kwargs=kwargs, dynamo=True, verbose=False)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.onnx")
            program.save(path, external_data=True)  # within one file a model may have 2 GB
            self.session = self.open_session(path)
        self.inputs = [value.name for value in self.session.get_inputs()]
        self.outputs = [value.name for value in self.session.get_outputs()]
        shapes = [list(tensor.shape) for tensor in given]
        if [value.shape for value in self.session.get_inputs()] != shapes:
            raise RuntimeError(f"the exported model takes {self.inputs} of other shapes than the {shapes} it was given")
        if len(self.outputs) != sum(isinstance(leaf, torch.Tensor) for leaf in self.leaves):
            raise RuntimeError(f"the exported model returns {len(self.outputs)} tensors, and the model does not")

    def open_session(self, path: str) -> Any:
        import onnxruntime

        options, self.run_options = onnxruntime.SessionOptions(), onnxruntime.RunOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        if self.device.type != "cuda":
            return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        # On a stream of ours, and without waiting at the end: the host runs ahead, as it does with torch.
        self.run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        settings = {
            "device_id": str(self.device.index or 0),
            "user_compute_stream": str(self.stream.cuda_stream),
            "use_tf32": str(int(torch.backends.cuda.matmul.allow_tf32)),
        }
        session = onnxruntime.InferenceSession(path, options, providers=[("CUDAExecutionProvider", settings)])
        if "CUDAExecutionProvider" not in session.get_providers():
            raise RuntimeError("ONNX Runtime could not start its CUDA provider and would have computed on the CPU")
        return session

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [tensor.contiguous() for tensor in self.form.tensors(args, kwargs)]
        leaves = [self.room_for(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        made = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        binding = self.session.io_binding()
        for name, tensor in zip(self.inputs, given, strict=True):
            binding.bind_input(name, *self.place_of(tensor))
        for name, tensor in zip(self.outputs, made, strict=True):
            binding.bind_output(name, *self.place_of(tensor))
        if self.stream is None:
            self.session.run_with_iobinding(binding, self.run_options)
        else:
            self.stream.wait_stream(torch.cuda.current_stream())
            self.session.run_with_iobinding(binding, self.run_options)
            torch.cuda.current_stream().wait_stream(self.stream)
        return tree_unflatten(leaves, self.structure)

    def room_for(self, example: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(example, memory_format=torch.contiguous_format)

    def place_of(self, tensor: torch.Tensor) -> tuple:
        kind = self.ELEMENT_TYPES[tensor.dtype]
        return self.device.type, self.device.index or 0, kind, tuple(tensor.shape), tensor.data_ptr()


def run_on_graphs(hook: str, work: Any) -> Any:
    """Let torch.compile call `work` on every graph from now on, at this hook of inductor's settings. Returns `work`."""
    import torch._inductor.config as settings
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph: Any) -> None:
            work.graphs += 1
            work.change(graph)

        def uuid(self) -> Any:
            """Caches tell programs with the pass from those without by this."""
            return work.VERSION

    setattr(settings, hook, Pass())
    return work
