"""The unbiased estimator of pass@k."""

import numpy as np
from jaxtyping import Float, Int


def pass_at_k(correct_P: Int[np.ndarray, " P"], samples: int, k: int) -> Float[np.ndarray, " P"]:
    """The probability that at least one of k samples is right, of each problem.

        pass@k = 1 - C(n - c, k) / C(n, k) = 1 - prod_{i = n-c+1 .. n} (1 - k / i)

    Chen et al. (arXiv 2107.03374), eq 1, as a float64 product: binomials overflow.

    Args:
        correct_P: c, right samples of each problem, 0 to n.
        samples: n, samples a problem.
        k: 1 to n.

    Raises:
        ValueError: k is not in 1 .. n, or a count is not in 0 .. n.

    >>> pass_at_k(np.array([0, 1, 4]), samples=4, k=2).tolist()
    [0.0, 0.5, 1.0]
    """
    correct_P = np.asarray(correct_P)
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {samples} samples a problem")
    if correct_P.size and not (correct_P.min() >= 0 and correct_P.max() <= samples):
        raise ValueError(f"counts of right samples must lie in 0 .. {samples}")
    tail_N = np.arange(1, samples + 1, dtype=np.float64)
    miss_N = np.maximum(1 - k / tail_N, 0)  # 0 where fewer than k samples are wrong
    # log-free cumulative product from the right: entry c is the product over the last c factors
    product_C = np.concatenate([[1.0], np.cumprod(miss_N[::-1])])
    return 1 - product_C[correct_P]


def powers_up_to(samples: int) -> list[int]:
    """1, 2, 4 ... and `samples` itself: the k that are reported."""
    return sorted({*(2**i for i in range(samples.bit_length()) if 2**i <= samples), samples})
