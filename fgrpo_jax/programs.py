"""A config's real programs for devices that are not here, with abstract arguments.

No weight is allocated: arguments are shapes with shardings.
"""

import dataclasses
import functools
import importlib.util
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from fgrpo_jax import (
    UserError,
    accelerators,
    adapters,
    attention,
    batches,
    roofline,
    sharding,
    update,
    validation,
    weights,
)
from fgrpo_jax.accelerators import Topology
from fgrpo_jax.config import Config
from fgrpo_jax.layout import Layout, settings_of
from fgrpo_jax.logprobs import make_logprobs
from fgrpo_jax.model import Policy, backends_of, shares_columns
from fgrpo_jax.model_config import ModelConfig
from fgrpo_jax.optimizer import make_optimizer, make_schedule
from fgrpo_jax.sampling import Sampling
from fgrpo_jax.slots import make_programs
from fgrpo_jax.structs import LearnerBatch

SHAPES = pathlib.Path(__file__).parent / "assets" / "shapes" / "models.json"
DTYPES = {"auto": jnp.bfloat16, "bfloat16": jnp.bfloat16, "float32": jnp.float32}
STOP_IDS = (1, 0)  # any two: only their number matters to the program


def model_shape(path: str) -> ModelConfig:
    """Of model.path: a folder's config.json, or a known name's."""
    if path.startswith("embedded:") or (pathlib.Path(path) / "config.json").is_file():
        return weights.model_config(weights.resolve(path))
    known = json.loads(SHAPES.read_text())
    name = pathlib.PurePath(path).name.removesuffix("-Instruct").removesuffix("-Base")
    if name not in known:
        raise UserError(
            f"model.path is {path}: there is no {path}/config.json, and its last part is none of "
            f"the known {', '.join(known)}; give a folder with a config.json"
        )
    return ModelConfig.from_hugging_face(known[name])


