"""Answering: a trained looped GPT on conversations."""
