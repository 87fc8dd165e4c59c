"""`deeploop train`: one run of a recipe, of a file or of a run folder, with any field overridden."""

import dataclasses
import os
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from deeploop.commands.parsing import choose, parse, summary
from deeploop.config.old_names import current, require_new_flags
from deeploop.config.run import RunConfig
from deeploop.exits import memory_advice
from deeploop.files import read_table
from deeploop.runs.folder import check_kind, config_to_resume, is_export, load_config
from deeploop.tasks import read_config
from deeploop.tasks.chat.config import ChatTrainConfig
from deeploop.tasks.language.config import TrainConfig
from deeploop.tasks.puzzles.config import PuzzleDataConfig
from deeploop.tasks.puzzles.recipes import published_steps, require_puzzles
from deeploop.tasks.recipes import GONE, RECIPES, get_recipe, require_recipe
from deeploop.terminal import loading_torch, show
from deeploop.train.stop import StopRequest

# What other trainers call a field of ours. tyro goes by letters alone: to it, lr is --optim.branch-lr.
TRAIN_WORDS = {
    **dict.fromkeys(("lr", "learning-rate", "learning-rates"), "--optim.peak-lr"),
    "warmup": "--optim.warmup-steps",
    "steps": "--optim.steps",
    **dict.fromkeys(("batch", "batch-size"), "--optim.batch"),
}

RESUME, CONFIG, INIT_FROM = "--resume", "--config", "--init-from"
INSTEAD = f"""
or, without a recipe:
  {RESUME} RUN    go on with a run, by its own config
  {CONFIG} FILE   start from a run's config.json, or TOML with the same nesting"""
AUTO_LR, DRY_RUN, QUIET = "--auto-lr", "--dry-run", "--quiet"
HELP = (
    f"{AUTO_LR}: peak rate and warm-up as `deeploop recommend` has them for this rule and shape (language "
    "models only), in place of --optim.peak-lr and --optim.warmup-steps. "
    f"{DRY_RUN}: say what would be trained, and end. {QUIET}: print errors and the last line alone."
)


