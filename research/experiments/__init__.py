"""Scripts that trained or measured what docs/results holds."""
