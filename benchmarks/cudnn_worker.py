"""cuDNN's RNN functions (cudnn_rnn.py) in a process of their own: an algorithm that crashes ends that process alone."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from benchmarks.cudnn_rnn import Problem

_START_SECONDS, _CANDIDATE_SECONDS = 180, 60  # time limits
_MOST_CRASHES = 2  # of an algorithm, which is not tried again


@dataclasses.dataclass(frozen=True)
class Found:
    """The fastest candidate of one pass.

    Attributes:
      name: the candidate, as "PERSIST_STATIC, packed, TF32, CUDA graph".
      outputs: its results, as in cudnn_rnn.Rnn.outputs.
      times_ms: of all candidates that work.
      failed: why the others do not.
    """

    name: str
    outputs: list[np.ndarray]
    times_ms: dict[str, float]
    failed: dict[str, str]


def why_not(platform: str) -> str | None:
    """Why cuDNN's functions cannot be called; None if they may."""
    if platform != "gpu":
        return "there is no GPU"
    return "torch is not installed" if find_spec("torch") is None else None


class Worker:
    """The process, which starts with the first problem and starts again where it ended."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Connection | None = None
        self._broken = ""
        self._crashes: dict[str, list[str]] = {}  # the reasons, by algorithm

    def measure(self, problem: Problem) -> dict[str, Found]:
        """Of each pass. Raises RuntimeError if no candidate works."""
        crashed = {name: reasons[-1] for name, reasons in self._crashes.items() if len(reasons) >= _MOST_CRASHES}
        while not self._broken:
            self._send((problem, crashed))
            candidate = None
            while True:
                try:
                    kind, value = self._receive(_CANDIDATE_SECONDS if candidate else _START_SECONDS)
                except _EndedError as error:
                    if candidate is None:
                        self._broken = f"cuDNN does not start: {error}"
                    else:
                        crashed[candidate] = str(error)
                        self._crashes.setdefault(candidate.split(",")[0], []).append(str(error))
                    break
                if kind == "found":
                    return value
                if kind == "failed":
                    raise RuntimeError(value)
                candidate = value
        raise RuntimeError(self._broken)

    def sample(self, which: str) -> float:
        """The seconds of one call of the fastest candidate of the last problem."""
        self._send(which)
        _, value = self._receive(_CANDIDATE_SECONDS)
        return value

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = self._pipe = None

    def _send(self, what: Any) -> None:
        if self._process is not None and not self._process.is_alive():
            self.close()
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        assert self._pipe is not None
        self._pipe.send(what)

    def _receive(self, seconds: int) -> Any:
        assert self._pipe is not None
        try:
            if self._pipe.poll(seconds):
                return self._pipe.recv()
            reason = f"took more than {seconds} s"
        except (EOFError, ConnectionError):
            self._process.join()
            reason = f"ended the process with exit code {self._process.exitcode}"
        self.close()
        raise _EndedError(reason)


class _EndedError(RuntimeError):
    pass


def _serve(pipe: Connection) -> None:
    """Answers problems and requests for samples."""
    from benchmarks import cudnn_rnn

    cudnn, fastest, on_gpu = None, {}, True
    while True:
        try:
            request = pipe.recv()
        except EOFError:  # nobody asks any more
            return
        if isinstance(request, str):
            run, calls = fastest[request].run, fastest[request].calls
            pipe.send(("seconds", cudnn_rnn.seconds_of(run, on_gpu) / calls))
            continue
        problem, crashed = request
        cudnn, fastest, on_gpu = cudnn or cudnn_rnn.load(), {}, problem.device == "cuda"
        try:
            found = measured(cudnn, problem, crashed, lambda candidate: pipe.send(("trying", candidate)), fastest)
        except RuntimeError as error:
            pipe.send(("failed", str(error)))
        else:
            pipe.send(("found", found))


def measured(
    cudnn: Any, problem: Problem, crashed: dict[str, str], trying: Any, fastest: dict[str, Any]
) -> dict[str, Found]:
    """The fastest candidates, which stay in `fastest`, by pass.

    `crashed` has the reasons of candidates, and of whole algorithms, that are not tried.
    """
    from benchmarks import cudnn_rnn

    on_gpu = problem.device == "cuda"
    failed, reference = dict(crashed), {}
    times: dict[str, dict[str, float]] = {which: {} for which in cudnn_rnn.PASSES}
    results: dict[str, Found] = {}
    for candidate in problem.candidates():
        if {str(candidate), candidate.algorithm} & set(crashed):
            continue
        trying(str(candidate))
        try:
            rnn = cudnn_rnn.Rnn(cudnn, problem, candidate)
            for which, function in rnn.functions().items():
                function()
                outputs = rnn.outputs(which)
                _check_agreement(outputs, reference.setdefault(which, outputs), problem.tolerance)
                timed = cudnn_rnn.timed(rnn, function, on_gpu)
                name = f"{candidate}, {timed.how}"
                times[which][name] = 1e3 * timed.seconds
                if which not in fastest or timed.seconds < fastest[which].seconds:
                    fastest[which] = timed
                    results[which] = Found(name, outputs, times[which], failed)
        except Exception as error:  # of cuDNN, PyTorch or ctypes
            failed[str(candidate)] = " ".join(str(error).split())[:200]
            if on_gpu:
                _end_if_cuda_is_broken()
    if missing := [which for which in cudnn_rnn.PASSES if which not in results]:
        raise RuntimeError(f"no algorithm of cuDNN computes {missing[0]}: {failed}")
    return results


def _end_if_cuda_is_broken() -> None:
    """After some errors every later call of the process fails."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        os._exit(1)


def _check_agreement(outputs: list[np.ndarray], reference: list[np.ndarray], tolerance: float) -> None:
    for i, (a, b) in enumerate(zip(outputs, reference, strict=True)):
        difference = np.linalg.norm(a - b) / np.linalg.norm(b)
        if not difference <= tolerance:
            raise RuntimeError(f"output {i} differs from that of the first candidate by {difference:.1e} of its norm")
