"""Read and write run folders. Imports no torch."""
