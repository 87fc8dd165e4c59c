"""Puzzles: generation, storage, loading and symmetries."""
