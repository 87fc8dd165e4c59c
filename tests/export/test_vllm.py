"""The vLLM plugin against LoopedGPT: `make test-vllm`, in an environment of its own (docs/testing.md)."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM in an environment of its own: make test-vllm")
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: an engine starts in two seconds
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
os.environ.update(SETTINGS)

import vllm  # noqa: E402

from deeploop.data.hf_tokenizer import to_transformers  # noqa: E402
from deeploop.data.tokenizers import get_tokenizer  # noqa: E402
from deeploop.export import vllm_plugin  # noqa: E402
from deeploop.models.gpt import LoopedGPT  # noqa: E402
from deeploop.models.gpt_config import GPTConfig  # noqa: E402
from deeploop.models.hf import DeepLoopForCausalLM  # noqa: E402
from deeploop.rules import NAMED  # noqa: E402
from deeploop.tasks.chat.template import DEFAULT  # noqa: E402

# vLLM's attention on a CPU has heads of 32 and more.
SHAPE = {"blocks": 2, "rounds": 3, "width": 64, "heads": 2, "hidden": 48, "vocabulary": 257, "context": 256}
PROMPTS = [
    torch.randint(0, 257, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 2, 5, 11, 23, 31, 47, 64)
]
PARTS = {"prelude": 1, "coda": 1}
OTHERS = {
    "grouped": {"kv_heads": 1, "unigram_bias": True, "tied_head": False},
    "noise": PARTS | {"injection": "linear", "first_state": "noise"},
    "zeros": PARTS | {"injection": "add", "first_state": "zeros"},
    "retrofit": {
        **{"qk_norm": "before-rotary", "attention_bias": "qkvo", "mlp_bias": True, "head_width": 32},
        **{"rule": "prenorm:q=0.5", "input_norm": False, "rotary_scaling": (8, 1, 4, 64)},
        **{"heads": 4, "kv_heads": 2, "rotary_base": 5e5},
    },
}
MODELS = {
    **{f"{rule}, R={rounds}": {"rule": rule, "rounds": rounds} for rule in NAMED for rounds in (1, 3, 7)},
    **{f"parts, {kind}": PARTS | {"injection": kind} for kind in ("none", "add", "linear", "gated")},
    **OTHERS,
}


def make_gpt(**changes):
    """Weights so large that the likeliest token is not the last one again."""
    gpt = LoopedGPT(GPTConfig(**SHAPE | changes)).eval()
    generator = torch.Generator().manual_seed(18)
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            if name.endswith(("k_norm.weight", "inner.weight")):
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif parameter.ndim == 2 and "injection" not in name:
                parameter.normal_(0, 0.3, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5, generator=generator)
        gpt.embedding.weight.mul_(4)
    return gpt


def export(gpt, folder):
    DeepLoopForCausalLM.from_gpt(gpt).save_pretrained(folder)
    return str(folder)


def engine(folder, **settings):
    common = {"dtype": "float32", "max_model_len": 160, "enforce_eager": True, "max_num_seqs": 8}
    quiet = {"skip_tokenizer_init": True, "disable_log_stats": True}
    return vllm.LLM(folder, **common | quiet | settings)


def greedy(llm, prompts=PROMPTS, count=64):
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=count, logprobs=0, ignore_eos=True, detokenize=False
    )
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)


@torch.no_grad()
def assert_ours(gpt, outputs, count=64):
    """Each token is the likeliest of ours behind those before it, and its log-probability is ours."""
    every = set()
    for out in outputs:
        found = out.outputs[0]
        tokens = list(found.token_ids)
        assert len(tokens) == count
        every.update(tokens)
        text = torch.tensor([[*out.prompt_token_ids, *tokens]])
        logits = gpt.logits(gpt(text).states)[0, len(out.prompt_token_ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
        ours = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        theirs = torch.tensor(
            [place[token].logprob for place, token in zip(found.logprobs, tokens, strict=True)]
        )
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-3)
    assert len(every) > 8


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_and_their_log_probabilities_are_ours(name, tmp_path):
    """A batch of eight prompts of different lengths."""
    gpt = make_gpt(**MODELS[name])
    assert_ours(gpt, greedy(engine(export(gpt, tmp_path))))


def test_a_resized_vocabulary(tmp_path):
    """Without the rows that pad ours to a multiple of 64."""
    gpt = make_gpt(tied_head=False, unigram_bias=True)
    model = DeepLoopForCausalLM.from_gpt(gpt)
    model.resize_token_embeddings(300)
    model.save_pretrained(tmp_path)
    assert_ours(gpt, greedy(engine(str(tmp_path))))


@pytest.mark.parametrize("recompute", [False, True])
def test_other_rounds(recompute, tmp_path):
    gpt = make_gpt(recompute_alpha=recompute)
    outputs = greedy(engine(export(gpt, tmp_path), hf_overrides={"rounds": 5}))
    gpt.set_rounds(5)
    assert gpt.blocks[0].mlp.alpha == pytest.approx((2 * 2 * (5 if recompute else 3)) ** 0.5)
    assert_ours(gpt, outputs)


@pytest.mark.parametrize("cached", [False, True])
def test_prompts_in_pieces_with_and_without_the_prefix_cache(cached, tmp_path):
    gpt = make_gpt(**PARTS, injection="gated")
    llm = engine(
        export(gpt, tmp_path),
        enable_prefix_caching=cached,
        block_size=32,
        max_num_batched_tokens=48,
        max_num_seqs=4,
    )
    prompts = [[*PROMPTS[-1], *ending] for ending in ([1], [2, 3], [])]
    assert_ours(gpt, greedy(llm, prompts))
    again = greedy(llm, prompts)
    assert_ours(gpt, again)
    assert all((out.num_cached_tokens >= 32) == cached for out in again)


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"exit_gate": True}, {}, "exit_gate=True: vLLM runs all rounds for every token"),
        ({"cache_rounds": 1}, {}, "cache_rounds=1: vLLM keeps all rounds"),
        ({"rule": "circle"}, {}, "circle"),
        ({"prelude": 3}, {}, "prelude.0.attention.branch.k.weight: is missing"),
        ({"hidden": 96}, {}, "mlp.branch.down.weight: has shape (64, 48), by config.json it is (64, 96)"),
        ({}, {"hf_overrides": {"rounds": 0}}, "rounds=0: must be at least 1"),
        ({}, {"hf_overrides": {"rounds": "5"}}, "rounds='5': must be a whole number"),
        ({}, {"hf_overrides": {"num_loops": 5}}, "hf_overrides: num_loops is not a setting of this model"),
        ({}, {"tensor_parallel_size": 2}, "tensor_parallel_size=2: must be 1"),
        ({}, {"quantization": "fp8", "dtype": "bfloat16"}, "quantization=fp8: must be unset"),
    ],
)
def test_what_vllm_cannot_compute_is_refused_in_a_line(changes, settings, message, tmp_path):
    export(make_gpt(), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(Exception) as error:  # vLLM wraps some of them
        engine(str(tmp_path), **settings)
    said = str(error.value)
    assert message in said
    assert len([line for line in said.splitlines() if message in line]) == 1


def test_a_run_folder_is_no_export(tmp_path):
    """vLLM's own words, in one line."""
    (tmp_path / "config.json").write_text('{"task": "language", "model": {"blocks": 2}}')
    with pytest.raises(ValueError, match=r"Should have a `model_type` key in its config\.json") as error:
        engine(str(tmp_path))
    assert str(error.value).count("model_type") == 1


