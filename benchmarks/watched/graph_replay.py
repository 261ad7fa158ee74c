"""Steps that call nothing of torch's: a recorded CUDA graph that is replayed; on a CPU a step that was traced once."""

import torch
from own import Own
from parts import Pictures, loss_of, small_model
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.data import DataLoader

BATCH = 32
has_gpu = torch.cuda.is_available()
loader = DataLoader(Pictures(200 * BATCH if has_gpu else 80 * BATCH), batch_size=BATCH)
own = Own()


def recorded_step(model: torch.nn.Module, images: torch.Tensor, targets: torch.Tensor) -> torch.cuda.CUDAGraph:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model(images), targets).backward()
            optimizer.step()
            own.skipped += 1
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad()
    with torch.cuda.graph(graph):
        loss_of(model(images), targets).backward()
        optimizer.step()
    return graph


def traced_step(parameters, images, targets):
    def loss(values):
        return loss_of(torch.func.functional_call(model, values, (images,)), targets)

    gradients = torch.func.grad(loss)(parameters)
    return {name: value - 0.01 * gradients[name] for name, value in parameters.items()}


model = small_model(64 if has_gpu else 8)
static = (torch.randn(BATCH, 3, 16, 16), torch.zeros(BATCH, dtype=torch.long))
if has_gpu:
    model, static = model.cuda(), tuple(each.cuda() for each in static)
    graph = recorded_step(model, *static)
else:
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    step = make_fx(traced_step)(weights, *static)
own.begin()
for batch in loader:
    own.got()
    if has_gpu:
        for buffer, part in zip(static, batch, strict=True):
            buffer.copy_(part)
        graph.replay()
        torch.cuda.synchronize()
    else:
        weights = step(weights, *batch)
    own.step(BATCH)
own.end()
own.tell()
