"""The policy: params, tokens and cache in; hidden states, logits and cache rows out."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from fgrpo_jax import UserError, adapters, attention
from fgrpo_jax.adapters import Lora
from fgrpo_jax.layers import (
    MULTIPLIED,
    Layer,
    Past,
    RMSNorm,
    Turn,
    make_turn,
    multiply,
)
from fgrpo_jax.model_config import ModelConfig
from fgrpo_jax.numerics import MASKED
from fgrpo_jax.sharding import constrain, shards
from fgrpo_jax.validation import Config


@struct.dataclass
class Cache:
    """Keys and values of columns 0 .. S - 1; keys are rotated.

    Tuples of one [L, B, K, S, H] array for each block of layers in params["layers"].
    """

    k_LBKSH: Any
    v_LBKSH: Any


def blocks(params: Any) -> tuple[Any, ...]:
    """The stacks of layers that follow each other."""
    layers = params["layers"]
    return layers if isinstance(layers, tuple) else (layers,)


def first_columns(part_BT: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Of each column's part the first one; a part's columns are adjacent."""
    column_T = jnp.arange(part_BT.shape[1])
    differs_BT = part_BT != jnp.pad(part_BT, [(0, 0), (1, 0)])[:, :-1]
    return jax.lax.cummax(jnp.where(differs_BT, column_T[None], 0), axis=1)


_remat = functools.partial(jax.checkpoint, prevent_cse=False)  # the layers are scanned
_kept = jax.checkpoint_policies.save_only_these_names
REMAT: dict[str, Callable[[Any], Any]] = {  # by model.remat
    "none": lambda layer: layer,
    "dots": functools.partial(_remat, policy=_kept(MULTIPLIED)),
    "attention": functools.partial(_remat, policy=_kept(attention.KEPT)),
    "full": _remat,
}