def test_an_older_vllm_is_left_alone_with_one_line(monkeypatch, caplog):
    """It may be there for other models."""
    registered = []
    monkeypatch.setattr(vllm.ModelRegistry, "register_model", lambda *names: registered.append(names))
    monkeypatch.setattr(vllm, "__version__", "0.31.2")
    vllm_plugin.register()
    assert registered == []
    assert caplog.messages == [
        "vllm==0.31.2: deeploop's plugin needs 0.32 or newer; pip install --upgrade vllm"
    ]
    monkeypatch.setattr(vllm, "__version__", "0.32.0")
    vllm_plugin.register()
    assert registered == [("DeepLoopForCausalLM", "deeploop.export.vllm:DeepLoopForCausalLM")]


def test_a_server_answers_an_openai_client(tmp_path):
    """With the template of the folder, and other rounds than the export's."""
    gpt = make_gpt()
    tokenizer = to_transformers(get_tokenizer("bytes"), context=256)
    tokenizer.chat_template = DEFAULT
    tokenizer.save_pretrained(export(gpt, tmp_path))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = f"serve {tmp_path} --served-model-name looped --host 127.0.0.1 --port {port} --dtype float32"
    words += ' --max-model-len 160 --enforce-eager --hf-overrides {"rounds":4}'
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *words.split()]
    # The package vllm-cpu does not bring the metadata of vllm, by which its command names its version.
    metadata = tmp_path / "metadata" / "vllm-0.32.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    environment = os.environ if has_metadata() else os.environ | {"PYTHONPATH": str(metadata.parents[1])}
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server, tmp_path / "log")
        openai = pytest.importorskip("openai")
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        answer = client.chat.completions.create(
            model="looped",
            messages=[{"role": "user", "content": "again"}],
            temperature=0,
            max_completion_tokens=24,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        ).model_dump()
    finally:
        server.terminate()
        server.wait(60)
    prompt = tokenizer("<|endoftext|><|user|>\nagain\n<|assistant|>\n").input_ids
    assert answer["prompt_token_ids"] == prompt
    tokens = answer["choices"][0]["token_ids"]
    gpt.set_rounds(4)
    with torch.no_grad():
        logits = gpt.logits(gpt(torch.tensor([prompt + tokens])).states)
    assert logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == tokens
    assert len(tokens) == 24


def has_metadata():
    try:
        return bool(version("vllm"))
    except PackageNotFoundError:
        return False


def wait_for(address, server, log, seconds=300):
    until = time.monotonic() + seconds
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1)
    raise AssertionError(f"the server is not ready: {log.read_text()[-3000:]}")
