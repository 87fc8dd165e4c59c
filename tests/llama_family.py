"""Small random models of the Llama family, made by transformers."""

from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def make_model(family: str, **changes):
    """A random model whose biases and gains are no ones and zeros."""
    config_class = getattr(transformers, f"{family}Config")
    torch.manual_seed(0)
    config = config_class(
        **SHAPE | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None} | changes
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(float("norm" in name), 0.2)
            else:
                parameter.mul_(8)  # else all logits are about 0
    return model


def save_model(model, folder: Path, **options) -> Path:
    model.save_pretrained(folder, **options)
    return folder


@torch.no_grad()
def logits_of(model, tokens):
    return model(tokens).logits


TOKENS = torch.randint(300, (2, 40), generator=torch.Generator().manual_seed(1))


TEMPLATE = "{% for m in messages %}<user>{{ m['content'] }}</s>{% endfor %}"


def save_tokenizer(folder: Path, vocabulary: int = 300) -> Path:
    """A byte-level BPE trained on a few words, as transformers keeps one, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<s>", "</s>", "<user>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    engine.train_from_iterator(["the loop of the loops, and the other loops of them all, again"] * 9, trainer)
    named = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=engine, **named)
    fast.save_pretrained(folder)
    return folder
