"""`deeploop train`: one run of a recipe, of a file or of a run folder, with any field overridden."""

import dataclasses
import os
import re
import shlex
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

from deeploop.commands.parsing import choose, parse, summary, whole_number
from deeploop.config.json import leaf_hints
from deeploop.config.old_names import current, require_new_flags
from deeploop.config.run import RunConfig
from deeploop.config.short_names import GROUPS, SHORT, full_words
from deeploop.exits import memory_advice
from deeploop.files import read_table
from deeploop.runs.endings import outcome
from deeploop.runs.folder import (
    check_folder,
    check_kind,
    config_to_resume,
    is_export,
    load_config,
    other_setting,
)
from deeploop.tasks import read_config
from deeploop.tasks.chat.config import ChatTrainConfig
from deeploop.tasks.language.config import TrainConfig
from deeploop.tasks.puzzles.config import PuzzleDataConfig
from deeploop.tasks.puzzles.recipes import published_steps, require_puzzles
from deeploop.tasks.recipes import GONE, RECIPES, get_recipe, require_recipe
from deeploop.terminal import loading_torch, show
from deeploop.train.stop import StopRequest

# What other trainers call an option of ours.
TRAIN_WORDS = {
    **dict.fromkeys(("lr", "learning-rate", "learning-rates", "max-lr"), "--lr"),
    **dict.fromkeys(("warmup", "warm-up", "warmup-iters"), "--warmup"),
    **dict.fromkeys(("max-steps", "iters", "max-iters", "epochs", "num-train-epochs"), "--steps"),
    **dict.fromkeys(("batch-size", "bs"), "--batch"),
    **dict.fromkeys(("layers", "n-layer", "num-layers", "depth"), "--blocks"),
    **dict.fromkeys(("loops", "recurrences"), "--rounds"),
    **dict.fromkeys(("hidden-size", "n-embd", "d-model", "dim"), "--width"),
    **dict.fromkeys(("dataset", "data-dir", "corpus"), "--data"),
    **dict.fromkeys(("output-dir", "out-dir", "output"), "--out"),
    **dict.fromkeys(("seq-len", "block-size", "max-seq-length"), "--context"),
}

RESUME, CONFIG, INIT_FROM = "--resume", "--config", "--init-from"
INSTEAD = f"""
or, without a recipe:
  {RESUME} RUN    continue a run with its own config
  {CONFIG} FILE   start from a run's config.json, or TOML with the same nesting"""
EPOCHS = 10  # of a small corpus, where the command says no steps
FEWEST_STEPS = 100  # with fewer a smaller batch trains better
AUTO_LR, DRY_RUN, QUIET = "--auto-lr", "--dry-run", "--quiet"
HELP, HELP_ALL = ("-h", "--help"), "--help-all"
SWITCHES = {
    AUTO_LR: "learning rate and warm-up as `deeploop recommend` has them (language models)",
    DRY_RUN: "say what would be trained, and stop; the data need not be there",
    QUIET: "print errors and the last line alone",
    HELP_ALL: "every field of the recipe, by its path: --model.hidden, --log.every, …",
}


