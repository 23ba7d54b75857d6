"""The pytrees that flow: prompts -> rollouts -> learner batch -> train state."""

import dataclasses
from typing import Any

import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True)
class Problem:
    """One task with a verifiable answer."""

    text: str  # the user's message
    answer: str  # the gold answer
    kind: str = ""  # a label for metrics, as "2+3" or the source's name
    worked: str = ""  # a full solution, for supervised training


@dataclasses.dataclass(frozen=True)
class Prompts:
    """A step's prompts, on the host."""

    tokens_PC: Int[np.ndarray, "P C"]  # left-padded, so that every prompt ends in column C - 1
    length_P: Int[np.ndarray, " P"]  # real tokens
    position_P: Int[np.ndarray, " P"]  # place in the endless shuffled stream; seeds the samples
    problems: tuple[Problem, ...]


@struct.dataclass
class Samples:
    """What the sampler returns; column t is the t-th response token."""

    tokens_BT: Int[Array, "B T"]
    mask_BT: Bool[Array, "B T"]  # true on every sampled token, the stop token included
    logp_BT: Float[Array, "B T"]  # of the sampled token, under the distribution sampled from
    finished_B: Bool[Array, " B"]  # a stop token was sampled


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Scored groups, on the host."""

    prompts: Prompts
    tokens_BT: Int[np.ndarray, "B T"]
    mask_BT: Bool[np.ndarray, "B T"]
    sampler_logp_BT: Float[np.ndarray, "B T"]
    finished_B: Bool[np.ndarray, " B"]
    reward_PN: Float[np.ndarray, "P N"]  # shaped; the advantage is made of it
    correct_PN: Float[np.ndarray, "P N"]  # raw correctness, 0 or 1; the focal weight is made of it
    responses: tuple[str, ...]  # decoded, for judging and for reading; never tokenised again


@struct.dataclass
class LearnerBatch:
    """Rows of a step, split as [minibatches, microbatches, rows] before the axes named here."""

    tokens_BS: Int[Array, "*split S"]  # prompt (left-padded) and response
    start_B: Int[Array, "*split"]  # column of the first real token
    mask_BT: Bool[Array, "*split T"]  # response tokens that are trained
    advantage_B: Float[Array, "*split"]  # focal weight applied
    sampler_logp_BT: Float[Array, "*split T"]


@struct.dataclass
class TrainState:
    """All that training changes."""

    params: Any  # float32 master weights
    opt_state: Any
    step: Int[Array, ""]  # rollout steps done
