"""What the soak says of processes that grow, settle or come and go."""

from __future__ import annotations

from collections.abc import Callable

from tests.faults.soak import Life, Series, victim


def lived(seconds: int, resident: Callable[[int], float]) -> Life:
    """One that is looked at every second, with a recovery every ten, and holds so many KiB."""
    life = Life()
    for at in range(seconds):
        life.at.append(at)
        life.resident.append(int(1024 * resident(at)))
        life.descriptors.append(9)
        life.threads.append(3)
        life.recoveries.append(at // 10)
    return life


def test_growth_is_told_from_settling_and_short_lives_do_not_count() -> None:
    series = Series("min", 60)
    series._lives = {
        "grows": {1: lived(2000, lambda at: 1024 + at)},
        "settles": {2: lived(2000, lambda at: 1024 + min(at, 1000))},
        "dies": {3: lived(100, lambda at: 1024 + at), 4: lived(400, lambda at: 2048)},
        "is young": {5: lived(100, lambda at: 1024 + at)},
    }
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in series.table(120).splitlines()[2:]]
    assert rows == [
        ["grows", "1", "1", "1.1, 2.0, 3.0 MiB", "186", "+60.0, +60.0", "+10.1, +10.1", "9 → 9 (9-9)", "3 → 3 (3-3)"],
        ["settles", "1", "1", "1.1, 2.0, 2.0 MiB", "186", "+59.3, +0.0", "+10.0, +0.0", "9 → 9 (9-9)", "3 → 3 (3-3)"],
        ["dies", "2", "1", "2.0, 2.0, 2.0 MiB", "26", "+0.0, +0.0", "+0.0, +0.0", "9 → 9 (9-9)", "3 → 3 (3-3)"],
        ["is young", "1", "0", "", "", "", "", "", ""],
    ]


def test_every_stage_lives_while_another_one_dies() -> None:
    """With three stages and a kill every two minutes of an hour: the table has a long life of each."""
    killed = [victim(at / 3600, 3) for at in range(120, 3600, 120)]
    assert killed == [0] * 14 + [1] * 15
    assert {victim(at / 100, 5) for at in range(100)} == {0, 1, 2, 3}
    assert {victim(at / 100, 2) for at in range(100)} == {0}
