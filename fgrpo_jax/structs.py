"""The pytrees that flow: prompts -> rollouts -> learner batch -> train state."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from flax import struct
from jaxtyping import Bool, Float, Int

Leaf = Any  # an array, or what a tree map puts in its place, as a sharding


@dataclasses.dataclass(frozen=True)
class Problem:
    """One task with a verifiable answer."""

    text: str  # the user's message
    answer: str  # the gold answer
    kind: str = ""  # a label for metrics, as "2+3" or the source's name
    worked: str = ""  # a full solution, for supervised training
    data: Any = None  # what the reward needs beside the answer


@dataclasses.dataclass(frozen=True)
class Prompts:
    """A step's prompts, on the host."""

    tokens_PC: Int[np.ndarray, "P C"]  # left-padded, so that every prompt ends in column C - 1
    length_P: Int[np.ndarray, " P"]  # real tokens
    position_P: Int[np.ndarray, " P"]  # place in the endless shuffled stream; seeds the samples
    problems: tuple[Problem, ...]


Watch = Callable[[int, int, int, int], None]  # (responses, of how many, tokens, steps) so far


def unwatched(responses: int, of: int, tokens: int, steps: int) -> None:
    """The Watch that looks away."""


@dataclasses.dataclass(frozen=True)
class Response:
    """What was sampled for a row, on the host."""

    row: int  # prompt * N + sample
    tokens: Int[np.ndarray, " t"]  # the stop token included
    logp: Float[np.ndarray, " t"]  # of each token, under the policy at the sampler's temperature
    drawn_logp: Float[np.ndarray, " t"] | None  # under what was sampled from; None: the same
    finished: bool  # it came to a stop


@dataclasses.dataclass(frozen=True)
class Samples:
    """All responses of a call, on the host; column t is the t-th response token."""

    tokens_BT: Int[np.ndarray, "B T"]
    mask_BT: Bool[np.ndarray, "B T"]  # true on every sampled token, the stop token included
    logp_BT: Float[np.ndarray, "B T"]  # under the policy, temperature applied
    drawn_logp_BT: Float[np.ndarray, "B T"] | None  # after truncation too; None: the same
    finished_B: Bool[np.ndarray, " B"]  # it came to a stop within the limit


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Scored groups, on the host."""

    prompts: Prompts
    tokens_BT: Int[np.ndarray, "B T"]
    mask_BT: Bool[np.ndarray, "B T"]
    sampler_logp_BT: Float[np.ndarray, "B T"]  # of the sampler's policy, as Samples.logp_BT
    finished_B: Bool[np.ndarray, " B"]
    reward_PN: Float[np.ndarray, "P N"]  # shaped; the advantage is made of it
    correct_PN: Float[np.ndarray, "P N"]  # raw correctness, 0 or 1; the focal weight is made of it
    valid_PN: Bool[np.ndarray, "P N"]  # false: out of the group's statistics and of the loss
    responses: tuple[str, ...]  # decoded, for judging and for reading; never tokenised again
    verdicts: tuple[str, ...]  # rewards.VERDICTS, one a response
    ref_logp_BT: Float[np.ndarray, "B T"] | None = None  # of the reference policy, if there is one
    drawn_logp_BT: Float[np.ndarray, "B T"] | None = None  # of what was sampled from, as Samples


@struct.dataclass
class LearnerBatch:
    """Rows of a step; on the devices split as [minibatches, microbatches, rows] for B."""

    tokens_BS: Leaf  # int32 [B, S], prompt (left-padded) and response
    start_B: Leaf  # int32 [B], column of the first real token
    mask_BT: Leaf  # bool [B, T], response tokens that are trained
    advantage_B: Leaf  # float32 [B], focal weight applied
    sampler_logp_BT: Leaf  # float32 [B, T], of the sampler's policy
    drawn_logp_BT: Leaf = None  # float32 [B, T], of what was sampled from; None: the same
    ref_logp_BT: Leaf = None  # float32 [B, T], of the reference policy; None: no KL in the loss
    old_logp_BT: Leaf = None  # float32 [B, T], before the step; None: the policy has not moved
    length_BN: Leaf = None  # int32 [B, N], trained tokens of the group's rows, its own first
    width_ZZ: Leaf = None  # int32 [minibatches, microbatches], which of the widths; None: the last
    # Packed rows, R of them, hold several responses: what is by token is then [R, s], and tokens_BS
    # [R, C + s] with the prompt of all in front, or [R, s] with each one's before its response.
    part_Bs: Leaf = None  # int32 [R, s], number of the response, or with its prompt; 0: padding
    begin_B: Leaf = None  # int32 [B], first column of each response
    length_B: Leaf = None  # int32 [B], its columns
    used_Z: Leaf = None  # int32 [minibatches], microbatches that hold responses


@struct.dataclass
class TrainState:
    """All that training changes."""

    params: Any  # float32 master weights
    opt_state: Any
    step: Leaf  # int32 [], rollout steps done
    draws: Leaf  # int32 [], batches of prompts drawn: the data's position
    exponent: Leaf  # float32 [], lambda-GRPO's; 0 where it is not trained
    typical_norm: Leaf  # float32 [], running mean of the gradient norms of updates; 0: none yet
