"""The puller's sums, checked in tests after every fault and in production when idle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from sluice_engine.transfer.errors import BooksError
from sluice_engine.transfer.pull import Pull, PullState
from sluice_engine.transfer.sources import Sources
from sluice_engine.transfer.stranded import Stranded


def check_books(pulls: Sequence[Pull], sources: Sources, stranded: Stranded, counters: Mapping[str, int]) -> None:
    """Raises BooksError."""
    flights = Counter(pull.peer for pull in pulls if pull.flight is not None)
    for name, source in sources.items():
        if not source.in_flight == flights[name] <= sources.max_in_flight:
            raise BooksError(f"{name!r}: {source.in_flight} in flight on the books, {flights[name]} in fact")
        owed = sum(pull.owed_bytes for pull in pulls if pull.peer == name)
        if source.owed_bytes != owed:
            raise BooksError(f"{name!r}: {source.owed_bytes} bytes owed on the books, {owed} in fact")
    zombies = [pull for pull in pulls if pull.state is PullState.ZOMBIE]
    landing = {at for pull in zombies for at in pull.in_flight_records}
    if stranded.records != landing:
        raise BooksError(f"stranded are {sorted(stranded.records)}, zombies write {sorted(landing)}")
    posted, ended = counters["pieces_posted"], counters["pieces_done"] + counters["pieces_failed"]
    if posted != ended + flights.total():
        raise BooksError(f"{posted} pieces posted, {ended} ended, {flights.total()} in flight")
