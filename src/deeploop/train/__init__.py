"""Training: one loop for every task, and what it needs around it.

`config` composes the component configs, `loop` runs them; `language` is the task of predicting the
next token, `puzzle` that of solving puzzles. Nothing in `nn` or `models` imports this package.
"""
