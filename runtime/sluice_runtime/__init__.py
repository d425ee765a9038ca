"""What every long-running process of ours needs, whatever the service: health, logs, TLS, processes, fault points."""
