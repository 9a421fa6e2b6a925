"""Files of query statistics that need no name: a model's own, in the user's cache folder or inside the package."""

from importlib.resources import files
from pathlib import Path

from mlx_tq.errors import ConfigError
from mlx_tq.files import cache_folder


def kept_queries(model: str, *, covariance: bool = False) -> Path:
    """Where the statistics of the model with this fingerprint are kept, with or without the covariance."""
    return cache_folder() / _name(model, covariance)


def known_queries(model: str, *, covariance: bool = False) -> Path | None:
    """The file of statistics of the model with this fingerprint, or None where it was never asked."""
    shipped = Path(str(files("mlx_tq") / "assets" / "queries")) / _name(model, covariance)
    return next((path for path in (kept_queries(model, covariance=covariance), shipped) if path.is_file()), None)


def make_folder(path: Path) -> None:
    """Make the folder of such a file, and see that files can be made in it.

    Raises:
        ConfigError: they cannot.
    """
    trial = path.with_suffix(".trial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        trial.touch()
        trial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"no statistics can be kept in {path.parent}: {error.strerror}. Set XDG_CACHE_HOME to a folder that can be "
            "written, or name a file."
        ) from error


def _name(model: str, covariance: bool) -> str:
    return f"queries-{model}{'-covariance' if covariance else ''}.safetensors"
