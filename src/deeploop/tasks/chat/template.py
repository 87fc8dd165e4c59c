"""Chat templates: render a conversation as text, and find which parts of the text are answers.

A template is Jinja as in transformers, with `messages`, `bos_token`, `eos_token` and
`add_generation_prompt`, and runs in Jinja's sandbox. Answers are found by rendering prefixes of the
conversation, so a template works if each message only appends text to what is already written.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deeploop.data.pretrained_tokenizer import PretrainedTokenizer
from deeploop.data.tokenizers import Tokenizer, token_dtype
from deeploop.files import read_text
from deeploop.tasks.chat.template_sandbox import sandbox

Message = dict[str, str]  # role and content
Segment = tuple[str, bool]  # text, and True if it is an answer

ROLES = ("system", "user", "assistant")
# Unicode noncharacters, which no valid text contains. END stands for end-of-text while rendering; a special
# word after GUARD is not a token.
END, GUARD = "\ufdd0", "\ufdd1"
LARGEST_TEMPLATE = 2**20
LARGEST_TEXT = 2**24
TEMPLATE_FILE = "template.jinja"  # not transformers' name, as the folder may also hold a pretrained tokenizer

DEFAULT = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>\\n' + message['content'] -}}
{{- eos_token if message['role'] == 'assistant' -}}
{{- '\\n' -}}
{%- endfor -%}
{{- '<|assistant|>\\n' if add_generation_prompt -}}
"""
CHATML = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' -}}
{{- eos_token if message['role'] == 'assistant' -}}
{{- '\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt -}}
"""
TEMPLATES = {"default": DEFAULT, "chatml": CHATML}


class ChatTemplate:
    """A compiled template; `name` identifies it in errors."""

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name
        try:
            self._template = sandbox(LARGEST_TEXT).from_string(text)
        except Exception as error:  # an untrusted template may raise anything in Jinja
            raise ValueError(f"template {name}: not a Jinja template ({_one_line(error)})") from None

    def render(self, messages: Sequence[Message], *, ask: bool) -> str:
        """Render the conversation, with a prompt for an answer if `ask`. END represents end-of-text."""
        try:
            text = self._template.render(
                messages=list(messages), bos_token=END, eos_token=END, add_generation_prompt=ask
            )
        except Exception as error:
            raise ValueError(f"template {self.name}: fails ({_one_line(error)})") from None
        if len(text) > LARGEST_TEXT:
            raise ValueError(f"template {self.name}: writes more than {LARGEST_TEXT:,} characters")
        return text

    def segments(self, messages: Sequence[Message], *, ask: bool = False) -> list[Segment]:
        """Split the rendered text at its answers: the text before each, then the answer itself.

        An answer ends with END: the template's own, or one appended to the last text that it writes. With
        `ask`, the last segment is the prompt for one more answer.
        """
        parts: list[Segment] = []
        done = ""
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._rest(self.render(messages[:index], ask=True), done)
                whole = self.render(messages[: index + 1], ask=False)
                body, end, _ = self._rest(whole, done + before).partition(END)
                if not body.strip() and message["content"].strip():
                    raise ValueError(f"template {self.name}: leaves the answers out")
                parts += [(before, False), (body + END, True)]
                done += before + body + end
        if ask:
            parts.append((self._rest(self.render(messages, ask=True), done), False))
        return parts

    def _rest(self, text: str, done: str) -> str:
        if not text.startswith(done):
            raise ValueError(
                f"template {self.name}: does not only append text from message to message, so that answers "
                "can't be found; use one that does, such as default"
            )
        return text[len(done) :]


def find_template(asked: str, tokenizer: Tokenizer | None = None) -> ChatTemplate:
    """Find a template by name or file. `tokenizer` is the name of a pretrained tokenizer's own template."""
    if asked in TEMPLATES:
        return ChatTemplate(TEMPLATES[asked], asked)
    if asked == "tokenizer":
        own = tokenizer.settings.get("chat_template") if isinstance(tokenizer, PretrainedTokenizer) else None
        if own is None:
            raise ValueError("template tokenizer: the tokenizer has no chat template; take default")
        return ChatTemplate(own, asked)
    if not Path(asked).is_file():
        known = f"must be {', '.join(TEMPLATES)}, tokenizer, or a file of Jinja"
        if Path(asked).suffix or len(Path(asked).parts) > 1:
            raise ValueError(f"template {asked}: no such file; {known}")
        raise ValueError(f"template {asked}: {known}")
    return read_template(Path(asked))


def read_template(path: Path) -> ChatTemplate:
    """Read the template in a file."""
    try:
        return ChatTemplate(read_text(path, LARGEST_TEMPLATE), str(path))
    except OSError as error:
        raise ValueError(f"{path}: can't be read ({error.strerror})") from None


def kept_template(folder: Path) -> ChatTemplate | None:
    """The template in a run folder; None if the run was not trained on conversations."""
    path = folder / TEMPLATE_FILE
    return read_template(path) if path.exists() else None


def check_messages(messages: Any) -> list[Message]:
    """Check the messages of a conversation and drop those after its last answer."""
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages: must be a list of messages")
    checked = [_checked(message, f"messages[{index}]") for index, message in enumerate(messages)]
    answers = [index for index, message in enumerate(checked) if message["role"] == "assistant"]
    if not answers:
        raise ValueError("messages: has no answer (no message of role assistant)")
    return checked[: answers[-1] + 1]


def _checked(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or "role" not in message:
        raise ValueError(f'{where}: has no "role"; must be one of {", ".join(ROLES)}')
    if message["role"] not in ROLES:
        raise ValueError(f"{where}.role={message['role']!r:.40}: must be one of {', '.join(ROLES)}")
    content = message.get("content")
    if not isinstance(content, str):
        raise ValueError(f'{where}: has no string field "content"')
    if message["role"] == "assistant" and not content.strip():
        raise ValueError(f"{where}: an empty answer; leave the conversation out")
    return {"role": message["role"], "content": plain(content)}


def plain(text: str) -> str:
    """Replace the two noncharacters END and GUARD."""
    return text.replace(END, "\ufffd").replace(GUARD, "\ufffd")


def encode_segments(segments: Sequence[Segment], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Encode a conversation; return its tokens, and a bool array that marks the answers.

    Each segment is encoded separately, so that a growing conversation keeps its tokens. End-of-text comes
    first.
    """
    (first, is_answer), *rest = segments
    opened = [(first if first.startswith(END) else END + first, is_answer), *rest]
    parts = [encode_text(text, tokenizer) for text, _ in opened]
    answers = [np.full(len(tokens), own) for tokens, (_, own) in zip(parts, opened, strict=True)]
    return np.concatenate(parts), np.concatenate(answers)


def encode_text(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Encode text in which END is end-of-text and the tokenizer's special words are tokens."""
    dtype = token_dtype(tokenizer.vocabulary)
    special = {END: tokenizer.end_of_text, **special_tokens(tokenizer)}
    parts = [np.empty(0, dtype)]
    for number, piece in enumerate(re.split(f"(?<!{GUARD})({_any_of(special)})", text)):
        if number % 2:  # a match of the pattern
            parts.append(np.array([special[piece]], dtype))
        elif piece := piece.replace(GUARD, ""):
            parts.append(tokenizer.encode_array(piece))
    return np.concatenate(parts)


def _any_of(words: Iterable[str]) -> str:
    return "|".join(map(re.escape, words))


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Special words of a pretrained tokenizer that a template may write as tokens, such as <|im_start|>."""
    return tokenizer.special_tokens if isinstance(tokenizer, PretrainedTokenizer) else {}


def guarded(messages: Sequence[Message], tokenizer: Tokenizer) -> list[Message]:
    """Put GUARD before every special word in the messages, so that it is encoded as plain text."""
    if not (special := special_tokens(tokenizer)):
        return list(messages)
    start = re.compile(f"(?={_any_of(special)})")  # a lookahead, which also finds overlapping words
    return [{**message, "content": start.sub(GUARD, message["content"])} for message in messages]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
