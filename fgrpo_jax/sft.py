"""python -m fgrpo_jax.sft --config FILE: a supervised warm start on worked solutions.

Makes a new small Qwen2 model with a tokenizer for arithmetic, of bytes, or for mazes, of squares
and actions; trains it by maximum likelihood of the responses with the same model, update and
checkpoint code as RL; and writes it as a Hugging Face folder.
"""

import json
import pathlib
import sys
from typing import Any

import jax
import numpy as np
from rich.console import Console

from fgrpo_jax import (
    UserError,
    checkpoint,
    export,
    forms,
    metrics,
    prompts,
    sharding,
    validation,
    weights,
)
from fgrpo_jax import tokenizer as tokenizers
from fgrpo_jax import workdir as workdirs
from fgrpo_jax.config import Config
from fgrpo_jax.model import DTYPES, Policy
from fgrpo_jax.objective import Objective
from fgrpo_jax.optimizer import make_optimizer, make_schedule
from fgrpo_jax.rollouts import put_batch
from fgrpo_jax.structs import LearnerBatch
from fgrpo_jax.tokenizer import Tokenizer
from fgrpo_jax.update import UpdateSettings, abstract_state, init_state, make_update

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("user", "assistant", "system", "\\boxed{")
SQUARES = {"\n": "NEWLINE", "#": "WALL", ".": "PATH", "s": "START", "g": "GOAL"}  # of a maze's text
MAZE = (  # MaxRL's vocabulary, in the order of its ids
    *"<pad> <bos> <eos> <unk> GRID_START GRID_END PATH_START DONE".split(),
    *"PATH WALL GOAL START NEWLINE UP DOWN LEFT RIGHT".split(),
    "\n",
    *(f"RESERVED_{i}" for i in range(14)),
)


