"""Where the gateway's front door is."""

from __future__ import annotations

import socket

import pytest

from sluice_gateway.http.serve import listen, url_of


def dial(host: str, port: int) -> str:
    with socket.create_connection((host, port), 10) as sock:
        return str(sock.getpeername()[0])


def test_a_star_is_every_address_of_both_families() -> None:
    with listen("*:0") as sock:
        port = sock.getsockname()[1]
        assert [dial(host, port) for host in ("127.0.0.1", "::1")] == ["127.0.0.1", "::1"]
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_star_on_a_machine_without_ipv6_is_every_address_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with listen("*:0") as sock:
        assert sock.family is socket.AF_INET
        assert dial("127.0.0.1", sock.getsockname()[1]) == "127.0.0.1"


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0", "::1:0"])
def test_one_address_is_that_one(address: str) -> None:
    with listen(address) as sock:
        host = sock.getsockname()[0]
        assert host == address.removesuffix(":0").strip("[]")
        assert url_of(sock) in (f"http://{host}:{sock.getsockname()[1]}", f"http://[{host}]:{sock.getsockname()[1]}")
