"""Entry point of the Triton kernels: check whether they support a built model, and install them."""
