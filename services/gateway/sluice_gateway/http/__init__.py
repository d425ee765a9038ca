"""HTTP as the gateway speaks it: connections, bodies, framing, limits."""
