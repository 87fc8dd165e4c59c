"""The words that a model's config chooses among, which the layers take as well. No torch."""

from typing import Literal

InjectionKind = Literal["none", "add", "linear", "gated"]
QKNorm = Literal["after-rotary", "before-rotary", "none"]
AttentionBias = Literal["none", "qkv", "qkvo"]
