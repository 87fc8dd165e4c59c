"""The Hugging Face wrapper: logits, caches, padding, search and files, against LoopedGPT itself."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import replace

import pytest
import torch
from torch import nn

from deeploop.data.tokenizers import get_tokenizer
from deeploop.eval.generation import generate
from deeploop.models.gpt import LoopedGPT
from deeploop.models.gpt_config import GPTConfig
from deeploop.nn.context import Context
from deeploop.nn.layers import CausalSelfAttention
from deeploop.nn.written import difference
from deeploop.tasks.chat.template import DEFAULT

transformers = pytest.importorskip(
    "transformers", reason='needs transformers: pip install -c constraints.txt -e ".[hf]"'
)

from deeploop.data.hf_tokenizer import to_transformers  # noqa: E402
from deeploop.models.hf import DeepLoopConfig, DeepLoopForCausalLM, DeepLoopModel  # noqa: E402

CONFIG = GPTConfig(blocks=2, rounds=3, width=32, heads=2, hidden=48, vocabulary=257, context=48)
PROMPTS = [[5, 100, 7, 250, 31], [17], [200, 3, 3, 90, 41, 12, 77, 8, 150, 254, 6]]
PAD = 256


def make_gpt(**changes):
    """Weights so large that the likeliest token is not the last one again, and gains that are not all 1.

    With equal gains the keys' norm commutes with the rotation, and a shift of all positions changes nothing.
    """
    gpt = LoopedGPT(GPTConfig(**{**CONFIG.__dict__, **changes})).eval()
    generator = torch.Generator().manual_seed(18)
    with torch.no_grad():
        for module in gpt.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, 0.5, generator=generator)
            elif isinstance(module, CausalSelfAttention):
                module.k_norm.weight.uniform_(0, 2, generator=generator)
        gpt.embedding.weight.mul_(20)
    if gpt.output_bias is not None:
        gpt.set_unigram_bias(torch.arange(gpt.config.vocabulary) ** 2)
    return gpt


@pytest.fixture(scope="module")
def gpt():
    return make_gpt()


@pytest.fixture(scope="module")
def folder(gpt, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / "saved"
    DeepLoopForCausalLM.from_gpt(gpt).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture
def tokens():
    return torch.randint(0, 257, (3, 20), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def our_logits(gpt, tokens):
    return gpt.logits(gpt(tokens).states)


def theirs(model, prompt, count, **settings):
    """The tokens that transformers' `generate` adds to one prompt."""
    out = model.generate(torch.tensor([prompt]), max_new_tokens=count, pad_token_id=PAD, **settings)
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def test_loaded_logits_are_ours_bit_for_bit(gpt, model, tokens):
    assert type(model) is DeepLoopForCausalLM
    out = model(tokens)
    assert torch.equal(out.logits, our_logits(gpt, tokens))
    assert out.logits.shape[-1] == model.config.vocab_size == 257  # not the padded 320
    assert len(out.past_key_values.layers) == 6
    assert model(tokens, use_cache=False).past_key_values is None
    assert torch.equal(model(tokens, logits_to_keep=2).logits, out.logits[:, -2:])
    assert torch.equal(model(tokens, logits_to_keep=torch.tensor([4, 9])).logits, out.logits[:, [4, 9]])
    assert torch.equal(model(tokens, return_dict=False)[0], out.logits)


@pytest.mark.parametrize(
    "changes",
    [
        {"rule": "prenorm"},
        {"final_norm": False, "mup_base_width": 16},
        {"rule": "deeploop:inner_norm=off"},
        {"unigram_bias": True},
        {"rule": "flat:gain=0.5"},
        {"rule": "deeploop:alpha=flat,outer_gain=off"},
        {"prelude": 1, "coda": 2, "injection": "linear"},
        {"prelude": 1, "injection": "gated", "first_state": "zeros"},
    ],
)
def test_every_kind_of_block_goes_through(changes, tokens, tmp_path):
    gpt = make_gpt(**changes)
    DeepLoopForCausalLM.from_gpt(gpt).save_pretrained(tmp_path)
    loaded = DeepLoopForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, our_logits(gpt, tokens))


