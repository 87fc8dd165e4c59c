"""A reasoner (HRM, TRM) on puzzles."""
