"""A task of your own."""
