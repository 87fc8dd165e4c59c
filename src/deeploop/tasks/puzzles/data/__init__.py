"""Puzzles: how they are made, stored, drawn and shown again under symmetries."""
