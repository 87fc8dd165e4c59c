"""A looped GPT on text."""
