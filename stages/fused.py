"""Decoder layers of the common form in fewer, larger operations: bfloat16 on CPUs.

A step of few rows is bound by reading the weights, and then by how many operations there are, and by the Python between
them. A layer that normalises by root mean square, attends with rotary positions, and gates its MLP with SiLU (Llama and
most of its kin) is computed here in half as many: SiLU, gate and residual are applied in the products' own epilogues.

A layer is recognised by its modules, not by its class, and keeps its own code unless both give the same on random
hidden states. What its attention asks for (scaling, window) is taken from what its own code asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn

from actorpp.stages import native
from actorpp.stages.backends import AttentionBackend, Scoring
from actorpp.stages.history import LayerKV
from actorpp.stages.linears import PackedLinear, TiledLinear, gate_with, join
from actorpp.stages.native_backend import NativeBackend
from actorpp.stages.native_layer import Batches, NativeLayers, Rotary
from actorpp.stages.packed import PackedCache

_FORM = {
    "": {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}
"""Names of a layer's modules, and of those within them."""


class FusedLayer:
    """Computes what the layer's own ``forward`` does.

    Args:
        layer: One that ``_has_form``.
        scoring: What its attention asks for.
        shared: By all layers of a model.
    """

    def __init__(self, layer: Any, scoring: Scoring, shared: Shared) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index, self._width = attention.layer_idx, attention.head_dim
        self._project = join([attention.q_proj, attention.k_proj, attention.v_proj])
        self._queries = attention.q_proj.out_features // self._width
        self._keys = attention.k_proj.out_features // self._width
        self._output = attention.o_proj
        self._gate, self._down = gate_with(mlp.gate_proj, mlp.up_proj), mlp.down_proj
        self._norms = [(norm.weight, norm.variance_epsilon) for norm in _norms(layer)]
        self._scoring, self._shared = scoring, shared

    def __call__(
        self,
        hidden_states: torch.Tensor,
        *args: Any,
        position_embeddings: Rotary,
        packed: PackedCache,
        backend: AttentionBackend,
        **kwargs: Any,
    ) -> torch.Tensor:
        """(1, T, hidden_size) to the same. What else a model hands to its layers says nothing to a packed batch."""
        first, second = self._norms
        rows = hidden_states.shape[1]
        heads = self._project(rms_norm(hidden_states, *first)).view(rows, -1, self._width)
        rotate(heads, self._queries + self._keys, *self._shared.angles.of(position_embeddings))
        query, key, value = heads.transpose(0, 1).split_with_sizes((self._queries, self._keys, self._keys))
        packed.update(key[None], value[None], self.index)
        out, _ = backend.attend_step(query, packed.layer(self.index, None), self._scoring)
        hidden_states = self._output.plus(out.reshape(1, rows, -1), hidden_states)
        added: torch.Tensor = self._down.plus(self._gate.gated(rms_norm(hidden_states, *second)), hidden_states)
        return added

    def described(self) -> native.Layer | None:
        """The same as the library takes it, which then has this layer's addresses; None if it does not compute it."""
        linears = (self._project, self._output, self._gate, self._down)
        tiled = [linear.described for linear in linears if isinstance(linear, TiledLinear)]
        if len(tiled) < len(linears) or self._width % 32 or self._scoring.softcap or self._scoring.scaling <= 0:
            return None
        return native.Layer(
            *(native.Norm(weight.data_ptr(), epsilon) for weight, epsilon in self._norms),
            *tiled,
            heads=self._queries,
            kv_heads=self._keys,
            width=self._width,
            window=self._scoring.window or 0,
            scaling=self._scoring.scaling,
        )


class FusedRun:
    """Fused layers that are neighbours, all computed when a model calls the first of them.

    Attributes:
        layers: In order; complete before the first call.
    """

    def __init__(self, shared: Shared) -> None:
        self.layers: list[FusedLayer] = []
        self._shared = shared

    @cached_property
    def _in_one_call(self) -> NativeLayers | None:
        described = [found for layer in self.layers if (found := layer.described()) is not None]
        if len(described) < len(self.layers):
            return None
        return NativeLayers([layer.index for layer in self.layers], described)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        *args: Any,
        position_embeddings: Rotary,
        packed: PackedCache,
        backend: AttentionBackend,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As ``FusedLayer``, all in turn."""
        if self._in_one_call is not None and type(backend) is NativeBackend:
            batch = self._shared.batches.of(packed, self._shared.angles.of(position_embeddings))
            return self._in_one_call(hidden_states, packed, batch)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states, position_embeddings=position_embeddings, packed=packed, backend=backend
            )
        return hidden_states


def _pass_on(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Stands for a layer that the first of its run has computed."""
    return hidden_states


class Angles:
    """A step's cosines and sines, laid out once for all layers."""

    def __init__(self) -> None:
        self._given: Rotary | None = None
        self._laid_out: Rotary

    def of(self, given: Rotary) -> Rotary:
        """(T, head_dim) each, out of (1, T, head_dim); each sine has the sign of what it is multiplied with."""
        if given is not self._given:
            cos, sin = (side[0] for side in given)
            half = sin.shape[-1] // 2
            self._given = given
            self._laid_out = cos.contiguous(), torch.cat((-sin[:, :half], sin[:, half:]), dim=-1)
        return self._laid_out


