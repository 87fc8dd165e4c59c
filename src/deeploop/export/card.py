"""The model card of an export: the model, its training, and how to load it."""

from itertools import compress
from pathlib import Path
from typing import Any

import deeploop
from deeploop.models.accounting import parameter_count
from deeploop.models.gpt import LoopedGPT
from deeploop.models.gpt_config import PARTS, GPTConfig
from deeploop.runs.folder import load_any_config, read_stamp
from deeploop.tasks.iterate.config import IterateTrainConfig
from deeploop.tasks.language.config import TrainConfig
from deeploop.tasks.language.text import open_mixture
from deeploop.train.checkpoint import read_state


def model_card(run: Path, model: LoopedGPT, checkpoint: Path) -> str:
    """Return README.md of an export for transformers."""
    train = load_any_config(run)
    assert isinstance(train, TrainConfig | IterateTrainConfig)  # of a looped GPT, as loaded
    state, config = read_state(checkpoint, ()), model.config  # the weights were verified as they were loaded
    facts = {
        "stored blocks K": config.blocks,
        "rounds R": config.rounds,
        "effective depth N = K·R": config.depth,
        "residual rule": f"{config.residual.title} (`--rule {config.rule}`)",
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
    """Return the rule's scales as one row: α and β, or the ε on the branch; none for plain pre-norm."""
    rule, scales = config.residual, config.scales
    has = rule.has_alpha, scales.beta != 1, rule.epsilon != "none" or scales.epsilon != 1
    names, values = list(compress("αβε", has)), list(compress(scales, has))
    p = f" (p = {rule.p:g})" if rule.law else ""
    return {", ".join(names): ", ".join(f"{value:.6g}" for value in values) + p} if names else {}


def _cache(model: LoopedGPT) -> str:
    """Describe the slots of a cache and the slot of each visit, for serving engines."""
    config, kept = model.config, model.kept_rounds
    around = " + ".join(f"{count} of the {name}" for name in PARTS if (count := getattr(config, name)))
    slots = f"{model.slots} slots: one per (round, block), {kept} × {config.blocks}"
    if kept < model.rounds:
        slots += f", round r in those of r mod {kept}, tokens read one by one"
    return slots + (f", and {around}" if around else "")


def _source(config: TrainConfig | IterateTrainConfig, state: dict[str, Any]) -> str:
    """Describe the training corpora, if they are still the same, or the task."""
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
