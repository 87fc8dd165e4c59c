"""GGUF files: written here by the package gguf, from models that transformers made."""

import re

import numpy as np
import pytest
import torch

from deeploop.retrofit.families import LAYER_NAMES, OUTER_NAMES
from deeploop.retrofit.source import load_source, open_source
from llama_family import TOKENS, logits_of, make_model

gguf = pytest.importorskip("gguf")
WORDS = [f"w{index}" for index in range(300)]


def permuted(values, heads):
    """Permute the rows of q and k as llama.cpp's converter does."""
    pairs = values.reshape(heads, 2, -1, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def write_gguf(path, model, arch, *, quantized=None, extra=None, **metadata):
    config, weights = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    for name, value in metadata.items():
        getattr(writer, f"add_{name}")(value)
    for name, value in (extra or {}).items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    modules = {theirs: own for theirs, own in OUTER_NAMES.values()}
    for layer in range(config.num_hidden_layers):
        modules |= {theirs.format(layer): own.format(layer) for theirs, own in LAYER_NAMES.values()}
    for theirs, own in modules.items():
        for kind in ("weight", "bias"):
            if f"{theirs}.{kind}" not in weights or (theirs == "lm_head" and config.tie_word_embeddings):
                continue
            values = weights[f"{theirs}.{kind}"].numpy()
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
            if arch == "llama" and (role := theirs.rsplit(".", 1)[-1]) in heads:
                values = permuted(values, heads[role])
            raw_type = quantized if kind == "weight" and values.ndim == 2 else None
            if raw_type is not None:
                values = gguf.quants.quantize(values, raw_type)
            writer.add_tensor(f"{own}.{kind}", np.ascontiguousarray(values), raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("family", "arch", "changes"),
    [
        ("Llama", "llama", {"tie_word_embeddings": True}),
        ("Llama", "llama", {"attention_bias": True}),
        ("Qwen2", "qwen2", {"tie_word_embeddings": False}),
        ("Qwen3", "qwen3", {"head_dim": 8}),
    ],
)
def test_logits_are_those_of_transformers(family, arch, changes, tmp_path):
    theirs = make_model(family, **changes)
    ours = load_source(open_source(write_gguf(tmp_path / "x.gguf", theirs, arch)))
    with torch.no_grad():
        found = ours.logits(ours(TOKENS).states)
    torch.testing.assert_close(found, logits_of(theirs, TOKENS), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_without_a_type_is_linear_as_in_llama_cpp(name, tmp_path):
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    theirs = make_model("Llama", rope_parameters=rope)
    path = write_gguf(tmp_path / "x.gguf", theirs, "llama", extra={f"llama.{name}": 4.0})
    ours = load_source(open_source(path))
    with torch.no_grad():
        found = ours.logits(ours(TOKENS).states)
    torch.testing.assert_close(found, logits_of(theirs, TOKENS), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"rope.dimension_count": 4}, "rope.dimension_count=4: must be 8, the width of a head"),
        ({"attention.value_length": 4}, "attention.value_length=4: must be 8, the width of a head"),
        ({"attention.causal": False}, "attention.causal=False: must be True"),
        ({"attention.scale": 1.0}, "attention.scale=1.0: must be 0.353553"),
        ({"attention.sliding_window": 16}, "attention.sliding_window=16: must be 0"),
        ({"expert_count": 8}, "expert_count=8: must be 0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: unknown, and could change"),
        ({"rope.scale_linear": 2.0, "rope.scaling.factor": 4.0}, "rope.scale_linear=2.0 contradicts"),
        ({"rope.scaling.type": "yarn"}, "rope.scaling.type='yarn': must be none or linear"),
    ],
)
def test_metadata_that_change_the_model_are_refused(extra, message, tmp_path):
    own = {f"llama.{name}": value for name, value in extra.items()}
    path = write_gguf(tmp_path / "x.gguf", make_model("Llama"), "llama", extra=own)
    with pytest.raises(ValueError, match=re.escape(f"x.gguf: llama.{message}")):
        open_source(path)


def test_metadata_that_change_nothing_are_taken(tmp_path):
    own = {"rope.dimension_count": 8, "attention.causal": True, "vocab_size": 300, "expert_count": 0}
    own |= {"rope.scaling.type": "none", "rope.scaling.factor": 4.0, "attention.scale": 8**-0.5}
    theirs, extra = make_model("Llama"), {f"llama.{name}": value for name, value in own.items()}
    plain = open_source(write_gguf(tmp_path / "a.gguf", theirs, "llama")).config
    assert open_source(write_gguf(tmp_path / "b.gguf", theirs, "llama", extra=extra)).config == plain


def test_quantized_tensors_are_dequantized(tmp_path):
    theirs = make_model("Llama", intermediate_size=64)
    source = open_source(
        write_gguf(tmp_path / "x.gguf", theirs, "llama", quantized=gguf.GGMLQuantizationType.Q8_0)
    )
    assert source.types == "23 Q8_0, 7 F32"
    found = source.layer(0)["mlp.branch.down.weight"]
    torch.testing.assert_close(
        found, theirs.model.layers[0].mlp.down_proj.weight.detach(), atol=0.01, rtol=0.01
    )


def test_what_can_not_be_read_is_one_line(tmp_path, monkeypatch):
    theirs = make_model("Llama")
    with pytest.raises(
        ValueError, match=r"architecture 'mamba': unknown; what can be read is llama, qwen2, qwen3"
    ):
        open_source(write_gguf(tmp_path / "a.gguf", theirs, "mamba"))
    (tmp_path / "b.gguf").write_bytes(b"PK\3\4 not of this kind")
    with pytest.raises(ValueError, match=r"b\.gguf: not a GGUF file"):
        open_source(tmp_path / "b.gguf")
    whole = write_gguf(tmp_path / "c.gguf", theirs, "llama").read_bytes()
    for size in (4, 30, 400, len(whole) // 2):
        (tmp_path / "d.gguf").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"d\.gguf: ") as caught:
            open_source(tmp_path / "d.gguf")
        assert "\n" not in str(caught.value)
    (tmp_path / "d.gguf").write_bytes(whole[:16] + b"\xff" * 6 + whole[22:])  # a count of fields without end
    with pytest.raises(ValueError, match=r"d\.gguf: damaged GGUF file \(a count of"):
        open_source(tmp_path / "d.gguf")
    for name, value in (("key_length", 2**32 - 1), ("rope_scaling_factor", float("nan"))):
        odd = {name: value, "rope_scaling_type": gguf.RopeScalingType.LINEAR}
        with pytest.raises(ValueError, match=r"d\.gguf: llama\.\S+=\S+: must be a (whole )?number$"):
            open_source(write_gguf(tmp_path / "d.gguf", theirs, "llama", **odd))
    unread = write_gguf(tmp_path / "e.gguf", theirs, "llama")
    source = open_source(unread)
    monkeypatch.setattr(gguf.quants, "_type_traits", {})  # gguf knows the type, and not how to read it
    odd = gguf.GGMLQuantizationType.IQ1_M
    tensor = source.tensors._file._tensors["output.weight"]
    source.tensors._file._tensors["output.weight"] = tensor._replace(tensor_type=odd)
    with pytest.raises(ValueError, match=r"output\.weight is of type IQ1_M, which gguf can't dequantize"):
        source.outside()
