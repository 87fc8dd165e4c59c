"""`deeploop export --format nanbeige`: a plain loop that reads the files computes the run's logits."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import deeploop
from deeploop.cli import main
from deeploop.export.nanbeige import (
    FITTING,
    is_prenorm,
    nanbeige_config,
    nanbeige_weights,
    require_fitting,
    rope_scaling,
)
from deeploop.models import GPTConfig, LoopedGPT
from deeploop.rules import RULES
from deeploop.train.loop import train

pytest.importorskip("transformers", reason='needs transformers: pip install -c constraints.txt -e ".[hf]"')

from transformers import AutoTokenizer, GenerationConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

SHAPE = {"blocks": 2, "rounds": 3, "width": 32, "heads": 4, "hidden": 48, "vocabulary": 70, "context": 24}


def reference(config, weights, tokens):
    """Nanbeige's loop in plain torch, by mlx-lm's `models/nanbeige.py`."""
    heads, size, eps = config["num_attention_heads"], config["head_dim"], config["rms_norm_eps"]
    linear = lambda name, x: F.linear(x, weights[f"{name}.weight"])  # noqa: E731
    norm = lambda name, x: F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], eps)  # noqa: E731
    split = lambda x: x.unflatten(-1, (-1, size)).transpose(1, 2)  # noqa: E731
    cos, sin = rotary(config, tokens.shape[1])
    turn = lambda x: x * cos + torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1) * sin  # noqa: E731
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in [*range(config["num_hidden_layers"])] * config["num_loops"]:
        at = f"model.layers.{layer}"
        y = norm(f"{at}.input_layernorm", x)
        q, k, v = (split(linear(f"{at}.self_attn.{name}_proj", y)) for name in "qkv")
        k, v = (z.repeat_interleave(heads // k.shape[1], 1) for z in (k, v))
        y = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
        x = x + linear(f"{at}.self_attn.o_proj", y.transpose(1, 2).flatten(2))
        y = norm(f"{at}.post_attention_layernorm", x)
        y = F.silu(linear(f"{at}.mlp.gate_proj", y)) * linear(f"{at}.mlp.up_proj", y)
        x = x + linear(f"{at}.mlp.down_proj", y)
    return linear("lm_head", norm("model.norm", x))


def rotary(config, length):
    """transformers' own table, so that the words for its scaling are judged by it."""
    names = ("head_dim", "hidden_size", "num_attention_heads", "max_position_embeddings", "rope_theta")
    own = LlamaConfig(**{name: config[name] for name in names}, rope_scaling=config["rope_scaling"])
    return LlamaRotaryEmbedding(own)(torch.zeros(1), torch.arange(length)[None])


