"""`jaxgrad.config`: valid values, defaults, and the scope of `update` and `override`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from jaxgrad import config

pytestmark = pytest.mark.jax_version


@pytest.fixture(autouse=True)
def _defaults():
    before = config.current()
    yield
    config.update(**vars(before))


def test_the_defaults():
    assert config.current() == config.Settings(None, None, False, None)


def test_the_module_lists_its_public_names_only():
    assert [name for name in dir(config) if not name.startswith("__")] == sorted(config.__all__)


def test_update_reaches_every_thread_and_override_its_own():
    config.update(search="exhaustive")
    with config.override(deterministic=True, search="fallback") as settings, ThreadPoolExecutor(1) as pool:
        assert settings == config.current() == config.Settings("fallback", None, True)
        assert pool.submit(config.current).result() == config.Settings("exhaustive")
        with config.override(workspace_limit=0):
            assert config.current() == config.Settings("fallback", 0, True)
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
            "search must be one of 'heuristic', 'exhaustive', 'fallback' or None, got 'fast'",
        ),
        ({"workspace_limit": -1}, ValueError, r"workspace_limit must lie in \[0, 2\^63\), got -1"),
        (
            {"workspace_limit": 1 << 63},
            ValueError,
            r"workspace_limit must lie in \[0, 2\^63\), got 9223372036854775808",
        ),
        ({"plan_cache_dir": "a\0b"}, ValueError, r"plan_cache_dir must not contain a null character, got 'a\\x00b'"),
        ({"workspace_limit": 1.5}, TypeError, r"workspace_limit must be an int \(bytes\) or None, got float"),
        ({"workspace_limit": True}, TypeError, r"workspace_limit must be an int \(bytes\) or None, got bool"),
        ({"deterministic": 1}, TypeError, "deterministic must be a bool, got int"),
        ({"plan_cache_dir": 1}, TypeError, "plan_cache_dir must be a path or None, got int"),
        ({"plan_cache_dir": b"/\xff"}, ValueError, r"plan_cache_dir must be valid UTF-8, got '/\\udcff'"),
        ({"tuning": "tuning.json"}, TypeError, "tuning must be a jaxgrad.Tuning or None, got str"),
        (
            {"speed": 1},
            TypeError,
            "unknown setting 'speed'; the settings are search, workspace_limit, deterministic, plan_cache_dir, tuning",
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
    message = r"plan_cache_dir applies to the whole process; set it with jaxgrad.config.update"
    with pytest.raises(ValueError, match=message), config.override(plan_cache_dir=tmp_path):
        pass
    config.update(plan_cache_dir=tmp_path)
    assert config.current().plan_cache_dir == str(tmp_path)
    script = "from jaxgrad import config; print(repr(config.current().plan_cache_dir))"
    assert run_python(script, JAXGRAD_PLAN_CACHE_DIR="/a/path").stdout.strip() == "'/a/path'"
    assert run_python(script, JAXGRAD_PLAN_CACHE_DIR="").stdout.strip() == "''"  # no directory


@jax.jit
def _traced(x):
    """A function whose result says with which settings it was traced."""
    return x + config.current().deterministic


def test_a_jitted_function_follows_the_settings():
    """`override` and `update` reach functions that were traced before."""
    x = jnp.zeros(())
    assert _traced(x) == 0
    with config.override(deterministic=True):
        assert _traced(x) == 1
    assert _traced(x) == 0
    config.update(deterministic=True)
    assert _traced(x) == 1


def test_the_former_name_of_the_fallback_search():
    with pytest.warns(DeprecationWarning, match='search="default" is now called search="fallback"') as caught:
        config.update(search="default")
    assert config.current().search == "fallback"
    assert caught[0].filename == __file__
