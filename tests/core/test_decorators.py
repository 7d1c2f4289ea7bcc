"""`jaxgrad.accelerate`, `config.override` and `forward_mode` as decorators of functions, methods and objects."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from accelerated import convolve, convolve_arrays, passes
from flax import nnx

import jaxgrad
from jaxgrad._src.choice.settings import forward_mode_enabled
from jaxgrad._src.core.jax_internals import current_metadata
from jaxgrad._src.core.marks import is_accelerated

pytestmark = pytest.mark.jax_version

X, W = convolve_arrays()
DECORATORS = {
    "jaxgrad.accelerate": lambda: jaxgrad.accelerate(),
    "jaxgrad.config.override": lambda: jaxgrad.config.override(deterministic=True),
    "jaxgrad.forward_mode": lambda: jaxgrad.forward_mode(),
}
every_decorator = pytest.mark.parametrize("name", DECORATORS)


def _inside(name):
    """Whether this code runs inside the context."""
    return {
        "jaxgrad.accelerate": is_accelerated(current_metadata()),
        "jaxgrad.config.override": jaxgrad.config.current().deterministic,
        "jaxgrad.forward_mode": bool(forward_mode_enabled.value),
    }[name]


def _inside_any():
    return [name for name in DECORATORS if _inside(name)]


@every_decorator
def test_a_context_may_be_entered_again(name):
    context = DECORATORS[name]()
    with context, ThreadPoolExecutor(1) as pool:
        with context:
            assert _inside_any() == [name]
        assert pool.submit(_inside_any).result() == []
        assert pool.submit(context(_inside_any)).result() == [name]
        assert _inside_any() == [name]
    assert _inside_any() == []
    with pytest.raises(KeyError), context:
        raise KeyError
    assert _inside_any() == []
    assert context(_inside_any)() == [name]


@every_decorator
def test_a_block_is_left_in_the_thread_that_entered_it(name):
    context = DECORATORS[name]()
    with ThreadPoolExecutor(1) as pool, context:
        left = pool.submit(context.__exit__, None, None, None)
        with pytest.raises(RuntimeError, match="leaves a block that it has not entered"):
            left.result()


@every_decorator
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda context: pickle.loads(pickle.dumps(context))])
def test_copies_are_equal(name, copied):
    context = DECORATORS[name]()
    same = copied(context)
    assert same == context
    assert hash(same) == hash(context)
    assert [other() == context for other in DECORATORS.values()] == [other == name for other in DECORATORS]
    with same:
        assert _inside_any() == [name]


@every_decorator
@pytest.mark.parametrize("kind", ["class", "generator", "coroutine", "async generator"])
def test_functions_that_run_after_the_block_are_refused(name, kind):
    class Model:
        pass

    def generator():
        yield 1

    async def coroutine():
        return 1

    async def async_generator():
        yield 1

    functions = {"class": Model, "generator": generator, "coroutine": coroutine, "async generator": async_generator}
    with pytest.raises(TypeError, match=f"{name}: function must not be a {kind.removeprefix('async ')}"):
        DECORATORS[name]()(functions[kind])


class _Module(eqx.Module):
    def method(self):
        return _inside_any()

    def __call__(self):
        return _inside_any()


class _Model(nnx.Module):
    """An object with several kinds of attributes that can be called."""

    def __init__(self):
        self.child = _Module()
        self.function = _inside_any
        self.make = types.MethodType(_Module, self)  # binds a class

    def __call__(self):
        return _inside_any()

    def method(self):
        return _inside_any()

    partial = functools.partialmethod(method)

    @staticmethod
    def static():
        return _inside_any()

    @classmethod
    def of_class(cls):
        return _inside_any()

    def pieces(self):
        yield _inside_any()


@every_decorator
def test_methods_of_an_object(name):
    model = _Model()
    decorated = DECORATORS[name]()(model)
    for method in ("method", "partial", "__call__"):
        assert getattr(decorated, method)() == [name], method
    assert decorated.method.__self__ is model
    assert decorated.method == decorated.method
    assert decorated.method != model.method
    module = DECORATORS[name]()(_Module())
    for method in (module, module.method):
        assert method() == [name]
    for others in (decorated.child, decorated.function, decorated.static, decorated.of_class):
        assert others() == []
    assert next(decorated.pieces()) == []
    assert (decorated.pieces, decorated.make) == (model.pieces, model.make)
    assert repr(decorated).startswith(f"{name}(_Model(")


def _convolutions_on_kernels(function, *arguments):
    return set(jaxgrad.report(function, *arguments, platform="cpu").counts) == {"onednn"}


def test_jitted_methods_of_frameworks():
    class Layer(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(W)

        def __call__(self, x):
            return convolve(x, self.w[...])

        jitted = nnx.jit(__call__)

    class Module(eqx.Module):
        w: jax.Array

        def __call__(self, x):
            return convolve(x, self.w)

        jitted = eqx.filter_jit(__call__)

    for model in (Layer(), Module(jnp.asarray(W))):
        for jitted in (jaxgrad.accelerate(model).jitted, jaxgrad.accelerate(model.jitted)):
            assert _convolutions_on_kernels(jitted, X)
            assert jitted(X).shape == convolve(X, W).shape


class _Layer:
    def __init__(self):
        self.w = W

    def apply(self, x):
        return convolve(x, self.w)

    __call__ = apply

    @jaxgrad.accelerate
    def decorated(self, x):
        return convolve(x, self.w)


def _by_pickle(value, dumps=pickle.dumps):
    return pickle.loads(dumps(value))


def _by_cloudpickle(value):
    return _by_pickle(value, pytest.importorskip("cloudpickle").dumps)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": _by_pickle,
    "multiprocessing": functools.partial(_by_pickle, dumps=ForkingPickler.dumps),
    "cloudpickle": _by_cloudpickle,
}


def _ones(key, shape, dtype):
    return jnp.ones(shape, dtype)


_LINEN = nn.Conv(6, (3, 3), kernel_init=_ones, bias_init=_ones, param_dtype="float32")
_IMAGES = jnp.ones((2, 9, 7, 8), "float32")
_ACCELERATED = {
    "method": (jaxgrad.accelerate(_Layer().apply), (X,)),
    "method of an object": (jaxgrad.accelerate(_Layer()).apply, (X,)),
    "method of a decorated class": (_Layer().decorated, (X,)),
    "partial of a method": (functools.partial(jaxgrad.accelerate(_Layer().apply), X), ()),
    "two decorators": (jaxgrad.forward_mode()(jaxgrad.accelerate(_Layer().apply)), (X,)),
    "object": (jaxgrad.accelerate(_Layer()), (X,)),
    "pytree": (jaxgrad.accelerate(eqx.nn.Conv2d(3, 4, 3, key=jax.random.key(0), dtype="float32")), (X[0],)),
    "method of linen": (jaxgrad.accelerate(_LINEN.apply), (_LINEN.init(jax.random.key(0), _IMAGES), _IMAGES)),
}


@pytest.mark.each_value
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("what", _ACCELERATED)
def test_copies_are_accelerated(what, how):
    function, arguments = _ACCELERATED[what]
    assert _convolutions_on_kernels(COPIES[how](function), *arguments)


def test_a_copy_of_a_method_equals_it():
    method = jaxgrad.accelerate(_Layer().apply)
    assert copy.copy(method) == method
    assert type(copy.copy(method)) is types.MethodType
    assert copy.copy(_Layer().apply).__func__ is _Layer.apply


def test_a_function_by_its_name_in_a_module_and_copies_of_functions():
    assert pickle.loads(pickle.dumps(_Layer.decorated)) is _Layer.decorated
    function = jaxgrad.accelerate(lambda x: convolve(x, W))
    for copied in (copy.copy(function), copy.deepcopy(function)):
        assert _convolutions_on_kernels(copied, X)
    jitted = copy.copy(jaxgrad.accelerate(jax.jit(convolve)))
    assert passes(jitted.lower(X, W)) == {"forward": 1}


def test_the_names_of_an_object_are_listed():
    """As interactive sessions show them."""
    decorated = jaxgrad.accelerate(_LINEN)
    assert {"init", "apply", "bind", "features", "__wrapped__"} <= set(dir(decorated))


def test_forward_mode_is_a_decorator():
    def slope(x):
        return jax.jvp(lambda x: jaxgrad.conv_general_dilated(x, W, (1, 1), "SAME"), (x,), (x,))[1].shape

    for decorated in (jaxgrad.forward_mode(slope), jaxgrad.forward_mode()(slope)):
        assert decorated(X) == (2, 4, 9, 7)
        assert decorated.__name__ == "slope"
    with pytest.raises(TypeError, match=r"jaxgrad.forward_mode: function must be callable, got int"):
        jaxgrad.forward_mode(3)


def test_stages_of_an_object():
    """`lower` of an object that is not its own method."""
    jitted = jax.jit(convolve)

    class Proxy:
        def __call__(self, *arguments):
            return jitted(*arguments)

        def __getattr__(self, name):
            return getattr(jitted, name)

    attribute = Proxy()
    attribute.lower = jitted.lower
    for function in (Proxy(), attribute):
        assert passes(jaxgrad.accelerate(function).lower(X, W)) == {"forward": 1}
    assert passes(jaxgrad.accelerate(jax.pmap(convolve)).lower(X[None], W[None])) == {"forward": 1}


def test_attributes_are_read_without_their_code():
    class Child:
        def __getattr__(self, name):
            raise KeyError(name)

        def __call__(self):
            return 1

    class Parent:
        child = Child()

        def __call__(self):
            return 2

    assert jaxgrad.accelerate(Parent()).child() == 1


def test_partials_stay_partials():
    partial = jaxgrad.forward_mode()(functools.partial(lambda *values: (*values, _inside_any()), 1))
    assert type(partial) is functools.partial
    assert partial.args == (1,)
    assert partial(2) == (1, 2, ["jaxgrad.forward_mode"])
    named = functools.update_wrapper(functools.partial(_inside_any), _inside_any)
    assert jaxgrad.forward_mode()(named).__name__ == "_inside_any"
    with pytest.raises(TypeError, match="must not be a generator function, got"):
        jaxgrad.forward_mode()(functools.partial(_Model.pieces))


def test_functions_of_methods_are_freed():
    def make():
        def method(self):
            return _inside_any()

        return types.MethodType(method, "an object"), weakref.ref(method)

    method, function = make()
    assert jaxgrad.forward_mode()(method)() == ["jaxgrad.forward_mode"]
    del method
    gc.collect()
    assert function() is None


def test_an_attribute_of_the_name_decorator():
    model = _Model()
    decorated = jaxgrad.forward_mode()(model)
    decorated._decorator = 3
    assert model._decorator == decorated._decorator == 3
    assert decorated.method() == ["jaxgrad.forward_mode"]


def test_signature():
    @jaxgrad.config.override(deterministic=True)
    def function(x, *, y=2):
        """Docstring."""

    assert (function.__name__, function.__doc__) == ("function", "Docstring.")
    assert list(inspect.signature(function).parameters) == ["x", "y"]
