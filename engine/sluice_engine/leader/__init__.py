"""The leader: the one process of an engine that decides, and the server around it."""
