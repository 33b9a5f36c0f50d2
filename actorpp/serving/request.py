"""What a client may ask for, and the limits of every field. Decides nothing about scheduling."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from actorpp.errors import ContextLengthExceededError, InvalidRequestError
from actorpp.serving.api import GenerationParams
from actorpp.stages.messages import SamplingParams

MAX_PROMPT_CHARS = 16_000_000  # of text or chat content; more than a million tokens
MAX_PROMPT_TOKENS = 4_000_000
MAX_MESSAGES = 4096
MAX_TOOLS = 1024
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 20
MAX_OUTPUTS = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 128

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Unit = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Bias = Annotated[float, Meta(ge=-100, le=100)]


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a prompt is completed: the names, defaults and limits that every front door shares.

    Attributes:
        max_tokens: Tokens to generate at most; None: until the context, or the KV cache, is full, all of which is
            then reserved for the request while it runs.
        n: Outputs, independent of each other; more than one only with a temperature.
        temperature: 0 is greedy; otherwise logits are divided by it before sampling.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens whose probability reaches this.
        min_p: Keep tokens of at least this share of the most likely one's probability.
        repetition_penalty: Above 1 discourages tokens of the prompt and the output.
        presence_penalty, frequency_penalty: Above 0 discourage tokens that the output has.
        logit_bias: What is added to the logits of some token ids.
        seed: Makes sampling repeatable; None draws one.
        min_tokens: Tokens before which nothing stops the output.
        stop: A string, or several, that end the output; the text ends before the first of them.
        stop_token_ids: Ids that end the output, beside end-of-sequence.
        include_stop_str_in_output: Leave the stop string, or the stop token's text, in the text.
        logprobs: Give each output token's log-probability, and so many of the likeliest tokens with theirs.
        prompt_logprobs: The same for the prompt's tokens.
        ignore_eos: Go on past end-of-sequence tokens.
    """

    max_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = 16
    n: Annotated[int, Meta(ge=1, le=MAX_OUTPUTS)] = 1
    temperature: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    top_k: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Unit = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[Mapping[TokenId, Bias], Meta(max_length=MAX_LOGIT_BIAS)] = {}
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    stop: Stop | Annotated[Sequence[Stop], Meta(max_length=MAX_STOPS)] = ()
    stop_token_ids: Annotated[Sequence[TokenId], Meta(max_length=MAX_STOP_IDS)] = ()
    include_stop_str_in_output: bool = False
    logprobs: TopLogprobs | None = None
    prompt_logprobs: TopLogprobs | None = None
    ignore_eos: bool = False


class CompletionRequest(SamplingOptions, frozen=True, kw_only=True):
    """A completion as a client asks for it: one of ``prompt``, ``prompt_tokens`` and ``messages``.

    Attributes:
        prompt: Text, completed as it stands.
        prompt_tokens: Token ids.
        messages: A chat, through the model's template.
        tools, chat_template_kwargs: What the template gets beside the messages.
        add_special_tokens: Whether the tokenizer puts its own tokens around the text; unless given, not for a chat,
            whose template writes them.
        priority: Among waiting requests lower goes first, equal ones in order of arrival.
    """

    prompt: Annotated[str, Meta(max_length=MAX_PROMPT_CHARS)] | None = None
    prompt_tokens: Annotated[Sequence[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)] | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop``, however it was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def params(self, deadline_s: float | None = None, index: int = 0) -> GenerationParams:
        """Output number ``index`` for the engine, which sees token ids only."""
        return GenerationParams(
            max_tokens=self.max_tokens,
            sampling=SamplingParams(
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                logit_bias=tuple(sorted(self.logit_bias.items())),
                min_tokens=self.min_tokens,
                logprobs=self.logprobs,
                prompt_logprobs=self.prompt_logprobs if index == 0 else None,  # the prompt is the same
            ),
            seed=self.seed,
            index=index,
            ignore_eos=self.ignore_eos,
            stop_token_ids=tuple(self.stop_token_ids),
            priority=self.priority,
            deadline_s=deadline_s,
        )


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A text, or a chat, whose ids a client wants; fields as in CompletionRequest."""

    prompt: Annotated[str, Meta(max_length=MAX_PROMPT_CHARS)] | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool | None = None


S = TypeVar("S", bound=msgspec.Struct)


def checked(fields: dict[str, Any], type: type[S]) -> S:
    """``fields`` as a Struct of that type; unknown ones are ignored. Keys that are numbers may come as text.

    Raises:
        InvalidRequestError: A field is missing, of the wrong type or out of range.
    """
    try:
        return msgspec.convert(fields, type, str_keys=True)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None


def invalid_field(error: msgspec.ValidationError) -> InvalidRequestError:
    """msgspec's complaint as ours, with the field at fault."""
    message, _, path = str(error).partition(" - at `")
    field = re.search(r"\$\.(\w+)", path) or re.search(r"required field `(\w+)`", message)
    param = field[1] if field else None
    return InvalidRequestError(f"{param or 'request'}: {message[0].lower()}{message[1:]}", param=param)


