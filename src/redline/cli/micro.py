"""`redline micro`."""

from __future__ import annotations

import typer


def micro(context: typer.Context) -> int:
    """Run `micro_benchmarking_pytorch.py` with its own flags ('redline micro --help' lists them).

    \b
    Examples:
      redline micro --network resnet50 --batch-size 64 --iterations 20
      redline micro --network resnet50 --fp16 1 --flops-prof-step 10
    """
    from redline.compat.micro import main

    return main(context.args)
