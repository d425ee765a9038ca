"""Why there is no connection to a peer: gRPC says "Socket closed" where TLS has a reason. One bounded try, by the
standard library, of the same handshake."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time

from sluice_runtime.tls.identity import Identity, context_of
from sluice_runtime.tls.peers import Peer

TRY_S = 2.0
# The client's preface and empty settings of HTTP/2: a server that takes our certificate answers with its own.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
# OpenSSL's X509_V_ERR_*.
_NOT_YET_VALID, _EXPIRED, _OTHER_NAME = 9, 10, 62


async def why_not(address: str, peer: Peer, identity: Identity | None, timeout_s: float = TRY_S) -> str:
    """Empty when it is nothing about TLS. `identity` None: we speak plain text."""
    try:
        async with asyncio.timeout(timeout_s):
            return await (_speaks_tls(address) if identity is None else _why_not(address, peer, identity))
    except (OSError, TimeoutError, EOFError, ValueError):
        return ""  # nothing listens there, or it is slow: what gRPC says will do


async def _why_not(address: str, peer: Peer, identity: Identity) -> str:
    expected = str(identity.name.of(peer))
    try:
        took_ours = await _exchange(address, context_of(identity), expected)
    except ssl.SSLCertVerificationError as error:
        return _of_theirs(address, expected, error)
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "UNEXPECTED_EOF_WHILE_READING", "HTTP_REQUEST"):
            return f"{address} does not speak TLS: let it have --tls-dir too"
        return f"{address} breaks off the TLS handshake: {error.reason or error}"
    except ConnectionResetError:
        return f"{address} breaks off the TLS handshake"
    if took_ours:
        return ""
    over = time.time() - identity.not_after
    if over > 0:
        return f"{address} refuses our certificate: it expired {over:.0f} s ago"
    return f"{address} refuses our certificate: it trusts none of the CAs that signed it"


def _of_theirs(address: str, expected: str, error: ssl.SSLCertVerificationError) -> str:
    told = {
        _EXPIRED: "has expired",
        _NOT_YET_VALID: "is not valid yet: whose clock is wrong?",
        _OTHER_NAME: f"is not of {expected}",
    }.get(error.verify_code, f"is signed by none of the CAs that we trust ({error.verify_message})")
    return f"the certificate of {address} {told}"


async def _speaks_tls(address: str) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        await _exchange(address, context, "")
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "UNEXPECTED_EOF_WHILE_READING"):
            return ""
    return f"{address} speaks TLS, and we do not: start us with --tls-dir"


async def _exchange(address: str, context: ssl.SSLContext, name: str) -> bool:
    """Whether it answered after the handshake. Raises OSError, ssl.SSLError."""
    host, _, port = address.rpartition(":")
    context.set_alpn_protocols(["h2"])
    reader, writer = await asyncio.open_connection(
        host.strip("[]"), int(port), ssl=context, server_hostname=name or None
    )
    try:
        writer.write(_PREFACE)
        return bool(await reader.read(1))
    except ConnectionResetError:
        return False
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
