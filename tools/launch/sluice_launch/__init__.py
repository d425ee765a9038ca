"""Starting engines and gateways on this machine: `sluice up`, the harness, tests and benchmarks all do it with this."""
