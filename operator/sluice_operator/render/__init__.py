"""Children of a ModelDeployment as plain objects, ready to be applied. Nothing here looks at the cluster."""