def parse_request(fields: dict[str, Any]) -> CompletionRequest:
    """Check what a client asks for. None asks for a field's default, but for ``max_tokens``, where it has a meaning.

    ``prompt_tokens`` in an array are as many as allowed, and their range is checked with the vocabulary's: to look at a
    million of them one by one would hold up the loop.

    Raises:
        InvalidRequestError: As from ``checked``, or there is not exactly one prompt.
    """
    given_fields = {name: value for name, value in fields.items() if value is not None or name == "max_tokens"}
    ids = given_fields.get("prompt_tokens")
    if isinstance(ids, array):
        given_fields["prompt_tokens"] = ()
    request = checked(given_fields, CompletionRequest)
    if isinstance(ids, array):
        request = msgspec.structs.replace(request, prompt_tokens=ids)
    _check_prompt(request, ("prompt", "prompt_tokens", "messages"))
    if request.n > 1 and request.temperature == 0:
        raise InvalidRequestError("n: greedy outputs are all the same: give a temperature, or n = 1", param="n")
    if request.max_tokens is not None and request.min_tokens > request.max_tokens:
        raise InvalidRequestError(
            f"min_tokens: {request.min_tokens} is more than max_tokens, which is {request.max_tokens}",
            param="min_tokens",
        )
    return request


def parse_tokenize(fields: dict[str, Any]) -> TokenizeRequest:
    """Check what a client wants ids of. Raises InvalidRequestError as ``parse_request``."""
    request = checked(fields, TokenizeRequest)
    _check_prompt(request, ("prompt", "messages"))
    return request


def _check_prompt(request: CompletionRequest | TokenizeRequest, names: tuple[str, ...]) -> None:
    given = [name for name in names if getattr(request, name) is not None]
    if len(given) != 1:
        raise InvalidRequestError(
            f"give exactly one of {', '.join(names[:-1])} and {names[-1]}, not {' and '.join(given) or 'none'}",
            param=given[1] if given else "prompt",
        )
    if request.messages is not None:
        if not all(isinstance(message.get("role"), str) for message in request.messages):
            raise InvalidRequestError("messages: each needs a role", param="messages")
        if len(msgspec.json.encode(request.messages)) > MAX_PROMPT_CHARS:
            raise InvalidRequestError(f"messages: over {MAX_PROMPT_CHARS} bytes", param="messages")


def all_within(ids: Sequence[int], vocab_size: int) -> bool:
    """Whether all ids are at least 0 and under ``vocab_size``. In an array, a million take a millisecond."""
    values = np.frombuffer(ids, dtype=np.intc) if isinstance(ids, array) and ids.typecode == "i" else None
    low, high = (min(ids), max(ids)) if values is None else (values.min(), values.max())
    return bool(low >= 0 and high < vocab_size)


def check_fits(prompt_ids: Sequence[int], params: GenerationParams, vocab_size: int, context_length: int) -> None:
    """Whether a model can complete this at all, as far as its configuration tells.

    Raises:
        InvalidRequestError: The prompt is empty, or ids lie outside the vocabulary.
        ContextLengthExceededError: Prompt and max_tokens do not fit the context.
    """
    if not prompt_ids:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    biased = [token for token, _ in params.sampling.logit_bias]
    for ids, param in ((prompt_ids, "prompt"), (biased, "logit_bias"), (params.stop_token_ids, "stop_token_ids")):
        if ids and not all_within(ids, vocab_size):
            raise InvalidRequestError(f"{param}: token ids must lie in 0-{vocab_size - 1}", param=param)
    if len(prompt_ids) + (params.max_tokens or 1) > context_length:
        raise ContextLengthExceededError(
            f"the maximum context length is {context_length} tokens, but the prompt has {len(prompt_ids)} tokens and "
            f"max_tokens is {params.max_tokens or 'at least 1'}",
            param="max_tokens" if len(prompt_ids) < context_length else "prompt",
        )
