"""Decoding: one pass over the prompts, then one token per sequence and step; on a GPU, a CUDA graph.

decoder = Decoder(model, [[5, 100], [7]], capacity=40, choose=partial(choose, sampling=GREEDY))
first = decoder.start().tokens
second = decoder.step().tokens

A step is the model's own forward pass over a cache of fixed size, at positions held on the device. With
Triton, a GPU computes its blocks with kernels in bf16 (`nn/kernels/decode.py`).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop.accelerate import known
from deeploop.models.gpt import LoopedGPT
from deeploop.nn.cache import PositionedCache


class Choice(NamedTuple):
    """The next tokens and the largest logits, (B,); the host reads NaN and inf from the latter."""

    tokens: Tensor
    top: Tensor


Choose = Callable[[Tensor], Choice]
"""Chooses the next tokens from logits (B, V)."""


class Decoder:
    """A batch of prompts of any lengths, and the tokens that follow them.

    The results are in memory that the next step overwrites. A sequence whose cache is full stays at its last
    position; its further tokens are meaningless.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: LoopedGPT,
        prompts: Sequence[Sequence[int]],
        *,
        capacity: int,
        choose: Choose,
        graph: bool = True,
        kernels: bool = True,
    ) -> None:
        self.model, self._choose = model, choose
        device = model.cos.device
        self.uses_kernels = kernels and fits_kernels(model)
        self.uses_graph = graph and device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        # Padding follows a prompt: the prompt does not attend to it, and new tokens overwrite it.
        self._lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        longest = max(map(len, prompts))
        padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
        self._prompts = torch.tensor(padded, device=device)
        self._last = capacity - 1
        self._positions = self._lengths.clamp(max=self._last)
        self._choice = Choice(torch.zeros_like(self._lengths), torch.zeros(len(prompts), device=device))
        self._cache = model.new_cache(capacity)
        self._logits: Callable[[Tensor], Tensor] | None = None
        self._is_warm = False

    @torch.inference_mode()
    def start(self) -> Choice:
        """Read the prompts and return the first token of each."""
        with self._on_device(), self._arithmetic():
            states = self.model(self._prompts, cache=self._cache).states
            rows = torch.arange(len(states), device=states.device)
            logits = self.model.logits(states[rows, self._lengths - 1])
            cache = PositionedCache(self._cache, self._positions)
            self._logits = (KernelStep if self.uses_kernels else ModuleStep)(self.model, cache)
            self._accept(logits)
        return self._choice

    @torch.inference_mode()
    def step(self) -> Choice:
        """Read the last tokens and return the next. The first step compiles, the second captures a graph."""
        with self._on_device():
            if self._graph is None and self.uses_graph and self._is_warm:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self._advance()
                self._graph = graph
            if self._graph is not None:
                self._graph.replay()
            else:
                self._advance()
        self._is_warm = True
        return self._choice

    def _advance(self) -> None:
        assert self._logits is not None, "start() comes first"
        self._accept(self._logits(self._choice.tokens))
        self._positions.add_(1).clamp_(max=self._last)

    def _accept(self, logits: Tensor) -> None:
        # Tokens are copied to where the step reads them; the rest stays in place, as the graph requires.
        tokens, top = self._choose(logits)
        self._choice = Choice(self._choice.tokens.copy_(tokens), top)

    def _on_device(self) -> AbstractContextManager[object]:
        # Graphs and Triton launch on the current device, which may differ from the model's.
        device = self.model.cos.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def _arithmetic(self) -> AbstractContextManager[object]:
        device = self.model.cos.device.type
        return torch.autocast(device, torch.bfloat16) if self.uses_kernels else nullcontext()


