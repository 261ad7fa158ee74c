"""`redline serve`."""

from __future__ import annotations

from typing import Annotated

from redline.cli.options import WAY, Exit, opt, tell


def serve(
    host: Annotated[
        str, opt(group=WAY, help="The address to listen on. Any other than loopback requires the token.")
    ] = "127.0.0.1",
    port: Annotated[int, opt(group=WAY, help="The port; 0 takes a free one.")] = 8765,
    token: Annotated[bool, opt("--token", group=WAY, help="Require a token on loopback too.")] = False,
    name: Annotated[
        list[str] | None, opt("--name", group=WAY, help="Another host name it answers to. Repeatable.")
    ] = None,
) -> int:
    """Show the history as a web page, live and read-only.

    Ctrl-C ends it. The address is printed on stderr. With a token, the address contains it: open it once, and a cookie remembers it.

    \b
    Examples:
      redline serve
      redline serve --host 0.0.0.0 --name bench.example.org
    """
    from redline.api.serve import serve as run_server
    from redline.system.processes import give_way

    def on_start(address: str) -> None:
        give_way()  # not before: while it starts, somebody waits for it
        tell(f"redline: {address}")

    run_server(host=host, port=port, token=token, names=tuple(name or ()), on_start=on_start)
    return Exit.DONE
