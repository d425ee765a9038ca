"""Mutual TLS between our processes: identities, the calls that each may make, and certificates that change while we
run."""
