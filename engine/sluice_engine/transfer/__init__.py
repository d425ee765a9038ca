"""Moving records: the reader pulls. Plans, transports under one contract, the puller, the sidecar that runs them."""
