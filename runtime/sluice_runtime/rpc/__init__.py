"""gRPC: options, servers that ask for a key, health, and a process's call to itself."""