class Shared:
    """What all layers of a model have in common while a step runs."""

    def __init__(self) -> None:
        self.angles, self.batches = Angles(), Batches()


def rms_norm(hidden_states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Root mean square normalisation (Zhang and Sennrich, 2019), in float32 but for the weight."""
    library, size = native.library(), hidden_states.shape[-1]
    if library is not None and size % 16 == 0 and hidden_states.is_contiguous():
        out = torch.empty_like(hidden_states)
        library.actorpp_rms_norm(
            hidden_states.data_ptr(), weight.data_ptr(), out.data_ptr(), out.numel() // size, size, epsilon
        )
        return out
    wide = hidden_states.float()
    square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
    return weight * wide.mul_(square.div_(wide.shape[-1]).add_(epsilon).rsqrt_()).to(hidden_states.dtype)


def rotate(heads: torch.Tensor, count: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate, in place, the first ``count`` heads of (T, heads, head_dim) by the angles of their positions."""
    library, (rows, _, width) = native.library(), heads.shape
    if cos.shape != (rows, width):
        raise RuntimeError("rotary embeddings of a part of a head")
    if library is not None and width % 32 == 0:
        library.actorpp_rotate(heads.data_ptr(), cos.data_ptr(), sin.data_ptr(), rows, heads.stride(0), count, width)
        return
    rotated = heads[:, :count]
    rotated.copy_(torch.addcmul(rotated * cos[:, None], rotated.roll(width // 2, -1), sin[:, None]))


@contextmanager
def fusing(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Run the model once inside: afterwards layers of the right form compute as ``FusedLayer`` does, in runs.

    What they multiply with the same hidden states is then joined, and the single projections are gone.
    """
    calls: dict[Any, tuple[tuple[Any, ...], Mapping[str, Any]]] = {}

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[layer] = args, kwargs

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers if _has_form(layer)]
    yield
    for hook in hooks:
        hook.remove()
    shared = Shared()
    run, angles = FusedRun(shared), None
    each: Any
    for each in layers:
        args, kwargs = calls.get(each, ((), {}))
        fused = _checked(each, args, kwargs, shared) if kwargs else None
        if fused is None:
            angles = None  # a run ends
            continue
        if kwargs["position_embeddings"] is angles:
            each.forward = _pass_on
        else:
            each.forward = run = FusedRun(shared)
        run.layers.append(fused)
        angles = kwargs["position_embeddings"]
        for name in ("q_proj", "k_proj", "v_proj"):
            delattr(each.self_attn, name)
        del each.mlp.gate_proj, each.mlp.up_proj


def _has_form(layer: Any) -> bool:
    for name, expected in _FORM.items():
        module = layer.get_submodule(name) if not name or hasattr(layer, name) else None
        if module is None or {child for child, _ in module.named_children()} != expected:
            return False
        if any(True for _ in module.parameters(recurse=False)):
            return False
    projections = [child for name in ("self_attn", "mlp") for child in layer.get_submodule(name).children()]
    projections.remove(layer.mlp.act_fn)
    return all(isinstance(module, PackedLinear) for module in projections) and all(
        hasattr(norm, "weight") and hasattr(norm, "variance_epsilon") for norm in _norms(layer)
    )


def _norms(layer: Any) -> tuple[Any, Any]:
    return layer.input_layernorm, layer.post_attention_layernorm


class _Listening:
    """A backend that notes what is asked of it."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self.scorings: list[Scoring] = []
        self.tensors: list[torch.Tensor] = []

    def attend_step(
        self, query: torch.Tensor, kv: LayerKV, scoring: Scoring, *, with_lse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``AttentionBackend``."""
        if not with_lse:  # wanted for sinks, which a fused layer has not
            self.scorings.append(scoring)
        self.tensors += [query, kv.keys, kv.values]
        return self._backend.attend_step(query, kv, scoring, with_lse=with_lse)


def _checked(layer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], shared: Shared) -> FusedLayer | None:
    """The layer fused; None unless it gives what the layer's own code does for hidden states of the same shape."""
    hidden, *others = args
    random = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).to(hidden.dtype)
    own, ours = _Listening(kwargs["backend"]), _Listening(kwargs["backend"])
    expected = layer.forward(random, *others, **{**kwargs, "backend": own})
    if len(own.scorings) != 1 or not isinstance(expected, torch.Tensor):
        return None
    fused = FusedLayer(layer, own.scorings[0], shared)
    try:
        found = fused(random, *others, **{**kwargs, "backend": ours})
    except (RuntimeError, TypeError):  # rotary embeddings of another form
        return None
    pairs = [
        *((norm(random), rms_norm(random, norm.weight, norm.variance_epsilon)) for norm in _norms(layer)),
        (layer.mlp.act_fn(random), torch.nn.functional.silu(random)),
        *zip(own.tensors, ours.tensors, strict=True),  # what attention got
        (expected, found),
        (expected - random, found - random),  # what the layer adds
    ]
    return fused if all(alike(theirs, mine) for theirs, mine in pairs) else None


def alike(theirs: torch.Tensor, mine: torch.Tensor) -> bool:
    """Whether they differ by roundings alone."""
    return _norm(theirs - mine) <= 0.02 * _norm(theirs)


def _norm(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values.float()))
