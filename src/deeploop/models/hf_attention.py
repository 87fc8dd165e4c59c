"""Attention and cache of transformers, as called by the blocks of a LoopedGPT: a layer is a visit."""

from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from deeploop.models.hf_config import DeepLoopConfig
from deeploop.nn.cache import EngineAttention


class Visit:
    """A block's visit, with the attributes that transformers' attention functions read from a module."""

    is_causal = True

    def __init__(self, config: DeepLoopConfig, slot: int, training: bool) -> None:
        self.config, self.layer_idx, self.training = config, slot, training
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads


class TransformersAttention(EngineAttention):
    """The attention of `attn_implementation`, over keys and values in transformers' cache, if there is one.

    `weights` collects what the eager implementation computes at every visit.
    """

    def __init__(
        self,
        model: Any,  # a DeepLoopModel
        cache: Cache | None,
        mask: Any,
        options: dict[str, Any],
        wanted: bool = False,
    ) -> None:
        self.config: DeepLoopConfig = model.config
        self.training = model.training
        self.cache, self.mask, self.options = cache, mask, options
        self.weights: list[Tensor] | None = [] if wanted else None

    @property
    def seen(self) -> Any:
        """Return the attention weights (B, H, T, S) of each visit, if they were requested."""
        return None if self.weights is None else tuple(self.weights)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, slot: int) -> Tensor:
        if self.cache is not None:
            k, v = self.cache.update(k, v, slot)
        chosen = self.config._attn_implementation
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(chosen, eager_attention_forward)
        visit: Any = Visit(self.config, slot, self.training)
        scale = q.shape[-1] ** -0.5
        y, weights = attention(visit, q, k, v, self.mask, scaling=scale, dropout=0.0, **self.options)
        if self.weights is not None and weights is not None:
            self.weights.append(weights)
        return y.transpose(1, 2)  # (B, T, H, D) → (B, H, T, D)


class OverwrittenCache:
    """A cache while the token at position `start` is computed: a later round replaces an earlier one."""

    def __init__(self, cache: DynamicCache, start: int) -> None:
        self._cache, self._start = cache, start

    def update(self, k: Tensor, v: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        if self._cache.get_seq_length(slot) > self._start:
            layer: Any = self._cache.layers[slot]  # a DynamicLayer
            layer.crop(-1)
        return self._cache.update(k, v, slot)
