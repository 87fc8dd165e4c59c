"""deeploop: train transformers whose blocks are visited many times.

`deeploop.theory` has the visit counts, the scaling rules and the bounds; `deeploop.nn` the residual
module and its init for any PyTorch model; `deeploop.models.gpt` the looped GPT; `deeploop.load(run)`
gives the model and tokenizer of a run folder, `deeploop.recommend(blocks=12, rounds=3, width=768)` a rule and
its learning rate.
"""

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "load", "recommend"]


def __getattr__(name: str) -> Any:
    # `load` needs torch; `import deeploop` and `deeploop plan` should not wait for it.
    if name == "load":
        from deeploop.train.rundir import load

        return load
    if name == "recommend":
        from deeploop.report.recommend import recommend

        return recommend
    raise AttributeError(f"module 'deeploop' has no attribute {name!r}")
