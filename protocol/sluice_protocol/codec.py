"""The one file that knows protobuf. `encode_*` never fails on a valid value; `decode_*` raises `MalformedMessage`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import assert_never

from sluice_protocol import fleet as f
from sluice_protocol import generate as g
from sluice_protocol import source as s
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.sampling import Sampling, TokenLogprobs
from sluice_protocol.v1 import engine_pb2 as e
from sluice_protocol.v1 import fleet_pb2 as r
from sluice_protocol.v1 import source_pb2 as p


class MalformedMessage(Exception):
    """Unknown kind, or a value no sender of ours makes. Ends its own stream with UNIMPLEMENTED or INVALID_ARGUMENT."""

    def __init__(self, what: str, *, unknown: bool = False) -> None:
        super().__init__(what)
        self.unknown = unknown


# -- sampling ----------------------------------------------------------------------------------------------------------


def encode_sampling(value: Sampling) -> e.Sampling:
    return e.Sampling(
        temperature=value.temperature,
        top_p=value.top_p,
        top_k=value.top_k,
        min_p=value.min_p,
        repetition_penalty=value.repetition_penalty,
        presence_penalty=value.presence_penalty,
        frequency_penalty=value.frequency_penalty,
        logit_bias=dict(value.logit_bias),
        seed=value.seed,
        choice=value.choice,
        stop_token_ids=value.stop_token_ids,
        max_tokens=value.max_tokens,
        top_logprobs=value.top_logprobs,
    )


def decode_sampling(message: e.Sampling) -> Sampling:
    return Sampling(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        seed=message.seed,
        choice=message.choice,
        stop_token_ids=tuple(message.stop_token_ids),
        max_tokens=message.max_tokens,
        top_logprobs=message.top_logprobs if message.HasField("top_logprobs") else None,
    )


def encode_logprobs(index: int, value: TokenLogprobs) -> e.TokenLogprobs:
    return e.TokenLogprobs(index=index, logprob=value.logprob, top_ids=value.top_ids, top_logprobs=value.top_logprobs)


def decode_logprobs(message: e.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(message.logprob, tuple(message.top_ids), tuple(message.top_logprobs))


# -- gateway <-> engine ------------------------------------------------------------------------------------------------


def encode_engine_hello(value: g.EngineHello) -> e.EngineHelloReply:
    return e.EngineHelloReply(
        schema_version=value.schema_version,
        role=value.role.value,
        fingerprint=value.fingerprint.as_dict(),
        incarnation=value.incarnation,
        max_context_tokens=value.max_context_tokens,
        page_tokens=value.page_tokens,
        source_address=value.source_address,
        pid=value.pid,
        vocab_size=value.vocab_size,
        health_address=value.health_address,
    )


def decode_engine_hello(message: e.EngineHelloReply) -> g.EngineHello:
    return g.EngineHello(
        role=_role(message.role),
        fingerprint=Fingerprint.of(message.fingerprint),
        incarnation=message.incarnation,
        max_context_tokens=message.max_context_tokens,
        page_tokens=message.page_tokens,
        source_address=message.source_address,
        pid=message.pid,
        vocab_size=message.vocab_size,
        schema_version=message.schema_version,
        health_address=message.health_address,
    )


def encode_generate_request(value: g.GenerateRequest) -> e.GenerateRequest:
    return e.GenerateRequest(
        request_id=value.request_id,
        gateway_id=value.gateway_id,
        prompt_ids=value.prompt_ids,
        output_ids=value.output_ids,
        sampling=encode_sampling(value.sampling),
        source_address=value.source_address,
        trace_context=value.trace_context,
        stream=value.stream,
    )


def decode_generate_request(message: e.GenerateRequest) -> g.GenerateRequest:
    if not message.prompt_ids:
        raise MalformedMessage("prompt_ids is empty")
    return g.GenerateRequest(
        request_id=message.request_id,
        gateway_id=message.gateway_id,
        prompt_ids=tuple(message.prompt_ids),
        output_ids=tuple(message.output_ids),
        sampling=decode_sampling(message.sampling),
        source_address=message.source_address,
        trace_context=message.trace_context,
        stream=message.stream,
    )


def encode_generate_reply(value: g.GenerateReply) -> e.GenerateReply:
    match value:
        case g.Refused():
            return e.GenerateReply(
                refused=e.EngineRefused(reason=value.reason, detail=value.detail, retry_after_ms=value.retry_after_ms)
            )
        case g.Ended():
            route = value.route
            return e.GenerateReply(
                ended=e.Ended(
                    reason=value.reason.value,
                    num_tokens=value.num_tokens,
                    cached_tokens=value.cached_tokens,
                    error=value.error,
                    detail=value.detail,
                    route=e.Route(
                        prefill_pid=route.prefill_pid,
                        decode_pid=route.decode_pid,
                        records=route.records,
                        bytes=route.bytes,
                        transport=route.transport,
                        chunks=route.chunks,
                    ),
                )
            )
        case _:
            assert_never(value)


def decode_generate_reply(message: e.GenerateReply) -> g.GenerateReply:
    match message.WhichOneof("kind"):
        case "refused":
            refused = message.refused
            return g.Refused(refused.reason, refused.detail, refused.retry_after_ms)
        case "ended":
            ended = message.ended
            try:
                reason = g.EndReason(ended.reason)
            except ValueError as error:
                raise MalformedMessage(f"end reason {ended.reason!r}", unknown=True) from error
            route = ended.route
            return g.Ended(
                reason,
                ended.num_tokens,
                ended.cached_tokens,
                ended.error,
                ended.detail,
                g.Route(route.prefill_pid, route.decode_pid, route.records, route.bytes, route.transport, route.chunks),
            )
        case _:
            raise MalformedMessage("GenerateReply of unknown kind", unknown=True)


def encode_token_batch(value: g.TokenBatch) -> e.TokenBatch:
    return e.TokenBatch(
        step=value.step,
        streams=value.streams,
        counts=value.counts,
        tokens=value.tokens,
        logprobs=[encode_logprobs(index, logprobs) for index, logprobs in value.logprobs],
    )


def decode_token_batch(message: e.TokenBatch) -> g.TokenBatch:
    batch = g.TokenBatch(
        message.step,
        tuple(message.streams),
        tuple(message.counts),
        tuple(message.tokens),
        tuple((entry.index, decode_logprobs(entry)) for entry in message.logprobs),
    )
    if len(batch.streams) != len(batch.counts) or sum(batch.counts) != len(batch.tokens):
        raise MalformedMessage("TokenBatch rows and tokens do not add up")
    return batch


def encode_load(value: g.Load) -> e.LoadReply:
    return e.LoadReply(
        incarnation=value.incarnation,
        running=value.running,
        waiting=value.waiting,
        max_running=value.max_running,
        free_pages=value.free_pages,
        total_pages=value.total_pages,
        oldest_waiting_s=value.oldest_waiting_s,
        draining=value.draining,
        empty=value.empty,
        quarantined=value.quarantined,
        step_p95_ms=value.step_p95_ms,
        block_keys=value.block_keys,
        running_pages=value.running_pages,
        reserved_pages=value.reserved_pages,
        not_ready=value.not_ready,
        failing_sources=value.failing_sources,
    )


def decode_load(message: e.LoadReply) -> g.Load:
    return g.Load(
        message.incarnation,
        message.running,
        message.waiting,
        message.max_running,
        message.free_pages,
        message.total_pages,
        message.oldest_waiting_s,
        message.draining,
        message.empty,
        message.quarantined,
        message.step_p95_ms,
        tuple(message.block_keys),
        message.running_pages,
        message.reserved_pages,
        message.not_ready,
        tuple(message.failing_sources),
    )


def encode_drained(value: g.Drained) -> e.DrainReply:
    return e.DrainReply(remaining=value.remaining, empty=value.empty, left_ms=value.left_ms)


def decode_drained(message: e.DrainReply) -> g.Drained:
    return g.Drained(message.remaining, message.empty, message.left_ms)


# -- gateway -> operator -----------------------------------------------------------------------------------------------


def encode_fleet_report(value: f.FleetReport) -> r.ReportReply:
    queue = value.queue
    return r.ReportReply(
        gateway_id=value.gateway_id,
        ready=value.ready,
        running=value.running,
        queue=r.Queue(
            length=queue.length,
            for_prefill=queue.for_prefill,
            for_decode=queue.for_decode,
            oldest_for_prefill_ms=queue.oldest_for_prefill_ms,
            oldest_for_decode_ms=queue.oldest_for_decode_ms,
        ),
        engines=[encode_routed_engine(engine) for engine in value.engines],
        engines_omitted=value.engines_omitted,
    )


def decode_fleet_report(message: r.ReportReply) -> f.FleetReport:
    queue = message.queue
    return f.FleetReport(
        message.gateway_id,
        message.ready,
        message.running,
        f.Queue(
            queue.length,
            queue.for_prefill,
            queue.for_decode,
            queue.oldest_for_prefill_ms,
            queue.oldest_for_decode_ms,
        ),
        tuple(decode_routed_engine(engine) for engine in message.engines),
        message.engines_omitted,
    )


def encode_routed_engine(value: f.RoutedEngine) -> r.RoutedEngine:
    return r.RoutedEngine(
        address=value.address,
        role="" if value.role is None else value.role.value,
        fingerprint=value.fingerprint,
        incarnation=value.incarnation,
        ready=value.ready,
        draining=value.draining,
        trouble=value.trouble,
        inter_token_p95_ms=value.inter_token_p95_ms,
        load=None if value.load is None else encode_load(value.load),
        load_age_ms=value.load_age_ms,
    )


def decode_routed_engine(message: r.RoutedEngine) -> f.RoutedEngine:
    return f.RoutedEngine(
        message.address,
        _role(message.role) if message.role else None,
        message.fingerprint,
        message.incarnation,
        message.ready,
        message.draining,
        message.trouble,
        message.inter_token_p95_ms,
        decode_load(message.load) if message.HasField("load") else None,
        message.load_age_ms,
    )


def _role(told: str) -> g.Role:
    try:
        return g.Role(told)
    except ValueError as error:
        raise MalformedMessage(f"role {told!r} is none of {[role.value for role in g.Role]}") from error


# -- reader <-> source -------------------------------------------------------------------------------------------------


def encode_source_hello(value: s.SourceHello) -> p.SourceHelloReply:
    return p.SourceHelloReply(
        schema_version=value.schema_version,
        fingerprint=value.fingerprint.as_dict(),
        incarnation=value.incarnation,
        pools=[
            p.PoolInfo(
                kind=pool.kind,
                format_id=pool.format_id,
                base=pool.base,
                stride=pool.stride,
                record_bytes=pool.record_bytes,
                num_records=pool.num_records,
                memory=pool.memory,
            )
            for pool in value.pools
        ],
        transport=value.transport,
        agent_name=value.agent_name,
        agent_metadata=value.agent_metadata,
        pid=value.pid,
    )


def decode_source_hello(message: p.SourceHelloReply) -> s.SourceHello:
    return s.SourceHello(
        fingerprint=Fingerprint.of(message.fingerprint),
        incarnation=message.incarnation,
        pools=tuple(
            s.PoolInfo(
                pool.kind,
                pool.format_id,
                pool.base,
                pool.stride,
                pool.record_bytes,
                pool.num_records,
                pool.memory,
            )
            for pool in message.pools
        ),
        transport=message.transport,
        agent_name=message.agent_name,
        agent_metadata=message.agent_metadata,
        pid=message.pid,
        schema_version=message.schema_version,
    )


def encode_names(names: tuple[s.RecordName, ...]) -> list[p.RecordName]:
    return [p.RecordName(kind=name.kind, record=name.record, generation=name.generation) for name in names]


def decode_names(message: p.Fetch | p.Mismatch | p.Released) -> tuple[s.RecordName, ...]:
    return tuple([s.RecordName(name.kind, name.record, name.generation) for name in message.records])


def encode_reader_message(value: s.ReaderMessage) -> p.ReaderMessage:
    match value:
        case s.Open():
            return p.ReaderMessage(
                open=p.Open(
                    lease_id=value.lease_id,
                    incarnation=value.incarnation,
                    fingerprint=value.fingerprint.as_dict(),
                    want_prefill=p.WantPrefill(
                        prompt_ids=value.want.prompt_ids,
                        output_ids=value.want.output_ids,
                        sampling=encode_sampling(value.want.sampling),
                        request_id=value.want.request_id,
                        trace_context=value.want.trace_context,
                    ),
                    have_prefix=value.have_prefix,
                    ttl_ms=value.ttl_ms,
                )
            )
        case s.Pulled():
            return p.ReaderMessage(pulled=p.Pulled())
        case s.Fetch():
            return p.ReaderMessage(fetch=p.Fetch(records=encode_names(value.records)))
        case s.Mismatch():
            return p.ReaderMessage(mismatch=p.Mismatch(records=encode_names(value.records)))
        case s.Progress():
            return p.ReaderMessage(progress=p.Progress(num_bytes=value.num_bytes))
        case _:
            assert_never(value)


def decode_reader_message(message: p.ReaderMessage) -> s.ReaderMessage:
    match message.WhichOneof("kind"):
        case "open":
            opened = message.open
            if not opened.want_prefill.prompt_ids:
                raise MalformedMessage("Open wants no prompt")
            want = opened.want_prefill
            return s.Open(
                opened.lease_id,
                opened.incarnation,
                Fingerprint.of(opened.fingerprint),
                s.WantPrefill(
                    tuple(want.prompt_ids),
                    tuple(want.output_ids),
                    decode_sampling(want.sampling),
                    want.request_id,
                    want.trace_context,
                ),
                opened.have_prefix,
                opened.ttl_ms,
            )
        case "pulled":
            return s.Pulled()
        case "fetch":
            return s.Fetch(decode_names(message.fetch))
        case "mismatch":
            return s.Mismatch(decode_names(message.mismatch))
        case "progress":
            return s.Progress(message.progress.num_bytes)
        case _:
            raise MalformedMessage("ReaderMessage of unknown kind", unknown=True)


def encode_source_message(value: s.SourceMessage) -> p.SourceMessage:
    match value:
        case s.LeaseAdmitted():
            return p.SourceMessage(admitted=p.LeaseAdmitted(pid=value.pid))
        case g.Refused():
            return p.SourceMessage(
                refused=p.Refused(reason=value.reason, detail=value.detail, retry_after_ms=value.retry_after_ms)
            )
        case s.Granted():
            return p.SourceMessage(
                granted=p.Granted(
                    records=[
                        p.GrantedRecord(
                            kind=record.kind,
                            record=record.record,
                            generation=record.generation,
                            identity=record.identity,
                            digest=record.digest,
                            valid_tokens=record.valid_tokens,
                            index=record.index,
                        )
                        for record in value.records
                    ]
                )
            )
        case s.FirstToken():
            logprobs = None if value.logprobs is None else encode_logprobs(0, value.logprobs)
            return p.SourceMessage(
                first_token=p.FirstToken(
                    token=value.token,
                    logprobs=logprobs,
                    cached_tokens=value.cached_tokens,
                    chunks=value.chunks,
                    ends=value.ends,
                )
            )
        case s.Complete():
            return p.SourceMessage(
                complete=p.Complete(
                    num_records=value.num_records, num_bytes=value.num_bytes, num_tokens=value.num_tokens
                )
            )
        case s.Released():
            return p.SourceMessage(released=p.Released(records=encode_names(value.records)))
        case s.RecordBytes():
            return p.SourceMessage(
                record_bytes=p.RecordBytes(kind=value.kind, record=value.record, offset=value.offset, data=value.data)
            )
        case _:
            assert_never(value)


def encode_source_messages(values: Iterable[s.SourceMessage]) -> p.SourceMessages:
    return p.SourceMessages(messages=[encode_source_message(value) for value in values])


def decode_source_messages(message: p.SourceMessages) -> Iterator[s.SourceMessage]:
    """One by one: those before a malformed one count."""
    if not message.messages:
        raise MalformedMessage("SourceMessages without a message", unknown=True)
    for each in message.messages:
        yield decode_source_message(each)


def decode_source_message(message: p.SourceMessage) -> s.SourceMessage:
    match message.WhichOneof("kind"):
        case "admitted":
            return s.LeaseAdmitted(message.admitted.pid)
        case "refused":
            refused = message.refused
            return g.Refused(refused.reason, refused.detail, refused.retry_after_ms)
        case "granted":
            return s.Granted(
                tuple(
                    [
                        s.GrantedRecord(
                            record.kind,
                            record.record,
                            record.generation,
                            record.identity,
                            record.digest,
                            record.valid_tokens,
                            record.index,
                        )
                        for record in message.granted.records
                    ]
                )
            )
        case "first_token":
            first = message.first_token
            logprobs = decode_logprobs(first.logprobs) if first.HasField("logprobs") else None
            return s.FirstToken(first.token, logprobs, first.cached_tokens, first.chunks, first.ends)
        case "complete":
            complete = message.complete
            return s.Complete(complete.num_records, complete.num_bytes, complete.num_tokens)
        case "released":
            return s.Released(decode_names(message.released))
        case "record_bytes":
            data = message.record_bytes
            return s.RecordBytes(data.kind, data.record, data.offset, data.data)
        case _:
            raise MalformedMessage("SourceMessage of unknown kind", unknown=True)
