"""LoopedGPT for transformers: config, cache, masks, attention and files are transformers', the model is ours.

import deeploop.models.hf  # teaches transformers the model type "deeploop"
model = AutoModelForCausalLM.from_pretrained("exported", rounds=5)

A folder that `save_pretrained` writes carries its own code (`hf_source`), so that with
`trust_remote_code=True` it loads where deeploop is not installed.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from inspect import Signature, signature
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from deeploop.models.gpt import Block, LoopedGPT
from deeploop.models.hf_attention import OverwrittenCache, TransformersAttention
from deeploop.models.hf_config import DeepLoopConfig
from deeploop.models.hf_source import write_source
from deeploop.nn.layers import rotary_table
from deeploop.nn.written import as_written


@as_written
class CheckpointedBlock(GradientCheckpointingLayer, Block):
    """A block whose visits transformers recomputes in the backward pass, if asked."""


class DeepLoopPreTrainedModel(PreTrainedModel):
    """Base class: flags, files, initialization."""

    config: DeepLoopConfig
    config_class = DeepLoopConfig
    base_model_prefix = "model"
    _input_embed_layer = "embedding"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    supports_gradient_checkpointing = True
    _no_split_modules = ["DeepLoopModel"]  # noqa: RUF012 (the head reads the embedding)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Set what a loaded file did not provide: the rotary table always, weights if some were missing."""
        if not isinstance(module, DeepLoopModel):
            return
        parameters = dict(module.named_parameters())
        given = {k: v for k, v in parameters.items() if getattr(v, "_is_hf_initialized", False)}
        if len(given) < len(parameters):
            kept = {name: parameter.clone() for name, parameter in given.items()}
            module.gpt.init_weights(torch.initial_seed() % 2**63)
            module.load_state_dict(kept, strict=False)
        module.gpt.init_tables()

    @torch.no_grad()
    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Resize like any model of transformers. Rows beyond the vocabulary, which are padding, are removed
        first.

        A new word has the lowest bias of the old ones.
        """
        model: Any = self.base_model
        gpt: LoopedGPT = model.gpt
        if new_num_tokens is None and pad_to_multiple_of is None:
            return gpt.embedding
        old = gpt.config.vocabulary
        drop_padding(gpt)
        self.config.padded = False
        embedding = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        words = len(embedding.weight)
        if not mean_resizing:
            for matrix in (gpt.embedding, gpt.head) if gpt.head else (gpt.embedding,):
                matrix.weight[old:].normal_(std=float(matrix.weight[:old].std()))
        if gpt.output_bias is not None:
            lowest = float(gpt.output_bias.min())
            bias = F.pad(gpt.output_bias[:words], (0, max(0, words - old)), value=lowest)
            gpt.output_bias = nn.Parameter(bias, requires_grad=gpt.output_bias.requires_grad)
        gpt.config = replace(gpt.config, vocabulary=words)
        return embedding

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the head; None if it is the embedding."""
        model: Any = self.base_model
        return model.gpt.head

    def set_output_embeddings(self, new: nn.Module) -> None:
        model: Any = self.base_model
        model.head = new

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save like any model of transformers, with the code next to the weights."""
        if not self.is_remote_code():  # else transformers copies the files that the class came from
            name = write_source(save_directory, __name__, __file__)
            self.config.auto_map = {
                "AutoConfig": f"{name}.DeepLoopConfig",
                "AutoModel": f"{name}.DeepLoopModel",
                "AutoModelForCausalLM": f"{name}.DeepLoopForCausalLM",
            }
        super().save_pretrained(save_directory, *args, **kwargs)


def looped_gpt(config: DeepLoopConfig) -> LoopedGPT:
    """Build the model of a config, with as many rows of the embedding as its files have."""
    gpt = LoopedGPT(config.to_gpt(), seed=torch.initial_seed() % 2**63)
    if not config.padded:
        drop_padding(gpt)
    return gpt


def drop_padding(gpt: LoopedGPT) -> None:
    """Keep exactly one row per word in embedding, head and bias."""
    words = gpt.config.vocabulary
    for module, name in ((gpt.embedding, "weight"), (gpt.head, "weight"), (gpt, "output_bias")):
        weight = getattr(module, name, None)
        if weight is not None:
            setattr(module, name, nn.Parameter(weight[:words].detach().clone(), weight.requires_grad))
    gpt.embedding.num_embeddings = words
    if gpt.head is not None:
        gpt.head.out_features = words


def warn_of_budget(gpt: LoopedGPT) -> None:
    """Warn if the model may not work with its key-value budget."""
    if gpt.budget_warning:
        logging.getLogger(__name__).warning(gpt.budget_warning)


class DeepLoopModel(DeepLoopPreTrainedModel):
    """A LoopedGPT without its readout.

    Its parts are those of `gpt`, which is not a submodule, so that parameters have the names of `deeploop
    export`.
    """

    gpt: LoopedGPT

    def __init__(self, config: DeepLoopConfig) -> None:
        super().__init__(config)
        self.share(looped_gpt(config))
        self._follow_config()
        # Unless on the meta device, it has drawn its weights: by its own rule, not by a common std.
        self._is_hf_initialized = not self.gpt.cos.is_meta
        self.post_init()

    def share(self, gpt: LoopedGPT) -> None:
        """Take over the parts of a LoopedGPT; both then share parameters, buffers and submodules."""
        for block in (*gpt.prelude, *gpt.blocks, *gpt.coda):
            block.__class__ = CheckpointedBlock
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            vars(self)[name] = vars(gpt)[name]
        vars(self)["gpt"] = gpt

    def _follow_config(self) -> None:
        """Set the rounds that the config now asks for."""
        gpt, config = self.gpt, self.config
        if gpt.rounds != config.rounds:
            gpt.set_rounds(config.rounds, recompute_alpha=config.recompute_alpha)
        if gpt.cache_rounds != config.cache_rounds:
            gpt.set_cache_rounds(config.cache_rounds)
            warn_of_budget(gpt)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Compute the states after the final norm.

        `output_hidden_states` gives one more than there are visits: the input of the first block, then the
        stream after every visit; the last is after the final norm, as in transformers' own models.
        """
        self._follow_config()
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids, inputs_embeds: give exactly one of them")
        if inputs_embeds is None:
            assert input_ids is not None
            self._check(input_ids)
            inputs_embeds = self.gpt.embedding(input_ids)
        if not inputs_embeds.shape[1]:
            name = "inputs_embeds" if input_ids is None else "input_ids"
            raise ValueError(f"{name}: is empty; a new document begins with the tokenizer's bos_token_id")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        # Checkpointing computes a visit twice, which would write to the cache twice.
        if self.training and self.is_gradient_checkpointing:
            if past_key_values is not None:
                raise ValueError("past_key_values: must be None in training with gradient checkpointing")
            use_cache = False
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if past_key_values is not None:
            _require_slots(past_key_values, self.config.num_hidden_layers)
        if position_ids is None:
            position_ids = _positions(inputs_embeds, attention_mask, past_key_values)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        weights = self.config.output_attentions if output_attentions is None else output_attentions
        budgeted = past_key_values is not None and self.gpt.kept_rounds < self.gpt.rounds
        if budgeted and (hidden or weights):
            name = "output_hidden_states" if hidden else "output_attentions"
            raise ValueError(f"{name}=True: must be False with cache_rounds, or use_cache=False")
        if weights:
            kwargs["output_attentions"] = True  # implementations that compute no weights warn of it
        attention = TransformersAttention(self, past_key_values, mask, kwargs, bool(weights))
        with _recorded_visits(self.gpt if hidden else None) as visits:
            compute = self._one_by_one if budgeted else self._states
            states: Any = compute(inputs_embeds, position_ids, attention)
        stream: Any = (*visits[:-1], states) if hidden else None
        return BaseModelOutputWithPast(
            last_hidden_state=states,
            past_key_values=past_key_values,
            hidden_states=stream,
            attentions=attention.seen,
        )

    def _states(self, embedded: Tensor, positions: Tensor, attention: TransformersAttention) -> Tensor:
        """Compute states (B, T, width) after the final norm from embedded tokens at these positions (B or 1,
        T).
        """
        gpt = self.gpt
        rotary = self._rotary(positions, attention.cache)
        noise = gpt.first_noise
        state = None if noise is None else noise[positions].expand_as(embedded)  # padding moves it
        return gpt(positions, cache=attention, places=(rotary, None), state=state, embedded=embedded).states

    def _one_by_one(self, embedded: Tensor, positions: Tensor, attention: TransformersAttention) -> Tensor:
        """Compute states token by token, as a key-value budget requires: see `LoopedGPT.set_cache_rounds`."""
        cache, mask = attention.cache, attention.mask
        if not isinstance(cache, DynamicCache):
            raise ValueError(
                f"cache_rounds={self.config.cache_rounds}: needs a DynamicCache, not a {type(cache).__name__}"
            )
        if not (mask is None or isinstance(mask, Tensor)):
            raise ValueError(
                f'cache_rounds={self.config.cache_rounds}: needs attn_implementation="sdpa" or "eager"'
            )
        start, states = cache.get_seq_length(), []
        for t in range(embedded.shape[1]):
            one = slice(t, t + 1)
            seen = None if mask is None else mask[:, :, one, : start + t + 1]
            overwritten: Any = OverwrittenCache(cache, start + t)
            token = TransformersAttention(self, overwritten, seen, attention.options)
            states.append(self._states(embedded[:, one], positions[:, one], token))
        return torch.cat(states, dim=1)

    def _rotary(self, positions: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor]:
        """Return rows of the rotary table, which is extended if the text exceeds the context."""
        gpt = self.gpt
        if not torch.compiler.is_compiling():
            # A static cache is compiled later, when no table can grow.
            room = cache.get_max_length() if isinstance(cache, Cache) and cache.layers else 0
            longest = max(int(positions.max()) + 1, room)
            if longest > len(gpt.cos):
                self._lengthen(longest)
        return gpt.cos[positions][:, None], gpt.sin[positions][:, None]

    def _lengthen(self, length: int) -> None:
        gpt, own = self.gpt, self.gpt.config
        if gpt.first_noise is not None:
            raise ValueError(
                f"{length} tokens: must be at most {own.context} with first_state=noise, drawn by position"
            )
        table = rotary_table(length, own.head_size, own.rotary_base, own.rotary_scaling)
        gpt.cos, gpt.sin = (half.to(gpt.cos.device) for half in table)

    def _check(self, tokens: Tensor) -> None:
        """Refuse ids beyond the vocabulary, which the padded embedding would accept."""
        words = self.config.vocab_size
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling() and tokens.numel():
            if int(tokens.max()) >= words:
                raise IndexError(f"input_ids={int(tokens.max())}: must be below the vocabulary's {words}")
        else:  # as theirs, when the device gets there
            torch._assert_async((tokens < words).all(), "input_ids: must be below vocab_size")


