"""Plain PyTorch that switches apply and snippets contain, unchanged.

It has the parts of a model that a switch is about, other ways to call a model, BatchNorm folded into the layer before it, ONNX
Runtime with torch's tensors in and out, matrix products in better forms, and weight gradients beside the rest of the backward.
Nothing here knows of Redline. Every function or class works by itself, given the imports that its switch names and the other
functions of this file that its switch copies along with it.
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
import tempfile
from typing import Any

import torch
import torch.fx
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.utils._pytree import tree_flatten, tree_unflatten

SIDES = {"int8": 8, "int8-weights": 8, "fp8": 16, "fp8-weights": 16}
"""Both sides of a weight must be a multiple of this number for the GPU's product in that format."""


def is_plain_linear(module: nn.Module, sides: int) -> bool:
    """A layer whose weight nobody reads past it (as MultiheadAttention does), with sides of multiples of `sides`."""
    return type(module) is nn.Linear and all(side % sides == 0 for side in module.weight.shape)


def plain_linears(model: nn.Module, number_format: str) -> list[nn.Linear]:
    """Returns the layers that would be quantized."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return [layer for layer in layers if is_plain_linear(layer, SIDES[number_format])]


def repeated_blocks(model: nn.Module) -> list[str]:
    """Returns the names of the blocks a network is made of: modules of one class, none inside another, with most of the weights.

    Of classes that hold about the same share of the weights, the one with more instances: the layers, not the stages.
    """
    whole = max(sum(weight.numel() for weight in model.parameters()), 1)
    names: dict[type, list[str]] = {}
    for name, module in model.named_modules():
        containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
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


def compile_blocks(model: nn.Module, **settings: Any) -> list[str]:
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


def store_inputs(model: nn.Module) -> None:
    """Have a compiler store what each linear layer reads, in place.

    Where a product of one row becomes a reduction, the compiler would compute that row anew for every row of the
    weight: the exponentials of a gated layer cost as much time there as reading the weight.
    """

    def stored(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not torch.compiler.is_compiling():
            return None
        # Inductor must have stored what it is asked to see with other strides; the view itself costs nothing.
        return (inputs[0].as_strided(inputs[0].shape, inputs[0].stride()), *inputs[1:])

    for module in model.modules():
        # A forward of its own is a kernel of its own, which reads what was stored in any case.
        if isinstance(module, nn.Linear) and "forward" not in vars(module):
            module.register_forward_pre_hook(stored)


def recompute_blocks(model: nn.Module) -> list[str]:
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
        self.indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        plain = (bool, int, float, str, type(None))
        self.fixed = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, plain)}

    def tensors(self, args: tuple, kwargs: dict) -> list[Tensor]:
        """Returns the tensors of a call in the order of the example's."""
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


class WithAttention(nn.Module):
    """This is the model with every scaled_dot_product_attention in it done by one backend."""

    def __init__(self, model: nn.Module, backend: SDPBackend) -> None:
        super().__init__()
        self.model, self.backend = model, backend

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(self.backend):
            return self.model(*args, **kwargs)


