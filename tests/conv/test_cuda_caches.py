"""Caches of plans and kernels: they are bounded, JAX clears them, and calls run while another thread fills them.

With the fakes of fake_cuda.c; no GPU is needed.
"""

from __future__ import annotations

import pytest
from cuda_module import NEEDS_CUDA_MODULE

pytestmark = NEEDS_CUDA_MODULE


@pytest.fixture
def run(on_fake_cuda):
    """Runs a script in a process of its own and returns the values that it passes to `report`."""
    return lambda script, **environment: on_fake_cuda("import os\nfrom fake_gpu import *\n" + script, **environment)


_DEPTHWISE_PLAN = """
def depthwise_plan(length, batch=2, device=0):
    spec = (0, 2, 1)
    geometry = ConvGeometry(spec, (0, 2, 1), spec, (1,), ((1, 1),), (1,), 16, (length,), (3,))
    problem = ConvProblem(geometry, batch, 16, 16, jnp.dtype("float32"))
    return cuda.module.depthwise_weight_gradient_plan(device, 0, problem.shapes, geometry.attributes())

capacity = cuda.module.depthwise_plan_cache_info()["capacity"]
"""
_TIME_CANDIDATES = "engine(new_size())"
_UNLOAD_KERNELS = "cuda.module.clear_caches()"


@pytest.mark.parametrize(
    ("delay", "work"),
    [("waiting", _TIME_CANDIDATES), ("freeing", _TIME_CANDIDATES), ("freeing", _UNLOAD_KERNELS)],
    ids=["measurements", "frees", "kernels"],
)
def test_calls_run_while_another_thread_waits_for_the_device(run, delay, work):
    """Every measurement takes 0.3 s here, or every release of memory or of a kernel. Other calls run meanwhile."""
    found = run(f"""
import threading, time
{_DEPTHWISE_PLAN}
def work():
    {work}

for length in range(9, 15):
    depthwise_plan(length)
step = Step(gradients=False)
step.run()
fake.fake_{delay}(0.3)
start = time.perf_counter()
other = threading.Thread(target=work)
other.start()
time.sleep(0.1)
times = []
while other.is_alive():
    before = time.perf_counter()
    assert step.run() == "right"
    times.append(time.perf_counter() - before)
report(times=sorted(times), all=time.perf_counter() - start)
""")
    assert found["all"] > 0.5
    assert len(found["times"]) > 4
    assert found["times"][-2] < 0.2  # one call may wait for a core


def test_plans_are_bounded(run):
    """One plan for each size, of which the caches keep those used last."""
    found = run(
        """
capacity = jaxgrad.plan_cache_info()["cudnn"]["capacity"]
counts = []
for size in range(9, 9 + 2 * capacity + 100):
    engine(size, "heuristic")
    if size in (9 + capacity, 9 + 2 * capacity):
        counts.append(fake.fake_descriptors())
report(counts=counts, capacity=capacity, info=jaxgrad.plan_cache_info()["cudnn"]["size"])
""",
        FAKE_NVRTC="6",
    )  # no engine is checked, which would take minutes here
    assert found["info"] == found["capacity"]
    first, second = found["counts"]
    assert abs(second - first) < 0.1 * first


def test_depthwise_modules_are_bounded(run):
    """One module for each length and for all batch sizes of one tiling. The caches keep those used last."""
    found = run(f"""
{_DEPTHWISE_PLAN}
for batch in range(64, 128):
    depthwise_plan(64, batch)
of_batches = fake.fake_modules()
for length in range(9, 9 + capacity + 50):
    depthwise_plan(length)
size = cuda.module.depthwise_plan_cache_info()["size"]
report(of_batches=of_batches, modules=fake.fake_modules(), capacity=capacity, size=size)
""")
    assert found["size"] == found["capacity"]
    assert found["modules"] <= found["capacity"] + 64
    assert found["of_batches"] < 10


def test_kernels_of_one_device_do_not_evict_those_of_another(run):
    """Unloading a kernel waits until its GPU is idle, and that GPU may be waiting for the other one."""
    found = run(f"""
{_DEPTHWISE_PLAN}
depthwise_plan(9, device=1)
for length in range(9, 9 + capacity + 50):
    depthwise_plan(length)
full = cuda.module.depthwise_plan_cache_info()
depthwise_plan(9, device=1)
again = cuda.module.depthwise_plan_cache_info()
report(one=capacity, size=full["size"], capacity=full["capacity"], hits=again["hits"] - full["hits"])
""")
    assert found["hits"] == 1
    assert found["size"] == found["one"] + 1
    assert found["capacity"] == 2 * found["one"]


_DEPTHWISE_GRADIENT = """
x, w = jnp.ones((2, 9, 8, 16)), jnp.ones((3, 3, 1, 16))
settings = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}

def loss(x, w):
    return jnp.sum(jaxgrad.conv_general_dilated(x, w, **settings, feature_group_count=16, implementation="cuda"))

gradient = jax.jit(jax.grad(loss, 1)).lower(x, w).compile()
"""


