"""Choices of a model's config that the layers use as well. Imports no torch."""

from typing import Literal

InjectionKind = Literal["none", "add", "linear", "gated"]
QKNorm = Literal["after-rotary", "before-rotary", "none"]
AttentionBias = Literal["none", "qkv", "qkvo"]
