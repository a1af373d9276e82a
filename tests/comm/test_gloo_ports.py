"""The ports of gloo: open while a group is made, and then for nobody."""

import os
import socket
from collections.abc import Iterator

import pytest

from megaprec.comm import gloo_ports
from tests.refusals import raises
from tests.strangers import NOBODY, as_nobody


def port_of_a_group() -> socket.socket:
    """A socket as gloo's listener is."""
    return socket.create_server(("127.0.0.1", 0))


def test_who_connected_meanwhile_goes_on_and_nobody_connects_later() -> None:
    with gloo_ports.shut_when_connected():
        server = port_of_a_group()
        early = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    accepted.send(b"x")
    assert early.recv(1) == b"x"
    with pytest.raises(TimeoutError):
        socket.create_connection(server.getsockname(), timeout=0.3)
    for each in (server, early, accepted):
        each.close()


def test_a_port_that_was_open_before_stays_open() -> None:
    with port_of_a_group() as server:
        with gloo_ports.shut_when_connected():
            pass
        socket.create_connection(server.getsockname(), timeout=60).close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_another_user_who_connected_meanwhile_ends_the_run(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held: list[socket.socket] = []

    def connect() -> int:
        """The port, from a process that leaves its connection open to a child of its own."""
        held.append(socket.create_connection(server.getsockname()[:2]))
        if not os.fork():
            os.read(keeps_open, 1)
            os._exit(0)
        return held[0].getpeername()[1]

    keeps_open, end = os.pipe()
    shut = gloo_ports.shut_when_connected()
    shut.__enter__()
    server = socket.create_server((host, 0), family=family)
    port = as_nobody(connect)
    with raises("comm.other_user", user=NOBODY, address=host, port=port):
        shut.__exit__(None, None, None)
    os.write(end, b"x")
    for each in (keeps_open, end):
        os.close(each)
    server.close()


def test_a_connection_of_ones_own_is_no_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    def users(address: object) -> Iterator[int]:
        yield from (os.geteuid(), 0)

    monkeypatch.setattr(gloo_ports, "_users_connected_to", users)
    with gloo_ports.shut_when_connected():
        server = port_of_a_group()
    server.close()