def test_depthwise_modules_of_cuda_graphs_are_kept(run):
    """A graph that was captured runs the code of its module later."""
    found = run(f"""
{_DEPTHWISE_GRADIENT}
jax.block_until_ready(gradient(x, w))
before = jaxgrad.plan_cache_info()["cudnn"]["recorded"]
fake.fake_capture(1)
for _ in range(2):
    jax.block_until_ready(gradient(x, w))
report(found=[before, jaxgrad.plan_cache_info()["cudnn"]["recorded"]])
""")["found"]
    assert found == [0, 1]


_DEPTHWISE = """
def depthwise_plans(length):
    spec = (0, 2, 1)
    geometry = ConvGeometry(spec, (0, 2, 1), spec, (1,), ((1, 1),), (1,), 16, (length,), (3,))
    problem = ConvProblem(geometry, 2, 16, 16, jnp.dtype("float32"))
    cuda.module.depthwise_weight_gradient_plan(0, 0, problem.shapes, geometry.attributes())
    cuda.module.prepare_depthwise_convolution(0, 0, 0, False, problem.shapes, geometry.attributes())

def sizes():
    infos = "conv", "depthwise", "depthwise_convolution"
    return [getattr(cuda.module, f"{name}_plan_cache_info")()["size"] for name in infos]
"""


def test_jax_clears_plans_and_kernels(run):
    """Programs that were compiled before make their plans anew."""
    found = run(f"""
{_DEPTHWISE}
step = Step()
step.run()
modules = fake.fake_modules()  # of the reference
for _ in range(3):
    engine(new_size())
    depthwise_plans(new_size())
before, loaded = sizes(), fake.fake_modules() - modules
jax.clear_caches()
after, descriptors, kept = sizes(), fake.fake_descriptors(), fake.fake_modules() - modules
report(before=before, loaded=loaded, after=after, descriptors=descriptors, kept=kept,
       ran=[step.run(), step.run()], again=sizes())
""")
    assert min(found["before"]) > 0
    assert found["loaded"] >= 2
    assert found["after"] == [0, 0, 0]
    assert found["descriptors"] == found["kept"] == 0
    assert found["ran"] == ["right", "right"]
    assert found["again"][0] == 3


def test_a_plan_of_a_cuda_graph_stays_in_its_cache(run):
    """A new recording takes the same plan and not another one, which would stay for good too."""
    found = run("""
step = Step()
step.run()
fake.fake_capture(1)
counts = []
for _ in range(3):
    ran = step.run()
    jax.clear_caches()
    counts.append([ran, fake.fake_descriptors(), jaxgrad.plan_cache_info()["cudnn"]["recorded"]])
report(counts=counts)
""")
    (ran, descriptors, recorded), *others = found["counts"]
    assert ran == "right"
    assert recorded == 3
    assert descriptors > 0
    assert others == [[ran, descriptors, recorded]] * 2


def test_a_kernel_of_a_cuda_graph_stays_in_its_cache(run):
    found = run(f"""
{_DEPTHWISE_GRADIENT}
fake.fake_capture(1)
counts = []
for _ in range(3):
    jax.block_until_ready(gradient(x, w))
    jax.clear_caches()
    counts.append([fake.fake_modules(), jaxgrad.plan_cache_info()["cudnn"]["recorded"]])
report(counts=counts)
""")
    first, *others = found["counts"]
    assert first[1] == 1
    assert others == [first] * 2


def test_a_plan_that_replaced_one_stays_in_its_cache(run):
    """Otherwise the engine would run again that failed to run."""
    found = run("""
step = Step(gradients=False)
fail("cudnnBackendExecute", 1, 5000)
first = step.run()
fail(None)
replaced = cuda.module.conv_plan_cache_info()["size"]
jax.clear_caches()
report(first=first, replaced=replaced, size=cuda.module.conv_plan_cache_info()["size"], ran=step.run())
""")
    assert found["first"] == found["ran"] == "right"
    assert found["replaced"] >= found["size"] == 1


def test_caches_are_cleared_while_calls_run(run):
    found = run("""
import threading
step, results = Step(), []

def run_often():
    results.extend(step.run() for _ in range(20))

threads = [threading.Thread(target=run_often) for _ in range(2)]
for thread in threads:
    thread.start()
cleared = 0
while any(thread.is_alive() for thread in threads):
    cuda.module.clear_caches()
    cleared += 1
report(results=results, cleared=cleared)
""")
    assert found["results"] == ["right"] * 40
    assert found["cleared"] > 5


def test_plans_are_not_destroyed_when_the_process_ends(run):
    """That would wait for the GPUs. JAX clears its caches then."""
    found = run("""
import atexit
step = Step()
step.run()
before = cuda.module.conv_plan_cache_info()["size"]
atexit._run_exitfuncs()
report(before=before, after=cuda.module.conv_plan_cache_info()["size"])
""")
    assert found["before"] == found["after"] > 0


def test_the_import_alone_lets_jax_clear_the_caches(run_python):
    """Programs that were exported run the handlers without the ops."""
    run_python("""
import jaxgrad
from jax._src import util
found = [type(cache).__name__ for cache in util._caches]
assert found.count("_PlanCaches") >= 1, found
""")
