"""One table: what a reason from an engine means for a retry and for the client."""

from __future__ import annotations

from dataclasses import dataclass

from sluice_gateway.openai.errors import ApiError, invalid, model_broken, poison_suspected, unavailable


@dataclass(frozen=True, slots=True)
class Policy:
    """`retry`: another try may succeed. `spends`: it costs of the fault budget. `status`: what the client gets.

    `source`: it points at the pair's prefill engine, to which others are preferred until it answers again.
    """

    retry: bool
    spends: bool
    status: int
    source: bool = False


FAULT = Policy(retry=True, spends=True, status=503)
SOURCE_FAULT = Policy(retry=True, spends=True, status=503, source=True)
FREE = Policy(retry=True, spends=False, status=503)
FINAL = Policy(retry=False, spends=False, status=400)
# Tokens that the client has may be wrong: to go on from them would only hide it.
SUSPECT = Policy(retry=False, spends=False, status=503)
# Not the client's fault, and the same on every engine of these weights.
BROKEN = Policy(retry=False, spends=False, status=500)

# Reasons of the gateway itself.
ENGINE_LOST = "EngineLost"
SOURCE_LOST = "SourceLost"
TOKENS_LOST = "TokensLost"
TOKENS_SUSPECT = "TokensSuspect"
PREEMPTED = "Preempted"
DRAINING = "Draining"

POLICIES: dict[str, Policy] = {
    ENGINE_LOST: FAULT,
    TOKENS_LOST: FAULT,
    PREEMPTED: FREE,
    DRAINING: FREE,
    "Quarantined": FREE,
    "NotAttached": FREE,
    "StreamTaken": FAULT,
    "AttachLost": FREE,
    "ResourceExhausted": FREE,
    "NoRowFree": FREE,
    "NoPagesFree": FREE,
    "NoStateFree": FREE,
    SOURCE_LOST: SOURCE_FAULT,
    "LeaseEnded": SOURCE_FAULT,
    "SourceSilent": SOURCE_FAULT,
    "LeaseProtocolError": SOURCE_FAULT,
    "PeerLost": SOURCE_FAULT,
    "PeerRefused": SOURCE_FAULT,
    "IncarnationChanged": SOURCE_FAULT,
    "BadSource": SOURCE_FAULT,
    "RoomFailed": SOURCE_FAULT,
    "UnknownMessage": SOURCE_FAULT,
    "GenerationMismatch": SOURCE_FAULT,
    "TransportAway": FREE,
    "TransportLost": FAULT,
    "WrongRole": FAULT,
    "NoSource": FAULT,
    "FingerprintMismatch": FAULT,
    "TransferFailed": FAULT,
    "DigestMismatch": FAULT,
    # A cached record had changed. Where no token came out of it, another try computes it anew.
    "RecordCorrupt": FAULT,
    TOKENS_SUSPECT: SUSPECT,
    "ContextTooLong": FINAL,
    "LargerThanPool": FINAL,
    "TokenOutOfRange": FINAL,
    "NothingToProduce": FINAL,
    "InvalidArgument": FINAL,
    "BadSampling": FINAL,
    "BadLogits": BROKEN,
}


def policy_of(reason: str) -> Policy:
    """An unknown reason is a fault: it may be retried, and it costs."""
    return POLICIES.get(reason, FAULT)


def client_error(reason: str, detail: str, tries: int, victims: int = 0) -> ApiError:
    """What the client is told when a request ends with `reason` after `tries` tries.

    `victims`: how many engines' lives ended while they had it in work."""
    policy = policy_of(reason)
    if policy.status == 400:
        code = "context_length_exceeded" if reason in ("ContextTooLong", "LargerThanPool") else reason
        return invalid(None, f"The engine refused the request: {detail or reason}", code)
    if policy.status == 500:
        return model_broken(f"The model made no answer to this request: {detail or reason}.", reason)
    if reason == TOKENS_SUSPECT:
        return unavailable(
            "Memory that this answer was computed from has changed, so what was sent of it may be wrong. Discard it and"
            " send the request again.",
            reason,
        )
    last = f"{reason} ({detail})" if detail else reason
    if victims > 1:
        return poison_suspected(victims, last)
    return unavailable(f"The engines could not finish this request after {tries} tries: {last}", reason)
