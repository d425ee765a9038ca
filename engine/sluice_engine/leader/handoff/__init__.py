"""Handoffs on the leader's loop: what is granted to readers, what is pulled from sources."""
