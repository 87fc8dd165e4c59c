"""The config of a looped GPT in transformers: the fields of `GPTConfig`, also by transformers' names."""

from dataclasses import fields
from typing import Any

from transformers import PreTrainedConfig

from deeploop.config.old_names import model_section
from deeploop.models.gpt_config import PARTS, GPTConfig


class DeepLoopConfig(PreTrainedConfig):
    """The fields of `GPTConfig`, and the rounds the weights were trained at.

    `rounds` may be changed for test-time depth, also in `from_pretrained(folder, rounds=5)`; α stays that of
    `trained_rounds` unless `recompute_alpha` is set. `cache_rounds` is the number of rounds whose keys and
    values are kept, as in `LoopedGPT.set_cache_rounds`; None keeps all. With `padded`, as trained, the
    embedding has rows up to the next multiple of 64; after `resize_token_embeddings` it has exactly one per
    word.
    """

    model_type = "deeploop"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (theirs)
    attribute_map = {  # noqa: RUF012
        "vocab_size": "vocabulary",
        "hidden_size": "width",
        "intermediate_size": "hidden",
        "num_attention_heads": "heads",
        "max_position_embeddings": "context",
        "rms_norm_eps": "norm_eps",
        "tie_word_embeddings": "tied_head",
    }

    blocks: int = GPTConfig.blocks
    rounds: int = GPTConfig.rounds
    trained_rounds: int | None = None
    cache_rounds: int | None = None
    padded: bool = True
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

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
        if not isinstance(self.rounds, int):  # engines read this before a model is built
            raise ValueError(f"rounds={self.rounds!r}: must be a whole number")
        return self._once + self.blocks * min(self.cache_rounds or self.rounds, self.rounds)

    @num_hidden_layers.setter
    def num_hidden_layers(self, visits: int) -> None:
        rounds, rest = divmod(visits - self._once, self.blocks)
        if rest or rounds < 1:
            once = f"{self._once} + " if self._once else ""
            raise ValueError(
                f"num_hidden_layers={visits}: must be {once}{self.blocks} times the rounds, "
                "the visits of a forward pass"
            )
        self.rounds = rounds

    @property
    def _once(self) -> int:
        return sum(getattr(self, name) for name in PARTS)

    @property
    def num_key_value_heads(self) -> int:
        own: dict[str, int] = vars(self)
        return own["kv_heads"] or own["heads"]

    @num_key_value_heads.setter
    def num_key_value_heads(self, heads: int) -> None:
        self.kv_heads = heads

    @property
    def head_dim(self) -> int:
        own: dict[str, int] = vars(self)
        return own["head_width"] or own["width"] // own["heads"]

    @head_dim.setter
    def head_dim(self, size: int) -> None:
        self.head_width = size

    def to_gpt(self) -> GPTConfig:
        """Return the config of the model as it was trained."""
        own = {field.name: getattr(self, field.name) for field in fields(GPTConfig)}
        own["rotary_scaling"] = tuple(own["rotary_scaling"] or ())  # JSON has lists, or null
        return GPTConfig(**own | {"rounds": self.trained_rounds})
