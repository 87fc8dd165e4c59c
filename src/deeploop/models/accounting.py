"""Parameters, FLOPs and training memory of a looped GPT and of a reasoner, by formula."""

from deeploop.models.gpt_config import GPTConfig
from deeploop.models.reasoner import swiglu_hidden
from deeploop.models.reasoner_config import PuzzleShape, ReasonerConfig
from deeploop.nn.loss import MAX_LOGITS
from deeploop.nn.recompute import Recompute


def block_matrix_count(config: GPTConfig) -> int:
    """Entries of one block's matrices: q, k, v, o and gate, up, down."""
    heads = 2 * (config.heads + config.grouped_heads)  # q and o, k and v
    return config.width * (heads * config.head_size + 3 * config.hidden)


def block_bias_count(config: GPTConfig) -> int:
    """Entries of one block's biases."""
    qkv = (config.heads + 2 * config.grouped_heads) * config.head_size
    attention = {"none": 0, "qkv": qkv, "qkvo": qkv + config.width}[config.attention_bias]
    return attention + config.mlp_bias * (2 * config.hidden + config.width)


def parameter_count(config: GPTConfig) -> int:
    """Stored parameters: the padded embedding, an untied head, bias, blocks and gains."""
    norms = 2 * config.residual.gains  # without those of QK-norm
    block = block_matrix_count(config) + block_bias_count(config) + norms * config.width
    block += 2 * config.head_size * (config.qk_norm != "none")
    outside = config.input_norm + config.final_norm
    tables = 1 if config.tied_head else 2
    head = config.padded_vocabulary * (tables * config.width + config.unigram_bias)
    gate = config.exit_gate * (config.width + 1)
    return head + outside * config.width + config.stored_blocks * block + injection_count(config) + gate


def injection_count(config: GPTConfig) -> int:
    """Parameters of the injection."""
    matrices, vectors = {"none": (0, 0), "add": (0, 0), "linear": (2, 0), "gated": (1, 2)}[config.injection]
    return matrices * config.width**2 + vectors * config.width


def flops_per_token(
    config: GPTConfig,
    rounds: float | None = None,
    graph_rounds: float | None = None,
    *,
    context: float | None = None,
) -> int:
    """Training FLOPs per token (forward and backward) at sequences of `context` tokens, or the model's.

    6 per matrix entry visited: K blocks × R rounds, prelude, coda, injection and head, without the embedding
    lookup; and causal attention, half of its 12·T·H·D per visited block. Norms and the like are ignored. With
    an exit gate, head and coda are computed after every round. If rounds are drawn, `rounds` is their mean. A
    third is the forward pass; the rest is the backward pass, of `graph_rounds` rounds if it is truncated.
    """
    rounds = config.rounds if rounds is None else rounds
    in_graph = rounds if graph_rounds is None else graph_rounds
    attended = config.context if context is None else context
    entries = [_entries(config, count, attended) for count in (rounds, in_graph)]
    return round(2 * entries[0] + 4 * entries[1])


def _entries(config: GPTConfig, rounds: float, context: float) -> float:
    """Multiply-adds per token of a forward pass with that many rounds."""
    read = rounds if config.exit_gate else 1  # times that the head and the coda are computed
    visits = config.prelude + config.blocks * rounds + config.coda * read
    # The injection's product with e is computed once, that with the stream in every round.
    injected = {"linear": 1 + rounds, "gated": 1}.get(config.injection, 0) * config.width**2
    head = config.padded_vocabulary * config.width * read
    attention = context * config.heads * config.head_size
    return visits * (block_matrix_count(config) + attention) + injected + head


def flops_per_segment(config: ReasonerConfig, shape: PuzzleShape, *, forward_again: bool) -> int:
    """Training FLOPs of one puzzle's segment: all blocks forward, those in the graph backward, and the head.

    2 per matrix entry and position forward, twice that backward; attention is not causal and counted in full.
    With `forward_again` the next segment is computed too, for the target of q_continue.
    """
    positions = config.puzzle_positions + shape.length
    if config.mixer == "attention":
        mixing = positions * (8 * config.width**2 + 4 * positions * config.width)
    else:
        mixing = 6 * config.width * positions * swiglu_hidden(positions)
    block = mixing + 6 * positions * config.width * config.hidden
    schedule = config.schedule
    forward = schedule.N * (2 if forward_again else 1)
    head = 6 * shape.length * config.width * shape.vocabulary
    return block * (forward + 2 * schedule.N_g) + head


def activation_bytes(config: GPTConfig) -> int:
    """Bytes per token that one visit of a compiled block keeps for the backward pass, in bf16.

    The stream is fp32, inputs of products are bf16, and the compiler recomputes norms and SiLU:
        attention   the stream 4d; its norm 2d; q and k before their norm 4d; q, k, v and the output 8d;
                    the branch 2d                       = 20d, of which 12d depend on the heads' sizes
        SwiGLU      the stream 4d; its norm 2d; gate, up and their product 6·hidden; the branch 2d
    and one fp32 number per head or token for each norm and for the attention. This is an upper bound for the
    kernels in `nn/kernels`, which keep 4·hidden instead of 6 for SwiGLU. Compiled, pre-norm keeps less and
    post-norm about 6% more.
    """
    heads = (config.heads + config.grouped_heads) * config.head_size  # 2d by default
    return 16 * config.width + 6 * heads + 6 * config.hidden + 4 * (3 * config.heads + 4)


