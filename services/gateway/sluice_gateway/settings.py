"""Everything that can be set, as one value. Only `__main__` makes it from argv."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sluice_gateway.http.keep_alive import Pace
from sluice_gateway.openai.errors import ApiError
from sluice_gateway.openai.fields import boolean, take
from sluice_gateway.openai.requests import SAMPLING_DEFAULTS, sampling_numbers
from sluice_gateway.routing.fleet import Fleet
from sluice_gateway.routing.link import Timings
from sluice_gateway.text.encoders import SCRIPTED, Efforts
from sluice_gateway.text.large_requests import WorkerSpec
from sluice_protocol.sampling import Sampling

EMPTY_FLEET = Fleet()
DEFAULT_TIMINGS = Timings()
DEFAULT_PACE = Pace()


@dataclass(frozen=True, slots=True)
class Settings:
    """`api_keys` empty: no key is needed. `slow_client_bytes`: what may wait for one client that does not read.

    `held_body_bytes`: what all large bodies may have together. `worker` None: large requests are read in this process.
    `supervisor`: http://HOST:PORT of the gateway's own, for the status page.
    `head_timeout_s`: a client that has not said by then what it wants is dropped, `read_timeout_s`: one that has not
    read by then what was written to it. `max_connections`: 0 for as many as
    there are descriptors. `outage_s`: new requests wait for a fleet that lost its last usable pair this recently.
    """

    model_name: str
    gateway_id: str
    fleet: Fleet = EMPTY_FLEET
    fleet_file: Path | None = None
    fleet_poll_s: float = 0.5
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_queued: int = 1024
    deadline_s: float = 120.0
    max_deadline_s: float = 3600.0
    fault_budget: int = 2
    outage_s: float = 30.0
    max_body_bytes: int = 32 * 1024 * 1024
    held_body_bytes: int = 256 * 1024 * 1024
    worker: WorkerSpec | None = None
    body_timeout_s: float = 60.0
    head_timeout_s: float = 20.0
    read_timeout_s: float = 60.0
    max_connections: int = 0
    max_choices: int = 128
    slow_client_bytes: int = 1024 * 1024
    pace: Pace = DEFAULT_PACE
    shutdown_s: float = 10.0
    supervisor: str = ""
    sampling_defaults: Sampling = SAMPLING_DEFAULTS
    efforts: Efforts = SCRIPTED
    timings: Timings = DEFAULT_TIMINGS


class SettingsError(ValueError):
    """A value that the gateway cannot start with; the message names file and field."""


def sampling_defaults(generation_config: dict[str, Any], source: str = "generation_config.json") -> Sampling:
    """A model's own defaults. `do_sample: false` means greedy; without the file, OpenAI's temperature of 1.

    They have the bounds of a request. Raises SettingsError, which names `source` and the field.
    """
    try:
        sampling = take(generation_config, "do_sample", boolean, True)
        told = sampling_numbers(generation_config, SAMPLING_DEFAULTS)
    except ApiError as error:
        raise SettingsError(f"{source}: {error}") from error
    return told if sampling else replace(told, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
