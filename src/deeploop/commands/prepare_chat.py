"""`deeploop prepare chat`: write conversations in JSON lines as a chat folder."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tyro.conf import Positional

from deeploop.data.bpe import find_tokenizer
from deeploop.data.tokenizers import Tokenizer
from deeploop.files import resolve
from deeploop.runs.folder import load_config
from deeploop.tasks.chat.data import ChatSet
from deeploop.tasks.chat.prepare import prepare_chat
from deeploop.tasks.chat.template import find_template


@dataclass(frozen=True, kw_only=True)
class PrepareChat:
    """Conversations to fine-tune on: .jsonl with `messages`, or `prompt` and `response`."""

    file: Positional[Path]
    """A line per conversation: {"messages": [{"role": …, "content": …}, …]}, or a prompt and a response."""
    tokenizer: str
    """The run to fine-tune, whose tokenizer it is; or bytes, gpt2, or a folder that holds another."""
    template: str = "default"
    """How messages become text: default, chatml, tokenizer (a pretrained one's own), or a file of Jinja."""
    context: int | None = None
    """Most tokens: longer conversations lose whole turns at the front, and are counted. Unset: the run's."""
    validation_share: float = 0.05
    """Share of the conversations to hold out, spread over the file."""
    out: Path = Path("data/chat")
    """The chat folder to write."""


def run(args: PrepareChat) -> str:
    """Write the folder and return a summary to print."""
    if not args.file.name.endswith((".jsonl", ".jsonl.gz", ".jsonl.xz")):
        raise ValueError(f"{args.file}: unknown kind of file; known are .jsonl, .jsonl.gz, .jsonl.xz")
    found = (args.out / "chat.json").exists()
    tokenizer, context = tokenizer_and_context(args)
    chat = prepare_chat(
        args.file,
        tokenizer,
        find_template(args.template, tokenizer),
        args.out,
        context=context,
        validation_share=args.validation_share,
    )
    return ("already prepared: " if found else "") + describe(chat)


def tokenizer_and_context(args: PrepareChat) -> tuple[Tokenizer, int]:
    """Return the run's tokenizer and context, if a run was named."""
    run, found = Path(args.tokenizer), find_tokenizer(args.tokenizer)
    if args.context is not None:
        return found, args.context
    if not (resolve(run) / "run.json").exists():
        raise ValueError("context: must be given where --tokenizer names no run: --context 1024")
    return found, load_config(run).model.context


def describe(chat: ChatSet) -> str:
    """Describe what was kept, cut and left out."""
    counts = chat.facts["counts"]
    share = float(np.mean(chat.train.answers))
    shortened, left_out = (
        f"{counts[name]:,}" if counts[name] else "none" for name in ("shortened", "left_out")
    )
    return (
        f"{chat.folder}: {chat.source}, {chat.tokenizer_name} tokens; "
        f"train: {len(chat.train):,} conversations, {len(chat.train.tokens):,} tokens "
        f"({share:.0%} in answers); "
        f"validation: {len(chat.validation):,}, {len(chat.validation.tokens):,} tokens; "
        f"{shortened} shortened, {left_out} left out"
    )
