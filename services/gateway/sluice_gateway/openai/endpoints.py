"""What each route does with a request."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from sluice_gateway.gateway import Gateway
from sluice_gateway.http.auth import check_key
from sluice_gateway.http.bodies import Body, read_body
from sluice_gateway.http.keep_alive import Life
from sluice_gateway.http.origins import is_loopback
from sluice_gateway.http.respond import ClientGone, StreamResponse, WholeResponse, while_there
from sluice_gateway.openai import frames
from sluice_gateway.openai.client_names import ClientNames
from sluice_gateway.openai.errors import ApiError, invalid, model_not_found
from sluice_gateway.openai.frames import ChatFrames, CompletionFrames, Frames, Identity
from sluice_gateway.openai.health_report import VERSION, without_addresses
from sluice_gateway.openai.requests import Options
from sluice_gateway.openai.sinks import CollectSink, StreamSink
from sluice_gateway.routing.dispatch import Clock
from sluice_gateway.routing.jobs import Job, route_report, usage
from sluice_gateway.text.encoding import Kind

Write = Callable[[bytes], None]
MakeFrames = Callable[[int], Frames]
MakeJob = Callable[[], Coroutine[Any, Any, Job]]


class Endpoints:
    """Every handler raises ApiError for what it refuses."""

    def __init__(self, gateway: Gateway, wall: Clock, new_id: Callable[[], str]) -> None:
        self._gateway = gateway
        self._wall = wall
        self._new_id = new_id
        self._started = int(wall())

    # -- generating

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, Kind.CHAT, f"chatcmpl-{self._new_id()}")

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, Kind.COMPLETION, f"cmpl-{self._new_id()}")

    async def _generate(self, request: Request, kind: Kind, answer_id: str) -> Response:
        body = await self._body(request)
        try:
            deadline_s = self._deadline(request)
            preparing = self._gateway.prepare(body, kind, deadline_s)
            # A large one takes its time, and its client may not wait for that.
            prepared = await (while_there(request.receive, preparing) if body.is_large else preparing)
        except BaseException as error:
            self._gateway.counters.disconnected += isinstance(error, ClientGone)
            body.release()
            raise
        try:
            self._check_model(prepared.options)
            names = ClientNames.of(request.headers)
            make_job = partial(self._gateway.job, prepared, deadline_s, answer_id, names)
            return self._respond(request, prepared.options, make_job, answer_id, kind)
        except BaseException:
            prepared.drop()
            raise

    async def _body(self, request: Request) -> Body:
        self._gateway.counters.requests += 1
        self._check_key(request)
        settings, counters = self._gateway.settings, self._gateway.counters

        def refused() -> None:
            counters.refused_bodies += 1

        limit, seconds = settings.max_body_bytes, settings.body_timeout_s
        return await read_body(request, limit, seconds, self._gateway.bodies, refused)

    def _check_key(self, request: Request) -> None:
        check_key(request.headers.get("authorization"), self._gateway.settings.api_keys)

    def _check_model(self, options: Options) -> None:
        served = self._gateway.settings.model_name
        if options.model != served:
            raise model_not_found(options.model[:256], served)

    def _deadline(self, request: Request) -> float:
        """Seconds that the request may wait for a place."""
        settings = self._gateway.settings
        text = request.headers.get("x-sluice-deadline-ms")
        if text is None:
            return settings.deadline_s
        most = int(settings.max_deadline_s * 1000)
        if not (text.isascii() and text.isdigit() and len(text) < 12 and 1 <= int(text) <= most):
            message = f"Invalid value for the header 'x-sluice-deadline-ms': must be an integer between 1 and {most}."
            raise invalid("x-sluice-deadline-ms", message, "invalid_value")
        return int(text) / 1000

    def _respond(self, request: Request, options: Options, make_job: MakeJob, answer_id: str, kind: Kind) -> Response:
        gateway, settings = self._gateway, self._gateway.settings
        identity = Identity(
            answer_id, int(self._wall()), settings.model_name, gateway.system_fingerprint(), options.include_usage
        )
        wants_route = request.headers.get("x-sluice-route") == "1"
        if options.stream:
            make = ChatFrames if kind is Kind.CHAT else CompletionFrames
            name = "chat.completion.chunk" if kind is Kind.CHAT else "text_completion"

            def frames_of(index: int) -> Frames:
                return make(identity, index, gateway.tokenizer)

            life = gateway.new_life()

            def stream(write: Write) -> Coroutine[Any, Any, None]:
                return self._stream(make_job, life, identity.head(name), frames_of, wants_route, write)

            limit, pace = settings.slow_client_bytes, settings.pace
            return StreamResponse(stream, gateway.counters, answer_id, limit, pace, life.goes_on)
        whole = partial(self._whole, make_job, identity, kind, wants_route)
        return WholeResponse(whole, gateway.counters, answer_id)

    async def _stream(
        self,
        make_job: MakeJob,
        life: Life,
        head: dict[str, Any],
        make_frames: MakeFrames,
        wants_route: bool,
        write: Write,
    ) -> None:
        job = await make_job()
        outcomes = await self._gateway.run(job, lambda index: StreamSink(make_frames(index), write), life)
        last: dict[str, Any] = {"usage": usage(job, outcomes)} if job.options.include_usage else {}
        if wants_route:
            last["sluice"] = route_report(outcomes)
        if last:
            write(frames.event(head | {"choices": []} | last))
        write(frames.DONE)

    async def _whole(self, make_job: MakeJob, identity: Identity, kind: Kind, wants_route: bool) -> bytes:
        job = await make_job()
        describe = None
        if job.options.sampling.top_logprobs is not None:
            make = frames.chat_logprobs if kind is Kind.CHAT else frames.completion_logprobs
            describe = partial(make, tokenizer=self._gateway.tokenizer)
        sinks = [CollectSink(describe) for _ in range(job.num_choices)]
        outcomes = await self._gateway.run(job, sinks.__getitem__)
        is_chat = kind is Kind.CHAT
        choices = [self._choice(job, index, sink, is_chat) for index, sink in enumerate(sinks)]
        name = "chat.completion" if is_chat else "text_completion"
        answer = identity.head(name) | {"choices": choices, "usage": usage(job, outcomes)}
        if wants_route:
            answer["sluice"] = route_report(outcomes)
        return orjson.dumps(answer)

    def _choice(self, job: Job, index: int, sink: CollectSink, chat: bool) -> dict[str, Any]:
        reason = sink.reason or "stop"
        if not chat:
            return frames.completion_choice(index, sink.content, reason, sink.logprobs)
        reasoning = sink.reasoning if job.thinking else None
        return frames.chat_choice(index, sink.content, reasoning, reason, sink.logprobs)

    # -- what is there

    async def models(self, request: Request) -> Response:
        self._check_key(request)
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._check_key(request)
        served = self._gateway.settings.model_name
        if request.path_params["model_id"] != served:
            raise model_not_found(request.path_params["model_id"][:256], served)
        return _json(self._model())

    def _model(self) -> dict[str, Any]:
        name = self._gateway.settings.model_name
        context = self._gateway.context_tokens()
        told = {"id": name, "object": "model", "created": self._started, "owned_by": "sluice"}
        return told | {"max_model_len": context, "context_length": context}

    # -- how it is

    async def livez(self, _request: Request) -> Response:
        return _json({"verdict": "Progressing"})

    async def readyz(self, _request: Request) -> Response:
        lacking = self._gateway.not_ready()
        if lacking:
            return _json({"ready": False, "reason": lacking}, 503)
        return _json({"ready": True})

    async def health(self, request: Request) -> Response:
        """A caller that may see addresses and pids gets the whole report. A load balancer reads the status alone."""
        report = self._gateway.report()
        return _json(
            report if self._may_see_addresses(request) else without_addresses(report), 200 if report["ready"] else 503
        )

    def _may_see_addresses(self, request: Request) -> bool:
        """With a key; where there are none, on this machine and through no proxy."""
        keys = self._gateway.settings.api_keys
        if keys:
            try:
                check_key(request.headers.get("authorization"), keys)
            except ApiError:
                return False
            return True
        came_by_proxy = any(name in request.headers for name in ("forwarded", "x-forwarded-for", "x-real-ip", "via"))
        return request.client is not None and is_loopback(request.client.host) and not came_by_proxy

    async def version(self, _request: Request) -> Response:
        return _json({"version": VERSION})


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
