"""Solving puzzles with a reasoner: HRM and TRM."""
