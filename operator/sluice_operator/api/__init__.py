"""The API: what a ModelDeployment may say (`spec`), what it is told (`status`), and the CRD that follows from both."""
