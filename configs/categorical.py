"""The paper's categorical simulation: figure 2, of 17 group sizes, gamma 0 and 1, four seeds.

    python -m fgrpo_jax.experiments.categorical --config configs/categorical.py

Two CPU cores: five and a half minutes; the smoke setting, --config.steps=50 --config.every=10
--config.samples=[8,256,4096], 20 seconds.
"""

from fgrpo_jax.experiments import categorical


def get_config():
    return categorical.default()
