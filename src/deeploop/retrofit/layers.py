"""Choose the layers of a source to keep, loop and drop, and build the looped model."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from deeploop.config.kinds import InjectionKind
from deeploop.models.gpt import LoopedGPT
from deeploop.models.gpt_config import GPTConfig
from deeploop.retrofit.source import Source, open_source

KEEPS_THE_SOURCE: tuple[InjectionKind, ...] = ("none", "linear")
"""Injections that do not change the model at the start: none, and linear with W = [I | 0]."""


@dataclass(frozen=True)
class Layers:
    """Layers of the source, numbered from 0: before the loop, in it and after it. Others are dropped."""

    prelude: range
    core: range
    coda: range

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Yield the name of each block and the number of its layer in the source."""
        for name, part in (("prelude", self.prelude), ("blocks", self.core), ("coda", self.coda)):
            for place, layer in enumerate(part):
                yield f"{name}.{place}", layer

    @property
    def kept(self) -> list[int]:
        return [layer for _, layer in self]

    def dropped(self, count: int) -> list[int]:
        """The layers of a source with `count` layers that are in no part."""
        return sorted(set(range(count)) - set(self.kept))


def choose_layers(count: int, core: str, prelude: str | None = None, coda: str | None = None) -> Layers:
    """Parse layers such as `8-15` of a source with `count` layers; unset: all before or after the core."""
    looped = _parsed("core", core, count)
    before = range(looped.start) if prelude is None else _parsed("prelude", prelude, count)
    after = range(looped.stop, count) if coda is None else _parsed("coda", coda, count)
    if not looped:
        raise ValueError(f"core={core}: must name at least one layer, such as 8-15")
    for first, second, names in ((before, looped, "prelude and core"), (looped, after, "core and coda")):
        if first and second and first.stop > second.start:
            raise ValueError(
                f"{names} overlap or are out of order: {shown(first)} and {shown(second)}; "
                "prelude, core and coda must follow one another"
            )
    return Layers(before, looped, after)


def _parsed(name: str, text: str, count: int) -> range:
    if text == "none":
        return range(0)
    found = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", text)
    if found is None:
        raise ValueError(f"{name}={text}: must be layers such as 8-15, or none")
    first, last = int(found[1]), int(found[2] or found[1])
    if first > last:
        raise ValueError(f"{name}={text}: the lower layer comes first: {last}-{first}")
    if last >= count:
        raise ValueError(f"{name}={text}: the source has {count} layers, 0 to {count - 1}")
    return range(first, last + 1)


def shown(layers: range) -> str:
    """Format layers as 8-15, or none."""
    return f"{layers.start}-{layers.stop - 1}" if len(layers) > 1 else str(layers.start) if layers else "none"


def looped_config(
    config: GPTConfig,
    layers: Layers,
    *,
    rounds: int,
    injection: InjectionKind = "none",
    epsilon_exponent: float = 0.0,
    context: int | None = None,
) -> GPTConfig:
    """The source's config with its layers in three parts; at R = 1 with all layers it is the source."""
    if injection not in KEEPS_THE_SOURCE:
        raise ValueError(
            f"injection={injection}: must be none or linear; {injection} would change the source at R = 1"
        )
    if context is not None and context > config.context:
        raise ValueError(f"context={context}: must be at most the source's {config.context}")
    return replace(
        config,
        blocks=len(layers.core),
        rounds=rounds,
        prelude=len(layers.prelude),
        coda=len(layers.coda),
        injection=injection,
        rule=f"prenorm:q={epsilon_exponent!r}",
        recompute_alpha=epsilon_exponent
        != 0,  # use epsilon of the current number of rounds, in training and at test time
        context=context or config.context,
    )


def build(source: Source, layers: Layers, config: GPTConfig) -> LoopedGPT:
    """Build the looped model with the source's weights; an injection starts without an effect."""
    model = LoopedGPT(config)
    weights = source.outside()
    for name, layer in layers:
        weights |= {f"{name}.{own}": tensor for own, tensor in source.layer(layer).items()}
    new = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("injection.")}
    model.load_state_dict(weights | new)
    return model.eval()


def loop_pretrained(
    path: str | Path,
    core: str,
    *,
    rounds: int = 4,
    prelude: str | None = None,
    coda: str | None = None,
    injection: InjectionKind = "none",
    epsilon_exponent: float = 0.5,
    context: int | None = None,
) -> LoopedGPT:
    """Load the pretrained model at `path` with its layers `core`, such as 8-15, looped: `deeploop retrofit`.

    At R = 1 (`model.set_rounds(1)`) with all layers kept, its logits are the source's.
    """
    source = open_source(Path(path))
    layers = choose_layers(source.config.blocks, core, prelude, coda)
    config = looped_config(
        source.config,
        layers,
        rounds=rounds,
        injection=injection,
        epsilon_exponent=epsilon_exponent,
        context=context,
    )
    return build(source, layers, config)
