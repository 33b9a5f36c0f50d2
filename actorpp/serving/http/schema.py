"""The OpenAPI document's account of bodies and answers, made from the types that decode the bodies."""

from __future__ import annotations

from typing import Any

import msgspec

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code", "retryable", "retry_after_ms", "stage"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
                "retryable": {"type": "boolean"},
                "retry_after_ms": {"type": ["integer", "null"]},
                "stage": {"type": ["integer", "null"]},
            },
        }
    },
}


def body_schema(type: type[msgspec.Struct]) -> dict[str, Any]:
    """``openapi_extra`` of a route whose body is of that type."""
    (schema,), components = msgspec.json.schema_components([type], ref_template="#/$defs/{name}")
    whole = _inlined(schema, components)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": whole}}}}


def describe(*errors: int, stream: bool = False, text: str | None = None) -> dict[int | str, dict[str, Any]]:
    """``responses`` of a route: its answer (an object, or ``text`` of that media type), and the errors it may give."""
    schema = {"type": "object" if text is None else "string"}
    content: dict[str, Any] = {text or "application/json": {"schema": schema}}
    if stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
        errors = (400, 404, 413, 429, 503, 504)
    known = {*errors, 401, 413} | ({404} if errors else set())
    return {
        200: {"description": "The answer.", "content": content},
        **{
            status: {"description": "An error.", "content": {"application/json": {"schema": _ERROR}}}
            for status in sorted(known)
        },
    }


def _inlined(schema: Any, components: dict[str, Any]) -> Any:
    """The schema with its references resolved: bodies refer to nothing that refers back."""
    if isinstance(schema, list):
        return [_inlined(entry, components) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    if (reference := schema.get("$ref")) is not None:
        return _inlined(components[reference.rpartition("/")[2]], components)
    return {key: _inlined(value, components) for key, value in schema.items()}
