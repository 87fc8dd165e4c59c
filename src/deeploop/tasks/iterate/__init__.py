"""Training a looped GPT to apply a step many times."""
