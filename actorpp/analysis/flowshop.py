"""The flow shop: jobs that pass all machines in one order, as steps pass the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence


def completion_times(
    times: Sequence[Sequence[float]], needed: Sequence[int | None] | None = None
) -> list[tuple[float, ...]]:
    """When each job at the earliest leaves each machine, if all are ready at 0 and nothing else costs time.

    The recurrence of a permutation flow shop with unlimited buffers (S. M. Johnson, 1954):
    C(i, k) = max(C(i-1, k), C(i, k-1)) + t_k(i).

    Args:
        times: Of each job, in order: its time on each machine.
        needed: Of each job: index of an earlier one that must have left the last machine before it begins, or None.
    """
    done: list[tuple[float, ...]] = []
    free = [0.0] * (len(times[0]) if times else 0)
    for index, job in enumerate(times):
        after = needed[index] if needed is not None else None
        at = done[after][-1] if after is not None else 0.0
        for machine, time in enumerate(job):
            at = max(at, free[machine]) + time
            free[machine] = at
        done.append(tuple(free))
    return done


def makespan(times: Sequence[Sequence[float]], needed: Sequence[int | None] | None = None) -> float:
    """Time from 0 until the last job leaves the last machine; 0 without jobs. Arguments as for ``completion_times``."""
    done = completion_times(times, needed)
    return done[-1][-1] if done else 0.0
