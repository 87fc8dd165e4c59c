"""Fine-tuning of a looped GPT on conversations."""
