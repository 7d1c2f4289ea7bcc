"""What test_benchmark_cudnn.py runs in another process, which starts faster without JAX and PyTorch."""

from __future__ import annotations


def serve(pipe):
    """Ends at once without candidates, and at each candidate that is a number, with this exit code."""
    while True:
        candidates, crashed = pipe.recv()
        if not candidates:
            raise SystemExit(3)
        for candidate in candidates:
            pipe.send(("trying", candidate))
            if candidate.isdecimal() and candidate not in crashed:
                raise SystemExit(int(candidate))
        pipe.send(("found", crashed))
