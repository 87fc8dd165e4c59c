"""A task of your own for the training loop."""
