"""Training a reasoner (HRM, TRM) on puzzles."""
