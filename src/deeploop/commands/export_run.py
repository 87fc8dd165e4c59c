"""A run as a folder for transformers, with weights, tokenizer, code and model card: `deeploop export`."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import deeploop
from deeploop.commands.export import ExportArgs
from deeploop.data.chat_template import kept_template
from deeploop.data.tokenizers import Tokenizer
from deeploop.extras import require
from deeploop.files import exclusive_folder, new_folder, publish, read_json, resolve
from deeploop.models.accounting import parameter_count
from deeploop.models.gpt import LoopedGPT
from deeploop.models.gpt_config import PARTS, GPTConfig
from deeploop.runs.folder import load_any_config, read_stamp, require_checkpoint
from deeploop.tasks.iterate.config import IterateTrainConfig
from deeploop.tasks.iterate.load import load_iterate
from deeploop.tasks.language.config import TrainConfig
from deeploop.tasks.language.text import open_mixture
from deeploop.train.checkpoint import read_state
from deeploop.train.rundir import load

WITHOUT = "  # without deeploop: add trust_remote_code=True"
PART = ".deeploop-export.part"  # a name that nobody else uses: what lies there is ours to delete
# What `from_pretrained` loads, or runs, where it finds it: an earlier export's must not stay beside ours.
LOADED = (
    *("model*.safetensors", "model.safetensors.index.json", "generation_config.json", "deeploop_*.py"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.*", "additional_chat_templates"),
)
CARD_MARK = "A looped language model: K stored blocks applied for R rounds"  # in every model card of ours


def run(args: ExportArgs) -> str:
    """Exports the last checkpoint; returns what to print."""
    require("transformers", "hf")
    checkpoint = require_checkpoint(args.run)
    model, tokenizer = load_parts(args.run, checkpoint)
    longer = check_context(args.run, model.config.context, args.context)
    model = model if args.context is None else with_context(model, args.context)
    model.set_cache_rounds(args.cache_rounds)
    card = model_card(args.run, model, checkpoint)
    if args.folder.exists() and not args.folder.is_dir():
        raise ValueError(f"folder={args.folder}: is a file; name a folder")
    with exclusive_folder(args.folder, "folder"):
        part = open_part(args.folder)
        template = kept_template(resolve(args.run))
        text = None if template is None else template.text
        save_model(model.to(getattr(torch, args.dtype)), tokenizer, part, text)
        (part / "README.md").write_text(card, encoding="utf-8")
        kept = replace_export(part, args.folder)
    size = sum(file.stat().st_size for file in args.folder.iterdir() if file.is_file())
    return (
        f"written: {args.folder} ({size / 1e6:.1f} MB) of {args.run} at {checkpoint.name}{kept}{longer}\n\n"
        "  import deeploop.models.hf\n"
        f"  from transformers import AutoModelForCausalLM{', AutoTokenizer' * (tokenizer is not None)}\n\n"
        f'  model = AutoModelForCausalLM.from_pretrained("{args.folder}"){WITHOUT}'
        + (f'\n  tokenizer = AutoTokenizer.from_pretrained("{args.folder}"){WITHOUT}' if tokenizer else "")
    )


def load_parts(run: Path, checkpoint: Path) -> tuple[LoopedGPT, Tokenizer | None]:
    """Model and tokenizer; an iterated task has none, its tokens are numbers (docs/iterate.md)."""
    if isinstance(load_any_config(run), IterateTrainConfig):
        return load_iterate(run, checkpoint=checkpoint)[0], None
    return load(run, checkpoint=checkpoint)


def check_context(run: Path, trained: int, asked: int | None) -> str:
    """What to say of a context above the trained one; raises above that of a retrofit's source."""
    if asked is None or asked <= trained:
        return ""
    origin = read_stamp(run).get("retrofit")
    known = origin.get("context") if isinstance(origin, dict) else None
    if not isinstance(known, int):
        return f"\ncontext {asked:,}: more than the {trained:,} tokens that the run was trained with"
    if asked > known:
        raise ValueError(f"context={asked}: must be at most {known}, the context of the retrofit's source")
    return ""


