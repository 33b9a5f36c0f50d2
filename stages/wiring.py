"""How a stage reaches the driver and its neighbours: what the driver tells a stage process of it. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from actorpp.errors import ConfigError
from actorpp.transport.addresses import tcp_endpoint
from actorpp.transport.curve import CurveClient, CurveKeys, CurveServer

WIRING_VARIABLE = "ACTORPP_STAGE_WIRING"


class WiringSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Travels as JSON in the environment of a stage process.

    Attributes:
        driver: Endpoint of the driver's ROUTER.
        run_dir: Directory of the ipc sockets, private to this user.
        incarnation: Counts the starts of this stage, or the spares.
        control_host: Address of the inlets' sockets; None: ipc sockets in ``run_dir``.
        control_secret: With ``control_host``, the secret key that all processes of this run share: who has it belongs.
        spare: Wait for a stage to become; until then the stage's settings say what to import.
        interface: Address that the tensor transport binds to.
        deadline_s: Seconds that one tensor may be under way.
        trace: Record spans.
    """

    driver: str
    run_dir: str
    incarnation: int = 0
    control_host: str | None = None
    control_secret: str | None = None
    spare: bool = False
    tensor_transport: Literal["gloo", "nccl"] = "gloo"
    interface: str = "127.0.0.1"
    deadline_s: float = 600.0
    trace: bool = False
    log_level: str = "warning"

    @property
    def curve_server(self) -> CurveServer | None:
        """What a listening control socket needs."""
        keys = self._keys
        return None if keys is None else CurveServer(keys, frozenset({keys.public}))

    @property
    def curve_client(self) -> CurveClient | None:
        """What a connecting control socket needs."""
        keys = self._keys
        return None if keys is None else CurveClient(keys, keys.public)

    @property
    def _keys(self) -> CurveKeys | None:
        return None if self.control_secret is None else CurveKeys.of_secret(self.control_secret.encode())

    def endpoint(self, name: str) -> str:
        """Where a control socket listens."""
        return f"ipc://{self.run_dir}/{name}" if self.control_host is None else tcp_endpoint(self.control_host, 0)

    def to_env(self) -> dict[str, str]:
        """The environment variable that carries this to the stage's process."""
        return {WIRING_VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> WiringSpec:
        """Raises ConfigError when the variable is missing or does not decode."""
        try:
            return msgspec.json.decode(environ[WIRING_VARIABLE], type=cls)
        except (KeyError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{WIRING_VARIABLE} is missing or does not decode: {error!r}") from None
