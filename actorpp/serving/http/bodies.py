"""What HTTP clients send: bodies as OpenAI's clients and vLLM's benchmark tools write them, turned into our requests.

Names that are ours already are checked by the request's own rules. What is known and not supported is refused by name;
what is unknown is ignored, as OpenAI's own servers do. Nothing here knows of connections.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from actorpp.errors import InvalidRequestError
from actorpp.serving.request import (
    MAX_MESSAGES,
    MAX_PROMPT_CHARS,
    MAX_PROMPT_TOKENS,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    Bias,
    CompletionRequest,
    Penalty,
    Stop,
    TokenId,
    TokenizeRequest,
    Unit,
    parse_request,
    parse_tokenize,
)

MAX_PROMPTS = 1024
SEED_MASK = 2**63 - 1

Text = Annotated[str, Meta(max_length=MAX_PROMPT_CHARS)]
Ids = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]
Message = dict[str, Any]
Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]


class StreamOptions(msgspec.Struct, frozen=True):
    """``include_usage``: a last chunk with the usage; ``continuous_usage_stats``: the usage in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """Only ``text``: constrained decoding is not there yet."""

    type: str


class SamplingBody(msgspec.Struct, frozen=True, kw_only=True):
    """What both kinds of completion take. Null is "not given" everywhere.

    ``return_progress`` asks a stream for chunks with ``prompt_progress`` while the prompt is computed.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Unit | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=1024)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    user: Any = None


class CompletionBody(SamplingBody, frozen=True, kw_only=True):
    """``POST /v1/completions``. ``prompt`` is a text, a list of texts, a list of ids, or a list of lists of ids."""

    prompt: Text | list[Any]
    max_tokens: Count | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    suffix: Literal[""] | None = None


class ChatBody(SamplingBody, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``, through the model's own template."""

    messages: Messages
    max_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Tools | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None
    continue_final_message: Literal[False] | None = None
    add_generation_prompt: Literal[True] | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /tokenize``, of a text or a chat."""

    model: str | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /detokenize``."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)]
    model: str | None = None


# Fields of OpenAI's and vLLM's requests that would change the answer, and that this server does not do.
REFUSED = (
    "audio", "functions", "function_call", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
    "prompt_embeds", "prompt_logprobs", "structured_outputs", "use_beam_search", "chat_template",
)  # fmt: skip

# Fields of a body that a CompletionRequest has under the same name, with the same meaning.
_SAME = tuple(
    name
    for name in (*SamplingBody.__struct_fields__, "tools", "chat_template_kwargs", "messages")
    if name in CompletionRequest.__struct_fields__
)


def completion_requests(body: CompletionBody) -> list[CompletionRequest]:
    """One request for each prompt. Raises InvalidRequestError."""
    fields = _common(body) | {
        "logprobs": body.logprobs,
        "max_tokens": 16 if body.max_tokens is None else body.max_tokens,
    }
    if fields["max_tokens"] == 0:
        if not body.echo:
            raise InvalidRequestError("max_tokens: 0 only with echo", param="max_tokens")
        if body.stream:
            raise InvalidRequestError("max_tokens: 0 not in a stream", param="max_tokens")
        fields["max_tokens"] = 1  # the engine's least; the answer leaves it out
    if body.echo:
        fields["prompt_logprobs"] = body.logprobs
    return [parse_request(fields | prompt) for prompt in _prompts(body.prompt)]


def chat_request(body: ChatBody) -> CompletionRequest:
    """The request of a chat. Raises InvalidRequestError."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs: only with logprobs = true", param="top_logprobs")
    if body.tool_choice not in (None, "none", "auto"):
        raise InvalidRequestError(
            'tool_choice: only "auto" and "none": a tool\'s call is not forced', param="tool_choice"
        )
    limits = {limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None}
    if len(limits) > 1:
        raise InvalidRequestError("max_tokens and max_completion_tokens differ: give one", param="max_tokens")
    fields = _common(body) | {"max_tokens": limits.pop() if limits else None}
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    return parse_request(fields)


def tokenize_request(body: TokenizeBody) -> TokenizeRequest:
    """The request of a client that wants ids. Raises InvalidRequestError."""
    return parse_tokenize({name: value for name, value in msgspec.structs.asdict(body).items() if value is not None})


def _common(body: SamplingBody) -> dict[str, Any]:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequestError(f"best_of: only as many as n, which is {body.n or 1}", param="best_of")
    if body.response_format is not None and body.response_format.type != "text":
        raise InvalidRequestError(
            f"response_format: {body.response_format.type!r} is not supported, only 'text': no output is constrained",
            param="response_format",
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options: only with stream = true", param="stream_options")
    fields = {name: value for name in _SAME if (value := getattr(body, name, None)) is not None}
    fields.setdefault("temperature", 1.0)
    if body.top_k == -1:
        fields["top_k"] = 0
    if body.seed is not None:
        fields["seed"] = body.seed & SEED_MASK
    return fields


def _prompts(prompt: str | Sequence[Any]) -> list[dict[str, Any]]:
    """Each prompt as a CompletionRequest takes it."""
    if isinstance(prompt, str):
        return [{"prompt": prompt}]
    if not prompt:
        raise InvalidRequestError("prompt: the list is empty", param="prompt")
    if isinstance(prompt[0], int):
        return [{"prompt_tokens": prompt}]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequestError(f"prompt: {len(prompt)} prompts are more than {MAX_PROMPTS}", param="prompt")
    kinds: dict[type, str] = {str: "prompt", list: "prompt_tokens", array: "prompt_tokens"}
    if len({type(entry) for entry in prompt}) > 1 or type(prompt[0]) not in kinds:
        raise InvalidRequestError(
            "prompt: a text, a list of texts, a list of ids, or a list of lists of ids", param="prompt"
        )
    return [{kinds[type(entry)]: entry} for entry in prompt]
