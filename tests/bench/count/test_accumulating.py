"""Which buffers a model adds to call by call, on one that does so in several ways."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from redline.bench.count.facts import facts_of
from redline.bench.device.cpu import CpuDevice
from redline.bench.workload.workload import assemble
from redline.model.spec import Task
from redline.model.work import Facts


def facts(model: nn.Module, task: Task = "infer") -> Facts:
    inputs = ((torch.randn(3, 4),), {})
    return facts_of(assemble(model, inputs, task=task, source="test", identity="test", seed=0), CpuDevice(), "sgd", 0)


class Accumulates(nn.Module):
    """A count, one that is replaced, a moving average; and what only looks like them: a cache and a line of the last inputs."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in {"count": 3.0, "replaced": 3.0, "mean": 0.5}.items():
            self.register_buffer(name, torch.tensor(value))
        self.register_buffer("total", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("cache", torch.randn(8, 4))
        self.register_buffer("line", torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        seen = x.detach()
        self.count += 1
        self.replaced = self.replaced + 1
        self.mean.lerp_(seen.mean(), 0.01)
        self.total += 1
        self.cache[2:5] = seen + self.total[0] * self.cache[0]
        self.line.copy_(torch.cat([self.line[3:], seen * self.total[0]]))
        return x * self.mean + self.cache.sum() + self.line.sum() + self.count + self.replaced


def test_what_the_forward_adds_to_call_by_call() -> None:
    model = nn.Sequential(Accumulates())
    before = {name: value.clone() for name, value in model.named_buffers()}
    found = facts(model)
    assert {"0.cache", "0.line", "0.total"} < set(found.mutates)
    assert set(found.accumulates) == {"0.count", "0.replaced", "0.mean"}
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    trained = nn.Sequential(nn.Linear(4, 4), Accumulates())
    assert facts(trained, task="train").accumulates == ()
