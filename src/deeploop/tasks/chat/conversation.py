"""Chat with a model. The tokens of earlier turns stay in the key-value cache.

Example:

talk = Conversation(model, tokenizer, template)
answer = talk.ask("What is a loop?", write=print)
"""

import codecs
from collections.abc import Callable

import torch

from deeploop.data.tokenizers import Tokenizer
from deeploop.eval.generation import choose, require_finite
from deeploop.eval.sampling import Sampling
from deeploop.models.gpt import LoopedGPT
from deeploop.tasks.chat.prepare import cut_at_front
from deeploop.tasks.chat.template import (
    END,
    GUARD,
    ChatTemplate,
    Message,
    Segment,
    encode_segments,
    encode_text,
    guarded,
    plain,
)


class Conversation:
    """The questions and answers so far, and the cache of their tokens.

    When the context is full, the oldest turns are dropped, as in `prepare chat`; `forgotten` counts them.
    """

    def __init__(
        self,
        model: LoopedGPT,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        system: str = "",
        sampling: Sampling | None = None,
        max_tokens: int = 400,
    ) -> None:
        self._model, self._tokenizer, self._template = model, tokenizer, template
        self._system: list[Message] = [_message("system", system)] if system else []
        self._sampling, self._max_tokens = sampling or Sampling(), max_tokens
        self._generator = torch.Generator().manual_seed(self._sampling.seed)
        self.reset()
        if system:
            self._check_system()

    def _check_system(self) -> None:
        """Raise ValueError if not even the shortest question fits after the system message."""
        messages = guarded([*self._system, _message("user", "?")], self._tokenizer)
        if not self._fits(tokens := self._encoded(self._template.segments(messages, ask=True))):
            raise ValueError(
                f"system: its {len(tokens):,} tokens leave no room for a question and an answer in the "
                f"model's context of {self._model.config.context:,}; shorten it"
            )

    def reset(self) -> None:
        """Start a new conversation."""
        self.messages: list[Message] = list(self._system)
        self.forgotten = 0
        self._begin([])

    def ask(self, question: str, *, write: Callable[[str], object]) -> str:
        """Answer a question, passing each piece of text to `write` as it is generated."""
        messages = [*self.messages, _message("user", question)]
        self._add_question(messages)
        text = TextBeforeTail(self._tail(), write)
        self._draw_answer(text.add)
        answer = text.end()
        self.messages.append(_message("assistant", answer))
        return answer

    def _begin(self, tokens: list[int]) -> None:
        """Start with an empty cache, and tokens that the model has yet to read."""
        self._tokens, self._cache = tokens, self._model.new_cache()

    def _add_question(self, messages: list[Message]) -> None:
        """Append the question and the prompt for an answer; drop turns if they do not fit."""
        segments = self._template.segments(guarded(messages, self._tokenizer), ask=True)
        # Earlier tokens are kept as generated: encoding their text again could give other tokens.
        if self._tokens:
            tokens = [*self._tokens, *encode_text(segments[-1][0], self._tokenizer).tolist()]
        else:
            tokens = self._encoded(segments)
        if self._fits(tokens):
            self.messages, self._tokens = messages, tokens
            return
        for cut, kept in enumerate(cut_at_front(messages)):
            tokens = self._encoded(self._template.segments(guarded(kept, self._tokenizer), ask=True))
            if self._fits(tokens):
                self.messages, self.forgotten = kept, self.forgotten + cut
                self._begin(tokens)
                return
        raise ValueError(
            f"the message: its {len(tokens):,} tokens leave no room for an answer in the model's context of "
            f"{self._model.config.context:,}; shorten it"
        )

    def _encoded(self, segments: list[Segment]) -> list[int]:
        tokens: list[int] = encode_segments(segments, self._tokenizer)[0].tolist()
        return tokens

    def _fits(self, tokens: list[int]) -> bool:
        """True if there is room for an answer of `max_tokens`, or of a quarter of the context if less."""
        context = self._model.config.context
        # One more than the context: the model never reads the last token of an answer.
        return len(tokens) + min(self._max_tokens, max(1, context // 4)) <= context + 1

    def _tail(self) -> str:
        """The template's text between an answer and end-of-text, decoded from its tokens."""
        messages = [*guarded(self.messages, self._tokenizer), {"role": "assistant", "content": GUARD}]
        _, mark, tail = self._template.segments(messages)[-1][0].removesuffix(END).rpartition(GUARD)
        tokens = encode_text(tail if mark else "", self._tokenizer).tolist()
        return b"".join(map(self._tokenizer.token_bytes, tokens)).decode(errors="replace")

    @torch.inference_mode()
    def _draw_answer(self, write: Callable[[str], object]) -> None:
        end, device = self._tokenizer.end_of_text, next(self._model.parameters()).device
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for _ in range(min(self._max_tokens, self._model.config.context - len(self._tokens) + 1)):
            new = torch.tensor([self._tokens[self._cache.length :]], device=device)
            states = self._model(new, cache=self._cache).states
            uniform = torch.rand(1, generator=self._generator).to(device)
            logits = self._model.logits(states[:, -1])
            choice = choose(logits, self._sampling, uniform)
            require_finite(float(choice.top))
            token = int(choice.tokens)
            self._tokens.append(token)
            if token == end:
                break
            write(decoder.decode(self._tokenizer.token_bytes(token)))
        write(decoder.decode(b"", final=True))
        if self._tokens[-1] != end:  # an answer cut at the token limit needs an end too
            self._tokens.append(end)


class TextBeforeTail:
    """Write text as it arrives, except for a known tail; hold back what may be the tail's start."""

    def __init__(self, tail: str, write: Callable[[str], object]) -> None:
        self._tail, self._write = tail, write
        self._written = self._held = ""

    def add(self, piece: str) -> None:
        text, tail = self._held + piece, self._tail
        at = next(at for at in range(len(text) + 1) if tail.startswith(text[at:]))
        self._emit(text[:at])
        self._held = text[at:]

    def end(self) -> str:
        """Write what was held back, unless it is the tail; return the whole text without its tail."""
        if self._held != self._tail:
            self._emit(self._held)
        return self._written

    def _emit(self, text: str) -> None:
        self._write(text)
        self._written += text


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": plain(content)}
