"""Every exception that actorpp raises on purpose, in one tree.

Each class states a stable ``code`` (the word that travels to clients) and whether asking again can help. Programming
errors (a wrong type, a broken invariant) are ordinary Python exceptions and are not listed here.
"""

from __future__ import annotations

from typing import Any, ClassVar


class ActorppError(Exception):
    """Base of all errors raised on purpose.

    Attributes:
        code: Stable, lower-case word that names the kind of error, also over sockets.
        retryable: Whether the same request may succeed later.
        param: The option or request field at fault, if one is.
        retry_after_ms: After how many milliseconds asking again makes sense, if that can be said.
        stage: The number of the pipeline stage that it happened in, if it was one.
    """

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False
    default_retry_after_ms: ClassVar[int | None] = None

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_ms: int | None = None, stage: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_ms = self.default_retry_after_ms if retry_after_ms is None else retry_after_ms
        self.stage = stage

    def as_dict(self) -> dict[str, Any]:
        """The error object that clients get, the same over every door."""
        return {
            "code": self.code,
            "message": self.message,
            "param": self.param,
            "retryable": self.retryable,
            "retry_after_ms": self.retry_after_ms,
            "stage": self.stage,
        }


# --- configuration and models -------------------------------------------------------------------------------------


class ConfigError(ActorppError):
    """An option has a value that cannot work; the message says what was wrong and what is allowed."""

    code = "invalid_config"


class ModelNotFoundError(ActorppError):
    """No model under the name or path given."""

    code = "model_not_found"


class UnsupportedModelError(ActorppError):
    """The model exists, but this version refuses it, by name and with the reason."""

    code = "unsupported_model"


class CheckpointError(ActorppError):
    """The checkpoint is damaged: missing, mismatched or unreadable tensors or files."""

    code = "bad_checkpoint"


class ProfilingError(ActorppError):
    """The pipeline's profile cannot be measured now; nothing else is affected."""

    code = "profiling_failed"


class OutputError(ActorppError):
    """A result cannot be written: the reader went away, the disk is full, or the file is not writable."""

    code = "output_failed"


# --- requests -----------------------------------------------------------------------------------------------------


class RequestError(ActorppError):
    """A request ended without a result."""

    code = "request_failed"


class InvalidRequestError(RequestError):
    """A field of the request is missing, of the wrong type or out of range."""

    code = "invalid_request"


class ContextLengthExceededError(InvalidRequestError):
    """Prompt (and tokens to generate) do not fit the context."""

    code = "context_length_exceeded"


class PermissionDeniedError(RequestError):
    """The operation is for administrators, and the client has not shown that it is one."""

    code = "permission_denied"


class OverloadedError(RequestError):
    """The waiting queue is full."""

    code = "overloaded"
    retryable = True
    default_retry_after_ms = 1000


class AbortedError(RequestError):
    """The request was aborted by its client or by shutdown."""

    code = "aborted"


class DeadlineExceededError(RequestError):
    """The request's deadline passed before it ended."""

    code = "deadline_exceeded"


class StageFailedError(RequestError):
    """A pipeline stage died, stalled, or reported an error."""

    code = "stage_failed"
    retryable = True


class StageCrashedError(StageFailedError):
    """A stage ended, hangs, or could not go on by its own doing: what it computed may be the cause."""


class CrashingRequestError(StageFailedError):
    """This request has crashed its stage again and again, the last time alone: it would do so again."""

    retryable = False


class StageLoadError(StageFailedError):
    """A stage said that it cannot load its part of the model: it would say so again."""


class CoordinatorFailedError(RequestError):
    """The coordinator, or what restarts stages, has crashed: a fault of actorpp, with its cause."""

    code = "internal"


# --- actors -------------------------------------------------------------------------------------------------------


class ActorError(ActorppError):
    """Base of the actor runtime's errors."""

    code = "actor_error"


class ActorStoppedError(ActorError):
    """The actor has stopped: the message cannot be delivered, or the ask will get no reply."""

    code = "actor_stopped"


class ActorRestartedError(ActorError):
    """The actor was restarted while this ask was in flight; the message is not run again."""

    code = "actor_restarted"
    retryable = True


class AskTimeoutError(ActorError):
    """No reply within the ask's timeout."""

    code = "ask_timeout"
    retryable = True


class MailboxFullError(ActorError):
    """An inbox with the FAIL policy had no room."""

    code = "mailbox_full"
    retryable = True


class ActorDefinitionError(ActorError):
    """The actor class or its wiring cannot work; raised when the class is made or the actor is spawned."""

    code = "actor_definition"


class DeadlockError(ActorError):
    """A wait that cannot end: an actor that waits for itself; in virtual time, when only deadlines are left to happen.

    Attributes:
        graph: The wait-for graph (an ``actorpp.runtime.WaitGraph``), where one was made.
    """

    code = "deadlock"

    def __init__(self, message: str, *, graph: Any = None) -> None:
        super().__init__(message)
        self.graph = graph


# --- transport ----------------------------------------------------------------------------------------------------


class TransportError(ActorppError):
    """Base of the transport's errors."""

    code = "transport_error"


class ProtocolError(TransportError):
    """Bytes or messages that break the protocol: undecodable, oversized, out of sequence, or over the credit."""

    code = "protocol_error"


class PeerUnreachableError(TransportError):
    """The peer's outbox is full or its address is unknown."""

    code = "peer_unreachable"
    retryable = True


class EpochEndedError(TransportError):
    """The epoch ended while this operation was in flight."""

    code = "epoch_ended"
    retryable = True
