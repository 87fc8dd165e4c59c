"""Named experiments: recipes, the demo, and the pictures made from run folders."""
