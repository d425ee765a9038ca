"""Evidence of progress: the flight recorder, the verdict over it, and what is kept when something froze.

No torch, no gRPC: the supervisor lives on this alone, and so do the gateway's supervisor and `sluice doctor`.
"""
