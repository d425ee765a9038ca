"""The half of the operator that meets the API server, kopf and the fleet."""
