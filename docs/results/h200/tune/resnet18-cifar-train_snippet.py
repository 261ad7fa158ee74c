"""resnet18, training, batch 256: amp-bf16+channels-last+compile+fused-optimizer+graphs+cudnn-benchmark.

Plain PyTorch: nothing of Redline is needed.

    args, kwargs = prepare_inputs(*inputs)
    step = make_training_step(model, loss, args, kwargs, targets)  # shapes are fixed by the example
    value = step(args, kwargs, targets)  # one whole training step; returns the loss
"""

import torch
from torch.utils._pytree import tree_leaves, tree_map_only


def prepare_inputs(*args, **kwargs):
    """Inputs where and how this recipe wants them: a tuple of arguments and a dict of keywords."""

    def change(tensor):
        tensor = tensor.to("cuda")
        tensor = tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
        return tensor

    return tree_map_only(torch.Tensor, change, (args, kwargs))


def make_training_step(model, loss, args, kwargs, targets):
    """A function that takes prepared inputs and targets, does one step and returns the loss."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    model = model.to("cuda").train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model = model.to(memory_format=torch.channels_last)
    model = torch.compile(model, dynamic=False)
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True)

    def step(args, kwargs, targets):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            value = loss(model(*args, **kwargs), targets)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.detach()

    return recorded(step, (args, kwargs, targets))


def recorded(step, example):
    """The whole step as one CUDA graph; the model has made three steps on the example when this returns.

    The loss it returns is overwritten by the next call: copy what you want to keep.
    """
    own = tree_map_only(torch.Tensor, torch.clone, example)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(*own)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        value = step(*own)

    def replay(*given):
        for held, tensor in zip(tree_leaves(own), tree_leaves(given), strict=True):
            if isinstance(held, torch.Tensor):
                held.copy_(tensor)
        graph.replay()
        return value

    return replay


if __name__ == "__main__":
    import time

    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.get_model("resnet18", weights=None, num_classes=10)
    args, kwargs = ((torch.randn(256, 3, 32, 32),), {})
    classes = 10
    targets = torch.randint(0, classes, (256,), device="cuda")
    args, kwargs = prepare_inputs(*args, **kwargs)
    step = make_training_step(model, torch.nn.functional.cross_entropy, args, kwargs, targets)

    def seconds_per_step(steps):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            step(args, kwargs, targets)
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / steps

    rough = seconds_per_step(10)
    rough = seconds_per_step(max(10, round(1 / rough)))
    times = sorted(seconds_per_step(max(1, round(0.25 / rough))) for _ in range(12))
    print(f"{256 / times[len(times) // 2]:.1f} items/s")
