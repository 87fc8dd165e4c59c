"""Run folders as tables, figures and pages. Nothing in this package imports torch."""
