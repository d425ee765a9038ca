"""Values survive the wire; what no sender of ours makes is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_protocol import codec
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.fleet import FleetReport, Queue, RoutedEngine
from sluice_protocol.generate import (
    MAX_MESSAGE_BYTES,
    Drained,
    Ended,
    EndReason,
    EngineHello,
    GenerateRequest,
    Load,
    Refused,
    Role,
    Route,
    TokenBatch,
)
from sluice_protocol.sampling import Sampling, TokenLogprobs
from sluice_protocol.source import (
    Complete,
    Fetch,
    FirstToken,
    Granted,
    GrantedRecord,
    LeaseAdmitted,
    Mismatch,
    Open,
    PoolInfo,
    Progress,
    Pulled,
    RecordBytes,
    RecordName,
    Released,
    SourceHello,
    WantPrefill,
)
from sluice_protocol.v1 import engine_pb2, fleet_pb2, source_pb2

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
f32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
tokens = st.lists(u32, max_size=20).map(tuple)
some_tokens = st.lists(u32, min_size=1, max_size=20).map(tuple)
text = st.text(max_size=20)
fingerprints = st.dictionaries(text, text, max_size=4).map(Fingerprint.of)
samplings = st.builds(
    Sampling,
    temperature=f32,
    top_p=f32,
    top_k=u32,
    min_p=f32,
    repetition_penalty=f32,
    presence_penalty=f32,
    frequency_penalty=f32,
    logit_bias=st.dictionaries(u32, f32, max_size=4).map(lambda d: tuple(sorted(d.items()))),
    seed=u64,
    choice=u32,
    stop_token_ids=tokens,
    max_tokens=u32,
    top_logprobs=st.none() | u32,
)
logprobs = st.builds(TokenLogprobs, f32, tokens, st.lists(f32, max_size=5).map(tuple))
names = st.lists(st.builds(RecordName, text, u32, u64), max_size=4).map(tuple)
granted = st.builds(GrantedRecord, text, u32, u64, st.binary(max_size=16), u64, u32, u32)


@given(st.builds(GenerateRequest, text, text, some_tokens, tokens, samplings, text, text, u32))
def test_generate_request(value):
    assert codec.decode_generate_request(codec.encode_generate_request(value)) == value


@given(
    st.one_of(
        st.builds(Refused, text, text, u32),
        st.builds(
            Ended,
            st.sampled_from(EndReason),
            u32,
            u32,
            text,
            text,
            st.builds(Route, u32, u32, u32, u64, text, u32),
        ),
    )
)
def test_generate_replies(value):
    assert codec.decode_generate_reply(codec.encode_generate_reply(value)) == value


@given(st.lists(st.tuples(u32, st.lists(u32, min_size=1, max_size=3)), max_size=6), u64, logprobs)
def test_token_batches(rows, step, told):
    flat = tuple(token for _, row in rows for token in row)
    value = TokenBatch(
        step, tuple(s for s, _ in rows), tuple(len(r) for _, r in rows), flat, ((0, told),) if flat else ()
    )
    assert codec.decode_token_batch(codec.encode_token_batch(value)) == value


@given(
    st.one_of(
        st.builds(
            Open, text, text, fingerprints, st.builds(WantPrefill, some_tokens, tokens, samplings, text, text), u32, u32
        ),
        st.builds(Pulled),
        st.builds(Fetch, names),
        st.builds(Mismatch, names),
        st.builds(Progress, st.integers(0, 2**64 - 1)),
    )
)
def test_reader_messages(value):
    assert codec.decode_reader_message(codec.encode_reader_message(value)) == value


@given(
    st.one_of(
        st.builds(LeaseAdmitted, u32),
        st.builds(Refused, text, text, u32),
        st.builds(Granted, st.lists(granted, max_size=3).map(tuple)),
        st.builds(FirstToken, u32, st.none() | logprobs, u32, u32, st.booleans()),
        st.builds(Complete, u32, u64, u32),
        st.builds(Released, names),
        st.builds(RecordBytes, text, u32, u64, st.binary(max_size=64)),
    )
)
def test_source_messages(value):
    assert codec.decode_source_message(codec.encode_source_message(value)) == value
    assert list(codec.decode_source_messages(codec.encode_source_messages([value, value]))) == [value, value]


@given(
    st.builds(
        SourceHello,
        fingerprint=fingerprints,
        incarnation=text,
        pools=st.lists(st.builds(PoolInfo, text, text, u64, u64, u64, u32, text), max_size=3).map(tuple),
        transport=text,
        agent_name=text,
        agent_metadata=st.binary(max_size=64),
        pid=u32,
    )
)
def test_source_hello(value):
    assert codec.decode_source_hello(codec.encode_source_hello(value)) == value


@given(st.builds(EngineHello, st.sampled_from(Role), fingerprints, text, u32, u32, text, u32, u32, u32, text))
def test_engine_hello(value):
    assert codec.decode_engine_hello(codec.encode_engine_hello(value)) == value


loads = st.builds(
    Load,
    text,
    *[u32] * 5,
    f32,
    st.booleans(),
    st.booleans(),
    st.booleans(),
    f32,
    st.lists(st.binary(max_size=16), max_size=3).map(tuple),
    *[u32] * 2,
    st.booleans(),
)
flags = st.booleans()
routed = st.builds(
    RoutedEngine, text, st.none() | st.sampled_from(Role), text, text, flags, flags, text, f32, st.none() | loads, u32
)


@given(loads)
def test_load(value):
    assert codec.decode_load(codec.encode_load(value)) == value


@given(st.builds(Drained, u32, st.booleans(), u32))
def test_drained(value):
    assert codec.decode_drained(codec.encode_drained(value)) == value


@given(
    st.builds(FleetReport, text, flags, u32, st.builds(Queue, *[u32] * 5), st.lists(routed, max_size=3).map(tuple), u32)
)
def test_fleet_reports(value):
    assert codec.decode_fleet_report(codec.encode_fleet_report(value)) == value


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (codec.decode_reader_message, source_pb2.ReaderMessage()),
        (codec.decode_source_message, source_pb2.SourceMessage()),
        (lambda message: list(codec.decode_source_messages(message)), source_pb2.SourceMessages()),
        (codec.decode_generate_reply, engine_pb2.GenerateReply()),
        (codec.decode_generate_reply, engine_pb2.GenerateReply(ended=engine_pb2.Ended(reason="dreamt"))),
    ],
)
def test_an_unknown_kind_is_malformed_and_said_to_be_unknown(decode, message):
    with pytest.raises(codec.MalformedMessage) as info:
        decode(message)
    assert info.value.unknown


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (codec.decode_generate_request, engine_pb2.GenerateRequest(request_id="x")),
        (codec.decode_reader_message, source_pb2.ReaderMessage(open=source_pb2.Open(lease_id="x"))),
        (codec.decode_token_batch, engine_pb2.TokenBatch(streams=[1], counts=[2], tokens=[3])),
        (codec.decode_engine_hello, engine_pb2.EngineHelloReply(role="dreamer")),
        (
            codec.decode_fleet_report,
            fleet_pb2.ReportReply(engines=[fleet_pb2.RoutedEngine(role="dreamer")]),
        ),
    ],
)
def test_values_that_cannot_be_are_malformed(decode, message):
    with pytest.raises(codec.MalformedMessage):
        decode(message)


def test_unknown_extra_fields_are_ignored():
    data = codec.encode_reader_message(Pulled()).SerializeToString() + b"\xa2\x06\x03abc"
    assert codec.decode_reader_message(source_pb2.ReaderMessage.FromString(data)) == Pulled()


def test_a_prompt_of_a_million_tokens_fits_into_a_message():
    prompt = tuple(range(129_280)) * 8
    request = GenerateRequest("r", "g", prompt, (), Sampling())
    assert len(prompt) > 1_000_000
    assert codec.encode_generate_request(request).ByteSize() < MAX_MESSAGE_BYTES


def test_fingerprints_name_what_differs():
    one = Fingerprint.of({"model": "a", "page_tokens": "16"})
    other = Fingerprint.of({"model": "b", "page_tokens": "16", "extra": "x"})
    assert one.differences(other) == ("extra", "model")
    assert one.differences(one) == ()
    assert one.digest != other.digest
    assert len(one.digest) == 16
