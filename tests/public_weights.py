"""Weights of a reasoner as the public code of HRM and TRM saves them."""

import torch

from deeploop.models.public_reasoner import PARTS, TOP


def as_public(model):
    """The state dict that the public code would save: its names, q, k, v and gate, up joined."""
    ours, public = model.state_dict(), {}
    across = model.config.mixer == "mlp"
    for name, own in TOP.items():
        public[name] = ours[own]
    for module, level in {"H": "H_level", "L": "L_level", "shared": "L_level"}.items():
        for number in range(model.config.blocks_of.get(module, 0)):
            for name, parts in PARTS.items():
                if name.startswith("self_attn" if across else "mlp_t"):
                    continue
                own = [ours[f"stacks.{module}.blocks.{number}.{part}.weight"] for part in parts]
                public[f"{level}.layers.{number}.{name}.weight"] = torch.cat(own)
    return {f"_orig_mod.model.inner.{name}": tensor for name, tensor in public.items()}
