"""Addresses of listening sockets as text: an IPv6 address has brackets."""

from __future__ import annotations

from urllib.parse import unquote


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> tuple[str, str]:
    """(host without brackets, port as text) of `host:port`, also where an IPv6 address came without brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), port


def host_of(peer: str) -> str:
    """The host in what gRPC says of a peer: `ipv4:127.0.0.1:5000`, `ipv6:%5B::1%5D:5000`; anything else as it is."""
    kind, _, address = peer.partition(":")
    return split(unquote(address))[0] if kind in ("ipv4", "ipv6") else peer
