import dataclasses

import numpy as np
import pytest
from test_roofline import TINY

from fgrpo_jax import flops, programs


@pytest.mark.parametrize(
    "name, billions",
    [
        ("Qwen2.5-0.5B", 0.494),
        ("Qwen3-4B-Base", 4.022),
        ("Llama-3.2-3B-Instruct", 3.213),
        ("Qwen2.5-1.5B", 1.544),
        ("Qwen2.5-3B", 3.086),
        ("Qwen2.5-7B", 7.616),
        ("Qwen2.5-14B", 14.77),
        ("Qwen2.5-32B", 32.76),
        ("Qwen2.5-72B", 72.7),
        ("Qwen2.5-Math-1.5B", 1.544),
        ("Qwen2.5-Math-7B", 7.616),
    ],
)
def test_parameters_of_the_known_shapes_are_the_published_ones(name, billions):
    assert flops.parameters(programs.model_shape(f"Qwen/{name}")) / 1e9 == pytest.approx(
        billions, rel=5e-4
    )


def test_parameters_by_hand():
    # q 4*4*8, k and v 2*4*8 each, o 4*4*8, three of 16*8; biases 4*4 + 2 * 2*4, norms 2*8
    assert flops.Weights.of(TINY) == (128 + 64 + 64 + 128 + 384, 32 + 16, 256)
    assert flops.parameters(TINY) == 2 * (768 + 48) + 2 * 256 + 8
    assert flops.parameters(dataclasses.replace(TINY, tied=True)) == 2 * 816 + 256 + 8


def test_work_by_hand():
    # a prompt of 3 tokens with responses of 2 and 4; one of 2 with 1 and 0
    work = flops.Work.of(np.array([3, 2]), np.array([[2, 4], [1, 0]]))
    # pairs: prompts 1+2+3 and 1+2; responses 4+5, 4+5+6+7, 3
    assert work == (5, 7, 6 + 3 + 9 + 22 + 3)
    large = flops.Work.of(np.full(2, 1024), np.full((2, 1024), 8192, np.int32))
    assert large.pairs == 2 * (1024 * 1025 / 2) + 2048 * (1024 * 8192 + 8192 * 8193 / 2)


def test_model_flop_by_hand():
    # TINY: 768 weights a layer and 2 layers, a head of 32 x 8, 4 heads of 4
    work = flops.Work(5, 7, 43)
    forward = 2 * (12 * 2 * 768 + 7 * 256) + 4 * 2 * 4 * 4 * 43
    assert forward == 45952
    assert flops.forward_flop(TINY, work) == forward
    assert flops.update_flop(TINY, work) == 3 * forward
    attention = 4 * 2 * 4 * 4 * 43  # has no weights
    assert flops.update_flop(TINY, work, frozen=True) == 2 * forward + attention
