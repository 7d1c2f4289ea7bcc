"""What `jax.export` must be told of jaxgrad's custom calls."""

from __future__ import annotations

from jax import export

from jaxgrad import _ffi


def export_disabled_checks() -> list[export.DisabledSafetyCheck]:
    """The safety checks of `jax.export` that a program with jaxgrad's ops needs disabled.

    JAX refuses to export a custom call that it does not know, for it cannot promise that a later version runs it.
    jaxgrad's own calls keep their names and operands within a version of jaxgrad; a module exported with one is for
    processes that have imported the same one, which registers the handlers.

    Returns:
      One exemption for each handler that this build of jaxgrad registers, for the CPU and for CUDA.

    Example:
      >>> from jax import export
      >>> step = jax.jit(lambda x, w: jaxgrad.conv_general_dilated(x, w, (1, 1), "SAME"))
      >>> shapes = jax.ShapeDtypeStruct((8, 3, 32, 32), "float32"), jax.ShapeDtypeStruct((16, 3, 3, 3), "float32")
      >>> exported = export.export(step, disabled_checks=jaxgrad.export_disabled_checks())(*shapes)
    """
    targets = sorted({*_ffi.cpu_targets(), *_ffi.cuda_targets()})
    return [export.DisabledSafetyCheck.custom_call(target) for target in targets]
