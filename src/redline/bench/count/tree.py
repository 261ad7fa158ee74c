"""What was counted per module, summed up the tree of modules."""

from __future__ import annotations

from torch import nn

from redline.bench.count.counter import Share, WorkCounter
from redline.work import ModuleWork


def module_rows(model: nn.Module, counter: WorkCounter) -> list[ModuleWork]:
    """Parents before children, as `named_modules` tells them; what did nothing and holds nothing is left out."""
    rows = []
    whole = {path: Share() for path, _ in model.named_modules()}
    for path, share in counter.shares.items():
        for ancestor in ancestors(path):
            _add(whole[ancestor], share)
    for path, module in model.named_modules():
        share, calls = whole[path], counter.places.calls[path]
        params = sum(int(parameter.numel()) for parameter in module.parameters())
        if not (params or calls or share.bytes):
            continue
        rows.append(
            ModuleWork(
                path=path,
                type=type(module).__name__,
                params=params,
                calls=calls,
                number_format=share.formats.most_common(1)[0][0] if share.formats else "",
                flops=share.flops["forward"],
                backward_flops=share.flops["backward"],
                other_flops=share.other_flops,
                bytes=share.bytes["forward"],
                backward_bytes=share.bytes["backward"],
            )
        )
    return rows


def ancestors(path: str) -> list[str]:
    """The path itself, all those around it, and the model: `a.b`, `a` and the empty path."""
    found = [""]
    for position, character in enumerate(path):
        if character == ".":
            found.append(path[:position])
    return [*found, path] if path else found


def _add(total: Share, share: Share) -> None:
    total.flops.update(share.flops)
    total.bytes.update(share.bytes)
    total.formats.update(share.formats)
    total.other_flops += share.other_flops
