"""The source read by us gives transformers' own logits; what can't be read is told in one line."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from deeploop.models.accounting import block_matrix_count, flops_per_token, parameter_count
from deeploop.retrofit.families import config_of_folder
from deeploop.retrofit.source import load_source, open_source
from llama_family import TOKENS, logits_of, make_model, save_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "smollm": ("Llama", {"tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 2}),
    "llama3": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "multi-head": ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-3}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 12}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name, tmp_path):
    family, changes = FAMILIES[name]
    theirs = make_model(family, **changes)
    source = open_source(save_model(theirs, tmp_path))
    ours = load_source(source)
    expected = logits_of(theirs, TOKENS)
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(ours(TOKENS).states), expected, atol=1e-4, rtol=1e-5)
    assert expected.std() > 0.5  # or equal logits say little


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_and_flops_are_counted(name, tmp_path):
    family, changes = FAMILIES[name]
    theirs = make_model(family, **changes)
    config = open_source(save_model(theirs, tmp_path)).config
    padding = (config.padded_vocabulary - 300) * 32 * (1 if config.tied_head else 2)
    assert parameter_count(config) == sum(p.numel() for p in theirs.parameters()) + padding
    layer = theirs.model.layers[0]
    matrices = sum(p.numel() for p in layer.parameters() if p.ndim == 2)
    assert block_matrix_count(config) == matrices
    attention = 64 * layer.self_attn.q_proj.out_features  # causal: half of 2·T·H·D
    assert flops_per_token(config) == 6 * (3 * (matrices + attention) + config.padded_vocabulary * 32)


def test_a_sharded_folder_is_read(tmp_path):
    theirs = make_model("Llama")
    save_model(theirs, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ours = load_source(open_source(tmp_path))
    with torch.no_grad():
        found = ours.logits(ours(TOKENS).states)
    torch.testing.assert_close(found, logits_of(theirs, TOKENS), atol=1e-4, rtol=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(make_model("Llama"), tmp_path_factory.mktemp("llama"))


def changed(folder, out, **fields):
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | fields))
    return out


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "architecture 'MambaForCausalLM': unknown; what can be read",
        ),
        ({"num_hidden_layers": 4}, r"tensor model\.layers\.3\..* is absent: must be"),
        ({"num_hidden_layers": 2**31 - 1}, r"tensor model\.layers\..* is absent: must be"),  # at once
        ({"num_hidden_layers": 2}, r"tensor 'model\.layers\.2\..*': a llama model has none of that name"),
        ({"hidden_size": 2**30}, r"tensor .* is \(.*\): must be"),  # before memory is taken
        (
            {"rope_parameters": {"rope_type": "yarn"}},
            "rope_type='yarn': must be one of default, linear, llama3",
        ),
        ({"architectures": [{}]}, r"architecture {}: unknown"),
        ({"rope_parameters": {"rope_type": {}}}, r"rope_type={}: must be one of"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': must be silu"),
        ({"num_attention_heads": "4"}, "num_attention_heads='4': must be a whole number"),
        ({"num_key_value_heads": 3}, "kv_heads=3: must be 0 or a divisor"),
        ({"model_type": "mistral"}, "contradict one another: LlamaForCausalLM, mistral"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_parameters=.* contradicts rope_scaling="),
        ({"rope_theta": 5e5}, "rope_theta=10000.0 contradicts rope_theta=500000.0"),
        ({"rope_parameters": {"rope_type": "default", "factor": 4.0}}, r"factor=4\.0: unknown"),
        ({"original_max_position_embeddings": 16}, "original_max_position_embeddings=16: unknown"),
        ({"is_causal": False}, "is_causal=False: must be True"),
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping=30\.0: unknown, and could change"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5: must be 1"),
        ({"sliding_window": 16}, "sliding_window=16: unknown"),  # transformers' Llama has none
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types=.*: unknown"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.*: unknown"),
        ({"mlp_bias": 1}, "mlp_bias=1: must be true or false"),
    ],
)
def test_what_is_not_known_is_one_line(folder, tmp_path, fields, message):
    with pytest.raises(ValueError, match=message) as caught:
        open_source(changed(folder, tmp_path / "x", **fields))
    assert "\n" not in str(caught.value)


def test_without_architectures_the_model_type_is_read(folder, tmp_path):
    assert (
        open_source(changed(folder, tmp_path / "x", architectures=None)).config == open_source(folder).config
    )


def test_keys_of_real_folders_that_change_nothing_are_taken(folder, tmp_path):
    extra = {
        "rope_interleaved": False,
        "is_llama_config": True,
        "pretraining_tp": 1,
        "torch_dtype": "bfloat16",
    }
    extra |= {"transformers.js_config": {"dtype": "q4"}, "sliding_window": None, "rope_scaling": None}
    assert open_source(changed(folder, tmp_path / "x", **extra)).config == open_source(folder).config


def test_a_window_that_a_config_does_not_name_is_transformers_default():
    found = json.loads(make_model("Mistral", max_position_embeddings=8192).config.to_json_string())
    assert config_of_folder(found | {"sliding_window": None})[1].context == 8192
    del found["sliding_window"]
    assert config_of_folder(found)[1].context == 4096
    qwen = json.loads(make_model("Qwen2", max_position_embeddings=8192).config.to_json_string())
    assert config_of_folder(qwen)[1].context == 8192
    del qwen["sliding_window"], qwen["layer_types"]
    assert config_of_folder(qwen | {"use_sliding_window": True})[1].context == 4096
    with pytest.raises(ValueError, match=r"layer_types=.*: must be full_attention"):
        config_of_folder(qwen | {"layer_types": ["sliding_attention"] * 3})


def test_a_head_of_its_own_beside_a_tied_config_is_refused(tmp_path):
    """transformers 5 takes that head; before, it was left out here, and the logits were others."""
    folder = save_model(make_model("Llama", tie_word_embeddings=True), tmp_path)
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    save_file(weights | {"lm_head.weight": embedding.clone()}, folder / "model.safetensors")
    load_source(open_source(folder))
    save_file(weights | {"lm_head.weight": embedding + 1}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight is not the embedding, although tie_word_embed"):
        load_source(open_source(folder))


def test_pickled_weights_are_refused(folder, tmp_path):
    out = changed(folder, tmp_path / "x")
    (out / "model.safetensors").rename(out / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"pytorch_model\.bin: pickled weights, which can run code, are refused"
    ):
        open_source(out)


def test_an_index_stays_inside_its_folder(folder, tmp_path):
    out = changed(folder, tmp_path / "x")
    for file, message in (("../y.safetensors", "plain name"), ("absent.safetensors", "can't be read")):
        index = {"weight_map": {"lm_head.weight": file}}
        (out / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match=message):
            open_source(out)


def test_numbers_that_are_not_finite_are_refused(tmp_path):
    model = make_model("Llama")
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match=r"norm\.weight holds numbers that are not finite"):
        load_source(open_source(save_model(model, tmp_path)))
