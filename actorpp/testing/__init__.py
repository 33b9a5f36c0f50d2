"""Test kit for actors: virtual time, probes, a fake network, and a check for what a test leaves behind."""

from __future__ import annotations

from actorpp.testing.clock import VirtualTimeLoop, rng, run
from actorpp.testing.leaks import LeakError, no_leaks
from actorpp.testing.network import FakeNetwork, Link
from actorpp.testing.probe import Probe

__all__ = ["FakeNetwork", "LeakError", "Link", "Probe", "VirtualTimeLoop", "no_leaks", "rng", "run"]
