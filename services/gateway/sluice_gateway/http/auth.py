"""API keys."""

from __future__ import annotations

import hashlib
import hmac

from sluice_gateway.openai.errors import unauthorized


def check_key(header: str | None, keys: tuple[str, ...]) -> None:
    """Raises 401 unless `Authorization: Bearer <one of keys>`. Without keys everybody may come.

    Every key is compared, by digest, so the time tells neither which key was near nor how long keys are.
    """
    if not keys:
        return
    scheme, _, given = (header or "").partition(" ")
    if scheme.lower() != "bearer" or not given.strip():
        raise unauthorized("You didn't provide an API key. Send it in the header Authorization: Bearer <key>.")
    digest = _digest(given.strip())
    if not sum(hmac.compare_digest(digest, _digest(key)) for key in keys):
        raise unauthorized("Incorrect API key provided.")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
