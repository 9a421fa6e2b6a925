#!/bin/bash
# Install mlx for CUDA on a bare Linux machine without a network, from a folder of wheels, and run benchmarks.gpu:
#
#   benchmarks/gpu/install.sh WHEELS TARGET [FLAG...]
#
# WHEELS holds wheels, large ones in parts (split -b 45M -d NAME.whl NAME.whl.part); README.md says how to fetch them.
# TARGET is a folder for the packages. Parts may arrive in several calls: TARGET/wheels keeps what there was.
set -euo pipefail
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
wheels=$1 target=$2
shift 2
mkdir -p "$target/wheels"
cp "$wheels"/* "$target/wheels/"
target=$(cd "$target" && pwd)

cd "$target/wheels"
for first in *.part00; do
  [ -e "$first" ] || break
  wheel=${first%.part00}
  cat "$wheel".part?? > "$wheel"
  python3 -m zipfile -t "$wheel" > /dev/null 2>&1 || { echo "$wheel lacks parts; run this again with a folder of them" >&2; exit 1; }
done
# What the machine has stays: nothing is resolved, and a package that is missing is named when it is imported.
python3 -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$target" ./*.whl

# mlx looks for NVIDIA's libraries next to itself, and its compiler for CUDA's headers.
if [ ! -e "$target/nvidia" ]; then
  nvidia=$(python3 -c 'import nvidia; print(list(nvidia.__path__)[-1])' 2> /dev/null || true)
  [ -z "$nvidia" ] || ln -s "$nvidia" "$target/nvidia"
fi
for folder in /usr/local/cuda "$target/nvidia/cu13"; do
  [ ! -d "$folder/include" ] || export CUDA_HOME=${CUDA_HOME:-$folder}
done

# transformers is there for tokenizers alone; PyTorch would take longer to import than all else.
export USE_TORCH=0 USE_TF=0 HF_HUB_OFFLINE=1
cd "$checkout"
PYTHONPATH=$target${PYTHONPATH:+:$PYTHONPATH} exec python3 -m benchmarks.gpu "$@"
