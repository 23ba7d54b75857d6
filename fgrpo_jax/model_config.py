"""The shape of a model, read from config.json: Qwen2's, Qwen3's and Llama's dense layers."""

import dataclasses
import math
from typing import Any

from fgrpo_jax import UserError

LARGEST = {  # of config.json's sizes that are believed, before anything is made of them
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1000,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 12,
    "original_max_position_embeddings": 1 << 24,
}
FAMILIES = {  # by model_type: whether q, k, v have a bias, whether q and k are normalised
    "qwen2": (True, False),
    "qwen3": (False, True),
    "llama": (False, False),
}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's: wavelengths far beyond the first training's context are stretched."""

    factor: float  # of the longest wavelengths
    low: float  # turns within the first context below which a wavelength is long
    high: float  # and above which it is left as it is
    context: int  # tokens of the first training's


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of a model."""

    vocab: int  # V, rows of the embedding
    width: int  # D
    layers: int  # L
    heads: int  # Q
    kv_heads: int  # K
    head_size: int  # H
    feed_forward: int  # F
    rope_theta: float
    rms_eps: float
    tied: bool  # the embedding is the head
    bias: bool = True  # of queries, keys and values
    qk_norm: bool = False  # each head's query and key is normalised before it is rotated
    rope_scaling: RopeScaling | None = None

    def column_bytes(self, itemsize: int, tp: int = 1) -> int:
        """Of a column's keys and values in all layers, on one of tp devices."""
        return 2 * self.layers * -(-self.kv_heads // tp) * self.head_size * itemsize

    @property
    def layer_matrices(self) -> int:
        """Entries of one layer's weights that are multiplied by."""
        heads = self.width * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return heads + 3 * self.width * self.feed_forward

    @property
    def layer_vectors(self) -> int:
        """Entries of one layer's norms and biases."""
        biases = self.head_size * (self.heads + 2 * self.kv_heads) if self.bias else 0
        return biases + (2 * self.head_size if self.qk_norm else 0) + 2 * self.width

    def frequencies(self) -> list[float]:
        """Of RoPE: radians a position, for each of the H / 2 pairs of a head's features."""
        half = self.head_size // 2
        plain = [self.rope_theta ** (-i / half) for i in range(half)]
        return [_scaled(f, self.rope_scaling) for f in plain] if self.rope_scaling else plain

    @classmethod
    def from_hugging_face(cls, c: dict[str, Any], file: str = "config.json") -> "ModelConfig":
        """From the content of a config.json; UserError on what this policy does not compute."""
        return _Reader(c, file).read()


def _scaled(frequency: float, scaling: RopeScaling) -> float:
    turns = scaling.context * frequency / (2 * math.pi)
    kept = min(max((turns - scaling.low) / (scaling.high - scaling.low), 0.0), 1.0)
    return frequency * (kept + (1 - kept) / scaling.factor)


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Values of a config.json, each checked."""

    c: dict[str, Any]
    file: str

    def size(self, key: str, default: int | None = None, of: Any = None) -> int:
        value = (self.c if of is None else of).get(key)
        value = default if value is None else value
        if value is None:
            raise UserError(f"{self.file} has no {key}")
        if type(value) is not int or not 1 <= value <= LARGEST[key]:
            raise UserError(
                f"{self.file} has {key} {value!r:.40}: it must be a whole number from 1 to "
                f"{LARGEST[key]}"
            )
        return value

    def number(self, key: str, value: Any) -> float:
        if type(value) not in (int, float) or not 0 < value < 1e12:
            raise UserError(f"{self.file} has {key} {value!r:.40}: it must be a number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.c.get(key, False)
        if not isinstance(value, bool):
            raise UserError(f"{self.file} has {key} {value!r:.40}: it must be true or false")
        return value

    def read(self) -> ModelConfig:
        c, file = self.c, self.file
        if c.get("model_type") not in tuple(FAMILIES):  # which a list may be looked for in, too
            raise UserError(
                f"{file} has model_type {c.get('model_type')!r:.40}: it must be one of "
                f"{', '.join(FAMILIES)}"
            )
        for key in ("use_sliding_window", "attention_bias", "mlp_bias"):
            if c.get(key):
                raise UserError(f"{file} has {key} true: it is not supported")
        if c.get("hidden_act", "silu") != "silu":
            raise UserError(f"{file} has hidden_act {c['hidden_act']!r:.40}: it must be silu")
        width, heads = self.size("hidden_size"), self.size("num_attention_heads")
        kv_heads = self.size("num_key_value_heads", heads)
        if heads % kv_heads or (c.get("head_dim") is None and width % heads):
            raise UserError(
                f"{file} has hidden_size {width}, num_attention_heads {heads} and "
                f"num_key_value_heads {kv_heads}: each must be a multiple of the next"
            )
        head_size = self.size("head_dim", width // heads)
        if head_size % 2:
            raise UserError(
                f"{file} has heads of size {head_size}: RoPE turns pairs, so it is even"
            )
        theta, scaling = self.rope()
        bias, qk_norm = FAMILIES[c["model_type"]]
        return ModelConfig(
            vocab=self.size("vocab_size"),
            width=width,
            layers=self.size("num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            feed_forward=self.size("intermediate_size"),
            rope_theta=theta,
            rms_eps=self.number("rms_norm_eps", c.get("rms_norm_eps", 1e-6)),
            tied=self.flag("tie_word_embeddings"),
            bias=bias,
            qk_norm=qk_norm,
            rope_scaling=scaling,
        )

    def rope(self) -> tuple[float, RopeScaling | None]:
        """Its base, and how it is scaled."""
        c, file = self.c, self.file
        rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else ""
        if kind not in ("default", "llama3"):
            raise UserError(
                f"{file} scales RoPE: only the default rotation and llama3's are supported"
            )
        theta = self.number("rope_theta", c.get("rope_theta", rope.get("rope_theta", 10_000.0)))
        if kind == "default":
            return theta, None
        factor, low, high = (
            self.number(key, rope.get(key))
            for key in ("factor", "low_freq_factor", "high_freq_factor")
        )
        if low >= high:
            raise UserError(f"{file} has low_freq_factor {low}: it must be below high_freq_factor")
        context = self.size("original_max_position_embeddings", of=rope)
        return theta, RopeScaling(factor, low, high, context)