def main(arguments: list[str]) -> int:
    base, source, rest = choose_base(arguments)
    if base is None:
        return 0
    prog = f"deeploop train {source}"
    switches, rest = take_switches(rest, (AUTO_LR, DRY_RUN, QUIET))
    require_new_flags(rest, base.task)
    settled = words_of_source(base, source, rest)  # before those that are typed: of two the last one counts
    config = parse(
        type(base), [*settled, *rest], prog=prog, default=base, words=TRAIN_WORDS, description=HELP
    )
    check_path(config, base)
    is_first_rank = int(os.environ.get("RANK", 0)) == 0
    told = []
    if source in RECIPES:  # the config of a file or a run names its own
        config, line = with_vocabulary_of_corpus(config, rest)
        told += line
    if AUTO_LR in switches:
        config, line = with_measured_rate(config, rest)
        told += line
    if is_first_rank and QUIET not in switches:
        print(*told, sep="\n", end="\n" * bool(told))
    if isinstance(config, ChatTrainConfig) and config.init_from is None:
        raise ValueError(f"{INIT_FROM}: names the run to fine-tune; give {INIT_FROM} RUN")
    if isinstance(config.data, PuzzleDataConfig):
        require_puzzles(config.data.path)
        config = published_steps(config) if source in RECIPES else config
    size = config.device.micro_batch
    smaller = str(max(1, size // 2)) if size else "N with an N below the one printed at the start"
    with memory_advice(f"--device.no-graph, --device.recompute block, or --device.micro-batch {smaller}"):
        start = runner(dry_run=DRY_RUN in switches, quiet=QUIET in switches)
        # What is not as `words_of_source` has it was typed, or stands in the file.
        named = [f"model.{name}" for name in getattr(config.model, "__dataclass_fields__", ())]
        stop = StopRequest()
        result = start(config, source=source, quiet=QUIET in switches, named=named, stop=stop)
    code = stop.exit_code if result and result["ended"] == "stopped" else 0
    if result is None or not is_first_rank:
        return code
    if result["ended"] != "stopped" or QUIET in switches:  # that was said already
        print(
            f"{result['ended']} at step {result['step']}: {config.out}, last validation {result['loss']:.4f}"
        )
    return code


def words_of_source(base: RunConfig, start: str, words: list[str]) -> list[str]:
    """The model's settings of the run or export that is started from, as words; not those of a --config FILE.

    A fine-tuning has the rounds and the gate of the run too.
    """
    given, _ = take_value([word.replace("--init_from", INIT_FROM) for word in words], INIT_FROM)
    source = Path(given) if given else base.init_from
    if source is None or start.startswith(RESUME):
        return []
    from deeploop.train.initial import model_of, option  # now: it imports torch

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
                found += option(f"{part}.{field.name}", value)
    return found


def check_path(config: Any, base: Any) -> None:
    """Raises for a path that is given beside a mixture, which would not read it; the base's own is let be."""
    if isinstance(config, TrainConfig) and config.data.mix and config.data.path != base.data.path:
        raise ValueError(
            f"data.path={config.data.path}: must be left out with data.mix={' '.join(config.data.mix)}; "
            "to train on it too, name it there"
        )


def runner(*, dry_run: bool, quiet: bool) -> Callable[..., dict[str, Any] | None]:
    """The function that trains a config, or that says what would be trained."""
    with nullcontext() if quiet else loading_torch():
        from deeploop.train.loop import train
    return preview if dry_run else train


def preview(
    config: RunConfig, *, source: str, quiet: bool, named: Collection[str], stop: StopRequest
) -> None:
    """Say what would be trained; nothing is written."""
    from deeploop.train.distributed import open_world
    from deeploop.train.opening import preview_run

    with open_world(config.device) as world:
        lines = preview_run(config, world, source, named)
        if world.is_main:
            show("\n".join(lines))


def choose_base(words: list[str]) -> tuple[RunConfig | None, str, list[str]]:
    """The config that the words start from, the words that named it, and those that change it."""
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
    """The same of a file or a run folder; None where neither option is among the words."""
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


def take_switches(words: list[str], known: tuple[str, ...]) -> tuple[set[str], list[str]]:
    """The switches among the words that are no fields of a config, and the words without them."""
    return {word for word in words if word in known}, [word for word in words if word not in known]


def take_value(words: list[str], option: str) -> tuple[str | None, list[str]]:
    """The value that follows an option, and the words without both; None where none follows it."""
    for at, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == option and value:
            return value, words[:at] + words[at + 1 :]
        if word == option and at + 1 < len(words) and not words[at + 1].startswith("-"):
            return words[at + 1], words[:at] + words[at + 2 :]
    return None, words


def with_vocabulary_of_corpus(config: Any, words: list[str]) -> tuple[Any, list[str]]:
    """A recipe's config with the vocabulary of its corpus, unless the words settle it; and a line of it."""
    from deeploop.tasks.language.vocabulary import corpus_of_other_vocabulary  # now: it opens the corpus

    given = any(word.startswith("--model.vocabulary") for word in words)
    corpus = None if given else corpus_of_other_vocabulary(config)
    if corpus is None:
        return config, []
    line = f"vocabulary: {corpus.vocabulary:,}, as {corpus.folder} has it ({corpus.tokenizer_name})"
    return replace(config, model=replace(config.model, vocabulary=corpus.vocabulary)), [line]


def with_measured_rate(config: Any, words: list[str]) -> tuple[TrainConfig, list[str]]:
    """The config at the peak rate and warm-up that our runs have for its rule, and lines that say so."""
    if not isinstance(config, TrainConfig) or isinstance(config, ChatTrainConfig):
        raise ValueError(f"{AUTO_LR}: is for language models from their start; give --optim.peak-lr")
    for word in words:
        if word.replace("_", "-").startswith(("--optim.peak-lr", "--optim.warmup-steps")):
            raise ValueError(f"{word}: settles what {AUTO_LR} would; give one of the two")
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
        raise ValueError(f"{error}; or leave {AUTO_LR} out and give --optim.peak-lr") from None
    low, peak, high = found.rates
    warm = round(found.warmup * optim.steps)
    rate = replace(optim, peak_lr=peak, warmup_steps=warm, floor_lr=min(optim.floor_lr, peak))
    beyond = "".join(f"\n  {text}" for text in found.notes)
    told = (
        f"{AUTO_LR}: peak rate {peak:g}, {warm:,} steps of warm-up{beyond}\n"
        f"  compare {low:g} and {high:g} before a long run"
    )
    return replace(config, optim=rate), [told]
