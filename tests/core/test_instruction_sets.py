"""The CPU kernels with each instruction set that they are compiled for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from thorough import thorough_after

_NEEDS = {
    "avx512": {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx2", "fma", "f16c"},
    "avx2": {"avx2", "fma", "f16c"},
    "baseline": set(),
}

_SCRIPT = """
import os
import jax
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_disable_most_optimizations", True)  # for the references
from gru_cases import Case
from pool_cases import CASES, assert_maxima, assert_same_bits, make_inputs, value_and_gradient
from tolerances import DTYPES
from gru_running import check
from backends import CPU_KERNEL
from jaxgrad import _cpu

found = _cpu.build_info()["instruction_set"]
assert found == os.environ["EXPECTED"], f"runs on {found}"
for i, sizes in enumerate(((3, 9, 5, 3), (4, 21, 33, 50))):
    for j, dtype in enumerate(DTYPES):
        direction = "forward" if dtype == "bfloat16" else "reverse" if dtype == "float16" else "bidirectional"
        check(CPU_KERNEL, Case(*sizes, direction, linear_before_reset=(i + j) % 2 == 1), dtype)
for i, case in enumerate(CASES):
    x, dy = make_inputs(case, list(DTYPES)[i % 4])
    y, dx = value_and_gradient(case.op(implementation="cpu"), x, dy)
    expected_y, expected_dx = value_and_gradient(case.lax, x, dy)
    assert_maxima(case, x, y, expected_y)
    assert_same_bits(dx, expected_dx)
print(found)
"""


def _machine_has() -> set[str]:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^flags\s*:(.*)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return set(found.group(1).split()) if found else set()


# All other tests of the kernels run on the widest set.
_WIDEST = next(name for name, needs in _NEEDS.items() if needs <= _machine_has())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough) if name == _WIDEST else name for name in _NEEDS]
)
def test_values_and_gradients(run_python, name):
    if missing := _NEEDS[name] - _machine_has():
        pytest.skip(f"this machine lacks {', '.join(sorted(missing))}")
    done = run_python(_SCRIPT, JAXGRAD_CPU_ISA=name, EXPECTED=name, JAX_PLATFORMS="cpu")
    assert done.stdout.split() == [name]


def test_default_is_the_widest_instruction_set(run_python):
    script = "import os; os.environ.pop('JAXGRAD_CPU_ISA', None)\nfrom jaxgrad import _cpu\n"
    assert run_python(script + "print(_cpu.build_info()['instruction_set'])").stdout.split() == [_WIDEST]


@pytest.mark.parametrize("name", ["avx51", "AVX2"])
def test_an_unknown_name_is_an_error(run_python, name):
    script = "try:\n    import jaxgrad\nexcept ValueError as error:\n    print(error)"
    expected = f"jaxgrad: JAXGRAD_CPU_ISA must be 'avx512', 'avx2' or 'baseline', got '{name}'"
    assert run_python(script, JAXGRAD_CPU_ISA=name).stdout.strip() == expected


@pytest.mark.parametrize("name", thorough_after(2, ["", *_NEEDS]))
def test_known_names_are_no_error(run_python, name):
    """The name is an upper bound, so one that the processor lacks is no error. An empty value is no bound."""
    assert run_python("from jaxgrad import _cpu\nprint(_cpu.isa_error())", JAXGRAD_CPU_ISA=name).stdout.strip() == ""
