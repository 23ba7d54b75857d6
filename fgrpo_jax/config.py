"""The configuration: every key with its unit and meaning, and one clear sentence a mistake."""

import difflib
import functools
import importlib.util
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType

from ml_collections import ConfigDict, config_dict

from fgrpo_jax import UserError
from fgrpo_jax.validation import Config, keys, validate


def default() -> Config:
    """Every key of a run. A config file says only what differs."""
    c = _section()
    c.seed = 0  # of every random key: samples, data order, initial weights
    c.steps = 200  # rollout steps in the run

    c.model = _section()
    c.model.path = "embedded:tiny_arithmetic"  # Hugging Face folder, or embedded:NAME
    c.model.dtype = "auto"  # of computation: float32, bfloat16; auto: bfloat16, on CPU float32
    c.model.attention = "auto"  # xla, splash (TPU), cudnn (GPU); auto: the device's, where it can
    c.model.remat = "none"  # recomputed by the backward pass: none dots attention full, as README

    c.lora = _section()  # low-rank adapters: the model's weights stay as they are
    c.lora.rank = 0  # R of the adapters, which alone are trained; 0: all weights are
    c.lora.alpha = 32.0  # adapters' products count alpha / rank times
    c.lora.targets = ()  # matrices of a layer that have one, as q_proj; none named: all seven
    c.lora.export = "merged"  # policy/ at the end: merged into the weights, or adapter (as peft's)

    c.data = _section()
    c.data.source = "arithmetic"  # as forms.SOURCES; several: 0.7*jsonl:PATH+0.3*parquet:PATH
    c.data.eval_source = "arithmetic"  # the same forms, no weights; a generator's held-out problems
    c.data.fields = ""  # problem=question,answer=target: the files' names of fields; empty: guessed
    # The paper's: Please reason step by step, and put your final answer within \boxed{}.
    c.data.system = ""  # system message; empty: the chat template's own default
    c.data.chat_template = ""  # empty: the model's own; plain: text and newline; or a jinja file
    c.data.template = "{problem}"  # the user message; {problem} stands for the problem's text
    c.data.stop = ()  # strings that end a response, beside the tokenizer's stop tokens
    c.data.max_prompt = 24  # tokens; longer prompts are dropped and counted

    c.reward = "math"  # as answers.EXTRACT, reasoning_gym:TASK or module:function
    c.score = _section()
    c.score.workers = 2  # processes that judge answers
    c.score.timeout = 5.0  # seconds of wall time an answer, after which it is wrong
    c.score.wrong = 0.0  # reward of a wrong answer; the paper: 0 or -1
    c.score.right = 1.0  # reward of a right one
    c.score.overlong_buffer = 0  # last tokens of a response over which its reward falls; 0: off
    c.score.overlong_factor = 1.0  # by how much it has fallen at the limit
    c.score.coin = 0.0  # chance that a sample is paid as a right one, whatever it says; 0: off
    c.score.unlikeliness = 0.0  # share taken off likely right answers, by rank; paper: 0.25; 0: off

    c.algo = _section()
    c.algo.name = "grpo"  # the surrogate: grpo dapo cispo gspo gspo_token gmpo sapo reinforce
    c.algo.group_size = 8  # N, samples a prompt
    c.algo.focal_gamma = 0.5  # exponent of the focal weight (1 - success rate) ** gamma; 0: off
    c.algo.clip_low = config_dict.placeholder(float)  # ratio kept above 1 - low; None: published
    c.algo.clip_high = config_dict.placeholder(float)  # ratio kept below 1 + high; None: published
    c.algo.dual_clip = config_dict.placeholder(float)  # loss bound c |A| at A < 0; 0: none
    c.algo.aggregator = config_dict.placeholder(str)  # as choices.AGGREGATORS; None: published
    c.algo.advantage = "grpo"  # as choices.ADVANTAGES
    c.algo.std_eps = 1e-6  # added to standard deviations; verl 1e-6, TRL 1e-4
    c.algo.pass_k = 4  # k of pkpo
    c.algo.smooth_right = 0.05  # of ds_grpo, times -log-probability, where right
    c.algo.smooth_wrong = 0.05  # the same, times log-probability, where wrong
    c.algo.domain_weight = "log"  # of disco, by a kind's share of the data: log log_squared inverse
    c.algo.tau_right = 1.0  # sapo's temperature where the advantage is above 0
    c.algo.tau_wrong = 1.05  # and elsewhere
    c.algo.lambda_ratio = 1 / 9  # r of lambda_grpo: standard deviations of length to weight
    c.algo.lambda_lr = 0.1  # learning rate of lambda_grpo's exponent, which starts at 0
    c.algo.truncated = "keep"  # cut-off samples: keep, mask (no loss), drop (no statistics either)
    c.algo.entropy_coef = 0.0  # times the entropy, taken off the loss; 0: off

    c.kl = _section()
    c.kl.coef = 0.0  # times the KL to the reference; 0: off, and no reference is loaded
    c.kl.place = "loss"  # loss, or reward
    c.kl.estimator = "k3"  # k1 k2 k3 abs k1+ k3+; +: with the gradient of k2
    c.kl.reference = ""  # Hugging Face folder of the reference; empty: model.path
    c.kl.offload = False  # its weights wait in the host's memory while they are not used

    c.importance = _section()  # weights of the loss where sampler and trainer differ
    c.importance.kind = "none"  # none, truncate (TIS) or mask (IcePop)
    c.importance.level = "token"  # token, or sequence: the product over it
    c.importance.low = 0.5  # mask: smaller weights become 0
    c.importance.high = 2.0  # truncate: larger weights become this; mask: 0

    c.rollout = _section()
    c.rollout.prompts = 32  # P, prompts a step
    c.rollout.max_response = 32  # T, tokens
    c.rollout.temperature = 1.0  # above 0; divides the training log-probabilities too
    c.rollout.top_k = 0  # sample of so many likeliest tokens; 0: of all
    c.rollout.top_p = 1.0  # of the likeliest that together have this probability
    c.rollout.min_p = 0.0  # of those with this share of the likeliest one's probability
    c.rollout.max_drift = 0.1  # nats between sampler and trainer a token, above which a run warns
    c.rollout.slots = 0  # rows that decode at a time; 0: as many as cache_gib holds
    c.rollout.cache_gib = 4.0  # of a device's memory for the cache and logits, where slots is 0
    c.rollout.waiting = 0  # prompts prefilled ahead; 0: what a chunk may need
    c.rollout.prefill = 8192  # tokens a device prefills at a time; longer prompts go in pieces
    c.rollout.chunk = 64  # decode steps between two looks of the host
    c.rollout.unroll = "auto"  # decode layers one by one, not scanned: yes no; auto: not on a TPU
    c.rollout.subset = 0  # PODS: samples a prompt, of greatest variance, that are trained; 0: all
    c.rollout.dynamic = False  # DAPO: only groups both right and wrong count; draw until P of them
    c.rollout.attempts = 10  # dynamic: batches of P prompts drawn a step, at most

    c.learn = _section()
    c.learn.minibatch = 32  # prompts an optimizer update
    c.learn.microbatch = 256  # rows of a minibatch in memory at a time
    c.learn.pack = 0  # columns of rows that hold several responses, on a TPU prompts too; 0: off
    c.learn.widths = 1  # response widths, each half the next, that the update is compiled for
    c.learn.epochs = 1  # passes over the rollouts of a step
    c.learn.logit_chunk = 512  # response tokens a row whose logits are in memory at a time

    c.optim = _section()
    c.optim.lr = 1e-6  # peak learning rate
    c.optim.warmup = 15  # optimizer updates of linear rise
    c.optim.decay_start = 0  # rollout steps after which a linear fall to 0 begins; 0: none
    c.optim.decay_end = 0  # rollout steps after which the rate is 0
    c.optim.b1 = 0.9  # AdamW's decay of the first moment
    c.optim.b2 = 0.999  # and of the second
    c.optim.weight_decay = 0.01  # AdamW, decoupled
    c.optim.clip_norm = 1.0  # bound on the gradient's global norm
    c.optim.first_moment = "float32"  # how AdamW keeps it: float32, or bfloat16 (half the memory)

    c.mesh = _section()
    c.mesh.replica = 1  # copies of the whole sharded state, for slow links
    c.mesh.fsdp = -1  # devices that share rows, parameters and optimizer; -1: all that are left
    c.mesh.tp = 1  # devices that share each layer's heads and features
    c.mesh.sequence = "auto"  # tp shares columns between layers too: yes no; auto: not on a CPU

    c.checkpoint = _section()
    c.checkpoint.every = 50  # steps; the last step is always saved
    c.checkpoint.keep = 2  # newest checkpoints that stay
    c.checkpoint.best = ""  # metric of evaluations, as pass@1: its best checkpoint stays too
    c.checkpoint.folder = ""  # local, or gs://BUCKET/PATH; empty: WORKDIR/checkpoints

    c.guard = _section()  # against numbers that go bad; the batch goes to WORKDIR/bad_batch
    c.guard.on_not_finite = "end"  # loss or gradient NaN or infinite: skip the update; end too
    c.guard.spike = 0.0  # times the typical gradient norm, above which on_spike applies; 0: off
    c.guard.on_spike = "skip"  # the update; or end too
    c.guard.on_drift = "warn"  # above rollout.max_drift: warn, skip the update, or end too
    c.guard.on_recompile = "end"  # a program compiled again after a run's second step: warn, end
    c.guard.skips = 10  # steps one after the other with skipped updates, after which a run ends
    c.guard.constant = 0  # steps one after the other without a mixed group, the same; 0: any
    c.guard.keep = 10  # bad batches that are kept, the first ones

    c.watchdog = _section()  # of the processes of a run, which go on together
    c.watchdog.lag = 30.0  # seconds that one may be behind the others before the run ends; 0: any
    c.watchdog.stall = 3600.0  # seconds without anything new from any before it ends; 0: any

    c.eval = _section()
    c.eval.every = 50  # steps between evaluations; 0: only before and after
    c.eval.samples = 16  # n of pass@k, k = 1, 2, 4 ... n
    c.eval.problems = 256  # held-out problems, the first of eval_source
    c.eval.temperature = 1.0  # 0: greedy
    c.eval.top_k = 0  # as rollout.top_k
    c.eval.top_p = 1.0  # as rollout.top_p
    c.eval.min_p = 0.0  # as rollout.min_p

    c.profile = _section()
    c.profile.steps = ""  # steps whose trace goes to WORKDIR/profile: 3,4 or 3-5; empty: none

    c.sft = _section()
    c.sft.out = ""  # folder of the new checkpoint
    c.sft.steps = 600  # optimizer updates
    c.sft.rows = 96  # worked solutions an update
    c.sft.slips = 0.0  # chance that a six-digit worked solution ends in a wrong digit
    c.sft.layers = 2  # L of the new model
    c.sft.width = 96  # D
    c.sft.heads = 4  # Q
    c.sft.kv_heads = 2  # K
    c.sft.feed_forward = 384  # F
    c.sft.rope_theta = 10000.0  # base of the rotary angles' wavelengths, in tokens
    return c.lock()


