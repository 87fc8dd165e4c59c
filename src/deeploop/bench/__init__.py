"""How fast training and decoding are: `deeploop bench`."""
