"""Find the source of a non-finite loss or gradient."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deeploop.accelerate.install import eager_modules
from deeploop.train.distributed import World


@torch.no_grad()
def first_non_finite(model: nn.Module, forward: Callable[[], None], world: World) -> str:
    """Name the first non-finite weight, module output (`forward` is run again) or gradient.

    It may be on one rank only, but all ranks search, because a sharded forward pass needs them all.
    """
    # Taken first: the forward pass leaves sharded blocks gathered, and their gradients out of sight.
    gradients = [f"gradient of {name}" for name, p in model.named_parameters() if _broken(p.grad)]
    searches = (
        lambda: [f"weight {name}" for name, p in model.named_parameters() if _broken(p)],
        lambda: _broken_outputs(model, forward),
        lambda: gradients,
    )
    for search in searches:
        broken = [name for names in world.gather(search()) for name in names]
        if broken:
            return broken[0]
    return "not found when the step was repeated"


def _broken_outputs(model: nn.Module, forward: Callable[[], None]) -> list[str]:
    """Name the modules whose output is not finite, in the order of their calls."""
    names: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if any(map(_broken, output if isinstance(output, tuple) else (output,))):
                names.append(f"output of {name or 'the model'}")

        return hook

    hooks = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    with eager_modules():  # compiled blocks would not call the hooks
        forward()
    for hook in hooks:
        hook.remove()
    return names


def _broken(value: Any) -> bool:
    from torch.distributed.tensor import DTensor  # now: few runs need it

    local = value.to_local() if isinstance(value, DTensor) else value
    return isinstance(local, Tensor) and not bool(local.isfinite().all())
