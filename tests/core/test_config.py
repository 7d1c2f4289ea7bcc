"""`jaxgrad.config`: valid values, defaults, and the scope of `update` and `override`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxgrad import config


@pytest.fixture(autouse=True)
def _defaults():
    before = config.current()
    yield
    config.update(**vars(before))


def test_the_defaults():
    assert config.current() == config.Settings(None, None, False, None)


def test_update_reaches_every_thread_and_override_its_own():
    config.update(search="exhaustive")
    with config.override(deterministic=True, search="default") as settings, ThreadPoolExecutor(1) as pool:
        assert settings == config.current() == config.Settings("default", None, True)
        assert pool.submit(config.current).result() == config.Settings("exhaustive")
        with config.override(workspace_limit=0):
            assert config.current() == config.Settings("default", 0, True)
    assert config.current() == config.Settings("exhaustive")


def test_an_override_ends_with_an_error():
    with pytest.raises(KeyError), config.override(deterministic=True):
        raise KeyError
    assert not config.current().deterministic


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"search": "fast"},
            ValueError,
            "search must be one of 'heuristic', 'exhaustive', 'default' or None, got 'fast'",
        ),
        ({"workspace_limit": -1}, ValueError, "workspace_limit must not be negative, got -1"),
        ({"workspace_limit": 1.5}, TypeError, "workspace_limit must be an int, bytes, or None, got float"),
        ({"workspace_limit": True}, TypeError, "workspace_limit must be an int, bytes, or None, got bool"),
        ({"deterministic": 1}, TypeError, "deterministic must be a bool, got int"),
        ({"plan_cache_dir": 1}, TypeError, "plan_cache_dir must be a path or None, got int"),
        (
            {"speed": 1},
            TypeError,
            "speed is none of the settings, search, workspace_limit, deterministic, plan_cache_dir",
        ),
    ],
)
def test_invalid_settings(changes, error, message):
    with pytest.raises(error, match=message):
        config.update(**changes)
    if "plan_cache_dir" not in changes:
        with pytest.raises(error, match=message), config.override(**changes):
            pass
    assert config.current() == config.Settings()


def test_plan_cache_dir_is_process_wide(tmp_path, run_python):
    message = r"plan_cache_dir is of the whole process, jaxgrad.config.update sets it"
    with pytest.raises(ValueError, match=message), config.override(plan_cache_dir=tmp_path):
        pass
    config.update(plan_cache_dir=tmp_path)
    assert config.current().plan_cache_dir == str(tmp_path)
    script = "from jaxgrad import config; print(repr(config.current().plan_cache_dir))"
    assert run_python(script, JAXGRAD_PLAN_CACHE_DIR="/a/path").stdout.strip() == "'/a/path'"
    assert run_python(script, JAXGRAD_PLAN_CACHE_DIR="").stdout.strip() == "None"