def moved(model):
    """The model with gains that are not 1, as training leaves them."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                assert "norm" in name or "inner" in name
                parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize(
    "settings",
    [
        {"rule": "prenorm"},
        {"rule": "averaged"},
        {"rule": "lnscale"},
        {"rule": "factored:gain=2", "rounds": 5},
        {"rule": "prenorm:q=0.5", "kv_heads": 2, "head_width": 10},
        {"rule": "averaged", "tied_head": False, "mup_base_width": 16, "norm_eps": 1e-3},
        {"rule": "averaged", "input_norm": False, "rotary_base": 5000.0},
        {"rule": "averaged", "rotary_scaling": (4.0,)},
        {"rule": "averaged", "rotary_scaling": (8.0, 1.0, 4.0, 12.0)},
    ],
    ids=str,
)
def test_the_files_are_the_model(settings):
    model = moved(LoopedGPT(GPTConfig(**SHAPE | {"qk_norm": "none"} | settings), seed=3)).eval()
    require_fitting(model.config)
    config, weights = nanbeige_config(model) | {"max_position_embeddings": 24}, nanbeige_weights(model)
    tokens = torch.randint(70, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model.logits(model(tokens).states)
    torch.testing.assert_close(reference(config, weights, tokens), ours, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def run(make_config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("nanbeige") / "averaged"
    config = make_config(folder, model={"rule": "averaged", "qk_norm": "none"})
    train(replace(config, optim=replace(config.optim, peak_lr=1e-2)), quiet=True)
    return folder


def test_a_run_is_exported(run, tmp_path, capsys):
    folder = tmp_path / "out"
    assert main(["export", str(run), str(folder), "--format", "nanbeige"]) == 0
    assert f"mlx_lm.generate --model {folder}" in capsys.readouterr().out
    config, weights = (
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors"),
    )
    named = {name: config[name] for name in ("model_type", "num_hidden_layers", "num_loops", "torch_dtype")}
    assert named == {
        "model_type": "nanbeige", "num_hidden_layers": 2, "num_loops": 3, "torch_dtype": "float32"
    }  # fmt: skip
    assert config["skip_loop_final_norm"] is True
    gpt, ours = deeploop.load(run)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = torch.tensor([ours.encode("the loop visits")])
    assert tokenizer("the loop visits", return_tensors="pt").input_ids.tolist() == tokens.tolist()
    with torch.no_grad():
        expected = gpt.logits(gpt(tokens).states)
    torch.testing.assert_close(reference(config, weights, tokens), expected, atol=1e-4, rtol=0)
    assert GenerationConfig.from_pretrained(folder).eos_token_id == ours.end_of_text == config["eos_token_id"]
    card = (folder / "README.md").read_text()
    assert "A looped language model: K stored blocks applied for R rounds, in Nanbeige's format" in card
    assert "K = 2, R = 3" in card


def test_an_export_of_either_format_is_replaced(run, tmp_path):
    folder = tmp_path / "out"
    words = ["export", str(run), str(folder)]
    for kind in ("transformers", "nanbeige", "nanbeige", "transformers"):
        assert main([*words, "--format", kind, "--dtype", "bfloat16"]) == 0
        model_type = json.loads((folder / "config.json").read_text())["model_type"]
        assert model_type == {"transformers": "deeploop"}.get(kind, kind)
        assert any(folder.glob("deeploop_*.py")) == (kind == "transformers")
    assert {weight.dtype for weight in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("settings", "has", "flags"),
    [
        ({"rule": "deeploop"}, "model.rule=deeploop", "--model.rule averaged"),
        ({"rule": "flat:gain=2"}, "model.rule=flat:gain=2", "--model.rule averaged"),
        ({"rule": "postnorm"}, "model.rule=postnorm", "--model.rule averaged"),
        ({"qk_norm": "before-rotary"}, "model.qk_norm=before-rotary", "--model.qk-norm none"),
        ({"attention_bias": "qkv"}, "model.attention_bias=qkv", "--model.attention-bias none"),
        ({"mlp_bias": True}, "model.mlp_bias=True", "--model.no-mlp-bias"),
        ({"unigram_bias": True}, "model.unigram_bias=True", "--model.no-unigram-bias"),
        ({"exit_gate": True}, "model.exit_gate=True", "--model.no-exit-gate"),
        ({"final_norm": False}, "model.final_norm=False", "--model.final-norm"),
        ({"prelude": 1, "coda": 2}, "model.prelude=1, model.coda=2", "--model.prelude 0 --model.coda 0"),
        (
            {"injection": "add", "first_state": "zeros"},
            "model.injection=add, model.first_state=zeros",
            "--model.injection none --model.first-state embedding",
        ),
    ],
    ids=str,
)
def test_any_other_model_is_refused_with_the_flags_of_one_that_fits(settings, has, flags):
    config = GPTConfig(**SHAPE | {"rule": "averaged", "qk_norm": "none"} | settings)
    with pytest.raises(ValueError, match="not in Nanbeige's format") as refused:
        require_fitting(config)
    said = str(refused.value)
    flags += "" if config.unigram_bias else " --model.no-unigram-bias"  # which recipes have
    assert said == f"{has}: not in Nanbeige's format; a model that fits is trained with {flags}"


def test_every_field_of_the_model_was_thought_of():
    """A new field must be exported, or stand in FITTING."""
    exported = {
        "blocks",
        "rounds",
        "width",
        "heads",
        "kv_heads",
        "head_width",
        "hidden",
        "vocabulary",
        "context",
    }
    exported |= {"rotary_base", "rotary_scaling", "norm_eps", "input_norm", "tied_head", "mup_base_width"}
    exported |= {"rule"}
    ours = {"recompute_alpha", "mask_padding"}  # of changed depths and of validation
    assert {*GPTConfig.__dataclass_fields__} == exported | ours | {*FITTING}


def test_the_rules_that_fit():
    assert {rule.name for rule in RULES if is_prenorm(rule)} == {"prenorm", "averaged", "factored", "lnscale"}


def test_mistakes_are_one_line(run, tmp_path, capsys):
    words = ["export", str(run), str(tmp_path / "out"), "--format", "nanbeige"]
    assert main([*words, "--cache-rounds", "1"]) == 2
    assert capsys.readouterr().err.endswith("cache_rounds=1: must be unset with --format nanbeige\n")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text('{"model_type": "nanbeige"}')  # a model of somebody else
    assert main(words) == 2
    assert "is not empty and not an earlier export" in capsys.readouterr().err


def test_rope_scaling_in_their_words():
    assert rope_scaling(()) is None
    assert rope_scaling((2.0,)) == {"rope_type": "linear", "factor": 2.0}
    assert rope_scaling((8.0, 1.0, 4.0, 8192.0))["original_max_position_embeddings"] == 8192
