"""deeploop: train transformers that apply K stored blocks R times.

- `load(run)` returns the model and tokenizer of a run folder.
- `generate(model, tokenizer, prompt)` continues a text, `generate_batch` several.
- `recommend(blocks=4, rounds=16, width=384, tokens=300_000_000, batch_tokens=32_768)` names a rule and the
  learning rates to compare.
- `LoopedGPT(GPTConfig())` is the model, `deeploop.train.train(config)` trains it.
- `ScaledResidual` puts a residual rule into any PyTorch model, and `deeploop.nn` has its parts.
- `deeploop.theory` has visit counts, scales and bounds; `deeploop.models` also has the reasoners.

Packages are imported when they are first used.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

__version__ = "0.3.0"
__all__ = [
    "GPTConfig",
    "LoopedGPT",
    "ScaledResidual",
    "__version__",
    "generate",
    "generate_batch",
    "load",
    "recommend",
]

_NAMES = {
    "GPTConfig": ("deeploop.models.gpt_config", "GPTConfig"),
    "LoopedGPT": ("deeploop.models.gpt", "LoopedGPT"),
    "ScaledResidual": ("deeploop.nn.residual", "ScaledResidual"),
    "generate": ("deeploop.eval.generation", "generate_text"),
    "generate_batch": ("deeploop.eval.generation", "generate_texts"),
    "load": ("deeploop.train.rundir", "load"),
    "recommend": ("deeploop.report.recommend", "recommend"),
}
_PACKAGES = (
    "accelerate",
    "bench",
    "config",
    "data",
    "diagnose",
    "eval",
    "export",
    "models",
    "nn",
    "paper",
    "report",
    "retrofit",
    "runs",
    "sweep",
    "tasks",
    "theory",
    "train",
)


def __getattr__(name: str) -> _Any:
    # Most of them need torch; `import deeploop` and `deeploop plan` should not wait for it.
    if name in _NAMES:
        module, own = _NAMES[name]
        return getattr(_import_module(module), own)
    if name in _PACKAGES:
        return _import_module(f"deeploop.{name}")
    raise AttributeError(f"module 'deeploop' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*__all__, *_PACKAGES))