@torch.no_grad()
@pytest.mark.parametrize("rounds", [1, 3, 7])
def test_cached_logits_equal_uncached(folder, tokens, rounds):
    # In float64: seven rounds of weights as wild as these make 1e-3 of float32's rounding.
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, rounds=rounds, dtype="float64")
    whole = model(tokens).logits
    cache = model(tokens[:, :9], use_cache=True).past_key_values
    assert len(cache.layers) == 2 * rounds
    pieces = [model(tokens[:, a:b], past_key_values=cache).logits for a, b in ((9, 15), (15, 16), (16, 20))]
    assert (torch.cat(pieces, dim=1) - whole[:, 9:]).abs().max() < 1e-9


@torch.no_grad()
def test_prelude_and_coda_have_slots_of_the_cache(tokens, tmp_path):
    gpt = make_gpt(prelude=1, coda=1, injection="add", rule="flat")
    DeepLoopForCausalLM.from_gpt(gpt).save_pretrained(tmp_path)
    assert (tmp_path / "deeploop_nn_injection.py").is_file()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float64")
    cache = model(tokens[:, :9], use_cache=True).past_key_values
    assert len(cache.layers) == 1 + 2 * 3 + 1
    rest = model(tokens[:, 9:], past_key_values=cache, output_hidden_states=True)
    assert (rest.logits - model(tokens).logits[:, 9:]).abs().max() < 1e-9
    assert len(rest.hidden_states) == 1 + 8
    prompt = PROMPTS[0]
    assert theirs(model.float(), prompt, 20, do_sample=False) == list(generate(gpt, prompt, max_tokens=20))


RECURRENT = {"prelude": 1, "coda": 1, "injection": "add", "rule": "flat", "rounds": 4}


@torch.no_grad()
def test_a_first_state_of_noise_stands_at_the_token_s_position(tokens):
    gpt = make_gpt(**RECURRENT | {"injection": "linear", "first_state": "noise"})
    model = DeepLoopForCausalLM.from_gpt(gpt)
    assert torch.equal(model(tokens).logits, our_logits(gpt, tokens))
    padded = nn.functional.pad(tokens, (4, 0), value=PAD)
    mask = (torch.arange(24) >= 4).long().expand(3, -1)
    logits = model(padded, attention_mask=mask).logits[:, 4:]
    torch.testing.assert_close(logits, our_logits(gpt, tokens), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("budget", "first_state"), [(1, "noise"), (3, "embedding"), (9, "noise")])
def test_a_budget_of_rounds_is_ours_token_for_token(budget, first_state, tmp_path):
    gpt = make_gpt(**RECURRENT, first_state=first_state)
    DeepLoopForCausalLM.from_gpt(gpt).save_pretrained(tmp_path)
    every = [list(generate(gpt, prompt, max_tokens=12)) for prompt in PROMPTS]
    gpt.set_cache_rounds(budget)
    ours = [list(generate(gpt, prompt, max_tokens=12)) for prompt in PROMPTS]
    assert (ours == every) == (budget == 9)  # more than there are rounds keeps all
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, cache_rounds=budget)
    assert [theirs(model, prompt, 12, do_sample=False) for prompt in PROMPTS] == ours
    assert len(model(torch.tensor([[1, 2]]), use_cache=True).past_key_values.layers) == 2 + 2 * min(budget, 4)
    longest = max(map(len, PROMPTS))
    padded = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    out = model.generate(
        padded, attention_mask=(padded != PAD).long(), max_new_tokens=12, do_sample=False, pad_token_id=PAD
    )
    assert out[:, longest:].tolist() == ours
    assert model(padded, output_hidden_states=True, use_cache=False).hidden_states is not None


@pytest.mark.parametrize("injection", ["none", "linear"])
def test_loading_with_a_budget_that_breaks_the_model_is_warned_of_once(injection, tmp_path, caplog):
    DeepLoopForCausalLM.from_gpt(make_gpt(**RECURRENT | {"injection": injection})).save_pretrained(tmp_path)
    model = DeepLoopForCausalLM.from_pretrained(tmp_path, cache_rounds=1)
    model(torch.tensor([[1, 2]]))
    expected = [model.model.gpt.budget_warning] if injection == "none" else []
    assert [text for text in caplog.messages if "cache_rounds" in text] == expected
    model.set_cache_rounds(2)
    assert len([text for text in caplog.messages if "cache_rounds" in text]) == 2 * len(expected)
    model.set_rounds(model.config.rounds + 2)
    assert len([text for text in caplog.messages if "cache_rounds" in text]) == 3 * len(expected)


