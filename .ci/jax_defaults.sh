# Sourced by .ci/run and .ci/gpu: the arguments of pytest for some tests of every op with JAX's defaults.
jax_defaults=(--jax-defaults -k 'not xla_on' tests/{norm,gru}/test_values.py tests/gru/test_batch_major.py
  tests/conv/test_random_cases.py tests/{core,accelerate}/test_transforms.py)
