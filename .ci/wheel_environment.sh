# Sourced by scripts for machines with a GPU: `install_wheel WHEEL FOLDER` makes a virtual environment in FOLDER with the
# wheel beside the packages that are there, without a package index, and sets `python`.
install_wheel() {
  local wheel=$1 folder=$2
  python3 -m venv "$folder" || return 1
  python=$folder/bin/python
  # The packages that are there, even where python3 is that of a virtual environment itself.
  python3 -c 'import site; print(site.getsitepackages()[0])' > "$("$python" -c 'import site; print(site.getsitepackages()[0])')/base.pth"
  "$python" -m pip install --quiet --no-index --no-deps "$wheel"
}
