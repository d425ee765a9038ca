"""What can go wrong when records move, split by whose fault it is and whether a retry can help."""

from __future__ import annotations

from sluice_engine.errors import EngineError


class TransferError(EngineError):
    """Base of this package's errors. `reason` is one word for counters, the message says the rest."""

    @property
    def reason(self) -> str:
        return type(self).__name__


class TransferUnavailable(TransferError):
    """This machine or process has no such transport. Nothing falls back silently: say so and end."""


class PeerError(TransferError):
    """The source's fault."""


class BadPeer(PeerError):
    """What the source said cannot be used. The same words again will not do better."""


class PeerLost(PeerError):
    """The source's process is gone, or never was attached. Wait for its next incarnation."""


class PlanRejected(TransferError):
    """A set of pulls that must not be posted; `cause` is one word."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause, self.detail = cause, detail

    @property
    def reason(self) -> str:
        return self.cause


class StaleRecord(TransferError):
    """A record was asked for in a life that it does not live any more (source side of the byte stream)."""


class HandleMisuse(TransferError):
    """Our own bug: an unknown handle, or one released before it was terminal."""


class LinkClosed(TransferError):
    """The transport sidecar is gone, and with it everything that was in flight."""


class BooksError(TransferError):
    """The puller's sums do not add up: a bug of ours. Ends the process, with evidence."""
