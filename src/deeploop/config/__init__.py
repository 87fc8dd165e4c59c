"""Configurations: what runs share of them, and the names that older versions gave them. No torch."""
