"""The run folder of a retrofit: the looped source as a checkpoint of step 0, and the config to heal it."""

from dataclasses import replace
from pathlib import Path

from deeploop.config.json import to_dict
from deeploop.config.optim import OptimConfig
from deeploop.config.run import CheckpointConfig, LogConfig
from deeploop.data.bpe import find_tokenizer, tokenizer_files, vocabulary_fits
from deeploop.data.tokenizers import Tokenizer
from deeploop.files import write_json
from deeploop.models.gpt import LoopedGPT
from deeploop.models.gpt_config import GPTConfig
from deeploop.retrofit.layers import Layers, shown
from deeploop.retrofit.source import Source
from deeploop.runs.folder import provenance
from deeploop.tasks.language.config import DataConfig, RoundsConfig, TrainConfig
from deeploop.train.checkpoint import save_weights
from deeploop.train.rundir import create_run

BACKPROP = 8  # rounds with gradients, if an injection allows to truncate them


def healing_config(model: GPTConfig, out: Path, data: Path) -> TrainConfig:
    """The config for training a retrofit: rounds drawn around R, whose mean rises from 1 over a quarter.

    `deeploop train --config RUN/config.json` uses it, in a folder beside the run.
    """
    rounds = RoundsConfig()
    if model.rounds > 1:
        limit = RoundsConfig(sample="poisson-lognormal").law(model.rounds).most
        backprop = BACKPROP if model.injection != "none" and limit > BACKPROP else 0
        rounds = RoundsConfig(sample="poisson-lognormal", ramp="linear", backprop=backprop)
    depths = tuple(sorted({1, 2, 4, 8, model.rounds})) if model.rounds > 1 else ()
    return TrainConfig(
        out=out.with_name(f"{out.name}-healed"),
        init_from=out,
        model=model,
        data=DataConfig(path=data, validation_sequences=200, validate_every=250, validation_rounds=depths),
        optim=OptimConfig(steps=1_000, batch=32, peak_lr=2e-4, floor_lr=2e-5, warmup_steps=50),
        rounds=rounds,
        checkpoint=CheckpointConfig(every=250),
        log=LogConfig(every=10),
    )


def source_tokenizer(source: Source) -> Tokenizer:
    """The source's own tokenizer, which must not have more words than the source has rows."""
    tokenizer = find_tokenizer(str(source.path))
    if not vocabulary_fits(tokenizer.name, tokenizer.vocabulary, source.config.vocabulary):
        raise ValueError(
            f"{source.path}: its tokenizer has {tokenizer.vocabulary} words, "
            f"the model {source.config.vocabulary}"
        )
    return tokenizer


def write_run(
    model: LoopedGPT, config: TrainConfig, source: Source, layers: Layers, tokenizer: Tokenizer, out: Path
) -> None:
    """Write the folder: everything that commands expect in a run, and the weights as those of step 0."""
    stamp = {
        "task": "language",
        "tokenizer": tokenizer.name,
        "retrofit": {
            "source": source.path.name,
            "family": source.family,
            "layers": source.config.blocks,
            "context": source.config.context,
            **{name: shown(getattr(layers, name)) for name in ("prelude", "core", "coda")},
        },
    }
    create_run(replace(config, out=out), stamp, tokenizer_files(tokenizer))
    write_json(out / "config.json", to_dict(config))  # the config for healing, which has a folder of its own
    save_weights(out, model, {"tokens": 0, **provenance()})
