"""Every error that the service raises on purpose, in one tree.

RescueServiceError
├── InvalidRequestError         a request that is not valid as written
├── UnauthorizedError           no token, or a wrong one
├── ForeignOriginError          a browser page of another site, or a Host header that names another machine
├── SessionNotFoundError        a session that was never written, or was forgotten
├── BodyTooLargeError           a body over the limit, which is not parsed
├── BodyTooSlowError            a body that takes too long to arrive
├── SessionFullError            a session at its limit of spans; nothing of the call is stored
├── BusyError                   more requests in progress than the service takes; a retry may succeed
├── StoreFullError              the disk or a limit of the store is full; nothing of the call is stored
├── StoreUnavailableError       the data directory or the PostgreSQL server cannot be used now
│   └── DirectoryInUseError     another process uses the data directory
├── StoreDamagedError           the data on disk is not what was written
├── EmbedderUnavailableError    no dense vectors now; BM25 answers alone
└── SettingsError               a flag, variable or file of settings that is not valid

A message states the fault, the value, what would be valid, and what to do; it never contains text of a span.
`code` is stable: clients branch on it.
"""


class RescueServiceError(Exception):
    code = "internal_error"


class InvalidRequestError(RescueServiceError, ValueError):
    code = "invalid_request"


class UnauthorizedError(RescueServiceError):
    code = "unauthorized"


class ForeignOriginError(RescueServiceError):
    code = "foreign_origin"


class SessionNotFoundError(RescueServiceError, LookupError):
    code = "session_not_found"


class BodyTooLargeError(RescueServiceError):
    code = "body_too_large"


class BodyTooSlowError(RescueServiceError):
    code = "body_too_slow"


class SessionFullError(RescueServiceError):
    code = "session_full"


class BusyError(RescueServiceError):
    code = "busy"


class StoreFullError(RescueServiceError):
    code = "store_full"


class StoreUnavailableError(RescueServiceError):
    code = "store_unavailable"


class DirectoryInUseError(StoreUnavailableError):
    code = "directory_in_use"


class StoreDamagedError(RescueServiceError):
    code = "store_damaged"


class EmbedderUnavailableError(RescueServiceError):
    code = "embedder_unavailable"


class SettingsError(RescueServiceError, ValueError):
    code = "settings"
