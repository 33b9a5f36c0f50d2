"""The flow shop: jobs that pass all machines in one order, as steps pass the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence


def completion_times(
    times: Sequence[Sequence[float]],
    needed: Sequence[int | None] | None = None,
    *,
    hop: float = 0.0,
    round_trip: float = 0.0,
) -> list[tuple[float, ...]]:
    """When each job at the earliest leaves each machine, if all are ready at 0 and nothing else costs time.

    The recurrence of a permutation flow shop with unlimited buffers (S. M. Johnson, 1954), plus what a pipeline adds:
    C(i, k) = max(C(i-1, k), C(i, k-1) + hop) + t_k(i), and start(i, 0) >= C(needed(i), P-1) + round_trip.

    Args:
        times: Of each job, in order: its time on each machine.
        needed: Of each job: index of an earlier one that must have left the last machine before it begins, or None.
        hop: From one machine to the next.
        round_trip: From the end of a needed job until the one that waits for it can begin.
    """
    done: list[tuple[float, ...]] = []
    free = [0.0] * (len(times[0]) if times else 0)
    for index, job in enumerate(times):
        after = needed[index] if needed is not None else None
        at = done[after][-1] + round_trip if after is not None else 0.0
        for machine, time in enumerate(job):
            busy_until = free[machine]
            if busy_until > at:
                at = busy_until
            at += time
            free[machine] = at
            at += hop
        done.append(tuple(free))
    return done


def in_window(jobs: int, window: int) -> list[int | None]:
    """``needed`` of so many jobs with at most ``window`` of them, at least 1, under way: the one ``window`` before."""
    return [index - window if index >= window else None for index in range(jobs)]


def makespan(
    times: Sequence[Sequence[float]],
    needed: Sequence[int | None] | None = None,
    *,
    hop: float = 0.0,
    round_trip: float = 0.0,
) -> float:
    """Time from 0 until the last job leaves the last machine; 0 without jobs. Arguments as for ``completion_times``."""
    done = completion_times(times, needed, hop=hop, round_trip=round_trip)
    return done[-1][-1] if done else 0.0
