"""What a client is told when it does not get an answer, in OpenAI's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson


def quoted(text: str, most: int = 64) -> str:
    """A client's own text in a message for it, as JSON would write it, and not more of it than helps."""
    return orjson.dumps(text if len(text) <= most else f"{text[:most]}...").decode()


@dataclass(eq=False)
class ApiError(Exception):
    """`status` is the HTTP status; `kind`, `param` and `code` are OpenAI's `type`, `param` and `code`.

    `again` False: the same request should not be sent again, which OpenAI's clients do by themselves after a 5xx."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None
    again: bool = True

    def __str__(self) -> str:
        return self.message

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def event(self) -> bytes:
        """Of a stream that has begun: what status and headers would have said is in it too."""
        error: dict[str, Any] = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        error["status"] = self.status
        if self.retry_after_s is not None:
            error["retry_after"] = self.retry_after_s
        if not self.again:
            error["should_retry"] = False
        return b"data: " + orjson.dumps({"error": error}) + b"\n\n"

    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(b"content-type", b"application/json")]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(self.retry_after_s).encode()))
        if not self.again:
            headers.append((b"x-should-retry", b"false"))
        return headers


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """400: the client must change the request."""
    return ApiError(400, message, param=param, code=code)


def unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key")


def model_not_found(model: str, served: str) -> ApiError:
    message = f"The model {quoted(model, 256)} does not exist; this gateway serves {quoted(served, 256)}."
    return ApiError(404, message, param="model", code="model_not_found")


def body_too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request body is larger than {limit} bytes.", code="request_too_large")


def headers_too_large(limit: int) -> ApiError:
    message = f"Request line and headers are longer than {limit} bytes: leave some out."
    return ApiError(431, message, code="headers_too_large")


def not_http(why: str) -> ApiError:
    return invalid(None, f"This is not a request of HTTP/1.1: {why}", "invalid_http")


def too_many_connections() -> ApiError:
    message = (
        "This gateway has as many requests in work as it may have connections: try again, or raise its limit of open"
        " files (ulimit -n)."
    )
    return ApiError(503, message, "server_error", code="too_many_connections", retry_after_s=1)


def unsupported_media(message: str) -> ApiError:
    return ApiError(415, message, code="unsupported_media_type")


def context_too_long(limit: int, prompt: int, output: int, param: str) -> ApiError:
    message = (
        f"This model's maximum context length is {limit} tokens. However, you requested {prompt + output} tokens "
        f"({prompt} in the prompt, {output} in the completion). Please shorten the prompt or the completion."
    )
    return invalid(param, message, "context_length_exceeded")


def context_surely_too_long(limit: int, least: int, num_bytes: int, longest: int, param: str) -> ApiError:
    """Of a prompt that was not tokenised."""
    message = (
        f"This model's maximum context length is {limit} tokens. However, your prompt has at least {least} tokens "
        f"(it has {num_bytes} bytes of text, and no token stands for more than {longest}). Please shorten the prompt."
    )
    return invalid(param, message, "context_length_exceeded")


def context_too_long_counted(limit: int, least: int, param: str) -> ApiError:
    """Of a prompt whose tokens were counted as far as was needed."""
    message = (
        f"This model's maximum context length is {limit} tokens. However, your prompt has more than {least} tokens. "
        "Please shorten the prompt."
    )
    return invalid(param, message, "context_length_exceeded")


def prompt_too_large(memory_mib: int) -> ApiError:
    message = (
        f"The request needs more than the {memory_mib} MiB of memory that reading and tokenising one request may take. "
        "Please shorten the prompt."
    )
    return ApiError(413, message, code="prompt_too_large")


def prompt_too_slow(seconds: float) -> ApiError:
    """503: it is the prompt, so the same one should not be sent again by itself."""
    message = (
        f"The request was not read and tokenised within {seconds:g} s. Please shorten the prompt, or try again when "
        "the gateway's machine has less to do."
    )
    return ApiError(503, message, "service_unavailable_error", code="prompt_timeout", again=False)


def prompt_worker_lost(why: str) -> ApiError:
    message = f"The process that reads large requests is not there: {why}. Try again later, or send a shorter prompt."
    return ApiError(503, message, "service_unavailable_error", code="prompt_worker_lost", retry_after_s=1)


def too_many_large(limit: int) -> ApiError:
    message = f"{limit} large requests are being read and tokenised already. Try again later."
    return ApiError(429, message, "rate_limit_error", code="too_many_large_requests", retry_after_s=1)


def too_many_body_bytes(limit: int) -> ApiError:
    message = f"The request bodies that this gateway holds may have {limit} bytes together. Try again later."
    return ApiError(503, message, "service_unavailable_error", code="too_many_body_bytes", retry_after_s=1)


def queue_full(limit: int, retry_after_s: int = 1) -> ApiError:
    message = f"The queue is full ({limit} requests are waiting). Try again later."
    return ApiError(429, message, "rate_limit_error", code="queue_full", retry_after_s=retry_after_s)


def queue_full_of_tokens(limit: int) -> ApiError:
    message = f"The prompts that wait at this gateway may have {limit} tokens together. Try again later."
    return ApiError(429, message, "rate_limit_error", code="queue_full", retry_after_s=1)


def deadline_exceeded(waited_s: float, reason: str, retry_after_s: int = 1) -> ApiError:
    message = f"The request waited {waited_s:.1f} s without getting a place ({reason}). Try again later."
    return ApiError(429, message, "rate_limit_error", code="deadline_exceeded", retry_after_s=retry_after_s)


def unavailable(message: str, code: str = "no_pair", retry_after_s: int = 1) -> ApiError:
    return ApiError(503, message, "service_unavailable_error", code=code, retry_after_s=retry_after_s)


def internal(message: str = "The gateway failed on this request.", code: str = "internal_error") -> ApiError:
    return ApiError(500, message, "internal_error", code=code)


def unknown_token() -> ApiError:
    return internal("The tokenizer made a token that is not in the engines' vocabulary.")


def model_broken(message: str, code: str) -> ApiError:
    """500: it is the weights, and will be again."""
    return ApiError(500, message, "internal_error", code=code, again=False)


def poison_suspected(victims: int, last: str) -> ApiError:
    """503: the request may be what ends engines, so no client should send it again by itself."""
    message = (
        f"{victims} engines failed while they ran this request, the last with {last}. The request itself may be what "
        "ends them: do not send it again unchanged, and look at what the engines said when they ended."
    )
    return ApiError(503, message, "service_unavailable_error", code="PoisonSuspected", again=False)
