"""The tiny model of the engine's tests, for servers with a real engine behind them."""

from __future__ import annotations

from tests.unit.engine.conftest import model

__all__ = ["model"]
