"""A request body's bytes as one of the types of ``bodies``, with errors that name the field.

A decoder holds Python's lock, and so the server's loop up, until it is done: long lists of ids are decoded in slices.
"""

from __future__ import annotations

from array import array
from typing import Any, TypeVar

import msgspec

from actorpp.errors import InvalidRequestError
from actorpp.serving.http.bodies import REFUSED, CompletionBody, DetokenizeBody, Ids
from actorpp.serving.request import invalid_field

SLICE_BYTES = 1 << 18  # of JSON: about 50,000 ids, a few milliseconds

S = TypeVar("S", bound=msgspec.Struct)


# Looks for fields that are refused, and skips all others.
_REFUSED_FIELDS = msgspec.defstruct("_RefusedFields", [(name, Any, None) for name in REFUSED])

# The fields that may be long lists of ids.
_LISTS: dict[type[msgspec.Struct], str] = {CompletionBody: "prompt", DetokenizeBody: "tokens"}


def decode(data: bytes, type: type[S]) -> S:
    """The body. Raises InvalidRequestError: no JSON, a field of the wrong type or out of range, or one we refuse."""
    field, ids = _LISTS.get(type, ""), None
    try:
        refused = msgspec.json.decode(data, type=_REFUSED_FIELDS)
        if field and len(data) > SLICE_BYTES:
            data, ids = _without_ids(data, field)
        body = msgspec.json.decode(data, type=type)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is no JSON: {error}") from None
    for name in REFUSED:
        if getattr(refused, name):
            raise InvalidRequestError(f"{name} is not supported", param=name)
    return body if ids is None else msgspec.structs.replace(body, **{field: ids})


def _without_ids(data: bytes, field: str) -> tuple[bytes, list[array[int]] | array[int] | None]:
    """The body with a short list in place of its ids, and these; as it was, with None, where it has no long list."""
    found = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get(field)
    raw = b"" if found is None else bytes(found)
    first = raw[1:1024].lstrip()[:1]
    ids: list[array[int]] | array[int]
    if len(raw) <= SLICE_BYTES or raw[:1] != b"[" or first in b'"{':
        return data, None
    if first == b"[":
        ids = [_in_slices(bytes(inner), field) for inner in msgspec.json.decode(raw, type=list[msgspec.Raw])]
    else:
        ids = _in_slices(raw, field)
    at = data.index(raw)
    return data[:at] + b"[0]" + data[at + len(raw) :], ids


def _in_slices(raw: bytes, field: str) -> array[int]:
    """The ids of one JSON list. Raises InvalidRequestError when it is none."""
    ids = array("i")
    start, end = 1, len(raw) - 1
    while start < end:
        comma = raw.find(b",", start + SLICE_BYTES, end)
        stop = end if comma < 0 else comma
        try:
            ids.fromlist(msgspec.json.decode(b"[" + raw[start:stop] + b"]", type=Ids))
        except msgspec.MsgspecError:
            raise InvalidRequestError(f"{field}: token ids must be integers in 0-{2**31 - 1}", param=field) from None
        start = stop + 1
    return ids