class LayerTracer(torch.fx.Tracer):
    """Makes a graph of one call of a model, in which torch's own layers, and layers made from them, are units."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        units = (nn.modules.batchnorm._BatchNorm, nn.modules.conv._ConvNd)
        return isinstance(module, units) or super().is_leaf_module(module, name)


def foldable_batchnorms(model: nn.Module) -> list[tuple[str, str]]:
    """Returns the names of (convolution, BatchNorm) where the BatchNorm takes what the convolution gives, and nobody else does."""
    before = set(vars(model))
    try:
        graph = LayerTracer().trace(model)
    finally:
        for name in set(vars(model)) - before:  # the tracer leaves constants on the model
            delattr(model, name)
    modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
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

    pairs = []
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    for node in graph.nodes:
        sources = node.all_input_nodes
        if len(sources) != 1 or not node.op == sources[0].op == "call_module" or len(sources[0].users) != 1:
            continue
        layer, norm = modules[sources[0].target], modules[node.target]
        # Subclasses may do more in their forward than the layer they come from.
        if type(layer) not in convolutions or type(norm) not in norms or (layer.transposed and layer.groups != 1):
            continue
        has_statistics = not norm.training and norm.running_mean is not None
        if has_statistics and is_alone(sources[0].target) and is_alone(node.target):
            pairs.append((sources[0].target, node.target))
    return pairs


def fold_batchnorms(model: nn.Module) -> list[tuple[str, str]]:
    """Fold in place: the convolution takes over the scale and the shift, and an Identity stands where the BatchNorm was."""
    pairs = foldable_batchnorms(model)
    for layer_name, norm_name in pairs:
        layer: Any = model.get_submodule(layer_name)
        norm: Any = model.get_submodule(norm_name)
        layer.weight, layer.bias = fuse_conv_bn_weights(
            layer.weight, layer.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias, transpose=layer.transposed
        )  # fmt: skip
        parent, _, name = norm_name.rpartition(".")
        setattr(model.get_submodule(parent), name, nn.Identity())
    return pairs


class OnnxModel:
    """Called like the model it was made from, with inputs of the same shapes, on a CPU. Inputs and outputs are not copied."""

    def __init__(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.form = CallForm(args, kwargs)
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            # Leaves of the output that are no tensors stay as they are.
            self.leaves, self.structure = tree_flatten(model(*args, **kwargs))
            program: Any = torch.onnx.export(model, args, kwargs=kwargs, dynamo=True, verbose=False)
            path = os.path.join(folder, "model.onnx")
            program.save(path, external_data=True)  # within one file a model may have 2 GB
            self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.inputs = [value.name for value in self.session.get_inputs()]
        shapes = [list(tensor.shape) for tensor in self.form.tensors(args, kwargs)]
        if [value.shape for value in self.session.get_inputs()] != shapes:
            raise RuntimeError(f"the exported model takes {self.inputs} of other shapes than the {shapes} it was given")
        count = len(self.session.get_outputs())
        if count != sum(isinstance(leaf, Tensor) for leaf in self.leaves):
            raise RuntimeError(f"the exported model returns {count} tensors, and the model does not")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [tensor.numpy() for tensor in self.form.tensors(args, kwargs)]
        made = iter(self.session.run(None, dict(zip(self.inputs, given, strict=True))))
        leaves = [torch.from_numpy(next(made)) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.structure)


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


def patch_product(layer: nn.Conv2d, images: Tensor) -> Tensor:
    """A convolution whose patches lie side by side, done as one matrix product over the patches."""
    (height, width), weight = layer.kernel_size, layer.weight
    if images.dim() != 4:  # one item without a batch
        return nn.Conv2d.forward(layer, images)
    down, across = images.shape[2] // height, images.shape[3] // width
    # A convolution leaves out what fills no patch, too.
    images = images[:, :, : down * height, : across * width]
    patches = images.unflatten(3, (across, width)).unflatten(2, (down, height))
    # In the order in which the weight lies in memory, so that it need not be copied.
    is_channels_last = weight.stride(1) == 1
    patches = patches.permute(0, 2, 4, 3, 5, 1) if is_channels_last else patches.permute(0, 2, 4, 1, 3, 5)
    rows = (weight.permute(0, 2, 3, 1) if is_channels_last else weight).reshape(len(weight), -1)
    product = nn.functional.linear(patches.reshape(-1, rows.shape[1]), rows, layer.bias)
    output = product.view(len(images), down, across, len(weight)).permute(0, 3, 1, 2)
    return output if is_channels_last else output.contiguous()


def patch_convolutions(model: nn.Module) -> list[Any]:
    """Returns the convolutions whose patches neither overlap nor leave a gap: each is a product, which libraries do better."""
    convolutions: list[Any] = [module for module in model.modules() if type(module) is nn.Conv2d]
    return [
        layer
        for layer in convolutions
        if layer.kernel_size == layer.stride != (1, 1)
        and layer.groups == 1
        and layer.dilation == (1, 1)
        and layer.padding in ("valid", (0, 0))
    ]


def patches_as_products(model: nn.Module) -> int:
    """Compute each of them as a product, in place, and return how many there are. Weights and their names stay."""
    layers = patch_convolutions(model)
    for layer in layers:
        layer.forward = functools.partial(patch_product, layer)
    return len(layers)


class FusedActivations:
    """A pass over graphs that torch.compile has traced: a linear layer's product does the ReLU or GELU behind it as well.

    By itself inductor leaves the product to a library and writes a kernel for the activation, which reads and writes the
    largest tensor of a transformer once more. GELU becomes its tanh form, which is what libraries have.
    """

    VERSION = "linear layers with their activations, 1"
    changed = graphs = 0
    """Counts so far; no graph is looked at when the compiled program is found in a cache."""

    def change(self, graph: torch.fx.Graph) -> None:
        functional = nn.functional
        uses_gelu = {functional.gelu: True, functional.relu: False, torch.relu: False, torch.relu_: False}
        for node in list(graph.nodes):
            target = getattr(torch, node.target, None) if node.op == "call_method" else node.target
            if node.op not in ("call_function", "call_method") or target not in uses_gelu:
                continue
            linear = next(iter(node.all_input_nodes), None)
            if linear is not None and linear.target is functional.linear and len(linear.users) == 1:
                self.changed += self.fuse(graph, node, linear, uses_gelu[target])

    def fuse(self, graph: torch.fx.Graph, node: Any, linear: Any, use_gelu: bool) -> bool:
        given = dict(zip(("input", "weight", "bias"), linear.args, strict=False)) | linear.kwargs
        operands = [given.get(name) for name in ("input", "weight", "bias")]
        tensors: list[Any] = [getattr(part, "meta", {}).get("example_value") for part in (*operands, linear)]
        # Autocast casts what goes into a linear layer, and would leave the joint kernel in the format it finds.
        is_plain = all(isinstance(tensor, Tensor) and tensor.dtype == tensors[0].dtype for tensor in tensors)
        if not is_plain or tensors[0].dim() < 2 or not all(type(side) is int for side in tensors[0].shape):
            return False
        inputs, weight, bias = operands
        with graph.inserting_before(node):
            rows = graph.call_method("reshape", (inputs, (-1, tensors[0].shape[-1])))
            columns = graph.call_method("t", (weight,))
            product = graph.call_function(torch._addmm_activation, (bias, rows, columns), {"use_gelu": use_gelu})
            output = graph.call_method("reshape", (product, tuple(tensors[3].shape)))
        output.meta["example_value"] = node.meta.get("example_value")
        node.replace_all_uses_with(output)
        graph.erase_node(node)
        graph.erase_node(linear)
        return True


def fuse_activations() -> Any:
    """Let torch.compile fuse them in everything that it compiles from now on."""
    return run_on_graphs("pre_grad_custom_pass", FusedActivations())


class SideStreams:
    """Two operators for compiled programs: one begins a weight gradient on another stream, the other waits for some of them."""

    STREAMS = 3
    """They take turns."""

    def __init__(self, namespace: str) -> None:
        self.library = torch.library.Library(namespace, "DEF")
        self.turns: dict[torch.device, Any] = {}
        tags = (torch.Tag.needs_fixed_stride_order,)
        geometry = (
            "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] outer, SymInt groups"
        )
        self.library.define(f"begin(Tensor gradient, Tensor input, Tensor weight, {geometry}) -> Tensor", tags=tags)
        # Tensors that are read on another stream go in as well, so that their memory is not given away before.
        self.library.define("finish(Tensor[] begun, Tensor[] read, Tensor[] weights) -> Tensor[]", tags=tags)
        for name, work, shaped in (("begin", self.begin, self.ticket), ("finish", self.finish, self.gradients)):
            self.library.impl(name, work, "CompositeExplicitAutograd")
            torch.library.register_fake(f"{namespace}::{name}", shaped, lib=self.library)

    def begin(self, gradient: Tensor, inputs: Tensor, weight: Tensor, *geometry: Any) -> Tensor:
        """Returns a ticket, which will hold the weight's gradient."""
        ticket: Any = self.ticket(gradient)
        side = self.next_stream(gradient.device)
        if side is not None:
            side.wait_stream(torch.cuda.current_stream(gradient.device))
        with torch.cuda.stream(side):
            backward, wanted = torch.ops.aten.convolution_backward, (False, True, False)
            ticket.gradient = backward(gradient, inputs, weight, (0,), *geometry, wanted)[1]
            ticket.done = side.record_event() if side is not None else None
        return ticket

    def finish(self, begun: list[Any], read: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
        for ticket in begun:
            if ticket.done is not None:
                torch.cuda.current_stream(ticket.device).wait_event(ticket.done)
        return [vars(ticket).pop("gradient") for ticket in begun]

    def next_stream(self, device: torch.device) -> Any:
        if device.type != "cuda":
            return None
        if device not in self.turns:
            self.turns[device] = itertools.cycle([torch.cuda.Stream(device) for _ in range(self.STREAMS)])
        return next(self.turns[device])

    @staticmethod
    def ticket(gradient: Tensor, *_: Any) -> Tensor:
        return gradient.new_empty(1)

    @staticmethod
    def gradients(begun: Any, read: Any, weights: list[Tensor]) -> list[Tensor]:
        return [torch.empty_like(weight) for weight in weights]


class OverlappedGradients:
    """A pass over graphs that torch.compile has made: weight gradients of convolutions are computed on streams of their own.

    Nothing in the backward waits for them, while the gradients of activations are a chain in which each kernel waits for the
    one before it. Kernels that do not fill the device then run at the same time.
    """

    HELD = 2**30
    """Bytes that the weight gradients of one group read. They stay in memory until the next group has begun."""
    NAMESPACE = "overlapped_gradients"
    VERSION = f"weight gradients on {SideStreams.STREAMS} streams that hold {HELD} bytes, 1"
    changed = graphs = 0
    """Counts so far; no graph is looked at when the compiled program is found in a cache."""

    @property
    def operators(self) -> Any:
        found = getattr(torch.ops, self.NAMESPACE)
        if not hasattr(found, "begin"):
            found.side_streams = SideStreams(self.NAMESPACE)
        return found

    def change(self, graph: torch.fx.Graph) -> None:
        backward = torch.ops.aten.convolution_backward.default
        every = [node for node in graph.nodes if node.target is backward]
        groups: list[list[Any]] = []
        held = self.HELD
        for node in every:
            if not self._is_suited(node) or self._is_awaited(node, every):
                continue
            size = sum(value.meta["val"].numel() * value.meta["val"].element_size() for value in node.args[:2])
            if held + size > self.HELD:
                groups, held = [*groups, []], 0
            groups[-1].append(node)
            held += size
            self.changed += 1
        ends = [*(group[-1] for group in groups[1:]), list(graph.nodes)[-1]]
        for group, end in zip(groups, ends, strict=False):
            self._move(graph, group, end)
        if groups:
            from torch._inductor.pattern_matcher import stable_topological_sort

            stable_topological_sort(graph)  # what takes a weight's gradient now stands behind the end of its group

    @staticmethod
    def _is_suited(node: Any) -> bool:
        """Both gradients are wanted, and the weight's is to lie in memory as the weight does."""
        weight, wanted, given = node.args[2].meta["val"], node.args[10], node.meta["val"][1]
        like_weight = torch.empty_like(weight)
        return wanted[0] and wanted[1] and (like_weight.stride(), weight.dtype) == (given.stride(), given.dtype)

    @staticmethod
    def _is_awaited(node: Any, others: list[Any]) -> bool:
        """True if another convolution's backward needs the weight's gradient, as where a network makes the weight."""
        seen = {user for user in node.users if user.args[1] == 1}
        ahead = list(seen)
        while ahead:
            new = set(ahead.pop().users) - seen
            ahead += new
            seen |= new
        return not seen.isdisjoint(others)

    def _move(self, graph: torch.fx.Graph, nodes: list[Any], end: Any) -> None:
        """Begin each weight gradient where it is computed now, and wait for all of them before `end`."""
        begun = []
        for node in nodes:
            gradient, inputs, weight, _, *geometry, wanted = node.args
            with graph.inserting_before(node):
                begun.append(graph.call_function(self.operators.begin.default, (gradient, inputs, weight, *geometry)))
            begun[-1].meta["val"] = SideStreams.ticket(gradient.meta["val"])
            node.args = (*node.args[:10], [True, False, wanted[2]])
        read, weights = [value for node in nodes for value in node.args[:2]], [node.args[2] for node in nodes]
        with graph.inserting_before(end):
            finished = graph.call_function(self.operators.finish.default, (begun, read, weights))
            finished.meta["val"] = [node.meta["val"][1] for node in nodes]
            for index, node in enumerate(nodes):
                made = graph.call_function(operator.getitem, (finished, index))
                made.meta["val"] = node.meta["val"][1]
                node.meta["val"] = (node.meta["val"][0], None, node.meta["val"][2])
                for user in [user for user in node.users if user.args[1] == 1]:
                    user.replace_all_uses_with(made)
                    graph.erase_node(user)


def overlap_gradients() -> Any:
    """Let torch.compile do so in everything that it compiles from now on."""
    import torch._inductor.config as settings

    overlapped = OverlappedGradients()
    _ = overlapped.operators  # needed for programs that are found in a cache, too
    settings.reorder_for_peak_memory = False  # otherwise it may move the waiting to where it has just begun
    return run_on_graphs("post_grad_custom_post_pass", overlapped)
