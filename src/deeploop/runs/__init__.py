"""Run folders, read and kept without torch."""
