"""FSDP2 around a looped model: each physical block is gathered once per step, and its gradients reduced once.

By itself FSDP gathers a block for every visit's backward, and reduces what earlier micro-batches accumulated
after the last visit's backward already, the rest after the first visit's.
"""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard


class FirstVisits:
    """Delay each block's reduction to the backward of its first visit, the last one in a micro-batch.

    Only then are its gradients complete and its weights no longer needed.
    """

    def __init__(self, model: nn.Module, blocks: list[nn.Module], *, reshard: bool) -> None:
        self.model, self.blocks, self.reshard = model, blocks, reshard
        self.last, self.met = True, set[nn.Module]()
        for block in blocks:
            block.register_forward_hook(self._meet)

    def begin(self, *, last: bool) -> None:
        """Begin a micro-batch; after the `last` of a step gradients are reduced and weights resharded."""
        self.last, self.met = last, set()
        set_backward(self.model, reduce=last, reshard=last or self.reshard)
        for block in self.blocks:
            set_backward(block, reduce=False, reshard=self.reshard)

    @torch.compiler.disable
    def _meet(self, block: nn.Module, args: object, output: Tensor) -> None:
        # Calls outside the graph have no backward, and those of a recomputation come after the first.
        if output.requires_grad and block not in self.met:
            self.met.add(block)
            output.register_hook(
                lambda _: set_backward(block, reduce=self.last, reshard=self.last or self.reshard)
            )


def shard(model: nn.Module, blocks: list[nn.Module], *, reshard: bool) -> nn.Module:
    """Shard a model with one group per stored block: larger groups fail for modules used twice in a step.

    Unless `reshard`, a block stays whole from its first visit's forward to its first visit's backward.
    """
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model)
    model.first_visits = FirstVisits(model, blocks, reshard=reshard)  # type: ignore[assignment]
    return model


def set_backward(module: nn.Module, *, reduce: bool, reshard: bool) -> None:
    """Configure FSDP's post-backward work for this module alone."""
    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(reduce, recurse=False)
    module.set_reshard_after_backward(reshard, recurse=False)


def reshard_after_eval(model: nn.Module) -> None:
    """Reshard what an evaluation gathered: its weights may differ from those of training."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
