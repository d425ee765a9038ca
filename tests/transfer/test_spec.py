"""What a sidecar is told is what the engine has."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transfer_double import KEY, PLAN, hello, new_pools, tiny_layouts

from sluice_engine.transfer.errors import BadPeer
from sluice_engine.transfer.messages import (
    FrameReader,
    Stop,
    decode_command,
    decode_report,
    encode_frame,
)
from sluice_engine.transfer.seal import TAG_BYTES, open_seal, seal
from sluice_engine.transfer.spec import MemorySpec, SidecarRole, SidecarSpec, read_spec, write_spec
from sluice_engine.wire import FrameError
from sluice_records import RecordKind


@pytest.mark.parametrize("perturbed", [False, True])
def test_layouts_survive_the_way_to_the_sidecar(perturbed: bool) -> None:
    layouts = tiny_layouts(perturbed=perturbed)
    fd = write_spec(SidecarSpec(MemorySpec.of(layouts, PLAN), "leader.1", KEY, SidecarRole.READER))
    told = read_spec(fd)
    os.close(fd)
    assert told.memory.plan == PLAN
    for kind in RecordKind:
        assert told.memory.layouts()[kind] == layouts[kind]
        assert told.memory.layouts()[kind].format_id == layouts[kind].format_id


def test_a_seal_opens_for_its_own_hello_and_key_only() -> None:
    bare = replace(hello(new_pools(tiny_layouts())), agent_metadata=b"metadata")
    sealed = seal(bare, KEY)
    assert open_seal(sealed, KEY) == b"metadata"
    moved = replace(sealed.pools[0], base=1)
    for lie in (
        replace(sealed, agent_metadata=sealed.agent_metadata[:-1]),
        replace(sealed, agent_metadata=b""),
        replace(sealed, agent_metadata=b"\0" * TAG_BYTES + b"metadata"),
        replace(sealed, incarnation="source.2"),
        replace(sealed, agent_name="somebody"),
        replace(sealed, pid=1),
        replace(sealed, pools=(moved, *sealed.pools[1:])),
        bare,
    ):
        with pytest.raises(BadPeer):
            open_seal(lie, KEY)
    with pytest.raises(BadPeer):
        open_seal(sealed, bytes(32))


@given(st.lists(st.integers(1, 40), max_size=20))
def test_frames_are_cut_the_same_however_they_arrive(sizes: list[int]) -> None:
    commands = [Stop("a"), Stop("lease " * 9), Stop("")]
    data, reader, bodies = b"".join(map(encode_frame, commands)), FrameReader(), []
    for size in sizes:
        bodies += reader.feed(data[:size])
        data = data[size:]
    bodies += reader.feed(data)
    assert [decode_command(body) for body in bodies] == commands


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_frame_error(data: bytes) -> None:
    for decode in (decode_command, decode_report):
        try:
            decode(data)
        except FrameError:
            pass
    try:
        FrameReader().feed(data)
    except FrameError:
        pass


def test_a_command_is_no_report() -> None:
    body = encode_frame(Stop("a"))[4:]
    with pytest.raises(FrameError):
        decode_report(body)
    assert isinstance(decode_command(body), Stop)
