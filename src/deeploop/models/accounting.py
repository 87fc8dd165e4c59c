"""Parameters and FLOPs of a looped GPT, by formula."""

from deeploop.models.gpt import GPTConfig


def block_matrix_count(config: GPTConfig) -> int:
    """Entries of one block's matrices: q, k, v, o and gate, up, down."""
    return 4 * config.width**2 + 3 * config.width * config.hidden


def parameter_count(config: GPTConfig) -> int:
    """Stored parameters: the padded embedding (tied to the head), K blocks, all norm gains."""
    norms = 2 if config.block != "sandwich" or not config.inner_norm else 4
    block = block_matrix_count(config) + norms * config.width + 2 * config.head_size  # QK-norm
    outside = 1 + config.final_norm
    return (config.padded_vocabulary + outside) * config.width + config.blocks * block


def flops_per_token(config: GPTConfig, rounds: int | None = None) -> int:
    """Training FLOPs a token (forward and backward) at sequences of `context` tokens.

    6 for each matrix entry visited: K blocks × R rounds and the head, not the embedding lookup; and
    attention counted causally, as half of its 12·T·width a visited block. Norms and the like are left out.
    """
    visits = config.blocks * (config.rounds if rounds is None else rounds)
    head = config.padded_vocabulary * config.width
    attention = 6 * config.context * config.width
    return 6 * (visits * block_matrix_count(config) + head) + visits * attention