def test_what_a_budget_cannot_be_is_an_error_of_one_line():
    model = DeepLoopForCausalLM.from_gpt(make_gpt())
    with pytest.raises(ValueError, match=r"^cache_rounds=0: must be at least 1"):
        model.set_cache_rounds(0)
    model.set_cache_rounds(1)
    prompt = torch.tensor([[1, 2]])
    with pytest.raises(ValueError, match=r"^cache_rounds=1: needs a DynamicCache, not a StaticCache$"):
        model.generate(prompt, max_new_tokens=2, cache_implementation="static", pad_token_id=PAD)
    with pytest.raises(ValueError, match=r"^output_hidden_states=True: must be False with cache_rounds"):
        model(prompt, use_cache=True, output_hidden_states=True)


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_is_ours_token_for_token(gpt, folder, rounds, prompt):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, rounds=rounds)
    gpt.set_rounds(rounds)
    expected = list(generate(gpt, prompt, max_tokens=30))
    gpt.set_rounds(3)
    assert len(set(expected)) > 3
    for settings in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        assert theirs(model, prompt, 30, do_sample=False, **settings) == expected


def test_a_step_of_the_static_cache_compiles_without_a_break(gpt, model):
    compiled = transformers.CompileConfig(fullgraph=True, dynamic=False, mode=None, backend="eager")
    compiled._compile_all_devices = True
    settings = {"cache_implementation": "static", "compile_config": compiled}
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()
    assert theirs(model, PROMPTS[0], 12, do_sample=False, **settings) == list(
        generate(gpt, PROMPTS[0], max_tokens=12)
    )
    assert counters["unique_graphs"] == 1


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_left_padding_changes_nothing(gpt, model, cache):
    longest = max(map(len, PROMPTS))
    padded = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    out = model.generate(
        padded,
        attention_mask=mask,
        max_new_tokens=20,
        do_sample=False,
        pad_token_id=PAD,
        cache_implementation=cache,
    )
    for row, prompt in zip(out, PROMPTS, strict=True):
        assert row[longest:].tolist() == list(generate(gpt, prompt, max_tokens=20))
    with torch.no_grad():  # and without generate, positions come from the mask
        logits = model(padded, attention_mask=mask).logits
    for row, prompt in zip(logits, PROMPTS, strict=True):
        alone = our_logits(gpt, torch.tensor([prompt]))[0]
        assert (row[-len(prompt) :] - alone).abs().max() < 1e-4


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3, "do_sample": False},
        {"do_sample": True, "top_k": 20, "temperature": 0.9},
        {"do_sample": True, "top_p": 0.8, "num_beams": 2},
    ],
)
def test_beams_and_samples_do_not_depend_on_the_cache(model, settings):
    found = []
    for cache in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        torch.manual_seed(4)
        found.append(theirs(model, PROMPTS[0], 15, **settings, **cache))
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) > 3


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
@pytest.mark.parametrize("kv_heads", [0, 1])
@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention"])
def test_every_attention_of_a_cpu_is_ours(attention, kv_heads, tokens, tmp_path, monkeypatch):
    """In float64, which eager and flex attention do not have; flex attention is not compiled."""
    gpt = make_gpt(kv_heads=kv_heads)
    DeepLoopForCausalLM.from_gpt(gpt).save_pretrained(tmp_path)
    dtype, close = (torch.float64, 1e-9) if attention == "sdpa" else (torch.float32, 2e-3)
    settings = {"attn_implementation": attention, "dtype": dtype}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **settings)
    called = []
    interface = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    chosen = interface.get_interface

    def watched(name, default):
        called.append(name)
        return chosen(name, default)

    monkeypatch.setattr(interface, "get_interface", watched)
    logits = model(tokens, use_cache=False).logits
    assert called == [attention] * 6  # "eager" was accepted and ignored once
    expected = our_logits(gpt.to(dtype), tokens)
    torch.testing.assert_close(logits, expected, rtol=0, atol=close)
    start = tokens[:, :4].tolist()
    text = torch.tensor([[*row, *generate(gpt, row, max_tokens=16)] for row in start])
    assert torch.equal(model(text).logits[:, 3:-1].argmax(-1), text[:, 4:])  # greedy search
    padded = nn.functional.pad(tokens, (4, 0), value=PAD)
    mask = (torch.arange(24) >= 4).long().expand(3, -1)
    padded_logits = model(padded, attention_mask=mask).logits[:, 4:]
    torch.testing.assert_close(padded_logits, expected, rtol=0, atol=close)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_every_way_to_generate_gives_our_tokens(gpt, folder, attention):
    """A batch padded on the left, and continuous batching, which has attention functions of its own."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
    expected = [list(generate(gpt, prompt, max_tokens=16)) for prompt in PROMPTS]
    assert len({*expected[0], *expected[1], *expected[2]}) > 8
    greedy = transformers.GenerationConfig(
        max_new_tokens=16, do_sample=False, eos_token_id=-1, pad_token_id=PAD
    )
    ids = torch.tensor([[PAD] * (11 - len(prompt)) + prompt for prompt in PROMPTS])
    found = model.generate(ids, attention_mask=(ids != PAD).long(), generation_config=greedy)
    assert found[:, 11:].tolist() == expected
    small = transformers.ContinuousBatchingConfig(page_size=16, num_blocks=16, max_batch_tokens=32)
    found = model.generate_batch(
        PROMPTS, generation_config=greedy, continuous_batching_config=small, warmup=False
    )
    by_number = sorted(found, key=lambda name: int(name.rpartition("_")[2]))
    assert [found[name].generated_tokens for name in by_number] == expected


@torch.no_grad()
def test_the_usual_decoding_loop_has_its_context(gpt, model, tokens):
    """`out.past_key_values` was None unless asked for, and every further token stood alone."""
    past, found = None, []
    for token in tokens[:1].split(1, dim=1):
        out = model(token, past_key_values=past)
        past = out.past_key_values
        found.append(out.logits)
    assert (torch.cat(found, dim=1) - our_logits(gpt, tokens[:1])).abs().max() < 1e-3
    assert not torch.equal(found[-1], model(tokens[:1, -1:]).logits)


@torch.no_grad()
def test_embeddings_in_place_of_tokens(gpt, model, tokens):
    rows = model.get_input_embeddings()(tokens)
    assert torch.equal(model(inputs_embeds=rows).logits, our_logits(gpt, tokens))
    assert not torch.equal(model(inputs_embeds=rows + 1).logits, our_logits(gpt, tokens))
    for given in ({"input_ids": tokens, "inputs_embeds": rows}, {}):
        with pytest.raises(ValueError, match="input_ids, inputs_embeds: give exactly one"):
            model(**given)
    prompt = torch.tensor([PROMPTS[0]])
    embedded = model.generate(
        inputs_embeds=model.get_input_embeddings()(prompt),
        max_new_tokens=9,
        do_sample=False,
        pad_token_id=PAD,
    )
    assert embedded[0].tolist() == theirs(model, PROMPTS[0], 9, do_sample=False)


@torch.no_grad()
def test_the_base_model_gives_the_states(folder, gpt, model, tokens):
    base = transformers.AutoModel.from_pretrained(folder)
    assert type(base) is DeepLoopModel
    assert type(model.model) is type(model.base_model) is DeepLoopModel
    assert torch.equal(base(tokens).last_hidden_state, gpt(tokens).states)


def test_the_config_speaks_transformers(tmp_path):
    config = DeepLoopConfig(**CONFIG.__dict__ | {"kv_heads": 1, "tied_head": False}, use_cache=False)
    assert (config.num_key_value_heads, config.head_dim, config.num_attention_heads) == (1, 16, 2)
    assert config.tie_word_embeddings is False
    config.save_pretrained(tmp_path)
    again = DeepLoopConfig.from_pretrained(tmp_path)
    assert again.use_cache is False  # it was dropped
    assert again.to_gpt() == config.to_gpt()
    other = DeepLoopConfig(vocab_size=99, num_attention_heads=4, num_key_value_heads=2, head_dim=6)
    assert (other.to_gpt().vocabulary, other.to_gpt().kv_heads, other.to_gpt().head_width) == (99, 2, 6)
    assert DeepLoopConfig(rotary_scaling=None).to_gpt().rotary_scaling == ()
    with pytest.raises(ValueError, match=r"^rounds='3': must be a whole number$"):
        DeepLoopConfig(rounds="3").num_hidden_layers  # noqa: B018
    other.num_hidden_layers = 24
    assert other.rounds == 2
    with pytest.raises(ValueError, match="num_hidden_layers=7: must be 12 times the rounds"):
        other.num_hidden_layers = 7


def test_an_empty_prompt_is_refused(model):
    for method in (model, model.generate):
        with pytest.raises(ValueError, match=r"^input_ids: is empty; a new document begins with"):
            method(torch.zeros(1, 0, dtype=torch.long))


@torch.no_grad()
def test_a_cache_of_the_callers_own(model, tokens):
    """An empty one has no layers; a filled one is of one depth."""
    cache = transformers.DynamicCache()
    model(tokens[:, :6], past_key_values=cache)
    logits = model(tokens[:, 6:], past_key_values=cache).logits
    torch.testing.assert_close(logits, model(tokens).logits[:, 6:], rtol=0, atol=1e-3)
    model.set_rounds(2)
    try:
        with pytest.raises(ValueError, match="has 6 filled slots, the model needs 4 now; use a new cache"):
            model(tokens, past_key_values=cache)
        larger = transformers.StaticCache(config=model.config, max_cache_len=64)
        model.set_rounds(3)
        with pytest.raises(ValueError, match="has 4 slots, the model needs 6 now"):
            model(tokens, past_key_values=larger)
        larger = transformers.StaticCache(
            config=model.config, max_cache_len=64
        )  # empty: of use at fewer rounds
        model.set_rounds(2)
        expected = model(tokens).logits[:, 6:]
        model(tokens[:, :6], past_key_values=larger)
        logits = model(tokens[:, 6:], past_key_values=larger).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3)
    finally:
        model.set_rounds(3)


def test_ids_beyond_the_vocabulary_are_refused(model):
    """The embedding has 320 rows, of which 63 are padding."""
    with pytest.raises(IndexError, match="input_ids=257: must be below the vocabulary's 257"):
        model(torch.tensor([[3, 257]]))


@torch.no_grad()
def test_text_past_the_context(gpt, model):
    """Like other models it continues, with the rotation of a longer table."""
    longer = LoopedGPT(replace(gpt.config, context=80)).eval()
    longer.load_state_dict(gpt.state_dict())
    tokens = torch.randint(0, 257, (1, 70), generator=torch.Generator().manual_seed(3))
    assert torch.equal(model(tokens).logits, our_logits(longer, tokens))
    expected = list(generate(longer, PROMPTS[0], max_tokens=60))
    assert theirs(model, PROMPTS[0], 60, do_sample=False) == expected
    assert theirs(model, PROMPTS[0], 60, do_sample=False, cache_implementation="static") == expected
    noisy = DeepLoopForCausalLM.from_gpt(make_gpt(**RECURRENT, first_state="noise"))
    with pytest.raises(ValueError, match="70 tokens: must be at most 48 with first_state=noise"):
        noisy(tokens)


def test_rounds_of_one_call_of_generate(gpt, folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.set_rounds(2, recompute_alpha=True)
    alpha = model.model.blocks[0].mlp.alpha
    found = theirs(model, PROMPTS[0], 12, do_sample=False, rounds=5)
    gpt.set_rounds(5, recompute_alpha=True)
    expected = list(generate(gpt, PROMPTS[0], max_tokens=12))
    gpt.set_rounds(3)
    assert found == expected
    assert (model.config.rounds, model.model.gpt.rounds, model.model.blocks[0].mlp.alpha) == (2, 2, alpha)


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("words", [250, 257, 300, 400])
@pytest.mark.parametrize("mean", [True, False])
def test_another_vocabulary(tied, words, mean, tokens, tmp_path):
    """Exactly as many rows as words, here and in the file."""
    gpt = make_gpt(tied_head=tied, unigram_bias=True)
    model = DeepLoopForCausalLM.from_gpt(gpt)
    before = our_logits(gpt, tokens % 250)
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    assert len(model.get_input_embeddings().weight) == 320
    model.resize_token_embeddings(words, mean_resizing=mean)
    kept = min(words, 257)
    after = model(tokens % 250).logits
    assert after.shape[-1] == words
    torch.testing.assert_close(after[..., :kept], before[..., :kept])
    rows = {
        n: p for n, p in model.named_parameters() if n.split(".")[1] in ("embedding", "head", "output_bias")
    }
    assert [len(p) for p in rows.values()] == [words] * (2 if tied else 3)
    if words > 257:  # as the old rows, not as torch draws them
        for name, p in rows.items():
            new, old = p[257:], p[:257]
            assert (new == old.min()).all() if p.ndim == 1 else 0 < new.std() < 1.1 * old.std(), name
            assert p.ndim == 1 or (new.std() > 0.9 * old.std()) == (not mean), name
    model.save_pretrained(tmp_path)
    loaded = DeepLoopForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(tokens % 250).logits, after)
    assert (model.get_output_embeddings() is None) == tied
    loaded.model.resize_token_embeddings(words + 1, pad_to_multiple_of=64)
    assert loaded(tokens % 250).logits.shape[-1] == loaded.config.vocab_size == -(-(words + 1) // 64) * 64


def test_a_class_from_the_folder_s_code_is_saved(folder, tmp_path):
    """Taken from its module, not by an Auto class, which would say that it is remote code."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    name = "deeploop_models_hf.DeepLoopForCausalLM"
    remote = get_class_from_dynamic_module(name, str(folder))
    remote.from_pretrained(folder).save_pretrained(tmp_path)
    assert {path.name for path in folder.glob("*.py")} == {path.name for path in tmp_path.glob("*.py")}
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)


