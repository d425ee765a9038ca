"""A request inside an engine, and the facts that move it. Everything here is a value or owned by the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from sluice_engine.leader.scheduling.ledger import Holder, HolderKind
from sluice_engine.step import RecordRef, StepResult
from sluice_protocol.outputs import OutputLimit
from sluice_protocol.sampling import Sampling
from sluice_protocol.source import GrantedRecord
from sluice_records import ChainKey


class Mode(StrEnum):
    """UNIFIED: prefill and decode here. SOURCE: prefill here, a lease takes it away. READER: comes by a lease."""

    UNIFIED = "unified"
    SOURCE = "source"
    READER = "reader"


class Phase(StrEnum):
    WAITING = "waiting"  # no row yet
    PREFILLING = "prefilling"
    PULLING = "pulling"  # reader: records reserved, not committed
    DECODING = "decoding"
    HELD = "held"  # source: all done, the lease still holds the records
    ENDING = "ending"  # no more work; records go when the last step and the last handle that used them are done


class EndCause(StrEnum):
    FINISHED = "finished"
    PREEMPTED = "preempted"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """`prompt` + `outputs` are computed alike; `outputs` count against `sampling.max_tokens`."""

    id: int
    mode: Mode
    prompt: tuple[int, ...]
    outputs: tuple[int, ...]
    sampling: Sampling
    have_prefix: int = 0  # source: full pages the reader has already

    @property
    def num_tokens(self) -> int:
        """Given, not to come."""
        return len(self.prompt) + len(self.outputs)

    @property
    def limit(self) -> OutputLimit:
        """Of the outputs that are still to come."""
        return OutputLimit.of(self.sampling, len(self.outputs))


@dataclass(slots=True)
class Sequence:
    """`tokens`: all known to the scheduler. `computed`: positions written by the steps planned so far.
    `sampled`: tokens that those steps choose; those not seen yet are the difference to `len(tokens) - num_given`."""

    spec: SequenceSpec
    tokens: list[int]
    num_given: int
    phase: Phase = Phase.WAITING
    row: int | None = None
    state: RecordRef | None = None
    pages: list[RecordRef] = field(default_factory=list)
    computed: int = 0
    sampled: int = 0
    cached_tokens: int = 0
    chunks: int = 0
    keys: list[ChainKey] = field(default_factory=list)
    num_closed: int = 0  # leading pages that are closed
    snapshots: list[tuple[int, RecordRef]] = field(default_factory=list)  # (boundary in pages, not closed yet)
    borrowed: list[RecordRef] = field(default_factory=list)  # the snapshot it resumed from
    num_granted: int = 0  # source: leading pages granted or held by the reader already
    stopped: bool = False  # chose a stop token: later tokens are surplus
    last_step: int = -1
    handles_terminal: bool = True
    leased: list[RecordRef] = field(default_factory=list)
    cause: EndCause | None = None
    requeue: bool = False
    tainted: bool = False  # it may have computed from a record whose bytes had changed: nothing of it is cached
    # What follows from the spec, looked at in every step.
    id: int = field(init=False)
    mode: Mode = field(init=False)
    limit: OutputLimit = field(init=False)
    holder: Holder = field(init=False)
    lease_holder: Holder = field(init=False)

    def __post_init__(self) -> None:
        self.id, self.mode, self.limit = self.spec.id, self.spec.mode, self.spec.limit
        self.holder = Holder(HolderKind.SEQUENCE, self.spec.id)
        self.lease_holder = Holder(HolderKind.LEASE, self.spec.id)

    @property
    def sampling(self) -> Sampling:
        return self.spec.sampling

    @property
    def is_exhausted(self) -> bool:
        """Every token it may produce is planned."""
        return self.sampled >= self.limit.most


# -- facts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Aborted:
    """The client went, a deadline passed, or the first token ended it: no more work for this sequence."""

    id: int
    cause: EndCause = EndCause.ABORTED


@dataclass(frozen=True, slots=True)
class StepDone:
    result: StepResult


@dataclass(frozen=True, slots=True)
class PullGranted:
    """Reader: the source granted these, `peer` names its incarnation."""

    id: int
    lease_id: str
    peer: str
    records: tuple[GrantedRecord, ...]


@dataclass(frozen=True, slots=True)
class PullCommitted:
    """Reader: all verified, and the lease held to the end."""

    id: int
    first_token: int


@dataclass(frozen=True, slots=True)
class PullsTerminal:
    """Reader: no handle of this sequence's pulls is alive and none will be posted; `stranded` are given up on."""

    id: int
    stranded: tuple[RecordRef, ...] = ()


@dataclass(frozen=True, slots=True)
class Fenced:
    """The transport process is dead: nothing can land any more."""


@dataclass(frozen=True, slots=True)
class StrandingEnded:
    """A handle that was given up on became terminal after all: nothing can land in these records any more."""

    records: tuple[RecordRef, ...]


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """Source: the reader's hold is gone, whatever the reason."""

    id: int


@dataclass(frozen=True, slots=True)
class Suspected:
    """A reader says that these are not what was granted: they are verified before anything else is done with them."""

    records: tuple[RecordRef, ...]


@dataclass(frozen=True, slots=True)
class Corrupted:
    """Checks of these closed records failed: their memory does not have the bytes that were written."""

    records: tuple[RecordRef, ...]


@dataclass(frozen=True, slots=True)
class ScrubDue:
    """So many bytes of closed records may be verified in the background now."""

    nbytes: int


Fact = (
    Aborted
    | StepDone
    | PullGranted
    | PullCommitted
    | PullsTerminal
    | Fenced
    | StrandingEnded
    | LeaseEnded
    | Suspected
    | Corrupted
    | ScrubDue
)


# -- what the scheduler tells the leader ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Grant:
    """Source: records that the reader may read once the result of the step is here. (index, record); `valid` tokens."""

    id: int
    records: tuple[tuple[int, RecordRef, int], ...]
    final: bool


@dataclass(frozen=True, slots=True)
class Gone:
    """All records of the sequence are given back."""

    id: int
    cause: EndCause
    cached_tokens: int
    chunks: int