def _hands_to(base: Callable[..., Any]) -> Callable[[Any], Any]:
    """Add the parameters of `base` to the signature of a function that passes it `*args` and `**kwargs`.

    generate, Trainer and torch.export read the signature of `forward`.
    """

    def decorate(own: Any) -> Any:
        parameters = {**signature(base).parameters, **signature(own).parameters}
        del parameters["args"]
        own.__signature__ = Signature(sorted(parameters.values(), key=lambda parameter: parameter.kind))
        return own

    return decorate


class DeepLoopForCausalLM(DeepLoopPreTrainedModel, GenerationMixin):
    """A LoopedGPT that transformers can load, save, generate with and train.

    Logits are over the real vocabulary. With `tied_head` the head reads the embedding itself, so transformers
    has nothing to tie.
    """

    def __init__(self, config: DeepLoopConfig) -> None:
        super().__init__(config)
        self.model = DeepLoopModel(config)
        self.post_init()

    @classmethod
    def from_gpt(cls, gpt: LoopedGPT) -> Self:
        """Wrap a LoopedGPT; the weights are shared, not copied."""
        trained = asdict(gpt.config)
        now = {"rounds": gpt.rounds, "trained_rounds": gpt.config.rounds, "cache_rounds": gpt.cache_rounds}
        config = DeepLoopConfig(**trained | now)
        with torch.device("meta"):
            model = cls(config)
        model.model.share(gpt)
        return model.train(gpt.training)

    def set_rounds(self, rounds: int, *, recompute_alpha: bool | None = None) -> None:
        """Set the test-time depth, as `LoopedGPT.set_rounds`; caches made before no longer fit."""
        if recompute_alpha is not None:
            self.config.recompute_alpha = recompute_alpha
        self.model.gpt.set_rounds(rounds, recompute_alpha=self.config.recompute_alpha)
        warn_of_budget(self.model.gpt)
        self.config.rounds = rounds

    def set_cache_rounds(self, budget: int | None) -> None:
        """Set the key-value budget, as `LoopedGPT.set_cache_rounds`; caches made before no longer fit."""
        self.model.gpt.set_cache_rounds(budget)
        warn_of_budget(self.model.gpt)
        self.config.cache_rounds = budget

    def generate(self, *args: Any, rounds: int | None = None, **kwargs: Any) -> Any:
        """Generate like any model of transformers, at another depth if `rounds` is given."""
        generate: Any = super().generate  # type: ignore[misc]
        if rounds is None:
            return generate(*args, **kwargs)
        before = self.config.rounds
        self.set_rounds(rounds)
        try:
            return generate(*args, **kwargs)
        finally:
            self.set_rounds(before)

    @can_return_tuple
    @_hands_to(DeepLoopModel.forward)
    def forward(
        self, *args: Any, labels: Tensor | None = None, logits_to_keep: int | Tensor = 0, **kwargs: Any
    ) -> CausalLMOutputWithPast:
        """Compute next-token logits and, with `labels` (the input ids; -100 is ignored), their mean loss.

        The other arguments are those of `DeepLoopModel`.
        """
        out: BaseModelOutputWithPast = self.model(*args, **kwargs)
        assert out.last_hidden_state is not None
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.gpt.logits(out.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=out.past_key_values,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )


