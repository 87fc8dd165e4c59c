"""Scores of built models."""
