"""Counting a transformer of seven billion parameters, forward and backward, without its 27 GB: seconds and memory.

Redline's count (per module, per operator, with bytes) against the plain alternative, torch's own `FlopCounterMode` on
the meta device, which counts products alone. Each runs in a process of its own, so that its peak memory is its own.
Target: below 10 s and below 2 GB. Both are set against 6·N·tokens and the attention term.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any

WIDTH, LAYERS, HEADS, HIDDEN, VOCABULARY = 4096, 32, 32, 11008, 32000
BATCH, TOKENS = 1, 2048


def make_model() -> Any:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    class Block(nn.Module):
        """Attention and a gated MLP behind RMS norms, as Llama has them."""

        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
            self.out = nn.Linear(WIDTH, WIDTH, bias=False)
            self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
            self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
            self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            batch, length, _ = x.shape
            split = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
            query, key, value = split.permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
            middle = self.norm2(x)
            return x + self.down(F.silu(self.gate(middle)) * self.up(middle))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm = nn.RMSNorm(WIDTH)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    torch.set_default_dtype(torch.bfloat16)
    return Model()


def count_with_redline() -> dict[str, Any]:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from redline.bench.count.count import Task, count_work

    started = time.perf_counter()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = make_model()
        tokens = torch.randint(0, VOCABULARY, (BATCH, TOKENS))
    work = count_work(Task(model=model, inputs=((tokens,), {}), loss=lambda out: out.float().mean()))
    return {
        "flops": work.total_flops,
        "ratio": work.backward_flops / work.flops,
        "params": work.params,
        "uncounted": [one.name for one in work.uncounted],
        "seconds": time.perf_counter() - started,
    }


def count_with_torch() -> dict[str, Any]:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    started = time.perf_counter()
    with torch.device("meta"):
        model = make_model()
        tokens = torch.randint(0, VOCABULARY, (BATCH, TOKENS))
    counter = FlopCounterMode(display=False)
    with counter:
        model(tokens).float().mean().backward()
    params = sum(parameter.numel() for parameter in model.parameters())
    seconds = time.perf_counter() - started
    return {"flops": counter.get_total_flops(), "params": params, "seconds": seconds}


def in_a_process(which: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, which], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    if len(sys.argv) > 1:
        found = {"redline": count_with_redline, "torch": count_with_torch}[sys.argv[1]]()
        found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps(found))
        return
    ours, theirs = in_a_process("redline"), in_a_process("torch")
    tokens = BATCH * TOKENS
    # Looking a token up multiplies nothing. Causal: half of 4·N²·d per head forward, 2.5 times that backward.
    weights = 6 * (ours["params"] - VOCABULARY * WIDTH) * tokens
    attention = 3.5 * LAYERS * BATCH * 4 * TOKENS * TOKENS * WIDTH / 2
    expected = weights + attention
    print(f"{ours['params'] / 1e9:.2f} billion parameters, {tokens} tokens, forward and backward")
    print(f"expected: 6·N·tokens {weights / 1e12:.2f} + attention {attention / 1e12:.2f} = {expected / 1e12:.2f} TFLOP")
    for name, found in (("redline", ours), ("torch's FlopCounterMode on meta", theirs)):
        print(
            f"{name:<32} {found['seconds']:6.2f} s  {found['peak_bytes'] / 1e9:5.2f} GB  {found['flops'] / 1e12:8.2f} TFLOP "
            f"({found['flops'] / expected - 1:+.2%})"
        )
    print(f"redline's backward is {ours['ratio']:.3f}× its forward; not counted: {ours['uncounted'] or 'nothing'}")
    met = ours["seconds"] < 10 and ours["peak_bytes"] < 2e9
    print(
        f"target 10 s and 2 GB: {'met' if met else 'NOT MET'}; {ours['seconds'] / theirs['seconds']:.2f}× torch's time"
    )


if __name__ == "__main__":
    main()
