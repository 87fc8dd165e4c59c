"""A user's own task."""