def devices(topology: Topology) -> list[Any]:
    """Those of a topology, to compile for and no more."""
    chip = topology.chip
    module = {"tpu": "libtpu", "gpu": "jax_plugins.xla_cuda12"}[chip.platform]
    if not _installed(module):
        raise UserError(f"{topology.name} needs {accelerators.NEEDS[chip.platform]}")
    options: dict[str, Any] = {}
    if chip.platform == "gpu":
        options = dict(target_config=chip.target_config(), topology=f"1x1x{topology.devices}")
    names = {"tpu": (topology.name, "tpu"), "gpu": (chip.name, "cuda")}
    try:
        found = topologies.get_topology_desc(*names[chip.platform], **options)
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{topology.name} is no topology that XLA knows: {reason}") from None
    return list(found.devices)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def check_mesh(c: Config, m: ModelConfig, topology: Topology) -> tuple[int, int, int]:
    """validation's (replica, fsdp, tp); its UserError also says which would do."""
    n = topology.devices
    try:
        replica, fsdp, tp = validation.check_mesh(c, n)
        validation.need(
            m.kv_heads % tp == 0,
            f"mesh.tp is {tp}: it must divide the model's {m.kv_heads} key heads",
        )
        return replica, fsdp, tp
    except UserError as error:
        rows = min(c.learn.microbatch, batches.minibatch_rows(c))
        do = [
            f"fsdp {n // c.mesh.replica // tp} x tp {tp}"
            for tp in (1, 2, 4, 8, 16)
            if n % (c.mesh.replica * tp) == 0
            and m.kv_heads % tp == 0
            and c.rollout.prompts % (n // tp) == 0
            and rows % (n // tp) == 0
        ]
        do = f"these do: {', '.join(do)}" if do else "none does with this batch"
        raise UserError(f"{topology.name}: {error}; of its {n} devices {do}") from None


@dataclasses.dataclass
class Built:
    """A config's programs with their abstract arguments, and the formulas' job."""

    job: roofline.Job
    programs: dict[str, Callable[[], Any]]  # name -> lowered
    arguments: dict[str, int]  # name -> bytes of a device
    parts: dict[str, int]  # bytes of a device that arguments take


def _bytes(tree: Any) -> int:
    """Of a device's share."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape) if x.sharding else x.shape) * _item(x.dtype)
        for x in jax.tree.leaves(tree)
    )


def _item(dtype: Any) -> int:
    return 8 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else jnp.dtype(dtype).itemsize


def build(c: Config, topology: Topology, mean_response: int, found: list[Any]) -> Built:
    """All programs of a step, as build.build makes them. Call it under no mesh."""
    m, chip = model_shape(c.model.path), topology.chip
    axes = check_mesh(c, m, topology)
    mesh = sharding.make_mesh(*axes, devices=found)
    dtype = DTYPES[c.model.dtype]
    backends = backends_of(c, chip.platform, dtype, m.head_size)
    # some rows of the embedding are unknown to the tokenizer, and are masked
    policy = Policy(
        m, dtype, c.model.remat, m.vocab - 1, backends, shares_columns(c, chip.platform),
        adapters.make_lora(c),
    )  # fmt: skip
    schedule = make_schedule(c.optim, batches.updates_a_step(c))
    optimizer = make_optimizer(c.optim, schedule)
    state = update.abstract_state(policy, optimizer, mesh)
    key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
    abstract = lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    of = lambda x, axes: abstract(x, sharding.activation(mesh, axes))
    rows = lambda *shape, kind=jnp.int32: of(jax.ShapeDtypeStruct(shape, kind), "BT"[: len(shape)])
    number = jax.ShapeDtypeStruct((), jnp.int32)
    unroll = weights.unrolls(c, chip.platform)
    decode_params = weights.make_decode_params(policy, mesh, unroll)
    batch = learner_batch(c, mesh, attention.packs_whole(backends[0]))
    settings = update.settings_of(c, axes[0] * axes[1])
    logprobs = functools.partial(
        make_logprobs, temperature=settings.temperature, chunk=settings.logit_chunk, mesh=mesh
    )
    learn = update.make_update(policy, optimizer, schedule, settings, state)
    model = jax.eval_shape(policy.init, jax.random.key(0))
    cast = lambda x, place: jax.ShapeDtypeStruct(x.shape, dtype, sharding=place)
    frozen = jax.tree.map(cast, model, sharding.state_shardings(mesh, model))
    base = frozen if policy.lora else None
    reference = frozen if c.kl.coef else None
    own_reference = reference and (not policy.lora or c.kl.reference)

    with jax.set_mesh(mesh):
        sampling = Sampling(
            c.rollout.temperature, c.rollout.top_k, c.rollout.top_p, c.rollout.min_p
        )
        s = settings_of(c, policy, c.algo.group_size, sampling, STOP_IDS, c.data.max_prompt)
        ragged = backends[1] == "ragged"
        layout = Layout.of(s, c.rollout.prompts, c.data.max_prompt, ragged)
        shapes = jax.eval_shape(decode_params, state.params, base)
        params = jax.tree.map(abstract, shapes, sharding.state_shardings(mesh, shapes, "decode"))
        sampler = make_programs(policy, s)
        both = jax.eval_shape(lambda p: sampler.empty(p, layout), params)
        table, room = jax.tree.map(
            lambda x: of(x, "LBKSH" if x.ndim == 5 else "BD"[: x.ndim]), both
        )
    width, X = layout.widths[-1], layout.shards
    ended, group = rows(X * layout.slots, kind=jnp.bool_), X * layout.group
    lower: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
        "decode_params": (decode_params, (state.params, base), {}),
        "prefill": (
            sampler.prefill,
            (params, room, rows(group, layout.columns), rows(group), rows(group), number),
            {},
        ),
        "decode": (
            sampler.decode,
            (params, table, room, number, number, key, ended, number),
            {"width": width},
        ),
        "move_back": (sampler.move_back, (table, number), {}),
        "update": (learn, (state, batch, base), {}),
    }
    if batch.old_logp_BT:
        plain = dataclasses.replace(batch, old_logp_BT=None)
        shared = {"samples": settings.samples, "widths": settings.widths}
        lower["old"] = (logprobs(policy, whose="old"), (state.params, plain, base), shared)
    if reference:
        plain = learner_batch(c, mesh, arranged=False)
        plain = dataclasses.replace(plain, ref_logp_BT=None, old_logp_BT=None)
        whole = dataclasses.replace(policy, lora=None)
        lower["reference"] = (logprobs(whole, whose="reference"), (reference, plain), {})

    def lowered(name: str) -> Callable[[], Any]:
        program, arguments, static = lower[name]

        def run() -> Any:
            with jax.set_mesh(mesh):
                return program.lower(*arguments, **static)

        return run

    minibatch = batches.minibatch_rows(c)
    job = roofline.Job(
        model=m, chip=chip, replica=axes[0], fsdp=axes[1], tp=axes[2],
        item=jnp.dtype(dtype).itemsize, prompts=c.rollout.prompts, samples=c.algo.group_size,
        trained=c.rollout.prompts // c.learn.minibatch * minibatch, minibatch=minibatch,
        microbatch=min(minibatch, c.learn.microbatch), epochs=c.learn.epochs,
        columns=c.data.max_prompt, response=c.rollout.max_response, mean_response=mean_response,
        remat=c.model.remat, logit_chunk=c.learn.logit_chunk,
        old=batches.updates_a_step(c) > 1, reference=bool(c.kl.coef),
        slots=X * layout.slots, waiting=X * layout.waiting, cached=layout.cached,
        flash=backends[0] != "xla", ragged=ragged, share_columns=policy.share_columns,
        adapters=sum(x.size for x in jax.tree.leaves(state.params)) if policy.lora else 0,
        moments=6 if c.optim.first_moment == "bfloat16" else 8,
    )  # fmt: skip
    parts = {
        "parameters": _bytes((state.params, base)),
        "optimizer": _bytes(state.opt_state),
        "batch": _bytes(batch),
        "decode weights": _bytes(params),
        "cache": _bytes((table, room)),
        "slots": _bytes(table),
        "reference": _bytes(reference) if own_reference and not c.kl.offload else 0,
        "shared": 0 if own_reference else _bytes(reference),  # reference and parameters at once
    }
    arguments = {name: _bytes(args) for name, (_, args, _) in lower.items()}
    return Built(job, {name: lowered(name) for name in lower}, arguments, parts)


def learner_batch(c: Config, mesh: Any, whole: bool = False, arranged: bool = True) -> LearnerBatch:
    """What the update takes, as shapes: rollouts.learner_batch's result, and what fills it up.

    whole: as packing.pack's. arranged: packed or by length, where the config asks for it.
    """
    n, N = batches.minibatch_rows(c), c.rollout.subset or c.algo.group_size
    pack = c.learn.pack if arranged else 0
    by_length = arranged and not pack and c.learn.widths > 1
    size = min(n, c.learn.microbatch)
    micros = (c.rollout.prompts // c.learn.minibatch, n // size)
    responses, T = size * N if pack else size, pack or c.rollout.max_response

    def rows(kind: Any, count: int, *shape: int) -> Any:
        place = sharding.activation(mesh, "ZZBT" if shape else "ZZB")
        return jax.ShapeDtypeStruct((*micros, count, *shape), kind, sharding=place)

    def numbers(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding.replicated(mesh))

    sampling = Sampling(top_k=c.rollout.top_k, top_p=c.rollout.top_p, min_p=c.rollout.min_p)
    by_token = rows(jnp.float32, size, T)
    return LearnerBatch(
        tokens_BS=rows(jnp.int32, size, T if pack and whole else c.data.max_prompt + T),
        start_B=rows(jnp.int32, size),
        mask_BT=rows(jnp.bool_, size, T),
        advantage_B=rows(jnp.float32, responses),
        sampler_logp_BT=by_token,
        drawn_logp_BT=by_token if sampling.truncated else None,
        ref_logp_BT=by_token if c.kl.coef else None,
        old_logp_BT=by_token if batches.updates_a_step(c) > 1 else None,
        length_BN=rows(jnp.int32, responses, N) if c.algo.aggregator == "lambda_grpo" else None,
        width_ZZ=numbers(*micros) if by_length else None,
        part_Bs=rows(jnp.int32, size, T) if pack else None,
        begin_B=rows(jnp.int32, responses) if pack else None,
        length_B=rows(jnp.int32, responses) if pack else None,
        used_Z=numbers(micros[0]) if pack else None,
    )