def _require_slots(cache: Cache, visits: int) -> None:
    """Refuse a cache that has too few slots, or was filled at another depth; an empty one may have none."""
    slots, filled = len(cache.layers), sum(getattr(layer, "is_initialized", True) for layer in cache.layers)
    if 0 < slots < visits or filled not in (0, visits):
        has = f"{filled} filled slots" if filled else f"{slots} slots"
        raise ValueError(f"past_key_values: has {has}, the model needs {visits} now; use a new cache")


def _positions(embedded: Tensor, attention_mask: Tensor | None, cache: Cache | None) -> Tensor:
    """Return the positions (B or 1, T) of tokens (B, T); padding has none."""
    count = embedded.shape[1]
    if attention_mask is not None and attention_mask.ndim == 2:
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -count:]
    start = 0 if cache is None else cache.get_seq_length()
    return torch.arange(count, device=embedded.device)[None] + start


@contextmanager
def _recorded_visits(gpt: LoopedGPT | None) -> Iterator[list[Tensor]]:
    """Collect the input of the first block, then the output of every visit; without a model, nothing."""
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
    AutoModel.register(DeepLoopConfig, DeepLoopModel)
    AutoModelForCausalLM.register(DeepLoopConfig, DeepLoopForCausalLM)
    vars(sys.modules["transformers"])["DeepLoopForCausalLM"] = DeepLoopForCausalLM  # for `transformers serve`
