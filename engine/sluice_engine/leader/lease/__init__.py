"""The lease thread: the streams of all rooms of an engine, on an event loop and a thread of their own."""
