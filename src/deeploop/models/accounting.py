"""Parameters and FLOPs of a looped GPT, FLOPs of a reasoner, by formula."""

from deeploop.models.gpt import GPTConfig
from deeploop.models.reasoner import PuzzleShape, ReasonerConfig, swiglu_hidden


def block_matrix_count(config: GPTConfig) -> int:
    """Entries of one block's matrices: q, k, v, o and gate, up, down."""
    return 4 * config.width**2 + 3 * config.width * config.hidden


def parameter_count(config: GPTConfig) -> int:
    """Stored parameters: the padded embedding (tied to the head) and its bias, K blocks, all norm gains."""
    norms = 2 if config.block != "sandwich" or not config.inner_norm else 4
    block = block_matrix_count(config) + norms * config.width + 2 * config.head_size  # QK-norm
    outside = 1 + config.final_norm
    head = config.padded_vocabulary * (config.width + config.unigram_bias)
    return head + outside * config.width + config.blocks * block


def flops_per_token(config: GPTConfig, rounds: int | None = None) -> int:
    """Training FLOPs a token (forward and backward) at sequences of `context` tokens.

    6 for each matrix entry visited: K blocks × R rounds and the head, not the embedding lookup; and
    attention counted causally, as half of its 12·T·width a visited block. Norms and the like are left out.
    """
    visits = config.blocks * (config.rounds if rounds is None else rounds)
    head = config.padded_vocabulary * config.width
    attention = 6 * config.context * config.width
    return 6 * (visits * block_matrix_count(config) + head) + visits * attention


def flops_per_segment(config: ReasonerConfig, shape: PuzzleShape, *, forward_again: bool) -> int:
    """Training FLOPs of one puzzle's segment: all blocks forward, those in the graph backward, and the head.

    2 for each matrix entry and position forward, twice that backward; attention, which is not causal, counted
    whole. `forward_again`: the segment after it is run too, for the target of q_continue.
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
