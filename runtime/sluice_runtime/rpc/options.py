"""Channel and server options that every gRPC end of an engine uses."""

from __future__ import annotations

from sluice_protocol.generate import MAX_MESSAGE_BYTES

KEY_HEADER = "x-sluice-key"

# A peer that is silent for keepalive_time + timeout is gone: its streams end, and with them its leases.
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),
)
# A connection whose handshake is not done by then is closed: it needs no key so far, and it costs a descriptor. Shorter
# than a client's own attempt, and than the least time for which a server may accept no connection.
SERVER: tuple[tuple[str, int], ...] = (("grpc.server_handshake_timeout_ms", 4_000),)
# Of a channel that comes back soon after its peer has.
RECONNECT: tuple[tuple[str, int], ...] = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # No backoff, whatever its name: the time that one attempt to connect may take, handshake included.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
