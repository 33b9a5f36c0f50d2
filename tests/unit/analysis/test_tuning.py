"""Which settings are tried, which one is best, and what is said of it."""

from __future__ import annotations

import pytest

from actorpp.analysis.spread import Spread, spread
from actorpp.analysis.tuning import (
    Setting,
    best,
    fixed_settings,
    initial_sizes,
    recommended,
    relative,
    smooth_factors,
    verdict,
)


def at(*seconds: float) -> dict[int, Spread]:
    return {1000 * (index + 1): spread([value]) for index, value in enumerate(seconds)}


SMALL, LARGE = Setting("fixed", 256), Setting("fixed", 1024)
DYNAMIC, PLANNED = Setting("sglang", 512, 0.75), Setting("planned")


def test_the_settings_of_each_step() -> None:
    assert fixed_settings([512, 4096, 2048, 8192], 2000) == [Setting("fixed", 512), Setting("fixed", 2000)]
    assert initial_sizes(512, 64, 8192) == [
        Setting("sglang", 1024, 0.75), Setting("sglang", 1280, 0.75), Setting("sglang", 1536, 0.75)
    ]  # fmt: skip
    assert initial_sizes(512, 64, 1200) == [Setting("sglang", 1024, 0.75), Setting("sglang", 1200, 0.75)]
    assert initial_sizes(8, 64, 40) == [Setting("sglang", 40, 0.75)]
    assert [setting.smooth_factor for setting in smooth_factors(1024)] == [0.75, 0.6, 0.65, 0.7, 0.8, 0.85]


def test_flags_are_those_of_the_command_line() -> None:
    assert SMALL.flags == "--chunk-policy fixed --chunked-prefill-size 256"
    assert PLANNED.flags == "--chunk-policy planned"
    assert [setting.name for setting in (SMALL, DYNAMIC, PLANNED)] == [
        "fixed 256",
        "sglang 512 smoothing 0.75",
        "planned",
    ]
    assert DYNAMIC.flags.endswith("--chunked-prefill-size 512 --dynamic-chunking-smooth-factor 0.75")


def test_the_best_has_the_smallest_mean_ratio_over_all_lengths() -> None:
    measured = {SMALL: at(1.0, 8.0), LARGE: at(2.0, 3.0)}
    assert relative(measured, LARGE, SMALL) == pytest.approx((2 * 3 / 8) ** 0.5)
    assert best(measured, "fixed") == LARGE
    with pytest.raises(ValueError, match="planned"):
        best(measured, "planned")


def test_a_gain_below_one_percent_is_called_none() -> None:
    measured = {PLANNED: at(0.9, 3.6), SMALL: at(1.0, 4.0), DYNAMIC: at(0.995, 3.98)}
    assert verdict(measured) == [
        f"Best fixed size: {SMALL.flags}",
        "Dynamic chunking gains less than 1% over it (+0.5%): not worth it",
        "Planned chunks take 10.0% less time, with no size to choose",
        f"Use {PLANNED.flags} (the default), the simplest within 1% of the fastest",
    ]
    said = verdict({SMALL: at(1.0, 4.0), DYNAMIC: at(0.9, 3.8)})
    assert said[1] == f"Dynamic chunking gains 7.5% over it, with {DYNAMIC.flags}"
    assert len(said) == 3


@pytest.mark.parametrize(
    ("planned", "fixed", "dynamic", "use"),
    [
        (1.0, 0.995, 0.991, PLANNED),  # none is worth leaving the default for
        (1.0, 0.985, 0.98, SMALL),  # a fixed size is; dynamic chunking beside it is not
        (1.0, 0.985, 0.97, DYNAMIC),
        (0.9, 1.0, 0.95, PLANNED),
        (1.0, 0.99, 1.0, SMALL),  # 1% is worth it
    ],
)
def test_the_advice_is_the_simplest_of_the_fastest_and_agrees_with_what_is_said_of_each(
    planned: float, fixed: float, dynamic: float, use: Setting
) -> None:
    measured = {PLANNED: at(planned, planned), SMALL: at(fixed, fixed), DYNAMIC: at(dynamic, dynamic)}
    assert recommended(measured) == use
    said = verdict(measured)
    assert said[-1].startswith(f"Use {use.flags}")
    assert use != DYNAMIC or "not worth it" not in said[1]


def test_times_that_scatter_are_said_to() -> None:
    steady = {SMALL: at(1.0), PLANNED: {1000: spread([0.97, 1.0, 1.02])}}
    assert not any("differed" in line for line in verdict(steady))
    said = verdict(steady | {PLANNED: {1000: spread([0.8, 1.0, 1.1])}})
    assert any("Times of one setting differed by up to 30%" in line and "may be chance" in line for line in said)
