"""Passes over the graphs that torch.compile makes, as plain PyTorch that switches apply and snippets contain, unchanged.

As in `plain.py`, nothing here knows of Redline.
"""

from __future__ import annotations

from typing import Any


def add_pass(added: Any) -> None:
    """Have torch.compile call it on every graph from now on, after others, and in place of an earlier one of its class."""
    import torch._inductor.config as settings
    from torch._inductor.custom_graph_pass import CustomGraphPass

    before: Any = settings.post_grad_custom_post_pass
    known = getattr(before, "passes", [before] if before is not None else [])

    class Passes(CustomGraphPass):
        passes = (*(each for each in known if type(each) is not type(added)), added)

        def __call__(self, graph: Any) -> None:
            for each in self.passes:
                each(graph)

        def uuid(self) -> Any:
            """By which caches tell programs with these passes from those without."""
            return [each.uuid() for each in self.passes]

    settings.post_grad_custom_post_pass = Passes()
