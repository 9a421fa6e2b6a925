"""Cache folders that share the compiled CPU kernels, which take 10 s to compile."""

from pathlib import Path

from mlx_tq.files import cache_folder

KERNELS = cache_folder() / "kernels"  # of whoever runs the tests: no test has set another folder yet


def make_cache_folder(folder: Path) -> Path:
    KERNELS.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / "mlx_tq").mkdir(parents=True)
    (folder / "mlx_tq" / "kernels").symlink_to(KERNELS)
    return folder
