"""Trains the network of train_digits_cnn.py with each batch spread over all devices, of one process or of several.

The training step is the same function: `jit` over a mesh splits it. Each device works on its own digits, the gradients
of the weights are summed over the devices, and batch normalization takes the statistics of the whole batch, so that the
losses are those of one device.

  pip install ".[examples]"
  python examples/train_data_parallel.py
  XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/train_data_parallel.py

With several processes, on one machine or more, each is started with its own number:

  python examples/train_data_parallel.py --processes 2 --process 0 --coordinator localhost:9876 &
  python examples/train_data_parallel.py --processes 2 --process 1 --coordinator localhost:9876

A process takes all the GPUs that it sees: on one machine CUDA_VISIBLE_DEVICES=0 and =1 give each of two its own.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence

import digits
import jax
import train_digits_cnn as cnn
import training
from jax.sharding import AxisType

import jaxgrad


def main(arguments: Sequence[str] | None = None) -> None:
    description = "Trains a convolutional network to read handwritten digits, over all devices that there are."
    parser = cnn.argument_parser(description, "train_data_parallel.png")
    parser.add_argument("--processes", type=training.positive_int, default=1, help="how many train together")
    parser.add_argument("--process", type=int, default=0, help="which of them this one is, from 0")
    parser.add_argument("--coordinator", default="localhost:9876", help="the address of the one with number 0")
    args = parser.parse_args(arguments)
    if not 0 <= args.process < args.processes:
        parser.error(f"argument --process: must lie in [0, {args.processes}), got {args.process}")
    if args.processes > 1:
        jax.distributed.initialize(args.coordinator, args.processes, args.process)
    # Every process does the same work; only the first one prints.
    with contextlib.nullcontext() if args.process == 0 else contextlib.redirect_stdout(io.StringIO()):
        implementation = digits.implementation(
            args, jaxgrad.conv_general_dilated, jaxgrad.batch_norm_training, jaxgrad.batch_norm_inference
        )
        data = digits.load(args.seed)
        devices = jax.device_count()
        if args.batch_size % devices:
            parser.error(f"argument --batch-size: must be a multiple of the {devices} devices, got {args.batch_size}")
        mesh = jax.make_mesh((devices,), ("batch",), axis_types=(AxisType.Auto,))
        print(f"devices: {devices}, of {args.processes} process{'es' if args.processes > 1 else ''}")
        history = cnn.train(data, args, implementation, mesh)
        print(f"training loss: {history[-1].train_loss:.5f}")
        digits.print_accuracy(history, data)
        digits.print_step_time(history)
        if args.process == 0:
            digits.save_curves(history, args.plot)
            print(f"curves: {args.plot}")


if __name__ == "__main__":
    main()
