"""A task of the package reasoning-gym as puzzles for HRM and TRM: 4 × 4 Sudoku as JSON lines.

Run: pip install reasoning-gym; python examples/reasoning_gym_pairs.py mini_sudoku.jsonl
Then: deeploop prepare pairs mini_sudoku.jsonl && deeploop train trm-sudoku4 --data data/pairs
"""

import json
import sys

try:
    import reasoning_gym
except ImportError as error:
    sys.exit(print(f"skipped: {error.name} is not installed; run: pip install reasoning-gym"))

COUNT = 2500


def pairs(count):
    """The puzzle and the solution of each example, as grids."""
    for example in reasoning_gym.create_dataset("mini_sudoku", size=count, seed=0):
        facts = example["metadata"]
        yield {"input": facts["puzzle"], "output": facts["solution"]}


path = sys.argv[1] if len(sys.argv) > 1 else "mini_sudoku.jsonl"
with open(path, "w", encoding="utf-8") as file:
    for pair in pairs(COUNT):
        print(json.dumps(pair), file=file)
print(f"{path}: {COUNT} pairs; next: deeploop prepare pairs {path}")
