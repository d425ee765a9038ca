"""Which nodes pods can stand on, and why not on others. No cluster is met here."""
