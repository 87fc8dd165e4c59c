"""Settings shared by all runs, and their names in older versions. Imports no torch."""
