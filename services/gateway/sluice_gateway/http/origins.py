"""Which web pages may call the gateway from a browser: a check of what `--cors-origin` was given."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_address

ANY = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@,*]+", re.ASCII)


class OriginError(ValueError):
    """The message names the option and the remedy."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`, an address or a name."""
    if host == "localhost":
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback or (mapped is not None and mapped.is_loopback)


def check_origins(origins: Sequence[str], host: str) -> None:
    """`host`: where the gateway listens. Raises OriginError."""
    for origin in origins:
        if origin == ANY:
            if not is_loopback(host):
                raise OriginError(
                    f"--cors-origin * lets every web page that a user visits call this gateway, so it goes with a"
                    f" loopback address only, and not with {host}: name the origins of your pages instead"
                )
        elif _ORIGIN.fullmatch(origin) is None:
            raise OriginError(
                f"--cors-origin {origin!r} is no origin: give scheme, host and port of a page as the browser shows"
                " them, without a path, such as https://chat.example.com or http://localhost:3000"
            )
