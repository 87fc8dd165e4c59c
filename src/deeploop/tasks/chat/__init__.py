"""A looped GPT on conversations."""
