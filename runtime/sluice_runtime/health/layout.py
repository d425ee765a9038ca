"""The flight recorder's file, byte for byte. Little endian; every number is an aligned u64: its store is one store.

    header   magic, version, file bytes, readiness word
    rows     ROWS of ROW_BYTES: one per watched thread: name, then the numbers of `Field`, then what it was last doing
    mirrors  MIRRORS of them: a sequence lock, a length, a time, a name, bytes (JSON)
    steps    a ring of the last STEPS step records
    events   one ring per writer, WRITERS of them: its name, then its last EVENTS lines

Rows, mirrors and writers are named by the service whose supervisor creates the file; an empty name is an unused place.

A reader must take a file of another version for unreadable, not for empty.
"""

from __future__ import annotations

from enum import IntEnum

MAGIC = int.from_bytes(b"SLUICEFR", "little")
VERSION = 5
WORD = 8


class Header(IntEnum):
    MAGIC = 0
    VERSION = 1
    FILE_BYTES = 2
    READINESS = 3


class Readiness(IntEnum):
    """The supervisor's word, followed by `grpc.health.v1` and by Load."""

    STARTING = 0
    READY = 1
    NOT_READY = 2
    QUARANTINED = 3


HEADER_BYTES = 64


class Field(IntEnum):
    """Numbers of a row. Times are CLOCK_MONOTONIC in ns, one clock for all processes of a machine; 0 means never."""

    STATE = 0
    PID = 1
    TID = 2
    TICKS = 3
    PROGRESS = 4
    PENDING = 5
    PENDING_SINCE = 6
    STEP = 7
    PHASE = 8
    PHASE_SINCE = 9
    EXPECTED_NS = 10
    DEADLINE = 11
    COUNT_A = 12
    COUNT_B = 13
    IDENT = 14  # of the thread as faulthandler prints it; 0: not told


class State(IntEnum):
    """Of the thread that a row watches."""

    ABSENT = 0  # not started in this life
    RUNNING = 1
    ENDED = 2  # as it should, at the end of its process
    FAILED = 3  # its loop ended without being asked to


class Phase(IntEnum):
    """What a thread was last doing. Says where it is stuck, so it changes before the work, not after it."""

    IDLE = 0
    STARTING = 1
    LOADING = 2
    SERVING = 3  # callbacks of an event loop
    PLANNING = 4
    PUBLISHING = 5
    RECEIVING = 6
    BOOKKEEPING = 7  # records moved, rows bound
    DEVICE = 8
    COLLECTIVE = 9
    REPORTING = 10
    POSTING = 11
    POLLING = 12
    VERIFYING = 13
    ENCODING = 14
    DRAINING = 15
    ACCEPTING = 16  # what waits at a listening socket
    WAITING = 17  # for room, or for a turn


NAME_BYTES, FIELDS, DOING_BYTES = 32, 16, 96
ROW_BYTES = NAME_BYTES + FIELDS * WORD + DOING_BYTES
ROWS = 64
ROWS_AT = HEADER_BYTES


# Of every service: its supervisor writes lines, and it may have a certificate.
SUPERVISOR, IDENTITY = "supervisor", "identity"

MIRRORS = 6
MIRROR_HEAD_BYTES = 4 * WORD + NAME_BYTES  # sequence, length, at, spare, name
MIRROR_NAME_AT = 4 * WORD
MIRROR_BYTES = 64 * 1024
MIRRORS_AT = ROWS_AT + ROWS * ROW_BYTES

STEPS = 200
STEP_HEAD_BYTES = 8 * WORD


class StepField(IntEnum):
    """Of one slot of the ring of steps; the encoded record follows, cut at STEP_FRAME_BYTES."""

    NUMBER = 0
    SENT_AT = 1
    DONE_AT = 2
    FRAME_BYTES = 3  # of the whole record
    TOKENS = 4
    ROWS = 5
    EXPECTED_NS = 6
    CHAIN = 7  # first 8 bytes of the digest that the record was chained to


# A chunk of some thousand tokens for a sequence that begins: the step that is stuck is often the largest.
STEP_FRAME_BYTES = 16 * 1024 - STEP_HEAD_BYTES
STEP_BYTES = STEP_HEAD_BYTES + STEP_FRAME_BYTES
STEPS_AT = MIRRORS_AT + MIRRORS * (MIRROR_HEAD_BYTES + MIRROR_BYTES)


WRITERS, EVENTS, EVENT_TEXT_BYTES = 6, 64, 192
EVENT_BYTES = 2 * WORD + EVENT_TEXT_BYTES  # number from 1, at, text
RING_BYTES = NAME_BYTES + EVENTS * EVENT_BYTES
RINGS_AT = STEPS_AT + STEPS * STEP_BYTES
FILE_BYTES = RINGS_AT + WRITERS * RING_BYTES


def row_at(index: int) -> int:
    return ROWS_AT + index * ROW_BYTES


def mirror_at(slot: int) -> int:
    return MIRRORS_AT + slot * (MIRROR_HEAD_BYTES + MIRROR_BYTES)


def step_at(slot: int) -> int:
    return STEPS_AT + slot * STEP_BYTES


def ring_at(writer: int) -> int:
    """Its name is there, and its lines follow."""
    return RINGS_AT + writer * RING_BYTES


def event_at(writer: int, slot: int) -> int:
    return ring_at(writer) + NAME_BYTES + slot * EVENT_BYTES
