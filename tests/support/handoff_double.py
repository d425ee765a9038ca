"""A source and a reader engine joined in memory: grants become pulls, bytes are copied, then committed. No streams."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_double import Engine

from sluice_engine.leader.scheduling.sequence import Grant, LeaseEnded, Mode, PullCommitted, PullGranted
from sluice_engine.leader.scheduling.state import Plan
from sluice_protocol.source import GrantedRecord


@dataclass
class Handoff:
    """`outputs` are what a client would have seen: the first token comes from the source."""

    source: Engine
    reader: Engine
    outputs: dict[int, list[int]] = field(default_factory=dict)
    _rooms: dict[int, int] = field(default_factory=dict)  # sequence at the source -> at the reader
    _waiting: dict[int, list[Grant]] = field(default_factory=dict)  # by step at the source
    _prompts: dict[int, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    pulled_records: int = 0

    def submit(self, prompt: tuple[int, ...], max_tokens: int) -> int:
        """The reader's sequence number."""
        sequence = self.reader.submit(prompt, max_tokens, mode=Mode.READER)
        self._prompts[sequence] = (prompt, max_tokens)
        self.outputs[sequence] = []
        return sequence

    def run(self, max_steps: int = 3000) -> None:
        for _ in range(max_steps):
            idle = not self.reader.loop.has_work
            if idle and not self.source.loop.has_work:
                break
            if not idle:
                self._on_reader_plan(self.reader.step())
            if self.source.loop.has_work:
                self._on_source_plan(self.source.step())
        else:
            raise AssertionError("still busy")
        for sequence in self.outputs:
            self.outputs[sequence] += self.reader.outputs[sequence]
        for engine in (self.source, self.reader):
            engine.run()
            assert not engine.state.sequences

    def _on_reader_plan(self, planned: Plan) -> None:
        for sequence, have_prefix in planned.rooms:
            prompt, max_tokens = self._prompts[sequence]
            room = self.source.submit(prompt, max_tokens, mode=Mode.SOURCE, have_prefix=have_prefix)
            self._rooms[room] = sequence
        for pulls in planned.record.pulls:
            for item in pulls.items:
                self.pulled_records += 1
                there, here = self.source.pools[item.kind], self.reader.pools[item.kind]
                here.record(item.destination)[:] = there.record(item.source)
                trailer = here.trailer(item.destination)
                assert (trailer.identity, trailer.digest) == (item.identity, item.digest)
                assert here.digest(item.destination, trailer.identity) == trailer.digest
        for room, sequence in list(self._rooms.items()):
            if pulls_of(planned, sequence) and self._is_complete(room):
                del self._rooms[room]
                self.source.tell(LeaseEnded(room))
                self.reader.tell(PullCommitted(sequence, self.outputs[sequence][0]))

    def _is_complete(self, room: int) -> bool:
        return any(g.id == room and g.final for p in self.source.plans for g in p.grants)

    def _on_source_plan(self, planned: Plan) -> None:
        """In lockstep the step has run when the plan comes back: its digests are in the trailers."""
        for grant in planned.grants:
            sequence = self._rooms[grant.id]
            if grant.final:
                self.outputs[sequence].append(self.source.outputs[grant.id][0])
            records = []
            for index, ref, valid in grant.records:
                trailer = self.source.pools[ref.kind].trailer(ref.record)
                records.append(
                    GrantedRecord(
                        ref.kind.value, ref.record, ref.generation, trailer.identity, trailer.digest, valid, index
                    )
                )
            self.reader.tell(PullGranted(sequence, str(sequence), "source", tuple(records)))


def pulls_of(planned: Plan, sequence: int) -> bool:
    return any(pulls.lease_id == str(sequence) for pulls in planned.record.pulls)