def _section() -> Config:
    return ConfigDict()


def load(path: str, overrides: Sequence[str] = (), methods: Sequence[str] = ()) -> Config:
    """The config of a file's get_config(), with the apply(c) of each method file and then the
    overrides "a.b=value" applied, validated.

    Raises UserError with one sentence for an unreadable file, an unknown or mistyped key, or
    values that do not fit together.
    """
    return validate(read(path, overrides, methods))


def read(
    path: str,
    overrides: Sequence[str] = (),
    methods: Sequence[str] = (),
    default: Callable[[], Config] = default,
) -> Config:
    """The same, not validated; also of another kind of config, which `default` gives."""
    c = _from_file(path, default)
    for method in methods:
        _call(method, "method", "apply", default, c)
    for override in overrides:
        _override(c, override)
    return c


def _call(
    path: str, flag: str, function: str, default: Callable[[], Config], *arguments: Config
) -> Config | None:
    """What the function of a Python file that a flag names returns."""
    if not pathlib.Path(path).is_file():
        raise UserError(f"{flag} file {path} does not exist: give --{flag} a Python file")
    spec = importlib.util.spec_from_file_location("fgrpo_jax_config_file", path)
    if spec is None or spec.loader is None:
        raise UserError(f"{flag} file {path} is not a Python file: its name must end in .py")
    module: ModuleType = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return getattr(module, function)(*arguments)
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        key = re.search(r'Key "(\w+)"', reason[0])
        hint = (
            _nearest(key[1], keys(default()))
            if key and isinstance(error, AttributeError | KeyError)
            else ""
        )
        reason = f"{key[1]!r} is not a key" if hint and key else reason[0]
        raise UserError(f"{flag} file {path} cannot be read: {reason}{hint}") from error


