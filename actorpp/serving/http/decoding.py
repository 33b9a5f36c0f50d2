"""A request body's bytes as one of the types of ``bodies``, with errors that name the field."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from actorpp.errors import InvalidRequestError
from actorpp.serving.http.bodies import REFUSED
from actorpp.serving.request import invalid_field

S = TypeVar("S", bound=msgspec.Struct)


# Looks for fields that are refused, and skips all others.
_REFUSED_FIELDS = msgspec.defstruct("_RefusedFields", [(name, Any, None) for name in REFUSED])


def decode(data: bytes, type: type[S]) -> S:
    """The body. Raises InvalidRequestError: no JSON, a field of the wrong type or out of range, or one we refuse."""
    try:
        refused = msgspec.json.decode(data, type=_REFUSED_FIELDS)
        body = msgspec.json.decode(data, type=type)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is no JSON: {error}") from None
    for name in REFUSED:
        if getattr(refused, name):
            raise InvalidRequestError(f"{name} is not supported", param=name)
    return body
