"""Decisions: pure functions over what was observed. No cluster is met here."""
