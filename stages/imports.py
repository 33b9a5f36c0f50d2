"""Imports transformers into a stage process, without what a stage never runs there.

Along with any model, transformers imports torch's compiler, its sharding over device meshes, SciPy and image code, and
twice reads its 2,000 source files for the names they define: three of five CPU seconds of a stage's start. In a process
of our own, ``import_lightly`` has transformers take those parts for not installed, gives it what it names of the
compiler in their place, and keeps the names from one start to the next. Numbers do not change: none of it computes.

It is not for a program that embeds stages: there transformers belongs to the program.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import structlog

from actorpp.stages.cache import build, cache_folder

log = structlog.get_logger(__name__)

UNUSED = (
    "is_torch_distributed_available",  # tensors sharded over meshes; our links use torch.distributed directly
    "is_torch_flex_attn_available",
    "is_scipy_available",  # losses
    "is_sklearn_available",  # assisted generation
    "is_vision_available",
    "is_torchvision_available",
)
ACCELERATE = "is_accelerate_available"  # places weights on devices other than the CPU
COMPILER = "torch._dynamo"
MASK_MODE = "_trace_wrapped_higher_order_op"

Names = dict[frozenset[str], dict[str, set[str]]]


def import_lightly(device: str) -> None:
    """Import torch, and transformers' base of all models; call it before anything else has.

    Should this version of transformers not bear it, transformers is imported as it comes.

    Args:
        device: Where the stage computes, such as ``cpu`` or ``cuda:1``.
    """
    unused = UNUSED if device != "cpu" else (*UNUSED, ACCELERATE)
    hook = _ImportUtilsHook(lambda module: _change(module, unused))
    sys.meta_path.insert(0, hook)
    try:
        with _compiler_stood_in():
            _import_base()
    except (AttributeError, ImportError, NameError, TypeError) as error:
        log.warning("this version of transformers needs all its parts; a start takes longer", error=repr(error))
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        sys.meta_path.remove(hook)
        _import_base()
    else:
        sys.meta_path.remove(hook)


def _import_base() -> None:
    """What every model's module imports."""
    for name in ("modeling_utils", "generation.utils", "models.auto.modeling_auto", "modeling_layers"):
        importlib.import_module(f"transformers.{name}")


class _ImportUtilsHook(importlib.abc.MetaPathFinder):
    """Calls ``change`` with transformers' module of availability checks, before any other module has seen it."""

    def __init__(self, change: Callable[[ModuleType], None]) -> None:
        self.change = change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "transformers.utils.import_utils":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                self.change(module)

            spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def _change(import_utils: Any, unused: Sequence[str]) -> None:
    for name in unused:
        getattr(import_utils, name)  # AttributeError: another version
        setattr(import_utils, name, lambda *args, **kwargs: False)
    models = Path(sys.modules["transformers"].__path__[0]) / "models"
    version: str = sys.modules["transformers"].__version__
    original: Callable[..., Names] = import_utils.define_import_structure
    names_of_models = cache(lambda: _names(version, lambda: original(models)))

    def define_import_structure(module_path: str | Path, prefix: str | None = None) -> Names:
        if Path(module_path) not in (models, models / "__init__.py") or "dev" in version:
            return original(module_path, prefix)
        names = names_of_models()
        if prefix is None:
            return {backends: {**modules} for backends, modules in names.items()}
        return {backends: {f"{prefix}.{m}": n for m, n in modules.items()} for backends, modules in names.items()}

    import_utils.define_import_structure = define_import_structure


def _names(version: str, define: Callable[[], Names]) -> Names:
    """Which names the modules of transformers' models define, by the packages they need; kept in the user's cache."""
    found: Names | None = None

    def make(scratch: Path, result: Path) -> None:
        nonlocal found
        found = define()
        listed = [
            [sorted(backends), {module: sorted(names) for module, names in modules.items()}]
            for backends, modules in found.items()
        ]
        (result / "names.json").write_text(json.dumps(listed))

    try:
        folder = build(cache_folder(), f"transformers-{version}-names", make)
        listed = json.loads((folder / "names.json").read_bytes())
    except (OSError, ValueError):  # a full disk, a folder of someone else's: it only takes longer
        return found or define()
    return {frozenset(backends): {m: set(names) for m, names in modules.items()} for backends, modules in listed}


@contextmanager
def _compiler_stood_in() -> Iterator[None]:
    """What transformers names of torch's compiler while it is imported: marks on functions, and one way to trace masks.

    Afterwards the compiler is imported by whoever uses it, as ever.
    """
    compiler, traced = ModuleType(COMPILER), ModuleType(f"{COMPILER}.{MASK_MODE}")
    compiler.__path__ = []

    def mark(function: Any = None, *args: object, **kwargs: object) -> Any:
        return function if callable(function) else lambda function: function

    def mask_mode() -> Any:
        return importlib.import_module(traced.__name__).TransformGetItemToIndex()

    for name in ("allow_in_graph", "assume_constant_result", "disable"):
        setattr(compiler, name, mark)
    traced.TransformGetItemToIndex = mask_mode  # type: ignore[attr-defined]
    sys.modules.update({module.__name__: module for module in (compiler, traced)})
    try:
        yield
    finally:
        for module in (compiler, traced):
            del sys.modules[module.__name__]
