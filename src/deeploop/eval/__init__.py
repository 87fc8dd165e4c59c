"""Scores of built models, and text from them."""