def _bytes() -> tuple[Any, dict[str, Any]]:
    """A tokenizer whose tokens are bytes, chat markers and a few words, and its settings."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    backend.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    return backend, {
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHATML,
    }


def _squares() -> tuple[Any, dict[str, Any]]:
    """A tokenizer of mazes, a token a square or action, with MaxRL's ids, and its settings."""
    from tokenizers import AddedToken, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    vocabulary = {token: i for i, token in enumerate(MAZE)}
    backend = Backend(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Replace(letter, f" {word} ") for letter, word in SQUARES.items()]
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in MAZE[:4]])
    return backend, {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "chat_template": "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }


WARM = {  # what has worked solutions: its tokenizer, and what ends a response beside its eos
    "arithmetic": (_bytes, ()),
    "maze": (_squares, ("DONE",)),
}


def new_folder(c: Config, folder: pathlib.Path) -> None:
    """A model-less Hugging Face folder: config.json, and the tokenizer of the source's problems."""
    make, stops = WARM[_kind(c)]
    backend, settings = make()
    eos, pad, bos = (
        backend.token_to_id(settings.get(f"{name}_token", "")) for name in ("eos", "pad", "bos")
    )
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **settings,
    }
    model_config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "vocab_size": -(-backend.get_vocab_size() // 16) * 16,  # divides among up to 16 devices
        "hidden_size": c.sft.width,
        "num_hidden_layers": c.sft.layers,
        "num_attention_heads": c.sft.heads,
        "num_key_value_heads": c.sft.kv_heads,
        "intermediate_size": c.sft.feed_forward,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": c.sft.rope_theta,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }
    ends = [eos, *map(backend.token_to_id, stops)]
    for name, content in (
        ("tokenizer_config.json", tokenizer_config),
        ("config.json", model_config),
        ("generation_config.json", {"eos_token_id": ends if stops else eos}),
    ):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")


def _kind(c: Config) -> str:
    """The one kind of all sources, of WARM; UserError where there is none."""
    kinds = {part.kind for part in forms.parts(c.data.source)}
    if len(kinds) > 1 or not kinds <= WARM.keys():
        raise UserError(
            f"data.source is {c.data.source}: worked solutions are of {' or of '.join(WARM)} alone"
        )
    return kinds.pop()


def worked_batch(c: Config, examples: prompts.Prompts, tokenizer: Tokenizer) -> LearnerBatch:
    """Prompts and worked solutions as rows whose advantage is 1; the stop token is trained."""
    worked = tokenizer.encode([problem.worked for problem in examples.problems])
    rows, T = len(worked), c.rollout.max_response
    tokens_BT = np.zeros((rows, T), np.int32)
    mask_BT = np.zeros((rows, T), bool)
    for row, ids in enumerate(worked):
        ids = [*ids, tokenizer.stop_ids[0]]
        if len(ids) > T:
            raise UserError(
                f"a worked solution has {len(ids)} tokens: raise rollout.max_response above {T}"
            )
        tokens_BT[row, : len(ids)] = ids
        mask_BT[row, : len(ids)] = True
    return LearnerBatch(
        tokens_BS=np.concatenate([examples.tokens_PC, tokens_BT], axis=1),
        start_B=examples.tokens_PC.shape[1] - examples.length_P,
        mask_BT=mask_BT,
        advantage_B=np.ones(rows, np.float32),
        sampler_logp_BT=np.zeros((rows, T), np.float32),
    )


def train(c: Config, workdir: pathlib.Path, console: Console) -> None:
    """Writes the trained checkpoint to sft.out."""
    if not c.sft.out:
        raise UserError("sft.out is empty: give the folder of the new checkpoint")
    if c.lora.rank:
        raise UserError(
            f"lora.rank is {c.lora.rank}: sft trains a new model, all of it; leave it 0"
        )
    _kind(c)
    if c.sft.width % c.sft.heads or c.sft.heads % c.sft.kv_heads:
        raise UserError("sft.width must be a multiple of sft.heads, and that of sft.kv_heads")
    if c.sft.rows % (jax.device_count() // c.mesh.tp):
        raise UserError(f"sft.rows is {c.sft.rows}: it must divide among the devices")
    out = pathlib.Path(c.sft.out)
    if out.exists() and not (out / "config.json").exists():
        raise UserError(f"sft.out is {out}: it exists and is no model folder, give another")
    with workdirs.locked(workdir):
        workdirs.check(c, workdir)
        workdirs.claim(c, workdir)
        _train(c, workdir, out, console)


def _train(c: Config, workdir: pathlib.Path, out: pathlib.Path, console: Console) -> None:
    folder = workdir / "start"
    new_folder(c, folder)
    tokenizer = tokenizers.load(folder)
    policy = Policy(
        weights.model_config(folder), DTYPES[c.model.dtype](), c.model.remat, tokenizer.size
    )
    mesh = sharding.make_mesh(*validation.check_mesh(c, jax.device_count()))
    examples = prompts.load(c, c.data.source, "train", tokenizer)
    schedule = make_schedule(c.optim, updates_a_step=1)
    optimizer = make_optimizer(c.optim, schedule)
    settings = UpdateSettings(Objective("reinforce"), 1.0, 1, c.learn.logit_chunk)
    abstract = abstract_state(policy, optimizer, mesh)
    update = make_update(policy, optimizer, schedule, settings, abstract)
    with (
        jax.set_mesh(mesh),
        metrics.Bar(c.sft.steps, 0, console) as bar,
    ):
        checkpoints = checkpoint.of(c, workdir)
        state = checkpoints.restore(abstract)
        if state is None:
            params = jax.jit(policy.init)(jax.random.key(c.seed))
            state = init_state(params, optimizer, abstract)
        log = metrics.Journal(workdir / "metrics.jsonl", int(state.step))
        for step in range(int(state.step), c.sft.steps):
            part = prompts.batch_at(examples, step, c.sft.rows, c.seed, slice(None))
            batch = put_batch(worked_batch(c, part, tokenizer), 1, 1, mesh)
            state, numbers = update(state, batch)
            numbers = jax.device_get(numbers)
            names = ("loss", "entropy", "grad_norm", "lr")  # nothing was sampled: no ratios
            record = {"step": step + 1} | {name: numbers[name] for name in names}
            log.write(record)
            bar.show(step + 1, record)
            if step + 1 == c.sft.steps or (step + 1) % c.checkpoint.every == 0:
                checkpoints.save(state, step + 1)
        export.export(out, state.params, folder)


if __name__ == "__main__":
    from fgrpo_jax.main import run

    sys.exit(run(train, "Supervised warm start.", sys.argv[1:]))
