"""The prompt worker's jobs, as decisions."""

from __future__ import annotations

import signal

from sluice_gateway.text.prompt_queue import Blame, Entry, Phase, blame, next_starts

PARSE, PARSED, ENCODE = Phase.PARSE, Phase.PARSED, Phase.ENCODE


def test_one_job_of_each_phase_is_in_work_the_oldest_first() -> None:
    waiting = [Entry(1, ENCODE), Entry(2, ENCODE), Entry(3, PARSED), Entry(4, PARSE), Entry(5, PARSE)]
    assert next_starts(waiting) == [4, 1]
    assert next_starts([Entry(1, ENCODE, runs=True), *waiting[1:]]) == [4]
    assert next_starts([Entry(1, ENCODE, runs=True), Entry(2, ENCODE), Entry(4, PARSE, runs=True)]) == []


def test_a_job_that_runs_alone_has_nothing_beside_it() -> None:
    assert next_starts([Entry(1, PARSE, runs=True, alone=True), Entry(2, ENCODE)]) == []
    assert next_starts([Entry(1, PARSE, alone=True), Entry(2, ENCODE, runs=True), Entry(3, PARSE)]) == []
    assert next_starts([Entry(1, PARSE), Entry(2, ENCODE, alone=True)]) == [2]


def test_a_job_that_took_too_long_fails_and_no_other_one() -> None:
    running = [Entry(1, ENCODE, runs=True), Entry(2, PARSE, runs=True), Entry(3, PARSE)]
    assert blame(running, -signal.SIGKILL, overrun=1) == Blame(failed=frozenset({1}))


def test_the_only_job_of_a_worker_that_aborted_fails() -> None:
    """That is what the allocator does at the limit."""
    assert blame([Entry(1, ENCODE, runs=True), Entry(2, PARSE)], -signal.SIGABRT, None) == Blame(failed=frozenset({1}))


def test_after_a_death_of_unknown_cause_its_jobs_are_tried_alone_and_fail_with_the_second() -> None:
    both = [Entry(1, ENCODE, runs=True), Entry(2, PARSE, runs=True), Entry(3, PARSE)]
    assert blame(both, -signal.SIGABRT, None) == Blame(alone=frozenset({1, 2}))
    assert blame([Entry(1, PARSE, runs=True)], -signal.SIGKILL, None) == Blame(alone=frozenset({1}))
    assert blame([Entry(1, PARSE, runs=True, alone=True)], -signal.SIGKILL, None) == Blame(failed=frozenset({1}))


def test_a_worker_that_dies_idle_is_nobodys_fault() -> None:
    assert blame([Entry(1, PARSED), Entry(2, PARSE)], -signal.SIGKILL, None) == Blame()
