"""A rule for looped depth in a transformers Llama: two layers applied six times, their branches times 1/N.

Run: python examples/hf_llama.py     (needs transformers: pip install -c constraints.txt -e ".[hf]")
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from deeploop.nn import RMSNorm, ScaledResidual

try:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer
except ImportError:
    raise SystemExit('needs transformers: pip install -c constraints.txt -e ".[hf]"') from None

BLOCKS, ROUNDS, WIDTH, LENGTH, DIGITS = 2, 6, 64, 16, 10


class Layer(nn.Module):
    """Attention and MLP of a Llama layer, each inside the residual equation."""

    def __init__(self, layer: LlamaDecoderLayer, config: LlamaConfig, **options):
        super().__init__()
        norm = partial(RMSNorm, eps=config.rms_norm_eps)  # new norms: their gains start at 1, as Llama's do
        self.attention = ScaledResidual(layer.self_attn, config.hidden_size, norm=norm, **options)
        self.mlp = ScaledResidual(layer.mlp, config.hidden_size, norm=norm, **options)


class Visit(nn.Module):
    """One visit of a shared layer. Each visit has keys and values of its own, so a cache slot of its own."""

    def __init__(self, layer: Layer, slot):
        super().__init__()
        self.layer, self.slot = layer, slot

    def forward(self, x, **kwargs):
        self.layer.attention.branch.layer_idx = self.slot
        # Llama's attention returns (output, weights): ScaledResidual takes the output.
        return self.layer.mlp(self.layer.attention(x, **kwargs))


def loop_layers(model: LlamaForCausalLM, rounds, rule="averaged"):
    """Applies the model's K layers `rounds` times by a rule such as averaged (1/N), flat or prenorm."""
    config, llama = model.config, model.model
    blocks = len(llama.layers)
    layers = [Layer(layer, config, rule=rule, blocks=blocks, rounds=rounds) for layer in llama.layers]
    llama.layers = nn.ModuleList(Visit(layers[n % blocks], n) for n in range(blocks * rounds))
    config.num_hidden_layers = blocks * rounds  # visits: the cache is sized by them
    return model


def normalise_embedding(model: LlamaForCausalLM):
    """The loop starts from a stream of RMS 1, as LoopedGPT's does: Llama's embeddings are drawn at 0.02."""
    model.model.embed_tokens.register_forward_hook(lambda _, inputs, x: F.rms_norm(x, x.shape[-1:]))
    return model


def make_llama():
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=DIGITS + 1,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=BLOCKS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2 * LENGTH,
            eos_token_id=None,
        )
    )


def sequences(count):
    """Eight digits, a separator, the same digits again: the second half can be known."""
    digits = torch.randint(DIGITS, (count, LENGTH // 2))
    return torch.cat([digits, torch.full((count, 1), DIGITS), digits], dim=1)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = loop_layers(normalise_embedding(make_llama()), ROUNDS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    print(f"{BLOCKS} layers × {ROUNDS} rounds, {sum(p.numel() for p in model.parameters()):,} parameters")
    for step in range(61):
        tokens = sequences(16)
        labels = tokens.clone()
        labels[:, : LENGTH // 2 + 1] = -100  # the first half is random
        loss = model(tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}")
    prompt = sequences(1)[:, : LENGTH // 2 + 1]
    text = model.generate(prompt, max_new_tokens=LENGTH // 2, do_sample=False)[0].tolist()
    print(f"digits {text[: LENGTH // 2]}, copied {text[LENGTH // 2 + 1 :]}")
