"""Score language models, and generate text from them."""
