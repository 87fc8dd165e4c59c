"""A looped GPT that applies a step many times."""
