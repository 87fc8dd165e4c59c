"""Training a looped GPT on text."""