def with_context(model: LoopedGPT, context: int) -> LoopedGPT:
    """The same weights for sequences of another length."""
    other = LoopedGPT(replace(model.config, context=context))
    other.load_state_dict(model.state_dict())
    return other.eval()


def save_model(
    model: LoopedGPT, tokenizer: Tokenizer | None, folder: Path, template: str | None = None
) -> None:
    """Weights, config, generation defaults, code, tokenizer and its chat template."""
    from transformers import GenerationConfig

    from deeploop.data.hf_tokenizer import to_transformers
    from deeploop.models.hf import DeepLoopForCausalLM

    wrapper = DeepLoopForCausalLM.from_gpt(model)
    if tokenizer is None:
        wrapper.save_pretrained(folder)
        return
    theirs = to_transformers(tokenizer, context=model.config.context)
    # A pretrained tokenizer may name another end than the one that documents and answers were trained with.
    ends = [own for own in dict.fromkeys((theirs.eos_token_id, tokenizer.end_of_text)) if own is not None]
    wrapper.generation_config = GenerationConfig(
        bos_token_id=theirs.bos_token_id,
        eos_token_id=ends if len(ends) > 1 else ends[0],
        pad_token_id=theirs.pad_token_id,
    )
    wrapper.save_pretrained(folder)
    if template is not None:
        theirs.chat_template = template
        # What the template calls bos_token and eos_token was end-of-text in training.
        theirs.bos_token = theirs.eos_token = theirs.convert_ids_to_tokens(tokenizer.end_of_text)
    theirs.save_pretrained(folder)


def open_part(folder: Path) -> Path:
    """An empty folder inside `folder`, which must hold nothing but an earlier export."""
    part = folder / PART
    ours = (part.is_dir() and not part.is_symlink()) or read_json(folder / "config.json").get(
        "model_type"
    ) == "deeploop"
    if not ours and any(file.name != ".lock" for file in folder.iterdir()):
        raise ValueError(f"folder={folder}: is not empty and not an earlier export; name another folder")
    return new_folder(part)


def _is_our_card(card: Path) -> bool:
    return card.is_file() and CARD_MARK in card.read_text(encoding="utf-8", errors="replace")


def replace_export(part: Path, folder: Path) -> str:
    """Moves the files of a whole export into place, config.json last: without it nothing is loaded.

    A README.md that somebody else wrote stays; returns a word about that.
    """
    kept, card = "", folder / "README.md"
    if card.exists() and not _is_our_card(card):
        (part / "README.md").unlink()
        kept = f"; {card} is not of an export, and stays"
    (folder / "config.json").unlink(missing_ok=True)
    _remove_loaded(folder)
    for file in part.iterdir():
        file.chmod(0o644)  # safetensors leaves 0600
    publish(part, folder, last="config.json")
    return kept


