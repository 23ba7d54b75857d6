"""Named aggregators: from losses by token to (sum, count), whose quotient is the loss.

Sum both over microbatches and devices, then divide once: gradients then do not depend on how a
batch was split, as those of a mean of means do. The loss at masked tokens does not matter, not
even where it is NaN (the gradient of what made it may be, though). Each is jitted with its
settings (Python numbers) static.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from fgrpo_jax.numerics import at_least_float32, group_statistics, kernel, masked_mean

Tokens = Float[Array, "B T"]
Mask = Bool[Array, "B T"]
Scalar = Float[Array, ""]


@kernel()
def token_mean(loss_BT: Tokens, mask_BT: Mask) -> tuple[Scalar, Scalar]:
    """The mean over all tokens: DAPO (arXiv 2503.14476), F-GRPO's own.

    verl's `token-mean`; TRL's `dapo`, `cispo`, and `bnpo` where a batch is in one piece.

    >>> total, count = token_mean(jnp.array([[1.0, 3.0]]), jnp.array([[True, True]]))
    >>> float(total / count)
    2.0
    """
    loss_BT = at_least_float32(loss_BT)
    return jnp.where(mask_BT, loss_BT, 0).sum(), mask_BT.sum().astype(loss_BT.dtype)


@kernel("count_empty", "eps")
def sequence_mean_token_mean(
    loss_BT: Tokens, mask_BT: Mask, count_empty: bool = False, eps: float = 1e-8
) -> tuple[Scalar, Scalar]:
    """The mean over sequences of their mean: GRPO as first published (arXiv 2402.03300).

    verl's `seq-mean-token-mean`; TRL's `grpo` and `sapo`, with count_empty and eps 0.

    Args:
        count_empty: rows without a token count as sequences, as in TRL; not in verl.
        eps: added to the lengths, in tokens.

    >>> mask = jnp.array([[True, True], [True, False]])
    >>> total, count = sequence_mean_token_mean(jnp.array([[1.0, 3.0], [4.0, 9.0]]), mask)
    >>> float(total / count)
    3.0
    """
    loss_BT = at_least_float32(loss_BT)
    return masked_mean(loss_BT, mask_BT, eps).sum(), _rows(loss_BT, mask_BT, count_empty)


@kernel("count_empty")
def sequence_mean_token_sum(
    loss_BT: Tokens, mask_BT: Mask, count_empty: bool = False
) -> tuple[Scalar, Scalar]:
    """The mean over sequences of their sum; verl's `seq-mean-token-sum`, TRL's `luspo` (with
    count_empty)."""
    loss_BT = at_least_float32(loss_BT)
    return jnp.where(mask_BT, loss_BT, 0).sum(), _rows(loss_BT, mask_BT, count_empty)


@kernel("length", "count_empty")
def constant_length(
    loss_BT: Tokens, mask_BT: Mask, length: int, count_empty: bool = False
) -> tuple[Scalar, Scalar]:
    """Each sequence's sum over the same constant: Dr. GRPO (arXiv 2503.20783).

    TRL's `dr_grpo`, with count_empty; verl's `seq-mean-token-sum-norm`, whose length is by
    default the width of the batch at hand, so that the loss's scale changes from batch to batch.

    Args:
        length: in tokens, above 0; the limit of a response.
    """
    total, rows = sequence_mean_token_sum(loss_BT, mask_BT, count_empty=count_empty)
    return total, rows * length


def _rows(loss_BT: Array, mask_BT: Array, count_empty: bool) -> Array:
    there_B = jnp.ones(mask_BT.shape[0], bool) if count_empty else mask_BT.any(axis=1)
    return there_B.sum().astype(loss_BT.dtype)


@kernel("ratio", "eps")
def length_weight(
    length_PN: Num[Array, "P N"],
    exponent: Scalar,
    valid_PN: Bool[Array, "P N"] | None = None,
    ratio: float = 1 / 9,
    eps: float = 1e-6,
) -> Float[Array, "P N"]:
    """lambda-GRPO's learnable weight of each sequence in the token mean (arXiv 2510.06870).

        z = (length - mean) / std,  h = 1 + ratio z,  f = N softmax(h ** lambda) over the group

    Args:
        length_PN: response tokens of each sample of a group.
        exponent: lambda, trained with the policy; 0 is the plain token mean, below 0 favours
            short responses, above 0 long ones.

    Returns:
        weights that multiply a row's losses, of mean 1 over the valid rows of each group; 0 for
        the others.

    >>> length_weight(jnp.array([[10.0, 30.0]]), jnp.float32(0)).tolist()
    [[1.0, 1.0]]
    """
    groups = group_statistics(length_PN, valid_PN)
    z_PN = groups.centred / (groups.std() + eps)
    h_PN = jnp.maximum(1 + ratio * z_PN, 1e-6)
    share_PN = jax.nn.softmax(h_PN**exponent, axis=1, where=groups.valid)
    return jnp.where(groups.valid, groups.number * share_PN, 0)
