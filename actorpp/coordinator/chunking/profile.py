"""A pipeline's profile: measured stage times, and the file in the user's cache folder that keeps them.

It does not measure: ``actorpp.profiling`` does. A profile holds for one model in one dtype on one kind of device, with
one way to compute attention, one number of threads and one partition; where any of these differs, another file is
looked for.
"""

from __future__ import annotations

import os
import re
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from actorpp.coordinator.chunking.fit import StageFit, StageSample, fit_profile
from actorpp.stages.cache import cache_folder

GOOD_R2 = 0.95  # of a fit: below it, times scatter by more than the formula can be off


class ProfileKey(msgspec.Struct, frozen=True):
    """What a profile holds for.

    Attributes:
        model: Digest of the model's config.json: the same model in another folder is the same.
        dtype: What it computes in.
        device: The device's name.
        attention: The backend of attention, which also chooses how layers are computed.
        threads: Compute threads of each stage.
        partition: Layers of each stage.
    """

    model: str
    dtype: str
    device: str
    attention: str
    threads: int
    partition: tuple[int, ...]

    @classmethod
    def of(
        cls,
        config: dict[str, Any],
        *,
        dtype: str,
        device_type: str,
        attention: str,
        threads: int,
        partition: tuple[int, ...],
    ) -> ProfileKey:
        """The key of a pipeline on this machine.

        Args:
            config: The model's config.json.
            dtype: As resolved, not ``auto``.
            device_type: ``cpu`` or ``cuda``.
            attention: As resolved, where the driver can tell.
        """
        digest = blake2b(msgspec.json.encode(config, order="deterministic"), digest_size=8).hexdigest()
        return cls(digest, dtype, device_name(device_type), attention, threads, partition)

    @property
    def file(self) -> Path:
        """Where its profile is kept."""
        what = f"{self.model}-{self.dtype}-{self.device}-{self.attention}-{self.threads}"
        folder = cache_folder() / "profiles" / re.sub(r"[^\w.-]+", "-", what)
        return folder / f"{'-'.join(map(str, self.partition))}.json"


class Profile(msgspec.Struct, frozen=True):
    """Measured stage times of one pipeline.

    Attributes:
        key: What it holds for.
        samples: The measured steps, at least one, warm-up left out.
    """

    key: ProfileKey
    samples: tuple[StageSample, ...]

    def fit(self) -> tuple[StageFit, ...]:
        """The cost formula fitted to each stage, with residuals in the samples' order."""
        return fit_profile(self.samples)

    @property
    def doubts(self) -> list[str]:
        """Why its fit is not to be trusted; nothing where it is."""
        found = []
        for stage, fit in enumerate(self.fit()):
            if fit.r2 < GOOD_R2:
                found.append(f"stage {stage}: R^2 is {fit.r2:.3f}, less than {GOOD_R2}")
            if not fit.cost.c:
                found.append(f"stage {stage}: a step seems to have no fixed cost (c = 0)")
        return found

    def save(self) -> Path:
        """Write it to ``key.file``, in one go. Raises OSError."""
        file = self.key.file
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}.partial")
        try:
            partial.write_bytes(msgspec.json.format(msgspec.json.encode(self)))
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
        return file


def load_profile(key: ProfileKey) -> Profile | None:
    """The saved profile, or None where none is saved, or the file is not one (of another version, or damaged)."""
    return _read(key.file, key)


def any_partition(key: ProfileKey) -> Profile | None:
    """A saved profile of the same model on the same device, whatever its partition: the first by file name."""
    for file in sorted(key.file.parent.glob("*.json")):
        layers = tuple(int(count) for count in file.stem.split("-") if count.isdigit())
        if (profile := _read(file, msgspec.structs.replace(key, partition=layers))) is not None:
            return profile
    return None


def _read(file: Path, key: ProfileKey) -> Profile | None:
    try:
        profile = msgspec.json.decode(file.read_bytes(), type=Profile)
    except (OSError, msgspec.DecodeError):
        return None
    stages = {len(sample.seconds) for sample in profile.samples}
    usable = profile.key == key and stages == {len(key.partition)}
    return profile if usable else None


def device_name(device_type: str) -> str:
    """The name of this machine's processor or first GPU, as the system has it: the driver has no torch to ask."""
    if device_type == "cuda":
        files, field = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")), "Model"
    else:
        files, field = [Path("/proc/cpuinfo")], "model name"
    for file in files[:1]:
        try:
            found = re.search(rf"^{field}\s*:\s*(.+?)\s*$", file.read_text(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return found[1]
    return device_type
