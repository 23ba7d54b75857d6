"""What a model has and needs, by formula: weights, and FLOP of the forward and backward pass."""

from typing import Any, NamedTuple

from fgrpo_jax.model_config import ModelConfig

Number = int | float


class Weights(NamedTuple):
    """How many of each."""

    layer: int  # entries of one layer's matrices
    small: int  # of one layer's biases and norms
    table: int  # of the embedding, and of the head

    @classmethod
    def of(cls, m: ModelConfig) -> "Weights":
        return cls(m.layer_matrices, m.layer_vectors, m.vocab * m.width)


def parameters(m: ModelConfig) -> int:
    """All weights of the model; a head that is the embedding is counted once."""
    w = Weights.of(m)
    return m.layers * (w.layer + w.small) + (1 if m.tied else 2) * w.table + m.width


class Work(NamedTuple):
    """What a forward pass computes: real tokens, whatever padding is computed with them."""

    prompts: Number  # tokens of prompts
    tokens: Number  # of responses: those that have logits
    pairs: Number  # (token, token that it attends to), itself among them

    @classmethod
    def of(cls, prompt_R: Any, response_RM: Any) -> "Work":
        """Of prompts of so many tokens, and M responses behind each; floats, on host or device."""
        p, t = prompt_R.astype(float), response_RM.astype(float)
        within = lambda x: (x * (x + 1) / 2).sum()
        return cls(p.sum(), t.sum(), within(p) + within(t) + (p[..., None] * t).sum())


BACKWARD = 2  # times the forward pass: gradients of the inputs, and of the weights


def attention_flop(m: ModelConfig, work: Work) -> Number:
    """Of scores and their products with values, forward."""
    return 4 * m.layers * m.heads * m.head_size * work.pairs


def forward_flop(m: ModelConfig, work: Work) -> Number:
    """What the model needs, the same on any machine: matrices and head, attention's pairs."""
    matrices = (work.prompts + work.tokens) * m.layers * m.layer_matrices
    return 2 * (matrices + work.tokens * m.vocab * m.width) + attention_flop(m, work)


def update_flop(m: ModelConfig, work: Work, frozen: bool = False) -> Number:
    """Forward and backward; what is computed again in the backward pass is not counted.

    frozen: the weights, so that they need no gradients; those of adapters are not counted.
    """
    whole = (1 + BACKWARD) * forward_flop(m, work)
    of_weights = forward_flop(m, work) - attention_flop(m, work)
    return whole - of_weights if frozen else whole