def training_bytes(
    config: GPTConfig, sequences: int, recompute: Recompute = "off", *, shards: int = 1, muon: bool = False
) -> int:
    """Estimate the peak GPU memory of a step on `sequences` at once; `shards` is the number of FSDP ranks.

    A parameter has 16 bytes for weight, gradient and two moments (12 in the blocks' matrices under Muon,
    which has one moment); sharded ones are also gathered in full during the step. Activations are kept for
    K·R visits at a time, or for K (by round) or 1 (by block), each with the block's bf16 weights, and for
    every state of the stream that something is recomputed from; prelude and coda are recomputed only by
    block. An injection keeps up to two states per round, an exit gate the coda's visits and the head's
    gradients of every round. The backward pass needs one more visit. Logits: those of a chunk, in bf16 and
    twice in fp32.
    """
    tokens, parameters = sequences * config.context, parameter_count(config)
    read = config.rounds if config.exit_gate else 1
    once = config.prelude + config.coda * read
    held = {"off": config.depth + once, "round": config.blocks + once, "block": 1}[recompute] + 1
    states = {"off": 1, "round": config.rounds, "block": config.depth + once}[
        recompute
    ] + 2  # embedding, loss
    states += 0 if config.injection == "none" else 2 * (config.rounds if recompute == "off" else 1)
    visits = held * (tokens * activation_bytes(config) + 2 * block_matrix_count(config))
    logits = 10 * min(MAX_LOGITS, tokens * config.padded_vocabulary)
    stored = 16 * parameters - (4 * config.stored_blocks * block_matrix_count(config) if muon else 0)
    whole = stored // shards + (8 * parameters if shards > 1 else 0)
    heads = 4 * (read - 1) * config.width * (tokens + config.padded_vocabulary)
    return whole + visits + 4 * states * tokens * config.width + logits + heads


def reasoner_activation_bytes(config: ReasonerConfig, positions: int, *, kernels: bool = False) -> int:
    """`activation_bytes` of a reasoner's block, which has one norm per sublayer and none on q and k.

    attention   the sum before the norm 4d; input, q, k, v, their rotated copies and the output 14d; branch 2d
    SwiGLU      its input and its branch 2d each; gate, up and product 6·hidden. Over the sequence,
                likewise with its hidden width, for each of d columns.

    On the kernels, states are bf16, and neither sums nor products of gate and up are kept:
        attention   input, output and branch 2d each; q, k, v 6d, q and k rotated 4d
        SwiGLU      input and branch 2d each; gate and up 4·hidden
    """
    if kernels:
        return 20 * config.width + 4 * config.hidden + 4 * (config.heads + 4)
    mlp = 2 * config.width + 6 * config.hidden
    if config.mixer == "attention":
        return 20 * config.width + mlp
    return 10 * config.width + 6 * config.width * swiglu_hidden(positions) // positions + mlp


def segment_bytes(
    config: ReasonerConfig,
    shape: PuzzleShape,
    puzzles: int,
    recompute: Recompute = "off",
    *,
    share: int = 0,
    shards: int = 1,
    kernels: bool = False,
) -> int:
    """Estimate `training_bytes` of a reasoner's step on `puzzles` at once; a round is a call of a module.

    `share` is the number of puzzles in this rank's step, if larger. `kernels`: blocks run on the kernels,
    whose states are bf16. On Hopper FP8 keeps as much as bf16; elsewhere a visit keeps 3·width bytes more per
    position, less than a tenth, for which `train/memory.py` leaves room.
    """
    positions = config.puzzle_positions + shape.length
    blocks, calls = max(config.blocks_of.values()), config.schedule.N_g
    held = {"off": calls, "round": blocks, "block": 1}[recompute] + 1
    tokens = puzzles * positions
    mixing = 3 * positions * swiglu_hidden(positions) if config.mixer == "mlp" else 4 * config.width**2
    block = mixing + 3 * config.width * config.hidden
    parameters = sum(config.blocks_of.values()) * block
    whole = 16 * parameters // shards + (8 * parameters if shards > 1 else 0)
    table = 4 * shape.puzzle_ids * config.width
    # The input of a call, and x in fp32 while it is computed; of all puzzles the carry before and after the
    # step, and that of the step not yet read back.
    carried = 6 * max(share, puzzles) * positions
    states = (2 if kernels else 4) * ((calls + 2) * tokens + carried) * config.width
    visit = tokens * reasoner_activation_bytes(config, positions, kernels=kernels) + 2 * block
    return whole + table + held * visit + states