def test_the_loss_is_ours(gpt, model, tokens):
    targets = tokens[:, 1:].clone()
    labels = tokens.clone()
    targets[0, :5], labels[0, 1:6] = -1, -100
    with torch.no_grad():
        ours = gpt(tokens[:, :-1], targets).loss / (targets >= 0).sum()
        assert model(tokens, labels=labels).loss.item() == pytest.approx(ours.item(), abs=1e-5)


def test_gradients_flow(folder, tokens):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).train()
    model(tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("recompute", [False, True])
def test_other_rounds_when_loading(gpt, folder, tokens, recompute, tmp_path):
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder, rounds=5, recompute_alpha=recompute)
    gpt.set_rounds(5, recompute_alpha=recompute)
    expected = our_logits(gpt, tokens)
    gpt.set_rounds(3)
    model.save_pretrained(tmp_path)
    later = load(folder, recompute_alpha=recompute)
    later.set_rounds(5)
    for loaded in (model, load(tmp_path), later):
        assert loaded.config.num_hidden_layers == 10
        with torch.no_grad():
            assert torch.equal(loaded(tokens).logits, expected)
    alpha = model.model.blocks[0].mlp.alpha
    assert alpha == pytest.approx((2 * 2 * (5 if recompute else 3)) ** 0.5)


