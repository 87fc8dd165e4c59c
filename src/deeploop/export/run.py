"""Export a run as a folder for transformers: weights, tokenizer, code and model card."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from deeploop.data.tokenizers import Tokenizer
from deeploop.export.card import model_card
from deeploop.export.folder import new_export, written
from deeploop.extras import require
from deeploop.files import resolve
from deeploop.models.gpt import LoopedGPT
from deeploop.runs.folder import load_any_config, read_stamp, require_checkpoint
from deeploop.tasks.chat.template import kept_template
from deeploop.tasks.iterate.config import IterateTrainConfig
from deeploop.tasks.iterate.load import load_iterate
from deeploop.train.rundir import load

if TYPE_CHECKING:
    from transformers import GenerationConfig

WITHOUT = "  # without deeploop: add trust_remote_code=True"


def export_run(
    run: Path,
    folder: Path,
    *,
    dtype: str = "float32",
    context: int | None = None,
    cache_rounds: int | None = None,
) -> str:
    """Export the last checkpoint for transformers; return what to print."""
    require("transformers", "hf")
    checkpoint = require_checkpoint(run)
    model, tokenizer = load_parts(run, checkpoint)
    longer = check_context(run, model.config.context, context)
    model = model if context is None else with_context(model, context)
    model.set_cache_rounds(cache_rounds)
    card = model_card(run, model, checkpoint)
    with new_export(folder) as part:
        save_model(model.to(getattr(torch, dtype)), tokenizer, part, template_of(run))
        (part / "README.md").write_text(card, encoding="utf-8")
    return (
        f"{written(folder, run, checkpoint)}{longer}\n\n"
        "  import deeploop.models.hf\n"
        f"  from transformers import AutoModelForCausalLM{', AutoTokenizer' * (tokenizer is not None)}\n\n"
        f'  model = AutoModelForCausalLM.from_pretrained("{folder}"){WITHOUT}'
        + (f'\n  tokenizer = AutoTokenizer.from_pretrained("{folder}"){WITHOUT}' if tokenizer else "")
    )


def load_parts(run: Path, checkpoint: Path) -> tuple[LoopedGPT, Tokenizer | None]:
    """Load the model, and its tokenizer unless it is an iterated task's, whose tokens are numbers."""
    if isinstance(load_any_config(run), IterateTrainConfig):
        return load_iterate(run, checkpoint=checkpoint)[0], None
    return load(run, checkpoint=checkpoint)


def check_context(run: Path, trained: int, asked: int | None) -> str:
    """Note a context above the trained one; raise ValueError above that of a retrofit's source."""
    if asked is None or asked <= trained:
        return ""
    origin = read_stamp(run).get("retrofit")
    known = origin.get("context") if isinstance(origin, dict) else None
    if not isinstance(known, int):
        return f"\ncontext {asked:,}: more than the {trained:,} tokens that the run was trained with"
    if asked > known:
        raise ValueError(f"context={asked}: must be at most {known}, the context of the retrofit's source")
    return ""


def template_of(run: Path) -> str | None:
    """Read the chat template that a run was fine-tuned with."""
    template = kept_template(resolve(run))
    return None if template is None else template.text


def with_context(model: LoopedGPT, context: int) -> LoopedGPT:
    """Return a model with the same weights for sequences of another length."""
    other = LoopedGPT(replace(model.config, context=context))
    other.load_state_dict(model.state_dict())
    return other.eval()


def save_model(
    model: LoopedGPT, tokenizer: Tokenizer | None, folder: Path, template: str | None = None
) -> None:
    """Write weights, config, generation defaults, code, tokenizer and its chat template."""
    from deeploop.models.hf import DeepLoopForCausalLM

    wrapper = DeepLoopForCausalLM.from_gpt(model)
    if tokenizer is None:
        wrapper.save_pretrained(folder)
        return
    wrapper.generation_config = save_tokenizer(tokenizer, folder, model.config.context, template)
    wrapper.save_pretrained(folder)


def save_tokenizer(
    tokenizer: Tokenizer, folder: Path, context: int, template: str | None = None
) -> "GenerationConfig":
    """Write the tokenizer with its chat template; return the generation defaults that follow from it."""
    from transformers import GenerationConfig

    from deeploop.data.hf_tokenizer import to_transformers

    theirs = to_transformers(tokenizer, context=context)
    # A pretrained tokenizer may name another end token than the one in training.
    ends = [own for own in dict.fromkeys((theirs.eos_token_id, tokenizer.end_of_text)) if own is not None]
    defaults = GenerationConfig(
        bos_token_id=theirs.bos_token_id,
        eos_token_id=ends if len(ends) > 1 else ends[0],
        pad_token_id=theirs.pad_token_id,
    )
    if template is not None:
        theirs.chat_template = template
        # What the template calls bos_token and eos_token was end-of-text in training.
        theirs.bos_token = theirs.eos_token = theirs.convert_ids_to_tokens(tokenizer.end_of_text)
    theirs.save_pretrained(folder)
    return defaults
