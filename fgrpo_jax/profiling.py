"""Traces of chosen steps, for Perfetto and XProf."""

import contextlib
import pathlib
from collections.abc import Callable, Collection, Iterator

import jax

from fgrpo_jax import distributed
from fgrpo_jax.metrics import Stopwatch

Profile = Callable[[int], contextlib.AbstractContextManager[None]]


def make_profile(steps: Collection[range], folder: pathlib.Path, watch: Stopwatch) -> Profile:
    """`with profile(step): ...` traces the step where it is in one of `steps`.

    folder/step_N/plugins/profile/TIME gets what XProf reads and, of a run on one host,
    perfetto_trace.json.gz.
    """

    @contextlib.contextmanager
    def profile(step: int) -> Iterator[None]:
        if not any(step in some for some in steps):
            yield
            return
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # each Python call would slow the host that is measured
        with watch("profile"):
            jax.profiler.start_trace(
                folder / f"step_{step}",
                create_perfetto_trace=distributed.hosts() == 1,  # it wants a folder for each host
                profiler_options=options,
            )
        try:
            with jax.profiler.StepTraceAnnotation("step", step_num=step):
                yield
        finally:
            with watch("profile"):
                jax.profiler.stop_trace()

    return profile