def test_saving_again_keeps_every_file(folder, model, tmp_path):
    model.save_pretrained(tmp_path)
    for file in folder.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


def test_embedding_and_head_are_one_parameter(folder, model):
    names = dict(model.named_parameters())
    assert "model.embedding.weight" in names
    assert not [name for name in names if "head" in name]
    assert model.get_input_embeddings() is model.model.embedding
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(names)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(gpt, folder, tokens, dtype):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert model.dtype == dtype
    assert model.model.cos.dtype == torch.float32  # and not garbage from the meta device:
    assert torch.equal(model.model.cos, gpt.cos)
    with torch.no_grad():
        difference = (model(tokens).logits - our_logits(gpt, tokens)).abs()
    assert difference.max() < 1e-3 if dtype == torch.float64 else difference.mean() < 1
    assert theirs(model, PROMPTS[0], 5, do_sample=False)


def test_a_new_model_is_drawn_by_our_rule():
    torch.manual_seed(11)
    config = DeepLoopConfig(**CONFIG.__dict__)
    drawn = DeepLoopForCausalLM(config)
    for name, parameter in LoopedGPT(CONFIG, seed=11).named_parameters():
        assert torch.equal(parameter, drawn.model.get_parameter(name)), name


def test_what_a_file_lacks_is_drawn_by_our_rule(model, tmp_path):
    weights = model.state_dict()
    lacking = "model.blocks.1.attention.branch.v.weight"
    model.save_pretrained(tmp_path, state_dict={k: v for k, v in weights.items() if k != lacking})
    torch.manual_seed(11)
    loaded = DeepLoopForCausalLM.from_pretrained(tmp_path)
    fresh = LoopedGPT(CONFIG, seed=11).state_dict()
    for name, tensor in loaded.state_dict().items():
        expected = fresh[name.removeprefix("model.")] if name == lacking else weights[name]
        assert torch.equal(tensor, expected), name


