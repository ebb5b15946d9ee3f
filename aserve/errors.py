"""Every error aserve raises on purpose: one tree, each with an HTTP status and the numbers that matter.

    AserveError                     500  anything below
    ├── ConfigError                      an option or a model directory is wrong; raised before serving
    ├── InvalidRequestError         400  the request can never be served as written
    │   ├── ContextLengthError      400  prompt (+ max_tokens) does not fit the context or the KV pool
    │   ├── RequestTooLargeError    413  the body is larger than the server takes
    │   └── MediaTypeError          415  the body says that it is something else than JSON
    ├── AuthenticationError         401  no or wrong API key
    ├── NotFoundError               404  no such model, route or request
    ├── OverloadedError             503  the waiting queue is full or the engine is draining; retry later
    │   └── TooManyRequestsError    429  one key or user has as many requests as it may have
    ├── DeadlineError               504  the deadline passed before the first token, or before the answer was whole
    ├── RequestFailedError          500  the engine failed this request; others go on
    └── EngineDeadError             503  the engine cannot go on; carries the cause

`wire()` gives the OpenAI error object; routes add nothing to it.
"""

from __future__ import annotations


class AserveError(Exception):
    """Base of every error in aserve. `status` is the HTTP status, `type` and `code` the OpenAI fields."""

    status: int = 500
    type: str = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def wire(self) -> dict[str, dict[str, object]]:
        """The OpenAI error body: {"error": {"message", "type", "param", "code"}}."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class ConfigError(AserveError):
    """An option or a model is wrong; `param` names the option to change. The CLI exits with code 2."""

    type = "configuration_error"


class InvalidRequestError(AserveError):
    """The request can never be served as written; `param` names the field to change."""

    status = 400
    type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """Prompt and asked output do not fit; the message names both lengths and the limit, in tokens."""

    code = "context_length_exceeded"

    def __init__(self, message: str, *, param: str | None, num_prompt: int, num_output: int | None, limit: int) -> None:
        super().__init__(message, param=param)
        self.num_prompt = num_prompt
        self.num_output = num_output
        self.limit = limit


class RequestTooLargeError(InvalidRequestError):
    """The body has more bytes than the server takes."""

    status = 413
    code = "request_too_large"


class MediaTypeError(InvalidRequestError):
    """The body's Content-Type is not JSON's."""

    status = 415
    code = "unsupported_media_type"


class AuthenticationError(AserveError):
    """No API key, or a wrong one."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class NotFoundError(AserveError):
    """No such model, route or request."""

    status = 404
    type = "not_found_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param)
        self.code = code


class OverloadedError(AserveError):
    """The waiting queue is full, or the engine is draining; try again in `retry_after` seconds."""

    status = 503
    type = "overloaded_error"
    code = "overloaded"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TooManyRequestsError(OverloadedError):
    """The API key or user has as many requests waiting, or in flight, as it may have."""

    status = 429
    type = "rate_limit_error"
    code = "too_many_requests"


class DeadlineError(AserveError):
    """The request's deadline passed before it produced a token, or before what was asked for was whole."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class RequestFailedError(AserveError):
    """The engine failed this request; others go on."""

    code = "request_failed"


class EngineDeadError(AserveError):
    """The engine cannot go on; `__cause__` says why. Every in-flight and later call raises it."""

    status = 503
    code = "engine_dead"
