"""A vLLM plugin: `vllm serve EXPORTED` and `vllm.LLM("EXPORTED")` run what `deeploop export` wrote.

The model is `LoopedGPT` itself. vLLM computes the attention, with a key-value cache for each visit: a block
that is visited R times has one matrix for each projection and R `Attention` objects of vLLM.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.sequence import IntermediateTensors

from deeploop.export.vllm_plugin import require_served
from deeploop.models.hf import looped_gpt
from deeploop.nn.cache import EngineAttention


class VisitAttention(EngineAttention):
    """vLLM's attention of each visit; vLLM holds positions, masks and the pages of keys and values."""

    def __init__(self, visits: nn.ModuleList) -> None:
        self.visits = visits

    def attend(self, q: Tensor, k: Tensor, v: Tensor, slot: int) -> Tensor:
        flat = (x[0].transpose(0, 1).flatten(1) for x in (q, k, v))  # (1, H, T, D) → (T, H·D)
        y: Tensor = self.visits[slot](*flat)
        return y.view(1, -1, q.shape[1], q.shape[3]).transpose(1, 2)


class DeepLoopForCausalLM(nn.Module):
    """A looped GPT whose attention is vLLM's. All tokens of a batch are one row of T tokens."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        require_served(vllm_config)
        with torch.device("meta"):
            self.model = looped_gpt(config)
        self.model.to_empty(device=vllm_config.device_config.device)
        self.model.init_tables()
        self.model.set_rounds(config.rounds)
        gpt = self.model.config
        self.visits = nn.ModuleList(
            Attention(
                gpt.heads,
                gpt.head_size,
                gpt.head_size**-0.5,
                num_kv_heads=gpt.grouped_heads,
                cache_config=vllm_config.cache_config,
                prefix=f"{prefix}.layers.{visit}.attn".lstrip("."),
            )
            for visit in range(self.model.visits)
        )

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Return the rows (T, width) of the embedding, before its norm."""
        rows: Tensor = self.model.embedding(input_ids)
        return rows

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Return the states (T, width) after the final norm."""
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed_input_ids(input_ids)
        model, at = self.model, positions[None]
        places = (model.cos[at][:, None], model.sin[at][:, None]), None
        first = None if model.first_noise is None else model.first_noise[at]
        attention = VisitAttention(self.visits)
        out = model(at, cache=attention, places=places, state=first, embedded=inputs_embeds[None])
        return out.states[0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return the logits (T, vocabulary) in fp32."""
        return self.model.logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy the weights of an export; return the names of those that were set."""
        own, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            if name not in own:
                raise ValueError(f"{name}: is not a weight of the model in config.json; export the run again")
            has, needs = tuple(tensor.shape), tuple(own[name].shape)
            if has != needs:
                raise ValueError(
                    f"{name}: has shape {has}, by config.json it is {needs}; export the run again"
                )
            default_weight_loader(own[name], tensor)
            loaded.add(name)
        if lacking := own.keys() - loaded:
            raise ValueError(f"{min(lacking)}: is missing in the file of weights; export the run again")
        return loaded