def test_what_does_not_fit_is_refused(folder):
    with pytest.raises(ValueError, match=r"model\.rounds=0: must be at least 1"):
        DeepLoopForCausalLM.from_pretrained(folder, rounds=0)


@torch.no_grad()
@pytest.mark.parametrize("from_config", [False, True])
def test_hidden_states_are_those_of_every_visit(folder, gpt, tokens, from_config):
    asked = {"output_hidden_states": True}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **(asked if from_config else {})).eval()
    out = model(tokens, **({} if from_config else asked))
    x = gpt.input_norm(gpt.embedding(tokens))
    expected = [x]
    for _ in range(3):
        for block in gpt.blocks:
            expected.append(x := block(x, Context((gpt.cos[:20], gpt.sin[:20]))))
    expected[-1] = gpt.final_norm(x)
    assert len(out.hidden_states) == 7 == model.config.num_hidden_layers + 1
    for found, state in zip(out.hidden_states, expected, strict=True):
        assert torch.equal(found, state)
    assert torch.equal(out.logits, our_logits(gpt, tokens))
    assert model(tokens, output_hidden_states=False).hidden_states is None
    assert not any(block._forward_hooks for block in model.model.blocks)


@torch.no_grad()
def test_attention_weights_of_every_visit(folder, tokens):
    load = transformers.AutoModelForCausalLM.from_pretrained
    found = load(folder, attn_implementation="eager")(tokens, output_attentions=True).attentions
    assert [weights.shape for weights in found] == [(3, 2, 20, 20)] * 6
    for weights in found:
        assert torch.equal(weights, weights.tril())
        torch.testing.assert_close(weights.sum(-1), torch.ones(3, 2, 20))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant, folder, tokens):
    def backward(model):
        calls = []
        for block in model.model.blocks:
            block.register_forward_pre_hook(lambda *_: calls.append(1))
        out = model(tokens, labels=tokens, use_cache=True, output_hidden_states=True)
        assert len(out.hidden_states) == 7
        out.loss.backward()
        return len(calls), {name: p.grad for name, p in model.named_parameters()}

    load = transformers.AutoModelForCausalLM.from_pretrained
    calls, expected = backward(load(folder).train())
    model = load(folder).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert model.is_gradient_checkpointing
    again, found = backward(model)
    assert (calls, again) == (6, 12)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad)
    with pytest.raises(ValueError, match="past_key_values: must be None"):
        model(tokens, past_key_values=transformers.DynamicCache())
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing
    assert backward(model)[0] == 6


