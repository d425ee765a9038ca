"""The operator for `ModelDeployment`: observe, plan, apply. Everything in here but observe and apply is pure."""
