"""CORS: answers for browsers whose page comes from elsewhere. Around everything else, so that errors have it too.

Starlette's middleware looks at the head of an answer only; the tokens of a stream pass it by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware

EXPOSED = ("x-request-id", "retry-after", "x-should-retry")
METHODS = ("GET", "POST", "OPTIONS")
PREFLIGHT_S = 600


def with_cors(app: Any, origins: Sequence[str]) -> Any:
    """`app` itself where no origin is allowed. Headers that a page asks for are allowed, whatever they are: OpenAI's
    client sends some ten `x-stainless-*`."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=list(origins),
        allow_methods=METHODS,
        allow_headers=["*"],
        expose_headers=EXPOSED,
        max_age=PREFLIGHT_S,
    )
