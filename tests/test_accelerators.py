import re

import pytest

from fgrpo_jax import UserError, accelerators


def test_topologies():
    v5e, h100 = accelerators.topology("v5e:4x8"), accelerators.topology("h100:8")
    assert (v5e.devices, v5e.chip.platform, v5e.chip.gib) == (32, "tpu", 15.75)
    assert (h100.devices, h100.chip.platform, h100.dims) == (8, "gpu", (8,))
    assert accelerators.topology("v5p:2x2x2").devices == 8


@pytest.mark.parametrize(
    "name, sentence",
    [
        (
            "v5litepod-16",
            "topology 'v5litepod-16': the chip must be one of v4, v5e, v5p, v6e, h100",
        ),
        ("v5e", "topology 'v5e': write the shape of its devices as in v5e:4x4"),
        ("v5e:4x4x4", "as in v5e:4x4"),
        ("v5p:4x4", "as in v5p:2x2x2"),
        ("h100:0", "topology 'h100:0': write the shape of its devices as in h100:8"),
    ],
)
def test_mistakes_get_one_sentence(name, sentence):
    with pytest.raises(UserError) as error:
        accelerators.topology(name)
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "chip", [c for c in accelerators.CHIPS.values() if c.platform == "gpu"], ids=lambda c: c.name
)
def test_targets_of_gpus_agree_with_the_table(chip):
    text = chip.target_config()
    of = lambda key: float(re.search(rf"{key}: ([\d.]+)", text)[1])
    assert of("memory_bandwidth") / 1e9 == pytest.approx(chip.gbs, rel=0.01)
    assert re.search(r'device_description_str: "([^"]+)"', text)[1] in chip.kinds
    assert of("device_memory_size") / 2**30 == pytest.approx(chip.gib, rel=0.01)


def test_bytes_are_matched_by_arithmetic_at_a_hundred_flops_or_more():
    """No unit of the table is a thousand times off."""
    for chip in accelerators.CHIPS.values():
        assert 90 < chip.tflops * 1e12 / (chip.gbs * 1e9) < 600


def test_devices_are_known_by_their_kind():
    of = accelerators.chip_of
    assert of("TPU v5 lite").tflops == 197 and of("NVIDIA H100 80GB HBM3").tflops == 989
    assert of("TPU v5").name == of("TPU v5p").name == "v5p"
    assert of("cpu") is None and of("NVIDIA H100 NVL") is None
    kinds = [kind for chip in accelerators.CHIPS.values() for kind in chip.kinds]
    assert len(kinds) == len(set(kinds)) and all(c.kinds for c in accelerators.CHIPS.values())
