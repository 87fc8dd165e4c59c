"""What a looped model is doing: measurements on built models, never on paths."""
