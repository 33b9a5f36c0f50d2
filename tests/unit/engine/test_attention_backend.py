"""The attention backend that an engine is given is the one that its stages compute with."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from actorpp.errors import ConfigError
from actorpp.serving.gateway import Gateway
from actorpp.stages import host
from actorpp.stages.backend_choice import BACKENDS
from tests.unit.engine.support import complete, served


def test_the_stages_compute_with_it(model: Path) -> None:
    async def body(gateway: Gateway) -> None:
        await complete(gateway, max_tokens=1)

    with patch.object(host, "choose_backend", wraps=host.choose_backend) as chosen:
        served(model, body, attention_backend="sdpa")
    assert {call.args[0] for call in chosen.call_args_list} == {"sdpa"}


@pytest.mark.parametrize("name", ["auto", "sdpa"])
def test_a_profile_is_kept_under_the_one_that_the_stages_have(model: Path, name: str) -> None:
    async def body(gateway: Gateway) -> None:
        stage = host.choose_backend(name, torch.device("cpu"))
        assert isinstance(stage, BACKENDS[gateway.engine.planning.key.attention])  # type: ignore[attr-defined, arg-type]
        assert gateway.engine.planning.key.attention != "auto"  # type: ignore[attr-defined]

    served(model, body, attention_backend=name, device="cpu")


def test_one_that_the_device_does_not_have_is_refused(model: Path) -> None:
    async def body(gateway: Gateway) -> None:
        raise AssertionError("the engine started")

    with pytest.raises(ConfigError, match="'flash_attn' needs a CUDA device") as refused:
        served(model, body, attention_backend="flash_attn", device="cpu")
    assert refused.value.param == "attention_backend"
