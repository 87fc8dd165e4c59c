"""Training: one loop for every task, and what it needs around it.

`config` composes the component configs, `loop` runs them; `language` is the task of predicting the
next token, `puzzle` that of solving puzzles, `iterate` that of applying a step many times. Nothing in `nn`
or `models` imports this package.
"""