def test_a_wrapped_model_keeps_what_its_kernels_know():
    gpt = make_gpt()
    DeepLoopForCausalLM.from_gpt(gpt)
    assert not any(difference(block) for block in gpt.blocks)


LORA = ["q", "v"]  # as docs/serving.md says


def test_the_documented_lora_targets_are_matrices_of_every_block(model):
    """peft takes the modules whose name ends in a dot and the target."""
    named = [name for name, m in model.named_modules() if name.rsplit(".")[-1] in LORA]
    assert len(named) == len(LORA) * len(model.model.blocks)
    assert all(isinstance(model.get_submodule(name), nn.Linear) for name in named)


@pytest.mark.parametrize(("targets", "count"), [(LORA, 4), ("all-linear", 14)])
def test_peft_trains_a_looped_block_once_for_all_visits(folder, tokens, targets, count):
    peft = pytest.importorskip("peft", reason="needs peft: pip install peft")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).train()
    model.gradient_checkpointing_enable()
    tuned = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets))
    trained = [name for name, p in tuned.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * count
    tuned(input_ids=tokens, labels=tokens).loss.backward()
    # B starts at zero, so only its own gradient does not vanish.
    assert all(p.grad.abs().sum() > 0 for name, p in tuned.named_parameters() if "lora_B" in name)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("adapters", [False, True])
def test_trainer_with_its_defaults(folder, tokens, tmp_path, checkpointing, adapters):
    """AdamW, a linear schedule, accumulated batches, and saving; the whole model, or LoRA on it."""
    pytest.importorskip("accelerate", reason="needs accelerate: pip install accelerate")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    frozen = model.model.blocks[0].mlp.branch.up.weight.clone()
    if adapters:
        peft = pytest.importorskip("peft", reason="needs peft: pip install peft")
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=LORA))
    rows = [{"input_ids": row, "labels": row, "noted": 1} for row in tokens]
    settings = transformers.TrainingArguments(
        tmp_path / "trained",
        max_steps=12,
        learning_rate=3e-3,
        logging_steps=1,
        gradient_accumulation_steps=2,
        gradient_checkpointing=checkpointing,
        report_to="none",
        use_cpu=True,
    )
    trainer = transformers.Trainer(model, settings, train_dataset=rows)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    inner = model.base_model.model if adapters else model
    assert torch.equal(inner.model.blocks[0].mlp.branch.up.weight, frozen) == adapters
    trainer.save_model(tmp_path / "saved")
    if not adapters:
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
        assert torch.equal(again(tokens).logits, model.eval()(tokens).logits)


