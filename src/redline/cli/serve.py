"""`redline serve`."""

from __future__ import annotations

from typing import Annotated

from redline.cli.options import HOW, Exit, opt, tell


def serve(
    host: Annotated[
        str, opt(group=HOW, help="The address to listen on. Any but loopback needs the token.")
    ] = "127.0.0.1",
    port: Annotated[int, opt(group=HOW, help="The port; 0 takes a free one.")] = 8765,
    token: Annotated[bool, opt("--token", group=HOW, help="Ask for a token on loopback too.")] = False,
    name: Annotated[
        list[str] | None, opt("--name", group=HOW, help="Another host name under which it may be asked. Repeatable.")
    ] = None,
) -> int:
    """Show the history as a web page, with live progress. Read-only; ends with Ctrl-C.

    The address is printed on stderr. With a token it contains the token: open it once, a cookie then keeps it.

    \b
    Examples:
      redline serve
      redline serve --host 0.0.0.0 --name bench.example.org
    """
    from redline.api.serve import serve as run_server

    run_server(
        host=host, port=port, token=token, names=tuple(name or ()), on_start=lambda address: tell(f"redline: {address}")
    )
    return Exit.DONE