class ModuleStep:
    """Logits (B, V) after one new token (B,) per sequence, computed by the model's modules."""

    def __init__(self, model: LoopedGPT, cache: PositionedCache) -> None:
        self._model, self._cache = model, cache

    def __call__(self, tokens: Tensor) -> Tensor:
        model, at = self._model, self._cache.positions
        rotary = model.cos[at][:, None, None], model.sin[at][:, None, None]
        places = rotary, self._cache.mask()
        state = None if model.first_noise is None else model.first_noise[at][:, None]
        states = model(tokens[:, None], cache=self._cache, places=places, state=state).states
        return model.logits(states[:, 0])


class KernelStep:
    """Logits as in `ModuleStep`, by Triton kernels: the stream in fp32, matrices packed once in `dtype`."""

    def __init__(self, model: LoopedGPT, cache: PositionedCache, dtype: torch.dtype = torch.bfloat16) -> None:
        from deeploop.nn.kernels.decode import Visit, biases_of  # imported here: needs Triton
        from deeploop.nn.kernels.stack import packs_of

        self._model, self._positions = model, cache.positions
        once, core = [*model.prelude], [*model.blocks]
        pairs: list[Any] = [known.sublayers(block) for block in (*once, *core, *model.coda)]
        biases = [biases_of(pair, dtype) for pair in pairs]
        packed = [*zip(pairs, packs_of(pairs, dtype), biases, strict=True)]
        first, last = len(once), len(once) + len(core)
        order = [*packed[:first], *packed[first:last] * model.rounds, *packed[last:]]
        visits = [Visit(*block, *cache.cache.memory(model.slot_of(i))) for i, block in enumerate(order)]
        end = first + model.rounds * len(core)
        self._prelude, self._core, self._coda = visits[:first], visits[first:end], visits[end:]
        words = (model.head or model.embedding).weight[: model.config.vocabulary]
        self._head = (words * model.config.matrix_lr_multiplier).to(dtype)

    def __call__(self, tokens: Tensor) -> Tensor:
        from deeploop.nn.kernels.decode import head_product

        model = self._model
        x = model.input_norm(F.embedding(tokens, model.embedding.weight).float())
        if self._prelude:
            x, _ = self._run(self._prelude, x)
        if model.injection is None:
            _, h = self._run([*self._core, *self._coda], x, model.final_norm)
        else:
            _, h = self._run_injected(x)
        logits = head_product(h, self._head)
        return logits if model.output_bias is None else logits + model.output_bias[: logits.shape[1]]

    def _run_injected(self, e: Tensor) -> tuple[Tensor, Tensor]:
        """Run the rounds one by one, injecting e into each, then the coda."""
        model, blocks = self._model, len(self._model.blocks)
        assert model.injection is not None
        noise = None if model.first_noise is None else model.first_noise[self._positions][:, None]
        x = model.initial_state(e[:, None], 0, noise)[:, 0]
        entered, h = model.injection.enter(e), e
        for start in range(0, len(self._core), blocks):
            coda = self._coda if start + blocks == len(self._core) else []
            visits = [*self._core[start : start + blocks], *coda]
            x, h = self._run(visits, model.injection(x, entered), model.final_norm)
        return x, h

    def _run(self, visits: Any, x: Tensor, after: nn.Module | None = None) -> Any:
        from deeploop.nn.kernels.decode import run

        return run(visits, x, self._positions, (self._model.cos, self._model.sin), after)


def describe(model: nn.Module) -> str:
    """Describe how the tokens of a model are decoded on its device."""
    if not isinstance(model, LoopedGPT):
        return "token by token, without a CUDA graph: with adaptive depth the steps differ"
    if not model.cos.is_cuda:
        return "eager modules"
    if fits_kernels(model):
        return "a CUDA graph of Triton kernels in bf16"
    return "a CUDA graph of eager modules: Triton is not installed, or its kernels don't support these blocks"


def fits_kernels(model: LoopedGPT) -> bool:
    """True if the kernels can decode with a model: it is on a GPU, and they support all of its blocks."""
    blocks = (*model.prelude, *model.blocks, *model.coda)
    return model.cos.is_cuda and known.has_plain_loop(model) and all(map(known.fits_decoding, blocks))
