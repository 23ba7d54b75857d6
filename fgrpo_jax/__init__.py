"""Reinforcement learning with verifiable rewards in JAX, with the focal weight of F-GRPO.

One alphabet names every axis, and array names end in their shape, as `logits_BTV`:

    P prompts          L layers              C prompt columns (left-padded)
    N samples/prompt   D model width         S columns in all, C + T
    B = P * N rows     Q query heads         V vocabulary
    T response tokens  K key/value heads     G query heads a key head, Q / K
                       H head size           F feed-forward width

Rows of a group are adjacent: row b is sample b % N of prompt b // N.
"""


class UserError(Exception):
    """A mistake in what the user gave: main prints it as one sentence and exits with code 2."""


class Preempted(Exception):
    """The run was asked to stop; nothing but work that is made again is lost."""


class StorageError(Exception):
    """A disk or bucket that refuses: main prints it as one sentence and exits with code 74."""
