"""The lease thread: the streams of all leases of an engine, on an event loop and a thread of their own."""
