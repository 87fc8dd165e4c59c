"""Sweeps: a grid of runs, its cells on disk, and how they are launched."""