def main(arguments: list[str]) -> int:
    base, source, rest = choose_base(arguments)
    if base is None:
        return 0
    prog = f"deeploop train {source}"
    if any(word in HELP for word in rest):
        print(first_options(base, source))
        return 0
    switches = {*rest} & {AUTO_LR, DRY_RUN, QUIET}
    rest = [word for word in rest if word not in switches]
    require_new_flags(rest, base.task)
    shape, notes = shape_of_width(base, rest)
    rest = full_words(["--help" if word == HELP_ALL else word for word in rest], leaf_hints(type(base)))
    if base.resume:
        check_kept(base, rest)
    settled = words_of_source(base, source, rest)  # before those that are typed: of two the last one counts
    config = parse(
        type(base),
        [*settled, *shape, *rest],
        prog=prog,
        default=base,
        words=TRAIN_WORDS,
        elsewhere=lambda option: option_of_other_tasks(option, base, source),
        description=f"The first ones have short names too: deeploop train {source} --help",
    )
    check_path(config, base)
    is_first_rank = int(os.environ.get("RANK", 0)) == 0
    if source in RECIPES:  # the config of a file or a run names its own
        config, line = with_vocabulary_of_corpus(config, rest)
        notes += line
        config, line = with_steps_of_corpus(config, rest, source, auto_lr=AUTO_LR in switches)
        notes += line
        config, line = with_published_steps(config, rest)
        notes += line
    if AUTO_LR in switches:
        config, line = with_measured_rate(config, rest)
        notes += line
    if is_first_rank and QUIET not in switches:
        print(*notes, sep="\n", end="\n" * bool(notes))
    if isinstance(config, ChatTrainConfig) and config.init_from is None:
        raise ValueError(f"{INIT_FROM}: names the run to fine-tune; give {INIT_FROM} RUN")
    if DRY_RUN in switches and not all(folder.exists() for folder in config.folders):
        from deeploop.train.header import without_data  # now: it imports torch

        check_folder(config)
        show("\n".join(without_data(config, source)))
        return 0
    if isinstance(config.data, PuzzleDataConfig):
        require_puzzles(config.data.path)
    size = config.device.micro_batch
    smaller = str(max(1, size // 2)) if size else "N with an N below the one printed at the start"
    with memory_advice(f"--device.no-graph, --device.recompute block, or --device.micro-batch {smaller}"):
        with nullcontext() if QUIET in switches else loading_torch():
            from deeploop.train.loop import train
        start = preview if DRY_RUN in switches else train
        # What is not as `words_of_source` has it was typed, or stands in the file.
        named = [f"model.{name}" for name in getattr(config.model, "__dataclass_fields__", ())]
        stop = StopRequest()
        result = start(config, source=source, quiet=QUIET in switches, named=named, stop=stop)
    code = stop.exit_code if result and result["ended"] == "stopped" else 0
    if result is None or not is_first_rank:
        return code
    if result["ended"] != "stopped" or QUIET in switches:  # that was said already
        found = outcome(result)
        print(
            f"{result['ended']} at step {result['step']}: {config.out}, last validation {result['loss']:.4f}"
            + f", {found}" * (found not in (None, result["ended"]))
        )
    return code


def check_kept(base: RunConfig, words: list[str]) -> None:
    """Refuse an option that changes what a resumed run keeps, before other fields are checked."""
    known = leaf_hints(type(base))
    for word in words:
        path = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if path in known and (path.startswith(("model.", "rounds.", "gate.")) or path in base.kept):
            old, (value, _) = (
                reduce(getattr, path.split("."), base),
                take_value(words, word.partition("=")[0]),
            )
            if type(old) is int and str(value).isdecimal() and int(str(value)) != old:
                raise other_setting(base.out, path, old, value)


def first_options(base: RunConfig, source: str) -> str:
    """Format the help of a recipe: the most important options, with their defaults."""
    known = leaf_hints(type(base))
    lines = [f"usage: deeploop train {source} [--option value …]", ""]
    if source in RECIPES:
        lines += [summary(RECIPES[source]), ""]
    for group, options in GROUPS.items():
        lines.append(f"{group}:")
        for name, (path, value, text) in options.items():
            if path in known:
                default = reduce(getattr, path.split("."), base)
                shown = "" if default is None else f" [{default}]"
                lines.append(f"  {f'--{name} {value}':<22} {text}{shown}")
        lines.append("")
    lines += [f"  {name:<22} {text}" for name, text in SWITCHES.items()]
    return "\n".join(
        [*lines, "", f"deeploop train {RESUME} RUN continues a run; {CONFIG} FILE starts from a file"]
    )


def shape_of_width(base: RunConfig, words: list[str]) -> tuple[list[str], list[str]]:
    """Return heads and hidden width for a `--width` given alone, as words, and a line about them.

    Heads keep their size if it divides the width, otherwise they shrink; the hidden width keeps its ratio, in
    multiples of 16.
    """
    given, rest = None, words
    while (found := take_value(rest, "--width"))[0] is not None:  # of several the last one counts
        given, rest = found
    named = any(
        word.startswith(("--model.heads", "--model.hidden", "--model.head-", INIT_FROM)) for word in words
    )
    if given is None or named or base.resume:
        return [], []
    try:
        width, model = whole_number(given), base.model
    except ValueError:  # reported by the parser
        return [], []
    if width < 2 or width % 2 or width == model.width:
        return [], []
    sizes = [size for size in range(2, model.width // model.heads + 1, 2) if width % size == 0]
    size = max(sizes, key=lambda size: (size % 8 == 0, size))  # what kernels take, if there is one
    heads, hidden = width // size, -(-model.hidden * width // model.width // 16) * 16
    line = f"width {width}: {heads} heads, hidden width {hidden} (--model.heads, --model.hidden)"
    return ["--model.heads", str(heads), "--model.hidden", str(hidden)], [line]


def option_of_other_tasks(option: str, base: RunConfig, source: str) -> str | None:
    """Explain an option that only recipes of other tasks have, naming one of them."""
    name = option.removeprefix("--").replace("-", "_")
    paths = {SHORT.get(option.removeprefix("--"), name), re.sub(r"(^|\.)no_", r"\1", name)}
    if paths & leaf_hints(type(base)).keys():
        return None
    for recipe, make in RECIPES.items():
        config = make()
        if paths & leaf_hints(type(config)).keys():
            return f"{option}: is for {config.kind}, such as {recipe}; {source} trains {base.kind}"
    return None


def words_of_source(base: RunConfig, start: str, words: list[str]) -> list[str]:
    """Return the model settings of the run or export to start from, as words, except those in a --config
    FILE.

    Fine-tuning keeps the rounds and the gate of the run too.
    """
    given, _ = take_value([word.replace("--init_from", INIT_FROM) for word in words], INIT_FROM)
    source = Path(given) if given else base.init_from
    if source is None or start.startswith(RESUME):
        return []
    from deeploop.train.initial import model_of, option_words  # now: it imports torch

    parts = {"model": model_of(source)}
    if not is_export(source):
        check_kind(base, source, "init_from")
        if isinstance(base, ChatTrainConfig):
            run = load_config(source)  # its model has had the rise to the mean
            parts |= {"rounds": replace(run.rounds, ramp="off"), "gate": run.gate}
    file = read_table(Path(start.removeprefix(f"{CONFIG} "))) if start.startswith(CONFIG) else {}
    found: list[str] = []
    for part, theirs in parts.items():
        if type(ours := getattr(base, part)) is not type(theirs):
            continue  # which is told when the weights are read
        named = current(type(ours), file.get(part, {}))
        for field in dataclasses.fields(theirs):
            value = getattr(theirs, field.name)
            if field.name not in named and value != getattr(ours, field.name):
                found += option_words(f"{part}.{field.name}", value)
    return found


def check_path(config: Any, base: Any) -> None:
    """Raise ValueError for a path given with a mixture, which would not read it; the base's own path is
    ignored.
    """
    if isinstance(config, TrainConfig) and config.data.mix and config.data.path != base.data.path:
        raise ValueError(
            f"data.path={config.data.path}: must be left out with data.mix={' '.join(config.data.mix)}; "
            "to train on it too, name it there"
        )


def preview(
    config: RunConfig, *, source: str, quiet: bool, named: Collection[str], stop: StopRequest
) -> None:
    """Print what would be trained; write nothing."""
    from deeploop.train.distributed import open_world
    from deeploop.train.opening import preview_run

    with open_world(config.device) as world:
        lines = preview_run(config, world, source, named)
        if world.is_main:
            show("\n".join(lines))


def choose_base(words: list[str]) -> tuple[RunConfig | None, str, list[str]]:
    """Return the config that the words start from, the words that named it, and those that change it."""
    if words and words[0].startswith("--") and (found := _base_without_recipe(words)):
        return found
    if words and words[0] in GONE:
        require_recipe(words[0])
    choice, rest = choose("recipe", words, {name: summary(make) for name, make in RECIPES.items()})
    if choice is None:
        print(INSTEAD)
        return None, "", []
    for option in (CONFIG, RESUME):
        value, _ = take_value(rest, option)
        if value is not None:
            raise ValueError(f"{option} {value}: goes without a recipe; say: deeploop train {option} {value}")
    return get_recipe(choice), choice, rest


def _base_without_recipe(words: list[str]) -> tuple[RunConfig, str, list[str]] | None:
    """Return the config of a file or a run folder; None if neither option is given."""
    file, rest = take_value(words, CONFIG)
    if file is not None:
        return read_config(Path(file)), f"{CONFIG} {file}", rest
    run, rest = take_value(words, RESUME)
    if run is not None:
        if any(word.partition("=")[0] == "--out" for word in rest):
            raise ValueError(f"--out: {RESUME} {run} writes into {run}; leave --out out")
        return config_to_resume(Path(run)), f"{RESUME} {run}", rest
    for option, what in ((CONFIG, "FILE"), (RESUME, "RUN")):
        if option in words:
            raise ValueError(f"{option}: names nothing; give {option} {what}, or a recipe as the first word")
    return None


def take_value(words: list[str], option: str) -> tuple[str | None, list[str]]:
    """Return the value that follows an option, and the words without both; None if no value follows."""
    for at, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == option and value:
            return value, words[:at] + words[at + 1 :]
        if word == option and at + 1 < len(words) and not words[at + 1].startswith("-"):
            return words[at + 1], words[:at] + words[at + 2 :]
    return None, words


def with_vocabulary_of_corpus(config: Any, words: list[str]) -> tuple[Any, list[str]]:
    """Set a recipe's vocabulary to its corpus's, unless the words set it; also return a line about it."""
    from deeploop.tasks.language.vocabulary import corpus_of_other_vocabulary  # now: it opens the corpus

    given = any(word.startswith("--model.vocabulary") for word in words)
    corpus = None if given else corpus_of_other_vocabulary(config)
    if corpus is None:
        return config, []
    line = f"vocabulary: {corpus.vocabulary:,}, as {corpus.folder} has it ({corpus.tokenizer_name})"
    return replace(config, model=replace(config.model, vocabulary=corpus.vocabulary)), [line]


def with_steps_of_corpus(
    config: Any, words: list[str], recipe: str, *, auto_lr: bool = False
) -> tuple[Any, list[str]]:
    """Limit a recipe to EPOCHS passes over its text, unless the words set the steps.

    Raises ValueError if too few steps are left, with the commands to choose from.
    """
    from deeploop.tasks.language.vocabulary import training_tokens  # now: it opens the corpora

    tokens = 0 if _names(words, "--optim.steps") else training_tokens(config)
    if not tokens:
        return config, []
    optim, context, mix = config.optim, config.model.context, config.data.mix
    steps, epochs = EPOCHS * tokens // (optim.batch * context), optim.steps * optim.batch * context / tokens
    if epochs <= EPOCHS:
        return config, []
    known = (
        f"{' '.join(mix) + ' have' if mix else f'{config.data.path} has'} {tokens:,} tokens, which the "
        f"{optim.steps:,} steps of {recipe} repeat {epochs:,.0f} times"
    )
    if steps < FEWEST_STEPS:
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        batch = -(-max(1, EPOCHS * tokens // (5 * FEWEST_STEPS * context)) // ranks) * ranks
        fewer = max(1, EPOCHS * tokens // (batch * context))
        source = ("--data.mix", *mix) if mix else ("--data", str(config.data.path))
        replaced = ("--data.path", "--data.mix", "--optim.batch", "--optim.warmup-steps")
        kept = shlex.join(_other_than(words, replaced))
        fitted = f"{kept} --batch {batch} --steps {fewer} --warmup {fewer // 5}".strip()
        command = shlex.join(source)
        if recipe == "tiny":
            typed = shlex.join(_other_than(words, ("--data.path", "--data.mix")))
            other = " ".join(filter(None, ("tiny", command, typed, f"--steps {optim.steps}")))
        else:
            out = ("--out", str(config.out)) if _names(words, "--out") else ()
            other = shlex.join(("tiny", *source, *out))
        raise ValueError(
            f"{known}; choose `deeploop train {recipe} {command} {fitted}` ({EPOCHS} epochs) "
            f"or `deeploop train {other}{f' {AUTO_LR}' * auto_lr}`"  # no rate is known for the small batch
        )
    warm = (
        optim.warmup_steps if _names(words, "--optim.warmup-steps") else min(optim.warmup_steps, steps // 5)
    )
    data, saved, each = config.data, config.checkpoint, max(1, steps // 10)
    if not _names(words, "--data.validate-every"):
        data = replace(data, validate_every=min(each, data.validate_every))
    if not _names(words, "--checkpoint.every"):
        saved = replace(saved, every=min(each, saved.every))
    fitted = replace(optim, steps=steps, warmup_steps=warm)
    line = f"steps: {steps:,}, {EPOCHS} epochs: {known}; warm-up {warm:,}; --steps sets another number"
    return replace(config, optim=fitted, data=data, checkpoint=saved), [line]


def with_published_steps(config: Any, words: list[str]) -> tuple[Any, list[str]]:
    """Set an ARC recipe's steps to 100,000 epochs of its puzzles, unless the words set the steps."""
    found = config if _names(words, "--optim.steps") else published_steps(config)
    steps = found.optim.steps
    if steps == config.optim.steps:
        return config, []
    epochs = f"100,000 epochs of {config.data.path}, as published"
    return found, [f"steps: {steps:,}, {epochs}; --steps sets another number"]


def _other_than(words: list[str], options: Collection[str]) -> list[str]:
    """Drop these options and their values."""
    kept, drop = [], False
    for word in words:
        if word.startswith("--"):
            drop = word.partition("=")[0].replace("_", "-") in options
        if not drop:
            kept.append(word)
    return kept


def _names(words: list[str], option: str) -> bool:
    return any(word.partition("=")[0].replace("_", "-") == option for word in words)


def with_measured_rate(config: Any, words: list[str]) -> tuple[TrainConfig, list[str]]:
    """Set the recommended peak rate and warm-up for the config's rule; also return lines about them."""
    if not isinstance(config, TrainConfig) or isinstance(config, ChatTrainConfig):
        raise ValueError(f"{AUTO_LR}: is for language models from their start; give --lr")
    for word in words:
        for option, short in (("--optim.peak-lr", "--lr"), ("--optim.warmup-steps", "--warmup")):
            if word.replace("_", "-").startswith(option):
                raise ValueError(f"{short}: is what {AUTO_LR} chooses; give one of the two")
    from deeploop.report.recommend import recommend  # now: it reads what was measured

    model, optim = config.model, config.optim
    model.require_plain_loop(AUTO_LR)
    batch_tokens = optim.batch * model.context
    try:
        if optim.kind != "adamw":
            raise ValueError(f"optim.kind={optim.kind}: our rates are AdamW's")
        found = recommend(
            model.blocks,
            model.rounds,
            model.width,
            optim.steps * batch_tokens,
            batch_tokens,
            rule=model.rule,
        )
    except ValueError as error:
        raise ValueError(f"{error}; or leave {AUTO_LR} out and give --lr") from None
    low, peak, high = found.rates
    warm = round(found.warmup * optim.steps)
    rate = replace(optim, peak_lr=peak, warmup_steps=warm, floor_lr=min(optim.floor_lr, peak))
    beyond = "".join(f"\n  {text}" for text in found.notes)
    note = (
        f"{AUTO_LR}: peak rate {peak:g}, {warm:,} steps of warm-up{beyond}\n"
        f"  compare {low:g} and {high:g} before a long run"
    )
    return replace(config, optim=rate), [note]
