"""Notices programs that a run compiles once more than it should, and what made JAX do so."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax

from fgrpo_jax import UserError

COMPILED = "/jax/core/compile/backend_compile_duration"  # JAX's event, also of a cached program


class Recompiles(logging.Handler):
    """What is compiled while it watches, with JAX's own words on the argument that has changed; a
    context manager.

    Args:
        ends: whether `check` raises, or else only tells.
        tell: takes a warning.
    """

    def __init__(self, ends: bool, tell: Callable[[str], Any] = print):
        super().__init__()
        self.ends, self.tell = ends, tell
        self._programs: list[str] = []
        self._reasons: list[str] = []
        self._watching = False

    def __enter__(self) -> "Recompiles":
        jax.monitoring.register_event_duration_secs_listener(self._compiled)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._compiled)

    def _compiled(self, event: str, duration_secs: float, **about: Any) -> None:
        if self._watching and event == COMPILED:
            self._programs.append(str(about.get("fun_name", "a program")))

    def emit(self, record: logging.LogRecord) -> None:
        """Takes JAX's explanation of a cache miss: its first line names the place, its last ones
        the arguments."""
        lines = [line.strip() for line in record.getMessage().splitlines()]
        if lines and lines[0].startswith("TRACING CACHE MISS"):
            self._reasons.append(" ".join(line for line in lines[1:] if line))

    @contextlib.contextmanager
    def watch(self, steady: bool) -> Iterator[None]:
        """steady: whether all that runs here should have been compiled before."""
        if not steady:
            yield
            return
        logger = logging.getLogger("jax")
        jax.config.update("jax_explain_cache_misses", True)
        logger.addHandler(self)
        self._watching = True
        try:
            yield
        finally:
            self._watching = False
            logger.removeHandler(self)
            jax.config.update("jax_explain_cache_misses", False)

    def check(self, step: int) -> None:
        """UserError, or a warning, that names what was compiled since the last check."""
        if not self._programs:
            return
        unknown = "JAX does not say why; an argument may lie on the devices in another layout"
        reasons = "; ".join(self._reasons) or unknown
        names = ", ".join(dict.fromkeys(self._programs))
        self._programs, self._reasons = [], []
        sentence = f"step {step} compiled {names} again, which the run had compiled: {reasons}"
        if self.ends:
            raise UserError(f"{sentence}; guard.on_recompile=warn goes on all the same")
        self.tell(f"warning: {sentence}")
