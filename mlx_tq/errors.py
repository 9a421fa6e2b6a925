"""Every error that mlx_tq raises on purpose, in one tree.

MlxTqError
├── ConfigError             a setting, flag or argument that cannot be met (exit code 2)
├── UnsupportedModelError   a model whose attention cannot run on a compressed cache
├── KernelUnavailableError  a GPU kernel that could not be built or run
├── NonFiniteError          a model that produced NaN or infinite keys, values or logits
├── CacheFormatError        a cache or file that is damaged, foreign or of another configuration
├── RankError               processes that run one model together disagree, or one is gone
└── RescueError             the rescue service was asked for and did not answer

A message says what went wrong, the offending value, what would be valid, and what to do.
"""


class MlxTqError(Exception):
    """Base of all errors of mlx_tq."""


class ConfigError(MlxTqError, ValueError):
    """A setting, flag or argument that cannot be met."""


class UnsupportedModelError(MlxTqError):
    """A model whose attention cannot run on a compressed cache."""


class KernelUnavailableError(MlxTqError):
    """A GPU kernel that could not be built or run."""


class NonFiniteError(MlxTqError):
    """A model produced NaN or infinite keys, values or logits."""


class CacheFormatError(MlxTqError):
    """A cache or cache file that is damaged, foreign or of another configuration."""


class RankError(MlxTqError):
    """Processes that run one model together disagree, or one is gone.

    Attributes:
        everywhere: it is raised on all of them, and told once.
    """

    def __init__(self, message: str, *, everywhere: bool = False) -> None:
        super().__init__(message)
        self.everywhere = everywhere


class RescueError(MlxTqError):
    """The rescue service was asked for and did not answer."""
