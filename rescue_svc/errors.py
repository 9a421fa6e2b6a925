"""Every error that the service raises on purpose, in one tree.

RescueServiceError
├── InvalidRequestError         a request that is not valid as written
├── UnauthorizedError           no token, or a wrong one
├── ForeignOriginError          a browser page of another site, or a Host header that names another machine
├── SessionNotFoundError        a session that was never written, or was deleted
├── BodyTooLargeError           a body over the limit, which is not parsed
├── BodyTooSlowError            a body that takes too long to arrive
├── SessionFullError            a session at its limit of spans; nothing of the call is stored
├── BusyError                   more requests in progress than the service takes; a retry may succeed
├── StoreFullError              the disk or a limit of the store is full; nothing of the call is stored
├── StoreUnavailableError       the data directory or the PostgreSQL server cannot be used now
│   └── DirectoryInUseError     another process uses the data directory
├── StoreDamagedError           the data on disk is not what was written
├── EmbedderUnavailableError    no dense vectors now; only keyword search is used
└── SettingsError               a flag, variable or file of settings that is not valid

A message states the fault, the value, what would be valid, and what to do; it never contains text of a span.
`code` is stable, because clients branch on it; `status` is that of the HTTP response.
"""


class RescueServiceError(Exception):
    code, status = "internal_error", 500


class InvalidRequestError(RescueServiceError, ValueError):
    code, status = "invalid_request", 422


class UnauthorizedError(RescueServiceError):
    code, status = "unauthorized", 401


class ForeignOriginError(RescueServiceError):
    code, status = "foreign_origin", 403


class SessionNotFoundError(RescueServiceError, LookupError):
    code, status = "session_not_found", 404


class BodyTooLargeError(RescueServiceError):
    code, status = "body_too_large", 413


class BodyTooSlowError(RescueServiceError):
    code, status = "body_too_slow", 408


class SessionFullError(RescueServiceError):
    code, status = "session_full", 413


class BusyError(RescueServiceError):
    code, status = "busy", 429


class StoreFullError(RescueServiceError):
    code, status = "store_full", 507


class StoreUnavailableError(RescueServiceError):
    code, status = "store_unavailable", 503


class DirectoryInUseError(StoreUnavailableError):
    code = "directory_in_use"


class StoreDamagedError(RescueServiceError):
    code, status = "store_damaged", 503


class EmbedderUnavailableError(RescueServiceError):
    code, status = "embedder_unavailable", 424


class SettingsError(RescueServiceError, ValueError):
    code = "settings"
