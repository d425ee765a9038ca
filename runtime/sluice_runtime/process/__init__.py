"""Processes of a service: how they are started, how they report, and how they end."""
