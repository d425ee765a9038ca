"""Keys and certificates of a ModelDeployment, and when they are replaced. No cluster is met here."""
