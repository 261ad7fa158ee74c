"""The worker's loop: a request in, `Progress` on the way, one reply out, until the desk hangs up.

Started as `python -m redline.bench.worker FD REQUESTED_AT` by the spawn door, or forked by the fork server.
"""

from __future__ import annotations

import socket
import sys
import time

from redline.bench.process import volunteer_for_oom
from redline.protocol import Close, Progress, receive_request, send


def serve(connection: socket.socket, *, import_s: float | None, requested_at: float) -> None:
    from redline.bench.session import BenchSession

    session = BenchSession(
        on_progress=lambda stage, detail: send(connection, Progress(stage=stage, detail=detail)),
        import_s=import_s,
        start_s=time.time() - requested_at,
    )
    while (request := receive_request(connection)) is not None:
        send(connection, session.handle(request))
        if isinstance(request, Close):
            return


def main(arguments: list[str]) -> None:
    descriptor, requested_at = int(arguments[0]), float(arguments[1])
    volunteer_for_oom()
    started = time.perf_counter()
    import torch  # noqa: F401  (timed here, on its own)
    import torchvision  # noqa: F401

    import_s = time.perf_counter() - started
    serve(socket.socket(fileno=descriptor), import_s=import_s, requested_at=requested_at)


if __name__ == "__main__":
    main(sys.argv[1:])
