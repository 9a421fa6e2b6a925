"""Models on the hub without their weights: configurations, and the headers of safetensors."""

import json
import shutil
from pathlib import Path

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_SMALL_FILES = [_CONFIG, _INDEX, "hf_quant_config.json", "*.py"]


def find_cached(name: str) -> Path | None:
    """Return the folder of a hub model whose weights have been downloaded, or None."""
    from huggingface_hub import try_to_load_from_cache  # takes 0.1 s to import

    config = try_to_load_from_cache(name, _CONFIG)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    files = {_WEIGHTS}
    if (folder / _INDEX).is_file():
        files = {*json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()}
    return folder if all((folder / file).is_file() for file in files) else None


def download_headers(name: str, folder: Path) -> Path:
    """Write the configuration of a hub model to `folder`, and its safetensors with a hole in place of the data.

    The holes have the length of the data and take no space. They are zeros when they are read.
    """
    from huggingface_hub import HfApi  # takes 0.1 s to import

    hub = HfApi()
    small_files = hub.snapshot_download(name, allow_patterns=_SMALL_FILES)
    shutil.copytree(small_files, folder, dirs_exist_ok=True)
    for file, header in hub.get_safetensors_metadata(name).files_metadata.items():
        if Path(file).name != file:  # mlx-lm reads no others, and the name may point out of the folder
            continue
        tensors = {
            tensor: {"dtype": info.dtype, "shape": info.shape, "data_offsets": info.data_offsets}
            for tensor, info in header.tensors.items()
        }
        encoded = json.dumps(tensors).encode()
        data_nbytes = max((info.data_offsets[1] for info in header.tensors.values()), default=0)
        with (folder / file).open("wb") as out:
            out.write(len(encoded).to_bytes(8, "little") + encoded)
            out.truncate(8 + len(encoded) + data_nbytes)
    return folder
