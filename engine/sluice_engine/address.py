"""Where somebody listens, as text: an IPv6 address has brackets."""

from __future__ import annotations


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> tuple[str, str]:
    """(host without brackets, port as text) of `host:port`, also where an IPv6 address came without brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), port
