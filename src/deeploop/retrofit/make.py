"""Turn a pretrained model into a looped one, in a run folder for further training: `deeploop retrofit`."""

from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from deeploop.config.json import to_dict
from deeploop.config.optim import OptimConfig
from deeploop.config.run import CheckpointConfig, LogConfig
from deeploop.data.bpe import find_tokenizer, tokenizer_files, vocabulary_fits
from deeploop.data.shards import Corpus
from deeploop.data.token_loader import validation_windows
from deeploop.data.tokenizers import Tokenizer
from deeploop.files import write_json
from deeploop.models.accounting import flops_per_token, parameter_count
from deeploop.models.gpt import LoopedGPT
from deeploop.models.gpt_config import GPTConfig
from deeploop.retrofit.layers import Layers, build, choose_layers, looped_config, shown
from deeploop.retrofit.options import RetrofitArgs
from deeploop.retrofit.source import Source, load_source, open_source
from deeploop.retrofit.suggest import rank_cores, table
from deeploop.runs.folder import provenance
from deeploop.tasks.language.config import DataConfig, RoundsConfig, TrainConfig
from deeploop.train.checkpoint import save_weights
from deeploop.train.rundir import create_run, new_run

CONTEXT = 1024
UNITS = ((1e9, "GFLOPs"), (1e6, "MFLOPs"), (1e3, "kFLOPs"))


def run(args: RetrofitArgs) -> str:
    """Do what the options ask for, and return the text to print."""
    source = open_source(args.source)
    context = training_context(args, source)
    if args.suggest:
        return suggest(args, source, context)
    if not args.core:
        raise ValueError("core: must give the layers to loop, such as --core 8-15; --suggest ranks them")
    layers = choose_layers(source.config.blocks, args.core, args.prelude, args.coda)
    model = looped_config(
        source.config,
        layers,
        rounds=args.rounds,
        injection=args.injection,
        epsilon_exponent=args.epsilon_exponent,
        context=context,
    )
    text = describe(source, layers, model)
    if args.dry_run:
        return text
    return f"{text}\n{write(args, source, layers, model)}"


def training_context(args: RetrofitArgs, source: Source) -> int:
    """Return the length of a training sequence: the option's, or the default within the source's context."""
    most = source.config.context
    if args.context is None:
        return min(CONTEXT, most)
    if not 1 <= args.context <= most:
        raise ValueError(f"context={args.context}: must be 1 to {most}, the context of {args.source}")
    return args.context


def describe(source: Source, layers: Layers, model: GPTConfig) -> str:
    """Describe the layers of each part, the parameters, and FLOPs per token by R."""
    dropped = layers.dropped(source.config.blocks)
    parts = ", ".join(f"{name} {shown(getattr(layers, name))}" for name in ("prelude", "core", "coda"))
    own = GPTConfig(**{**vars(source.config), "context": model.context})
    source_flops = flops_per_token(own) / 3
    size, unit = next((pair for pair in UNITS if source_flops >= pair[0]), UNITS[-1])
    lines = [
        f"layers:      {parts}" + (f"; dropped {', '.join(map(str, dropped))}" if dropped else ""),
        f"parameters:  {parameter_count(model):,} (source {parameter_count(own):,})",
        f"injection:   {model.injection}; ε = R^-{model.residual.q:g}",
        f"FLOPs per token, forward, at {model.context} tokens:",
        f"  source     {_digits(source_flops / size):>8} {unit}",
    ]
    for rounds in sorted({1, 2, 4, 8, model.rounds}):
        forward = flops_per_token(model, rounds) / 3
        lines.append(
            f"  R = {rounds:<6} {_digits(forward / size):>8} {unit}  ({forward / source_flops:.2f} ×)"
        )
    return "\n".join(lines)


def _digits(value: float) -> str:
    """Format a number as 1,120, 112 or 1.12."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def write(args: RetrofitArgs, source: Source, layers: Layers, model: GPTConfig) -> str:
    """Write the run folder; return the commands to continue with."""
    tokenizer = source_tokenizer(source)
    has_corpus = holds_corpus(args, tokenizer.name)
    config = healing_config(model, args.out, args.data)
    with new_run(args.out) as part:
        write_run(build(source, layers, model), config, source, layers, tokenizer, part)
    prepare = f"  deeploop prepare text FILE… --tokenizer {args.out} --out {args.data}\n"
    return (
        f"written: {args.out}\n\n"
        f"{'' if has_corpus else prepare}"
        f"  deeploop train --config {args.out / 'config.json'}      # heals it, into {config.out}\n"
        f"  deeploop validate {args.out} --data {args.data} --rounds 1 2 4 8"
    )


def holds_corpus(args: RetrofitArgs, tokenizer_name: str) -> bool:
    """True if there is a corpus already. Raises ValueError if it is of another tokenizer."""
    try:
        corpus = Corpus.open(args.data)
    except ValueError:  # no corpus yet
        return False
    require_tokens(args, corpus, tokenizer_name)
    return True


def require_tokens(args: RetrofitArgs, corpus: Corpus, tokenizer_name: str) -> None:
    """Raise ValueError for a corpus of another tokenizer than the source's."""
    if corpus.tokenizer_name != tokenizer_name:
        raise ValueError(
            f"data={args.data}: holds {corpus.tokenizer_name} tokens, the source reads {tokenizer_name}; "
            f"prepare the text with --tokenizer {args.source} --out FOLDER, and give --data FOLDER"
        )


def suggest(args: RetrofitArgs, source: Source, context: int) -> str:
    """Format the table of cores, best first."""
    tokenizer, corpus = source_tokenizer(source), Corpus.open(args.data)
    require_tokens(args, corpus, tokenizer.name)
    length = min(context, args.tokens)
    windows = validation_windows(corpus.validation, length, max(1, args.tokens // length))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs, targets = (part.to(device) for part in windows)
    with tqdm(total=source.config.blocks - args.length + 1, unit=" cores", disable=None, leave=False) as bar:
        model = load_source(source).to(device)
        own, found = rank_cores(model, inputs, targets, args.length, tell=lambda _: bar.update())
    best = found[0].core
    return "\n".join(
        [
            f"nats per token on {targets.numel():,} tokens of {args.data}, before any training; "
            f"the source has {own:.3f}",
            *table(found),
            f"\ndeeploop retrofit {args.source} --core {shown(best)} --data {args.data} "
            f"--context {context} --out {args.out}",
        ]
    )


# ── The run folder: a checkpoint of step 0, and the config to heal it by ──
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
