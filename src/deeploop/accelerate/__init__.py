"""The Triton kernels' entry point: compare a built model with what they know, and put it on them."""
