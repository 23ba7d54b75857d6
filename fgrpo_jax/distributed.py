"""Several hosts: start, end, words to each other, and moves between their arrays and global ones.

The only file that asks for process_index. On one host each function is the plain move.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np
from jax._src import distributed as jax_distributed
from jax.experimental import multihost_utils

from fgrpo_jax import UserError

# Seconds after which JAX ends the survivors of a process that died, and those that wait at the end;
# watchdog.py has said before which one it was.
TIMEOUT = 60
AGREE_MS = 120_000  # for all to say how they were started


def start() -> None:
    """Joins the other hosts where the environment tells of some: JAX_COORDINATOR_ADDRESS with
    JAX_NUM_PROCESSES and JAX_PROCESS_ID, a TPU pod, or SLURM. Before any other use of devices."""
    environment = os.environ
    if "JAX_COORDINATOR_ADDRESS" in environment:
        jax.distributed.initialize(
            environment["JAX_COORDINATOR_ADDRESS"],
            int(environment["JAX_NUM_PROCESSES"]),
            int(environment["JAX_PROCESS_ID"]),
            heartbeat_timeout_seconds=TIMEOUT,
            shutdown_timeout_seconds=TIMEOUT,
        )
    elif (
        "," in environment.get("TPU_WORKER_HOSTNAMES", "")
        or int(environment.get("SLURM_NTASKS", "1")) > 1
    ):
        jax.distributed.initialize(
            heartbeat_timeout_seconds=TIMEOUT, shutdown_timeout_seconds=TIMEOUT
        )


def leave(code: int) -> NoReturn:
    """Ends this process. One that fails does not wait for the others, which may be gone, to leave
    together with it."""
    if jax.distributed.is_initialized() and code not in (0, 75):
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(2 * is_main())  # JAX ends the others as soon as the one that coordinates is gone
        os._exit(code)
    sys.exit(code)


def _board() -> Any:
    """The client of the coordinator's, which keeps words and barriers."""
    return jax_distributed.global_state.client


def exchange(topic: str, mine: str) -> dict[int, str]:
    """Puts this host's word of a topic on the coordinator's board, in place of its last one, and
    reads those that are there, by host. Nobody waits for another."""
    if jax.process_count() == 1:
        return {0: mine}
    board = _board()
    board.key_value_set(f"fgrpo_jax/{topic}/{host()}", mine, allow_overwrite=True)
    words = board.key_value_dir_get(f"fgrpo_jax/{topic}/")
    return {int(key.rpartition("/")[2]): word for key, word in words}


def together(what: str, seconds: float = 10.0) -> bool:
    """Whether all hosts come here within so many seconds. What they come for is named once."""
    if jax.process_count() == 1:
        return True
    board = _board()
    try:
        board.wait_at_barrier(f"fgrpo_jax/{what}", int(1000 * seconds))
    except jax.errors.JaxRuntimeError:
        return False
    return True


def agree(facts: dict[str, Any]) -> None:
    """UserError on every host, where the facts are not the same on all; it names the first."""
    if jax.process_count() == 1:
        return
    board = _board()
    board.key_value_set(f"fgrpo_jax/facts/{host()}", json.dumps(facts))
    words = [
        json.loads(board.blocking_key_value_get(f"fgrpo_jax/facts/{p}", AGREE_MS))
        for p in range(hosts())
    ]
    for p, theirs in enumerate(words):
        for name in sorted(words[0].keys() | theirs.keys()):
            if words[0].get(name) != theirs.get(name):
                raise UserError(
                    f"the processes were not started alike: {name} is {words[0].get(name)!r} in "
                    f"process 0 and {theirs.get(name)!r} in process {p}"
                )


def is_main() -> bool:
    """Whether this process writes what is written once."""
    return jax.process_index() == 0


def hosts() -> int:
    return jax.process_count()


def host() -> int:
    """The number of this one."""
    return jax.process_index()


def share(total: int) -> slice:
    """This host's part of `total` rows that all hosts share equally."""
    if total % jax.process_count():
        raise ValueError(f"{total} rows do not divide among {jax.process_count()} hosts")
    size = total // jax.process_count()
    return slice(jax.process_index() * size, (jax.process_index() + 1) * size)


def to_global(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """The global array whose rows on this host's devices are `array`."""
    return jax.make_array_from_process_local_data(sharding, array)


def to_host(tree: Any, axis: int = 0) -> Any:
    """This host's rows of arrays whose given axis is shared by rows, as numpy."""

    def local(x: jax.Array) -> np.ndarray:
        if jax.process_count() == 1:
            return np.asarray(x)
        shards = {shard.index[axis].start or 0: shard.data for shard in x.addressable_shards}
        return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)], axis)

    return jax.tree.map(local, tree)


def total(value: float | int | np.number) -> float:
    """The sum over hosts of a number that each has one of."""
    return float(totals(np.float64(value)))


def totals(values: Any) -> np.ndarray:
    """The sum over hosts of each of the numbers."""
    values = np.asarray(values, np.float64)
    if jax.process_count() == 1:
        return values
    return multihost_utils.process_allgather(values).sum(axis=0)


def largest(value: Any) -> np.ndarray:
    """The largest of the numbers, or of each in the arrays, that hosts have one of each."""
    if jax.process_count() == 1:
        return np.asarray(value)
    return np.asarray(multihost_utils.process_allgather(np.asarray(value))).max(axis=0)


def from_host(value: Any, host: int) -> Any:
    """What one host has of a value that JSON can hold, on all of them."""
    if jax.process_count() == 1:
        return value
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    is_source = jax.process_index() == host
    size = multihost_utils.broadcast_one_to_all(np.int32(len(text)), is_source)
    text = text if is_source else np.zeros(int(size), np.uint8)
    return json.loads(multihost_utils.broadcast_one_to_all(text, is_source).tobytes())


def from_main(value: Any) -> Any:
    """The same, of the main process."""
    return from_host(value, 0)


def on_all_rows(function: Callable[..., Any], *rows: np.ndarray) -> Any:
    """This host's rows of what a function makes of the rows of all hosts, which are as many on
    each."""
    if jax.process_count() == 1:
        return function(*rows)
    result = function(*(multihost_utils.process_allgather(x, tiled=True) for x in rows))
    return result[share(len(result))]


def whole(x: jax.Array) -> np.ndarray:
    """All of a sharded array on every host, as numpy."""
    if x.is_fully_addressable:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))
