"""Every error that the service raises on purpose, in one tree.

RescueServiceError
├── InvalidRequestError         a request that cannot be met as it was written
├── UnauthorizedError           no token, or a wrong one
├── ForeignOriginError          a browser page of another site
├── SessionNotFoundError        a session that was never written, or that was forgotten
├── BodyTooLargeError           a body over the limit, refused before it is parsed
├── BodyTooSlowError            a body that takes too long to arrive
├── SessionFullError            a session at its cap of spans
├── BusyError                   more requests at once than the service takes
├── StoreFullError              the disk or a global cap is full
├── StoreUnavailableError       the data directory or the PostgreSQL server cannot be used now
│   └── DirectoryInUseError     another process holds the data directory
├── StoreDamagedError           the data on disk is not what was written
├── EmbedderUnavailableError    no dense vectors now; retrieval goes on with BM25
└── SettingsError               a flag, variable or file of settings that cannot be met

A message says what went wrong, the offending value, what would be valid, and what to do; it never holds text of a span.
`code` is stable: clients branch on it.
"""


class RescueServiceError(Exception):
    """Base of all errors of the service."""

    code = "internal_error"


class InvalidRequestError(RescueServiceError, ValueError):
    """A request that cannot be met as it was written."""

    code = "invalid_request"


class UnauthorizedError(RescueServiceError):
    """No token, or a wrong one."""

    code = "unauthorized"


class ForeignOriginError(RescueServiceError):
    """A browser page of another site asked, or the Host header names another machine."""

    code = "foreign_origin"


class SessionNotFoundError(RescueServiceError, LookupError):
    """A session that was never written, or that was forgotten."""

    code = "session_not_found"


class BodyTooLargeError(RescueServiceError):
    """A body over the limit; it was not parsed."""

    code = "body_too_large"


class BodyTooSlowError(RescueServiceError):
    """A body that takes too long to arrive."""

    code = "body_too_slow"


class SessionFullError(RescueServiceError):
    """A session at its cap of spans; nothing of the call was stored."""

    code = "session_full"


class BusyError(RescueServiceError):
    """More requests at once than the service takes; the same call may go through in a second."""

    code = "busy"


class StoreFullError(RescueServiceError):
    """The disk or a global cap is full; nothing of the call was stored."""

    code = "store_full"


class StoreUnavailableError(RescueServiceError):
    """The data directory or the PostgreSQL server cannot be used now."""

    code = "store_unavailable"


class DirectoryInUseError(StoreUnavailableError):
    """Another process holds the data directory."""

    code = "directory_in_use"


class StoreDamagedError(RescueServiceError):
    """The data on disk is not what was written."""

    code = "store_damaged"


class EmbedderUnavailableError(RescueServiceError):
    """No dense vectors now."""

    code = "embedder_unavailable"


class SettingsError(RescueServiceError, ValueError):
    """A flag, variable or file of settings that cannot be met."""

    code = "settings"
