"""The chat task: fine-tune a looped GPT on conversations, with the loss on the answers only."""

from pathlib import Path

import torch

from deeploop.data.bpe import tokenizer_files
from deeploop.data.token_loader import Loader
from deeploop.files import naming_field
from deeploop.tasks.chat.config import ChatDataConfig
from deeploop.tasks.chat.data import ChatSet
from deeploop.tasks.chat.loader import ChatLoader, held_out_rows
from deeploop.tasks.chat.template import TEMPLATE_FILE
from deeploop.tasks.language.task import LanguageTask


class ChatTask(LanguageTask):
    """A looped GPT on conversations that are packed into rows and masked from each other."""

    def open_data(self) -> Loader:
        config, world, context = self.config, self.world, self.config.model.context
        data = config.data
        assert isinstance(data, ChatDataConfig)
        self.corpus = chat = open_chat(data.path)
        self.tokenizer = self.checked_tokenizer()
        if chat.longest > context:
            raise ValueError(
                f"data.path={data.path}: holds conversations of {chat.longest:,} tokens, the model has "
                f"model.context={context}; prepare them with --context {context}"
            )
        held = held_out_rows(chat.validation, context, chat.end_of_text, data.validation_rows)
        self.targets = held.targets[held.targets >= 0]
        self.validation = self.own_share(*held)
        loader = ChatLoader(
            chat.train,
            context=context,
            batch=config.optim.batch,
            seed=config.seed,
            filler=chat.end_of_text,
            rank=world.rank,
            world=world.size,
        )
        if (batch := config.optim.batch) > loader.rows:  # a step would repeat conversations
            raise ValueError(
                f"optim.batch={batch}: a step of {batch} rows is more than the {loader.rows} that the "
                f"{len(chat.train):,} conversations of {data.path} fill; give --batch {loader.rows} or "
                "less, or prepare more conversations"
            )
        return loader

    def other_vocabulary(self) -> str:
        return f"prepare the conversations with the --tokenizer of {self.config.init_from}"

    def next_batch(self) -> dict[str, torch.Tensor]:
        names = ("inputs", "targets", "starts", "scored")
        return dict(zip(names, self.loader.step_batch(), strict=True))

    def files(self) -> dict[str, str]:
        """The template and a trained tokenizer: with the weights, all that `deeploop chat` needs."""
        return {TEMPLATE_FILE: self.corpus.template().text, **tokenizer_files(self.tokenizer)}


def open_chat(path: Path) -> ChatSet:
    """Open the conversations of a folder and verify their checksums."""
    with naming_field("data.path", path):
        chat = ChatSet.open(path)
        chat.verify()
    return chat