@dataclasses.dataclass(frozen=True)
class Policy:
    """The language model as functions of params.

    Rows are left-padded: `start_B` is the column of a row's first real token, and column j holds
    position j - start. params["layers"] holds the layers stacked, and they are scanned; or it is
    a tuple of blocks of stacked layers, which follow each other unrolled.
    """

    config: ModelConfig
    dtype: Any = jnp.float32  # of computation; norms, softmax, RoPE and logits are float32
    remat: str = "none"  # what the backward pass recomputes of a layer, as REMAT
    tokens: int | None = None  # ids that the tokenizer knows; the rows above are never sampled
    backends: tuple[str, str] = ("xla", "xla")  # of attention: over whole rows, and decoding
    share_columns: bool = False  # devices that share heads share a row's columns between layers
    lora: Lora | None = None  # adapters, which are then all that is trained

    def init(self, key: Array) -> Any:
        """Random float32 parameters."""
        c = self.config
        embed_key, head_key, *layer_keys = jax.random.split(key, 2 + c.layers)
        x_BTD, start_B = jnp.zeros((1, 1, c.width)), jnp.zeros(1, jnp.int32)
        turn = make_turn(jnp.zeros((1, 1)), c)

        def init_layer(key: Array) -> Any:
            return Layer(c, ("xla", "xla"), "BTD").init(key, x_BTD, turn, start_B, None)["params"]

        table = lambda key: {"weight": 0.02 * jax.random.normal(key, (c.vocab, c.width))}
        params = {
            "embed_tokens": table(embed_key),
            "layers": jax.vmap(init_layer)(jnp.stack(layer_keys)),
            "norm": {"weight": jnp.ones(c.width)},
        }
        return params if c.tied else params | {"lm_head": table(head_key)}

    def trained(self, key: Array) -> Any:
        """Fresh float32 parameters of those that training changes."""
        if self.lora:
            return self.lora.init(key, jax.eval_shape(self.init, key))
        return self.init(key)

    def weights(self, params: Any, base: Any = None) -> Any:
        """What the functions below take: params, or the base's with params as its adapters."""
        return self.lora.join(base, params) if self.lora else params

    def merged(self, params: Any, base: Any = None) -> Any:
        """The same without adapters: they are added to the weights."""
        return adapters.merge(self.weights(params, base))

    def hidden(
        self,
        params: Any,
        token_BT: Int[Array, "B T"],
        start_B: Int[Array, " B"],
        part_BT: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Final hidden states of whole rows.

        part_BT: a row holds several sequences instead, numbered from 1; 0 is padding. Each begins
        at position 0, and start_B is 0.
        """
        return self._forward(params, token_BT, start_B, 0, None, None, False, part_BT)[0]

    def response_hidden(
        self,
        params: Any,
        prompt_PC: Int[Array, "P C"],
        start_P: Int[Array, " P"],
        response_BT: Int[Array, "B T"],
        part_BT: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """The final hidden states that predict the tokens of responses.

        The B / P responses of a prompt are adjacent, and the prompt is computed once for all.
        part_BT: a row holds several responses of its prompt, numbered from 1; 0 is padding.
        """
        C, T = prompt_PC.shape[1], response_BT.shape[1]
        each = lambda x: jnp.repeat(x, response_BT.shape[0] // prompt_PC.shape[0], axis=0)
        begin_BT = jnp.zeros_like(response_BT) if part_BT is None else first_columns(part_BT)
        begins_BT = begin_BT == jnp.arange(T)[None]
        turn_P = self._turn(jnp.arange(C)[None] - start_P[:, None])
        turn_B = self._turn(C + jnp.arange(T)[None] - begin_BT - each(start_P)[:, None])

        def layer(carry, weights):
            x_PCD, x_BTD = carry
            apply = functools.partial(self._layer(T).apply, {"params": weights})
            x_PCD, (k_PKCH, v_PKCH) = apply(x_PCD, turn_P, start_P, None)
            past = Past(each(k_PKCH)[None], each(v_PKCH)[None], 0)
            return (x_PCD, apply(x_BTD, turn_B, each(start_P), past, part_BT)[0]), None

        layer = REMAT[self.remat](layer)
        x = self._embed(params, prompt_PC), self._embed(params, response_BT)
        (x_PCD, x_BTD), _ = jax.lax.scan(layer, x, params["layers"])
        x_PCD, x_BTD = constrain(x_PCD, "BTD"), constrain(x_BTD, "BTD")
        before_BTD = jnp.pad(x_BTD, [(0, 0), (1, 0), (0, 0)])[:, :-1]
        x_BTD = jnp.where(begins_BT[..., None], each(x_PCD[:, -1:]), before_BTD)
        return self._norm(params, constrain(x_BTD, "BTD"))

    def prefill(
        self,
        params: Any,
        token_BT: Int[Array, "B T"],
        start_B: Int[Array, " B"],
        cache: Cache | None = None,
    ) -> tuple[Float[Array, "B D"], Cache]:
        """The last column's hidden states, and the cache of these T columns, which follow those
        of `cache`."""
        column = cache.k_LBKSH[0].shape[3] if cache else 0
        hidden_BTD, rows = self._forward(params, token_BT, start_B, column, cache, None)
        return hidden_BTD[:, -1], rows

    def decode(
        self,
        params: Any,
        token_B: Int[Array, " B"],
        start_B: Int[Array, " B"],
        column: Int[Array, ""],
        cache: Cache,
        width: int | None = None,
    ) -> tuple[Float[Array, "B D"], Cache]:
        """One token a row at `column`, reading the cache before it; returns the cache with its
        row written. One write after all layers: carrying the cache through their scan would copy
        all of it every token.

        Args:
            width: columns that are read, of which those before `column` are some; None: all.
        """
        hidden_BTD, rows = self._forward(
            params, token_B[:, None], start_B, column, cache, width or cache.k_LBKSH[0].shape[3]
        )
        # Never true; but now XLA sees that all reading is before all writing, or it would copy the
        # caches of unrolled layers.
        column += (hidden_BTD[0, 0, 0] == jnp.inf).astype(column.dtype)
        write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=column, axis=3)
        return hidden_BTD[:, 0], jax.tree.map(write, cache, rows)

    def _forward(
        self,
        params: Any,
        token_BT: Array,
        start_B: Array,
        column: Any,
        cache: Cache | None,
        width: int | None,
        keep_rows: bool = True,
        part_BT: Array | None = None,
    ) -> tuple[Array, Any]:
        """Normalised hidden states of tokens whose first column is `column`, and their Cache."""
        first_BT = start_B[:, None] if part_BT is None else first_columns(part_BT)
        turn = self._turn(column + jnp.arange(token_BT.shape[1])[None] - first_BT)
        x_BTD = self._embed(params, token_BT)
        rows = []
        for i, block in enumerate(blocks(params)):

            def layer(x_BTD, xs, i=i):
                weights, number = xs
                past = None
                if cache:
                    past = Past(cache.k_LBKSH[i], cache.v_LBKSH[i], number, column, width)
                module = self._layer(token_BT.shape[1])
                x_BTD, new = module.apply({"params": weights}, x_BTD, turn, start_B, past, part_BT)
                return x_BTD, new if keep_rows else None

            count = jax.tree.leaves(block)[0].shape[0]
            layer = REMAT[self.remat](layer)
            x_BTD, new = jax.lax.scan(layer, x_BTD, (block, jnp.arange(count)), unroll=count == 1)
            rows.append(new)
        cache = Cache(*zip(*rows, strict=True)) if keep_rows else None
        return self._norm(params, constrain(x_BTD, "BTD")), cache

    def _layer(self, columns: int) -> Layer:
        return Layer(self.config, self.backends, self._stream(columns))

    def _stream(self, columns: int) -> str:
        return "BtD" if self.share_columns and columns > 1 else "BTD"

    def _turn(self, position_BT: Array) -> Turn:
        return make_turn(jnp.maximum(position_BT, 0), self.config)

    def _embed(self, params: Any, token_BT: Array) -> Array:
        weight_VD = params["embed_tokens"]["weight"]
        if shards("fsdp") > 1:
            # gathered whole, or hidden states of all rows would be added up over all devices; and
            # cast before that, which XLA would swap but for the barrier
            if weight_VD.dtype != self.dtype:
                weight_VD = jax.lax.optimization_barrier(weight_VD.astype(self.dtype))
            weight_VD = constrain(weight_VD, "VD")
        x_BTD = weight_VD[token_BT].astype(self.dtype)
        return constrain(x_BTD, self._stream(token_BT.shape[1]))

    def _norm(self, params: Any, x_BTD: Array) -> Array:
        out_BTD = RMSNorm(self.config.rms_eps).apply({"params": params["norm"]}, x_BTD)
        assert isinstance(out_BTD, Array)
        return out_BTD

    def logits(self, params: Any, hidden: Array, temperature: float) -> Array:
        """float32 logits [B (T) V] of hidden states [B (T) D], divided by a temperature above 0.

        Rows that the tokenizer does not know are masked, here and so in sampling and training.
        """
        c = self.config
        weight_VD = params["embed_tokens" if c.tied else "lm_head"]["weight"]
        equation = "BTD,VD->BTV" if hidden.ndim == 3 else "BD,VD->BV"
        logits = multiply(equation, hidden, weight_VD.astype(hidden.dtype), jnp.float32)
        logits = constrain(logits, "BTV" if logits.ndim == 3 else "BV") / temperature
        if self.tokens is None or self.tokens >= c.vocab:
            return logits
        known_V = jnp.arange(c.vocab) < self.tokens
        return jnp.where(jnp.expand_dims(known_V, tuple(range(logits.ndim - 1))), logits, MASKED)


def backends_of(c: Config, platform: str, dtype: Any, head_size: int) -> tuple[str, str]:
    """Policy.backends of a run; UserError where they are not here, or take other packed rows."""
    backends = attention.resolve(c.model.attention, platform, dtype, head_size, bool(c.learn.pack))
    longest = c.data.max_prompt + c.rollout.max_response
    if attention.packs_whole(backends[0]) and 0 < c.learn.pack < longest:
        raise UserError(
            f"learn.pack is {c.learn.pack}: with {backends[0]} attention packed rows hold prompts "
            f"too, so it must be at least data.max_prompt + rollout.max_response, {longest}, or 0"
        )
    return backends


def shares_columns(c: Config, platform: str) -> bool:
    """Policy.share_columns of a run. Eight devices of one CPU would wait for each other: their
    independent collectives block its few threads in different orders."""
    return c.mesh.sequence == "yes" or (c.mesh.sequence == "auto" and platform != "cpu")


DTYPES: dict[str, Callable[[], Any]] = {
    "float32": lambda: jnp.float32,
    "bfloat16": lambda: jnp.bfloat16,
    "auto": lambda: jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16,
}
