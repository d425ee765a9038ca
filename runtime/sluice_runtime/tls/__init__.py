"""Mutual TLS between our processes: who we are, who may call what, and certificates that change while we run."""