def _from_file(path: str, default: Callable[[], Config]) -> Config:
    c = _call(path, "config", "get_config", default)
    if not isinstance(c, ConfigDict):
        raise UserError(f"config file {path}: get_config() must return a ConfigDict")
    expected, given = keys(default()).keys(), keys(c).keys()
    for key in sorted(given - expected):
        raise UserError(
            f"config file {path}: there is no config key {key!r}{_nearest(key, expected)}"
        )
    for key in sorted(expected - given):
        raise UserError(f"config file {path} lacks {key}: begin with config.default()")
    return c


def _nearest(key: str, flat: Iterable[str]) -> str:
    flat = list(flat)
    leaf = {name.split(".")[-1]: name for name in flat}
    close = difflib.get_close_matches(key, flat, 1, 0.5)
    if not close:
        close = [leaf[m] for m in difflib.get_close_matches(key.split(".")[-1], leaf, 1, 0.5)]
    return f"; did you mean {close[0]!r}?" if close else "; config.default() lists them all"


def _override(c: Config, text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"--config.{text} has no value: write --config.{key}=VALUE")
    if key not in keys(c):
        raise UserError(f"there is no config key {key!r}{_nearest(key, keys(c))}")
    *path, leaf = key.split(".")
    node = c
    for name in path:
        node = node[name]
    kind = node.get_type(leaf)
    of = type(next(iter(node[leaf]), "")) if kind is tuple else str
    parse = {bool: _read_bool, tuple: functools.partial(_read_tuple, of)}.get(kind, kind)
    try:
        may_be_none = keys(default()).get(key, "") is None
        node[leaf] = None if value == "None" and may_be_none else parse(value)
    except (ValueError, KeyError):
        one = {str: "string", int: "whole number", float: "number"}[of]
        takes = f"a {one} or a JSON list of {one}s" if kind is tuple else kind.__name__
        raise UserError(f"config key {key} takes {takes}, not {value!r}") from None


def _read_bool(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _read_tuple(of: type, text: str) -> tuple[object, ...]:
    """A JSON list of strings or numbers, or one as it is."""
    if not text.startswith("["):
        return (of(text),) if text else ()
    found = json.loads(text)
    if not all(type(one) is of or (of is float and type(one) is int) for one in found):
        raise ValueError(text)
    return tuple(of(one) for one in found)
