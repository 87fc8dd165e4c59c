"""The Hugging Face wrapper of LoopedGPT: config, cache, masks and files are theirs, the model is ours.

import deeploop.models.hf  # teaches transformers the model type "deeploop"
model = AutoModelForCausalLM.from_pretrained("exported", rounds=5)

A folder that `save_pretrained` writes carries its own code (`hf_source`), so that with
`trust_remote_code=True` it loads where deeploop is not installed.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from deeploop.config.old_names import model_section
from deeploop.models.gpt import LoopedGPT, Places
from deeploop.models.gpt_config import PARTS, GPTConfig


class DeepLoopConfig(PreTrainedConfig):
    """The fields of `GPTConfig`, and the rounds the weights were trained at.

    `rounds` may be changed for test-time depth, also in `from_pretrained(folder, rounds=5)`; α stays that
    of `trained_rounds` unless `recompute_alpha` is set. `cache_rounds` is the budget of rounds whose keys and
    values are kept, as in `LoopedGPT.set_cache_rounds`; None keeps all.
    """

    model_type = "deeploop"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (theirs)
    attribute_map = {  # noqa: RUF012
        "vocab_size": "vocabulary",
        "hidden_size": "width",
        "intermediate_size": "hidden",
        "num_attention_heads": "heads",
        "max_position_embeddings": "context",
    }

    blocks: int = GPTConfig.blocks
    rounds: int = GPTConfig.rounds
    trained_rounds: int | None = None
    cache_rounds: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs = model_section(kwargs)
        for field in fields(GPTConfig):
            if not hasattr(self, field.name):
                setattr(self, field.name, kwargs.pop(field.name, field.default))
        super().__post_init__(**kwargs)
        if self.trained_rounds is None:
            self.trained_rounds = self.rounds

    @property
    def num_hidden_layers(self) -> int:
        """Slots of the cache, which `generate` sizes by this: one per visit, or fewer under a budget."""
        own = {name: getattr(self, name) for name in PARTS}
        kept = min(self.cache_rounds or self.rounds, self.rounds)
        return own["prelude"] + self.blocks * kept + own["coda"]

    def to_gpt(self) -> GPTConfig:
        """The config of the model as it was trained."""
        own = {field.name: getattr(self, field.name) for field in fields(GPTConfig)}
        own["rotary_scaling"] = tuple(own["rotary_scaling"])  # JSON has lists
        return GPTConfig(**own | {"rounds": self.trained_rounds})


class DeepLoopForCausalLM(PreTrainedModel, GenerationMixin):
    """A LoopedGPT that transformers can load, save, generate with and train.

    Logits are over the real vocabulary. With `tied_head` the head reads the embedding itself, so transformers
    has nothing to tie.
    """

    config_class = DeepLoopConfig
    base_model_prefix = "model"
    _input_embed_layer = "embedding"
    _supports_sdpa = True
    supports_gradient_checkpointing = True
    _no_split_modules = ["LoopedGPT"]  # noqa: RUF012 (the head reads the embedding)

    def __init__(self, config: DeepLoopConfig) -> None:
        super().__init__(config)
        self.model = LoopedGPT(config.to_gpt(), seed=torch.initial_seed() % 2**63)
        self.model.set_rounds(config.rounds)
        self.model.set_cache_rounds(config.cache_rounds)
        # Unless on the meta device, it has drawn its weights: by its own rule, not by a common std.
        self.model._is_hf_initialized = not self.model.cos.is_meta
        self.post_init()

    @classmethod
    def from_gpt(cls, gpt: LoopedGPT) -> Self:
        """Wraps a LoopedGPT; the weights are shared, not copied."""
        trained = asdict(gpt.config)
        now = {"rounds": gpt.rounds, "trained_rounds": gpt.config.rounds, "cache_rounds": gpt.cache_rounds}
        config = DeepLoopConfig(**trained | now)
        with torch.device("meta"):
            model = cls(config)
        model.model = gpt
        return model

    def set_rounds(self, rounds: int, *, recompute_alpha: bool | None = None) -> None:
        """Test-time depth, as in `LoopedGPT.set_rounds`; caches made before no longer fit."""
        self.model.set_rounds(rounds, recompute_alpha=recompute_alpha)
        self.config.rounds = rounds

    def set_cache_rounds(self, budget: int | None) -> None:
        """The key-value budget, as in `LoopedGPT.set_cache_rounds`; caches made before no longer fit."""
        self.model.set_cache_rounds(budget)
        self.config.cache_rounds = budget

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Next-token logits, and with `labels` (the input ids; -100 is left out) their mean loss.

        `output_hidden_states` gives one more than there are visits: what enters the first block, then the
        stream after every visit; the last is behind the final norm, as in transformers' own models.
        """
        if self.config.output_attentions if output_attentions is None else output_attentions:
            raise ValueError(
                "output_attentions=True: must be False; "
                "the model's scaled_dot_product_attention computes no attention weights to return"
            )
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        positions = self._positions(input_ids, attention_mask, position_ids, past_key_values)
        places = self._places(input_ids, attention_mask, positions, past_key_values)
        noise = self.model.first_noise
        first = None if noise is None else noise[positions].expand(*input_ids.shape, -1)  # padding moves it
        budgeted = past_key_values if self.model.kept_rounds < self.model.rounds else None
        if budgeted is not None and wanted:
            raise ValueError("output_hidden_states=True: must be False with cache_rounds, or use_cache=False")
        with _recorded_visits(self.model if wanted else None) as visits:
            if budgeted is not None:
                states = torch.cat([*self._one_by_one(input_ids, budgeted, places, first)], dim=1)
            else:
                states = self.model(input_ids, cache=past_key_values, places=places, state=first).states
        hidden: Any = (*visits[:-1], states) if wanted else None
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.logits(states[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=past_key_values, hidden_states=hidden
        )

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] | None = None,
        every_n_layers: int = 1,
    ) -> None:
        """Recomputes each block visit by `maybe_checkpoint`; transformers' function is not used."""
        if every_n_layers != 1:
            raise ValueError(f"every_n_layers={every_n_layers}: must be 1, every visit is recomputed")
        self.gradient_checkpointing = enable  # what `is_gradient_checkpointing` reads
        self.model.recompute = "block" if enable else "off"

    def _one_by_one(
        self, tokens: Tensor, cache: Cache, places: Places, first: Tensor | None
    ) -> Iterator[Tensor]:
        """States of token after token, as a budget of rounds asks: see `LoopedGPT.set_cache_rounds`."""
        if not isinstance(cache, DynamicCache):
            raise ValueError(
                f"cache_rounds={self.config.cache_rounds}: needs a DynamicCache, not a {type(cache).__name__}"
            )
        (cos, sin), mask = places
        assert mask is None or isinstance(mask, Tensor)  # documents are for training
        start, count = cache.get_seq_length(), tokens.shape[1]
        for t in range(count):
            one = slice(t, t + 1)
            seen = None if mask is None else mask[:, :, one, : start + t + 1]
            yield self.model(
                tokens[:, one],
                cache=_Overwritten(cache, start + t),
                places=((cos[:, :, one], sin[:, :, one]), seen),
                state=None if first is None else first[:, one],
            ).states

    def _positions(
        self, tokens: Tensor, attention_mask: Tensor | None, positions: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """Where the tokens stand, (B or 1, T): padding has no position."""
        if positions is None:
            start = 0 if cache is None else cache.get_seq_length()
            if attention_mask is not None and attention_mask.ndim == 2:
                positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            else:
                positions = torch.arange(tokens.shape[1], device=tokens.device)[None] + start
        context = self.config.max_position_embeddings
        if not torch.compiler.is_compiling() and int(positions.max()) >= context:
            raise ValueError(
                f"{int(positions.max()) + 1} tokens: must be at most the model's context {context}"
            )
        return positions

    def _places(
        self, tokens: Tensor, attention_mask: Tensor | None, positions: Tensor, cache: Cache | None
    ) -> Places:
        """Rotary table and mask of the tokens: nobody sees padding."""
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=torch.empty((*tokens.shape, 0), dtype=self.dtype, device=tokens.device),  # a shape
            attention_mask=attention_mask,
            past_key_values=cache,
            position_ids=positions,
        )
        assert mask is None or isinstance(mask, Tensor)  # flex attention is not offered
        return (self.model.cos[positions][:, None], self.model.sin[positions][:, None]), mask

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Sets what a loaded file has not given: the rotary table always, weights where some were missing."""
        if not isinstance(module, LoopedGPT):
            return
        parameters = dict(module.named_parameters())
        given = {k: v for k, v in parameters.items() if getattr(v, "_is_hf_initialized", False)}
        if len(given) < len(parameters):
            kept = {name: parameter.clone() for name, parameter in given.items()}
            module.init_weights(torch.initial_seed() % 2**63)
            module.load_state_dict(kept, strict=False)
        module.init_tables()

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        raise NotImplementedError("deeploop: the vocabulary of a trained model is fixed")

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """As ever, with the code beside the weights."""
        if not self.is_remote_code():  # else transformers copies the files that the class came from
            from deeploop.models.hf_source import write_source

            name = write_source(save_directory, "deeploop.models.hf")
            self.config.auto_map = {
                "AutoConfig": f"{name}.DeepLoopConfig",
                "AutoModelForCausalLM": f"{name}.DeepLoopForCausalLM",
            }
        super().save_pretrained(save_directory, *args, **kwargs)


class _Overwritten:
    """transformers' cache while a token stands at position `start`: a later round replaces an earlier one."""

    def __init__(self, cache: DynamicCache, start: int) -> None:
        self._cache, self._start = cache, start

    def update(self, k: Tensor, v: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        if self._cache.get_seq_length(slot) > self._start:
            layer: Any = self._cache.layers[slot]  # a DynamicLayer
            layer.crop(-1)
        return self._cache.update(k, v, slot)


@contextmanager
def _recorded_visits(gpt: LoopedGPT | None) -> Iterator[list[Tensor]]:
    """Collects what enters the first block, then what every visit gives; of no model nothing."""
    visits: list[Tensor] = []

    def record(block: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        visits.extend([output] if visits else [inputs[0], output])

    blocks = (*gpt.prelude, *gpt.blocks, *gpt.coda) if gpt else ()
    hooks = [block.register_forward_hook(record) for block in blocks]
    try:
        yield visits
    finally:
        for hook in hooks:
            hook.remove()


# Not in the copy that an exported folder carries: it must not stand for other folders of this type.
if __name__ == "deeploop.models.hf":
    AutoConfig.register("deeploop", DeepLoopConfig)
    AutoModelForCausalLM.register(DeepLoopConfig, DeepLoopForCausalLM)
