"""The exemptions that `jax.export` needs for jaxgrad's custom calls."""

from __future__ import annotations

from jax import export

from jaxgrad._src.native import cpu, cuda


def export_disabled_checks() -> list[export.DisabledSafetyCheck]:
    """Returns the safety checks that `jax.export.export` must disable for programs with jaxgrad's ops.

    JAX refuses to export custom calls that it does not know, because it cannot promise that later versions run them.
    The names and operands of jaxgrad's handlers are stable within one version of jaxgrad. A process that runs the
    exported program must import the same version.

    Returns:
      One exemption for each CPU and CUDA handler of this build of jaxgrad.

    Examples:
      >>> from jax import export
      >>> step = jax.jit(lambda x, w: jaxgrad.conv_general_dilated(x, w, (1, 1), "SAME"))
      >>> shapes = jax.ShapeDtypeStruct((8, 3, 32, 32), "float32"), jax.ShapeDtypeStruct((16, 3, 3, 3), "float32")
      >>> exported = export.export(step, disabled_checks=jaxgrad.export_disabled_checks())(*shapes)
    """
    targets = sorted((*cpu.targets(), *cuda.targets()))
    return [export.DisabledSafetyCheck.custom_call(target) for target in targets]