SERVE = "import deeploop.models.hf, transformers.cli.transformers as cli; cli.main()"  # docs/serving.md


@pytest.mark.parametrize("options", [[], ["--continuous-batching", "--cb-num-blocks", "16"]])
def test_transformers_serve_answers_a_chat(options, tmp_path):
    for module in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(module, reason='needs pip install "transformers[serving]"')
    gpt = make_gpt(context=256)
    DeepLoopForCausalLM.from_gpt(gpt).save_pretrained(tmp_path)
    tokenizer = to_transformers(get_tokenizer("bytes"), context=256)
    tokenizer.chat_template = DEFAULT
    tokenizer.save_pretrained(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = ["serve", str(tmp_path), "--device", "cpu", "--port", port, *options]
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen([sys.executable, "-c", SERVE, *words], stdout=log, stderr=log)
    asked = {
        "model": str(tmp_path),
        "messages": [{"role": "user", "content": "again"}],
        "generation_config": json.dumps({"do_sample": False, "max_new_tokens": 12, "eos_token_id": -1}),
    }
    request = urllib.request.Request(
        f"http://localhost:{port}/v1/chat/completions",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        answer = json.loads(answered(request, server))
    finally:
        server.terminate()
        server.wait(60)
    prompt = tokenizer("<|endoftext|><|user|>\nagain\n<|assistant|>\n").input_ids
    expected = tokenizer.decode(list(generate(gpt, prompt, max_tokens=12)), skip_special_tokens=True)
    assert answer["choices"][0]["message"]["content"] == expected


def answered(request, server, seconds=300):
    """The answer of a server that is starting."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read()) from None
        except urllib.error.URLError:
            time.sleep(0.5)
    raise AssertionError("the server did not answer")


ELSEWHERE = """
import sys

class NoDeepLoop:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "deeploop":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, NoDeepLoop())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

source, again, result = sys.argv[1:]
for tokenizer in (
    AutoTokenizer.from_pretrained(source),  # theirs, and nobody is there to say that code may run
    AutoTokenizer.from_pretrained(source, trust_remote_code=True),  # where somebody is, it isn't asked
    PreTrainedTokenizerFast.from_pretrained(source),
):
    assert tokenizer("Löop").input_ids == list("Löop".encode())
try:
    AutoModelForCausalLM.from_pretrained(source, trust_remote_code=False)
except ValueError:
    pass
else:
    sys.exit("loaded without being trusted")
model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True, rounds=4)
model.save_pretrained(again)
model = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True)
tokens = torch.arange(20)[None]
with torch.no_grad():
    logits = model(tokens, use_cache=False).logits
torch.save((logits, model.generate(tokens[:, :5], max_new_tokens=10, do_sample=False)), result)
assert not any(name.split(".")[0] == "deeploop" for name in sys.modules)
"""


def test_the_folder_brings_its_own_code(tmp_path):
    """A recurrent model, under a key-value budget; at another depth than it was trained at."""
    gpt = make_gpt(**RECURRENT | {"rounds": 3, "injection": "gated", "first_state": "noise"})
    gpt.set_cache_rounds(2)
    folder = tmp_path / "exported"
    DeepLoopForCausalLM.from_gpt(gpt).save_pretrained(folder)
    environment = {
        **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "1",
    }
    source, result = shutil.copytree(folder, tmp_path / "source"), tmp_path / "result.pt"
    to_transformers(get_tokenizer("bytes"), context=48).save_pretrained(source)
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, source, tmp_path / "again", result],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment,
        cwd=tmp_path,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    model = DeepLoopForCausalLM.from_pretrained(folder, rounds=4)
    logits, text = torch.load(result)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(logits, model(tokens, use_cache=False).logits)
    assert torch.equal(text, model.generate(tokens[:, :5], max_new_tokens=10, do_sample=False))
    gpt.set_rounds(4)
    assert torch.equal(logits, our_logits(gpt, tokens))
    assert text[0, 5:].tolist() == list(generate(gpt, range(5), max_tokens=10))
    # What was saved elsewhere is still a folder for the package.
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert type(again) is DeepLoopForCausalLM
