"""The version, read from the installed distribution so that pyproject.toml is its only source."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("jaxgrad")
except PackageNotFoundError:  # imported from a source tree that was never installed
    __version__ = "0+unknown"