def _remove_loaded(folder: Path) -> None:
    """Removes what transformers would load of an earlier export; symbolic links are unlinked."""
    for path in [path for pattern in LOADED for path in folder.glob(pattern)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def model_card(run: Path, model: LoopedGPT, checkpoint: Path) -> str:
    """README.md of the export: what it is, where it comes from, how it is loaded."""
    train = load_any_config(run)
    assert isinstance(train, TrainConfig | IterateTrainConfig)  # of a looped GPT, as loaded
    state, config = read_state(checkpoint, ()), model.config  # the weights were verified as they were loaded
    facts = {
        "stored blocks K": config.blocks,
        "rounds R": config.rounds,
        "effective depth N = K·R": config.depth,
        "residual rule": f"{config.residual.title} (`--model.rule {config.rule}`)",
        **_scales(config),
        "width, heads, hidden": f"{config.width}, {config.heads}, {config.hidden}",
        "key-value cache": _cache(model),
        "parameters": f"{parameter_count(config):,}",
        "context": f"{config.context:,} tokens",
        "vocabulary": f"{config.vocabulary:,}",
        "data": _source(train, state),
        "trained": f"{state['step']:,} steps"
        + (f", {state['tokens']:,} tokens" if "tokens" in state else ""),
    }
    if not config.is_plain_loop:
        facts["blocks of prelude, coda"] = f"{config.prelude}, {config.coda}, visited once"
        facts["injection, first state"] = f"{config.injection}, {config.first_state}"
    if isinstance(origin := read_stamp(run).get("retrofit"), dict):
        parts = (f"{name} {origin.get(name)}" for name in ("prelude", "core", "coda"))
        facts["layers of"] = f"{origin.get('source')} ({origin.get('layers')}): {', '.join(parts)}"
    if loss := (state.get("validation") or {}).get("loss"):
        unit = "token" if isinstance(train, TrainConfig) else "answer"
        facts["validation loss"] = f"{loss:.4f} nats per {unit}"
    table = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    use = TEXT
    if isinstance(train, IterateTrainConfig):
        use = ROUNDS if train.rounds.sample == "steps" else ANSWERS
    return CARD.format(name=train.out.name, table=table, version=deeploop.__version__, use=use)


def _scales(config: GPTConfig) -> dict[str, str]:
    """The numbers that the rule has: α and β, or the ε on the branch; plain pre-norm has none."""
    rule = config.residual
    alpha, beta, epsilon = config.scales
    known = {"α": rule.has_alpha, "β": beta != 1, "ε": rule.epsilon != "none" or epsilon != 1}
    numbers = zip(known.items(), (alpha, beta, epsilon), strict=True)
    own = {name: f"{number:.6g}" for (name, has), number in numbers if has}
    p = f" (p = {rule.p:g})" if rule.law else ""
    return {", ".join(own): ", ".join(own.values()) + p} if own else {}


def _cache(model: LoopedGPT) -> str:
    """How many slots a cache needs, and which visit has which: what serving engines must be told."""
    config, kept = model.config, model.kept_rounds
    around = " + ".join(f"{count} of the {name}" for name in PARTS if (count := getattr(config, name)))
    slots = f"{model.slots} slots: one per (round, block), {kept} × {config.blocks}"
    if kept < model.rounds:
        slots += f", round r in those of r mod {kept}, tokens read one by one"
    return slots + (f", and {around}" if around else "")


def _source(config: TrainConfig | IterateTrainConfig, state: dict[str, Any]) -> str:
    """What the corpora say of themselves, where they still are those that were trained on; or the task."""
    if isinstance(config, IterateTrainConfig):
        rule = f" of rule {config.data.rule}" if config.data.task == "automaton" else ""
        return f"{config.data.task}{rule}, 1 to {config.data.train_steps} steps, length {config.data.length}"
    names = ", ".join(folder.name for folder in config.data.folders)
    try:
        mixture = open_mixture(config.data)
    except ValueError:
        return names
    sources = "; ".join(corpus.source for corpus in mixture.corpora)
    return sources if mixture.checksum == state.get("corpus") else names


TEXT = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")  # rounds=5 evaluates at another depth
tokenizer = AutoTokenizer.from_pretrained(".")
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))"""
ANSWERS = """\
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(".")
answers = model(tokens).logits.argmax(-1)  # at the positions of the tokens, which docs/iterate.md lists"""
ROUNDS = ANSWERS.replace('(".")', '(".", rounds=200)  # one round per step that is asked for')
CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- deeploop
- looped-transformer
---
# {name}
A looped language model: K stored blocks applied for R rounds. Exported by deeploop {version}.

| | |
|---|---|
{table}

```python
import deeploop.models.hf  # without deeploop: trust_remote_code=True in every from_pretrained
{use}
```
Keys and values differ from round to round. An engine that keeps one slot per stored layer writes wrong text
after a few tokens; `config.num_hidden_layers` is the number of slots that are needed.

The Python files in this folder are deeploop's (Apache-2.0); they run only with `trust_remote_code=True`.
The licence of the weights is for their owner to state.
"""
