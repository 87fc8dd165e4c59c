"""`deeploop retrofit`: a pretrained model as a looped one, in a run folder that training goes on from."""

from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from tyro.conf import Positional

from deeploop.commands.parsing import run_command
from deeploop.data.shards import Corpus
from deeploop.data.token_loader import validation_windows
from deeploop.files import exclusive_folder
from deeploop.models.accounting import flops_per_token, parameter_count
from deeploop.models.gpt_config import GPTConfig
from deeploop.nn.injection import InjectionKind
from deeploop.retrofit.layers import Layers, build, choose_layers, looped_config, shown
from deeploop.retrofit.run import healing_config, source_tokenizer, write_run
from deeploop.retrofit.source import Source, load_source, open_source
from deeploop.retrofit.suggest import rank_cores, table

CONTEXT = 1024
UNITS = ((1e9, "GFLOPs"), (1e6, "MFLOPs"), (1e3, "kFLOPs"))


@dataclass(frozen=True, kw_only=True)
class RetrofitArgs:
    """Gives a pretrained model a loop: writes a run folder with its layers as prelude, core and coda."""

    source: Positional[Path]
    """A transformers folder (safetensors) or a GGUF file of a Llama, Mistral, Qwen2 or Qwen3 model."""
    core: str = ""
    """Layers to loop, such as 8-15, counted from 0."""
    prelude: str | None = None
    """Layers before the loop, such as 0-3, or none; unset: all before the core."""
    coda: str | None = None
    """Layers after the loop; unset: all after the core. Layers in no part are dropped."""
    out: Path = Path("runs/retrofit")
    """Run folder to write."""
    rounds: int = 4
    """Rounds R of the core: the mean in training, whose first steps rise to it from 1."""
    injection: InjectionKind = "none"
    """How the prelude's output enters every round: none, or linear, which starts as the identity."""
    epsilon_exponent: float = 0.5
    """Scale the core's branches by R^-q at R rounds; 0 leaves them as they were trained."""
    context: int | None = None
    """Tokens of a training sequence, at most the source's context; unset: 1024, or less where that is."""
    data: Path = Path("data/text")
    """Corpus, prepared with the source's tokenizer: to heal on, or for --suggest."""
    dry_run: bool = False
    """Print parameters and FLOPs per token by R; write nothing."""
    suggest: bool = False
    """Rank all cores of --length layers by the loss at R = 1, 2, 4 without training; write nothing."""
    length: int = 8
    """Layers of the cores that --suggest compares."""
    tokens: int = 2048
    """Tokens of the corpus' validation split that --suggest reads."""


def run(args: RetrofitArgs) -> str:
    """Reads the source and does what is asked; returns what to print."""
    source = open_source(args.source)
    context = training_context(args, source)
    if args.suggest:
        return suggest(args, source, context)
    if not args.core:
        raise ValueError("core: must name the layers to loop, such as --core 8-15; --suggest ranks them")
    layers = choose_layers(source.config.blocks, args.core, args.prelude, args.coda)
    model = looped_config(
        source.config,
        layers,
        rounds=args.rounds,
        injection=args.injection,
        epsilon_exponent=args.epsilon_exponent,
        context=context,
    )
    said = describe(source, layers, model)
    if args.dry_run:
        return said
    return f"{said}\n{write(args, source, layers, model)}"


def training_context(args: RetrofitArgs, source: Source) -> int:
    """The tokens of a training sequence that are asked for, or the default within the source's context."""
    most = source.config.context
    if args.context is None:
        return min(CONTEXT, most)
    if not 1 <= args.context <= most:
        raise ValueError(f"context={args.context}: must be 1 to {most}, the context of {args.source}")
    return args.context


def describe(source: Source, layers: Layers, model: GPTConfig) -> str:
    """Which layers go where, parameters, and FLOPs per token by R."""
    dropped = layers.dropped(source.config.blocks)
    parts = ", ".join(f"{name} {shown(getattr(layers, name))}" for name in ("prelude", "core", "coda"))
    own = GPTConfig(**{**vars(source.config), "context": model.context})
    source_flops = flops_per_token(own) / 3
    size, unit = next((pair for pair in UNITS if source_flops >= pair[0]), UNITS[-1])
    lines = [
        f"layers:      {parts}" + (f"; dropped {', '.join(map(str, dropped))}" if dropped else ""),
        f"parameters:  {parameter_count(model):,} (source {parameter_count(own):,})",
        f"injection:   {model.injection}; ε = R^-{model.epsilon_exponent:g}",
        f"FLOPs per token, forward, at {model.context} tokens:",
        f"  source     {source_flops / size:8.3g} {unit}",
    ]
    for rounds in sorted({1, 2, 4, 8, model.rounds}):
        forward = flops_per_token(model, rounds) / 3
        lines.append(f"  R = {rounds:<6} {forward / size:8.3g} {unit}  ({forward / source_flops:.2f} ×)")
    return "\n".join(lines)


def write(args: RetrofitArgs, source: Source, layers: Layers, model: GPTConfig) -> str:
    """The run folder; returns how to go on."""
    tokenizer = source_tokenizer(source)
    config = healing_config(model, args.out, args.data)
    with exclusive_folder(args.out, "out"):
        if any(file.name != ".lock" for file in args.out.iterdir()):
            raise ValueError(f"out={args.out}: is not empty; name another folder")
        write_run(build(source, layers, model), config, source, layers, tokenizer, args.out)
    prepare = f"  deeploop prepare text FILE… --tokenizer {args.out} --out {args.data}\n"
    return (
        f"written: {args.out}\n\n"
        f"{'' if fits(args.data, tokenizer.name) else prepare}"
        f"  deeploop train --config {args.out / 'config.json'}      # heals it, into {config.out}\n"
        f"  deeploop validate {args.out} --data {args.data} --rounds 1 2 4 8"
    )


def fits(data: Path, tokenizer_name: str) -> bool:
    """Whether there is a corpus of the source's tokens already."""
    try:
        return Corpus.open(data).tokenizer_name == tokenizer_name
    except ValueError:  # none yet
        return False


def suggest(args: RetrofitArgs, source: Source, context: int) -> str:
    """The table of cores, best first."""
    tokenizer, corpus = source_tokenizer(source), Corpus.open(args.data)
    if corpus.tokenizer_name != tokenizer.name:
        raise ValueError(
            f"data={args.data}: holds {corpus.tokenizer_name} tokens, the source reads {tokenizer.name}; "
            f"prepare the text with --tokenizer {args.source}"
        )
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


def main(arguments: list[str]) -> int:
    return run_command(RetrofitArgs, run, arguments, prog="deeploop retrofit")
