"""A tiny pretrained model as others keep one: a transformers folder, and a GGUF file."""

import json
import random
from collections.abc import Mapping
from pathlib import Path

import gguf
import torch
from safetensors.torch import save_file

from deeploop.data.bpe import find_tokenizer
from deeploop.data.pretrained_tokenizer import SETTINGS, TOKENIZER, PretrainedTokenizer, _engine_text
from deeploop.data.tokenizer_steps import LARGEST_GROWTH
from deeploop.data.tokenizers import byte_characters
from deeploop.retrofit.describe import describe
from deeploop.retrofit.families import LAYER_NAMES, OUTER_NAMES, config_of_folder
from deeploop.retrofit.source import CONFIG, INDEX, block_shapes, load_source, open_source

LAYERS, WIDTH = 2, 32
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the")]
WORDS = [*byte_characters().values(), *("".join(pair) for pair in MERGES), "<|endoftext|>", "</s>"]
TYPES = [1] * (len(WORDS) - 2) + [3, 3]  # the last two are control tokens
TEMPLATE = "{% for m in messages %}{{ m['content'] }}</s>{% endfor %}"
DESCRIPTION = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "max_position_embeddings": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "vocab_size": len(WORDS),
}


def tensors(kind: int) -> dict[str, torch.Tensor]:
    """By their names in a transformers folder (0) or a GGUF file (1)."""
    _, config = config_of_folder(DESCRIPTION)
    shapes = {}
    for ours, shape in block_shapes(config).items():
        module, _, attribute = ours.rpartition(".")
        names = (f"{LAYER_NAMES[module][kind].format(layer)}.{attribute}" for layer in range(LAYERS))
        shapes |= dict.fromkeys(names, shape)
    shapes[f"{OUTER_NAMES['embedding'][kind]}.weight"] = (len(WORDS), WIDTH)
    shapes[f"{OUTER_NAMES['final_norm'][kind]}.weight"] = (WIDTH,)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def write_folder(folder: Path) -> None:
    """config.json, weights in two files with their index, tokenizer."""
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(DESCRIPTION))
    named = sorted(tensors(0).items())
    parts = {"model-1.safetensors": named[:9], "model-2.safetensors": named[9:]}
    for file, part in parts.items():
        save_file(dict(part), folder / file)
    where = {name: file for file, part in parts.items() for name, _ in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / TOKENIZER).write_text(_engine_text(WORDS, MERGES, TYPES, "gpt-2"))
    settings = {"bos_token": "<|endoftext|>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (folder / SETTINGS).write_text(json.dumps(settings))


METADATA = {
    "general.architecture": "llama",
    "llama.block_count": LAYERS,
    "llama.context_length": 64,
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": WIDTH,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.bos_token_id": len(WORDS) - 2,
    "tokenizer.chat_template": TEMPLATE,
}
LISTS = {
    "tokenizer.ggml.tokens": WORDS,
    "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
}


def write_gguf(path: Path, metadata: Mapping[str, object] = METADATA | LISTS) -> None:
    """The model as one GGUF file; the matrices of SwiGLU have to be dequantized."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.kv_data = [{}]  # the architecture is among the metadata
    for name, value in metadata.items():
        large = type(value) is int and value >= 2**31
        kind = gguf.GGUFValueType.UINT64 if large else gguf.GGUFValueType.get_type(value)
        writer.add_key_value(name, value, kind)
    for name, tensor in tensors(1).items():
        kind = gguf.GGMLQuantizationType.Q8_0 if "ffn" in name and tensor.ndim == 2 else None
        values = tensor.numpy() if kind is None else gguf.quants.quantize(tensor.numpy(), kind)
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def forged_gguf(folder: Path, metadata: Mapping[str, object]) -> None:
    """A whole file that says something odd; what can't even be written is no case."""
    path = folder / "model.gguf"
    try:
        write_gguf(path, metadata)
    except Exception:
        return
    use(path)


def use(path: Path) -> None:
    """Call what `inspect`, `retrofit` and `prepare --tokenizer` call."""
    source = open_source(path)
    describe(source)
    model = load_source(source)
    model(torch.zeros(1, 3, dtype=torch.long))
    tokenizer = find_tokenizer(str(path))
    ids = tokenizer.encode("the loop é 12</s>")
    tokenizer.decode(ids)
    for token in ids:
        tokenizer.token_bytes(token)


STEPS: list[dict[str, object]] = [
    {"type": "NFKC"},
    {"type": "Lowercase"},
    {"type": "ByteLevel"},
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Prepend", "prepend": "a" * 900},
    {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"},
    {"type": "Replace", "pattern": {"String": "e"}, "content": "aeaeae" * 9},
    {"type": "Replace", "pattern": {"Regex": "[th]"}, "content": "at"},
    {"type": "Replace", "pattern": {"Regex": "."}, "content": "the" * 999},
]


def odd_steps(draw: random.Random) -> None:
    """A tokenizer of any steps: refused, or what it makes of a line is at most so many times as long."""
    text = json.loads(_engine_text(WORDS, MERGES, TYPES, "gpt-2"))
    steps = [draw.choice(STEPS) for _ in range(draw.choice((1, 2, 3, 12, 40)))]
    text["normalizer"] = {"type": "Sequence", "normalizers": steps}
    tokenizer = PretrainedTokenizer(json.dumps(text), {"bos_token": "<|endoftext|>"})
    line = "the loop a" * draw.choice((1, 9))
    if len(tokenizer.encode(line)) > LARGEST_GROWTH * len(line):
        raise AssertionError(f"{steps}: a text of {len(line)} grew into {len(tokenizer.encode(line))} tokens")
