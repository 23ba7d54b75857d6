import doctest
import importlib

import pytest

MODULES = "advantages losses kl aggregators shaping pass_at_k answers forms".split()


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    failed, tried = doctest.testmod(importlib.import_module(f"fgrpo_jax.{name}"))
    assert tried and not failed
