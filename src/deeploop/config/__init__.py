"""Settings that all runs share, and the names that older versions gave them. No torch."""
