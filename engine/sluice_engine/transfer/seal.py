"""Authentication of a source's metadata: one flipped byte of it can abort the process that loads it.

A sealed blob is an HMAC-SHA256 tag followed by the agent's metadata. The tag covers everything in the hello that says
where bytes lie and whose they are, under the key of the run.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import replace

import msgspec

from sluice_engine.transfer.errors import BadPeer
from sluice_protocol.source import SourceHello

KEY_BYTES = 32
TAG_BYTES = 32


def seal(hello: SourceHello, key: bytes) -> SourceHello:
    """The hello with its bare `agent_metadata` sealed."""
    return replace(hello, agent_metadata=_tag(hello, hello.agent_metadata, key) + hello.agent_metadata)


def open_seal(hello: SourceHello, key: bytes) -> bytes:
    """The bare metadata. Raises BadPeer when tag and hello do not belong together."""
    tag, metadata = hello.agent_metadata[:TAG_BYTES], hello.agent_metadata[TAG_BYTES:]
    if not hmac.compare_digest(tag, _tag(hello, metadata, key)):
        raise BadPeer(f"metadata of {hello.incarnation!r} is not sealed with the key of this run")
    return metadata


def _tag(hello: SourceHello, metadata: bytes, key: bytes) -> bytes:
    pools = [msgspec.to_builtins(pool) for pool in hello.pools]
    covered = (hello.incarnation, hello.transport, hello.agent_name, hello.pid, pools, metadata)
    return hmac.digest(key, msgspec.msgpack.encode(covered), hashlib.sha256)
