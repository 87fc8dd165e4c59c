"""Settings that all runs share. Imports neither torch nor numpy."""
