"""Whatever passes the door arrives as it was sent; a door that breaks is told from a worker that is gone."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest
from filled import filled

from redline.model.errors import DoorError
from redline.model.protocol import (
    Ask,
    BlockReply,
    Close,
    Prepare,
    Progress,
    Question,
    Reply,
    Request,
    receive_reply,
    receive_request,
    send,
)
from redline.model.record import Block

Pair = tuple[socket.socket, socket.socket]

REQUESTS = [filled(kind) for kind in get_args(Request) if kind is not Ask]
REQUESTS += [Ask(question=filled(kind)) for kind in get_args(Question)]
REPLIES = [filled(kind) for kind in get_args(Reply)]
PROGRESS = Progress(stage="compile", detail="fp16")


@pytest.fixture
def pair() -> Iterator[Pair]:
    desk, bench = socket.socketpair()
    desk.settimeout(20.0)
    bench.settimeout(20.0)
    with desk, bench:
        yield desk, bench


def framed(body: bytes) -> bytes:
    return struct.pack("!Q", len(body)) + body


class TestTheWire:
    @pytest.mark.parametrize(
        ("message", "receive"),
        [(request, receive_request) for request in REQUESTS] + [(reply, receive_reply) for reply in REPLIES],
        ids=lambda value: type(getattr(value, "question", value)).__name__,
    )
    def test_carries_every_message(self, pair: Pair, message: Any, receive: Any) -> None:
        send(pair[0], message)
        received = receive(pair[1])
        assert received == message
        assert type(received) is type(message)

    def test_does_not_mind_how_the_bytes_trickle_in(self, pair: Pair) -> None:
        desk, bench = pair
        data = framed(msgspec.msgpack.encode(PROGRESS))

        def trickle() -> None:
            for position in range(len(data)):
                bench.sendall(data[position : position + 1])

        sender = threading.Thread(target=trickle)
        sender.start()
        assert receive_reply(desk) == PROGRESS
        sender.join()

    def test_carries_blocks_larger_than_any_buffer(self, pair: Pair) -> None:
        desk, bench = pair
        samples = tuple(number * 1e-9 for number in range(1_000_000))
        reply = BlockReply(block=filled(Block, samples=samples))
        sender = threading.Thread(target=send, args=(bench, reply))
        sender.start()
        received = receive_reply(desk)
        sender.join()
        assert received == reply


class TestAnEnd:
    def test_between_messages_is_none(self, pair: Pair) -> None:
        desk, bench = pair
        desk.close()
        assert receive_request(bench) is None

    @pytest.mark.parametrize("kept", [1, 7, 8, 9, -1])
    def test_in_the_middle_of_a_frame_is_none(self, pair: Pair, kept: int) -> None:
        desk, bench = pair
        bench.sendall(framed(msgspec.msgpack.encode(PROGRESS))[:kept])
        bench.close()
        assert receive_reply(desk) is None

    def test_by_reset_is_none(self) -> None:
        """A worker that is killed with our request unread resets the connection."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            desk = socket.create_connection(server.getsockname(), timeout=20.0)
            bench, _ = server.accept()
            with desk:
                desk.sendall(b"never read")
                bench.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                bench.close()
                assert receive_reply(desk) is None


class TestNonsense:
    bodies = {
        "nothing": b"",
        "no msgpack": b"\xc1",
        "text": b"Traceback (most recent call last)",
        "no table": msgspec.msgpack.encode([1, 2]),
        "no type": msgspec.msgpack.encode({"stage": "build"}),
        "an unknown type": msgspec.msgpack.encode({"type": "Gossip"}),
        "not UTF-8": b"\x81\xa4type\xa2\xff\xfe",
        "bottomless": b"\x81\xa4type\xa9Progress\xa5stage" + b"\x91" * 100_000,
        "cut": msgspec.msgpack.encode(PROGRESS)[:-1],
    }

    @pytest.mark.parametrize(("sender", "receive"), [("worker", receive_reply), ("desk", receive_request)])
    @pytest.mark.parametrize("body", bodies.values(), ids=bodies)
    def test_breaks_the_door(self, pair: Pair, body: bytes, sender: str, receive: Any) -> None:
        sending = threading.Thread(target=pair[0].sendall, args=(framed(body),))
        sending.start()
        with pytest.raises(DoorError, match=f"the {sender} sent something that is not a message"):
            receive(pair[1])
        sending.join()

    def test_is_a_message_in_the_wrong_direction(self, pair: Pair) -> None:
        desk, bench = pair
        send(desk, Progress(stage="build"))
        with pytest.raises(DoorError, match="Progress"):
            receive_request(bench)
        send(bench, Close())
        with pytest.raises(DoorError, match="Close"):
            receive_reply(desk)

    def test_is_a_field_nobody_knows(self, pair: Pair) -> None:
        desk, bench = pair
        bench.sendall(framed(msgspec.msgpack.encode({"type": "Progress", "stage": "build", "mood": "good"})))
        with pytest.raises(DoorError, match="mood"):
            receive_reply(desk)

    def test_is_a_spec_out_of_range(self, pair: Pair) -> None:
        desk, bench = pair
        plain = msgspec.to_builtins(filled(Prepare))
        plain["spec"]["workload"]["batch"] = 0
        desk.sendall(framed(msgspec.msgpack.encode(plain)))
        with pytest.raises(DoorError, match="batch must be 1 or more"):
            receive_request(bench)
