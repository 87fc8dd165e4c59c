"""Predicting the next token: text, its loader, the task and its monitor."""
