"""Starts a script once a GPU: `python -m ampx_torch.apex.parallel.multiproc train.py --its --arguments`.

As apex did, it gives each process `--world-size` and `--rank`, and the output of all but the first goes to files
`GPU_<rank>.log`. The processes are started by `ampx run`, so that they find `apex`. torchrun is today's way.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from ampx.errors import InvalidOptionError


def main(arguments: Sequence[str]) -> int:
    """Start a process for each GPU, or `--world-size`; when one fails end the others and return its exit code."""
    count, options = _options(arguments)
    workers: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        for rank in range(count):
            output = None if rank == 0 else stack.enter_context(open(f"GPU_{rank}.log", "wb"))
            command = [sys.executable, "-m", "ampx", "run", *options, "--rank", str(rank)]
            workers.append(subprocess.Popen(command, stdout=output))
            stack.callback(workers[-1].wait)
            stack.callback(workers[-1].terminate)
        while True:
            codes = [worker.poll() for worker in workers]
            failed = next((code for code in codes if code), 0)
            if failed or None not in codes:
                return failed
            time.sleep(0.1)


def _options(arguments: Sequence[str]) -> tuple[int, list[str]]:
    """Return how many processes to start, and the script with its arguments, `--world-size` among them."""
    count = torch.cuda.device_count()
    options = list(arguments)
    if "--world-size" in options:
        count = int(options[options.index("--world-size") + 1])
    else:
        options += ["--world-size", str(count)]
    if not arguments or count < 1:
        raise InvalidOptionError(
            f"multiproc got {' '.join(arguments) or 'nothing'} and finds {torch.cuda.device_count()} GPUs; accepted: a "
            f"script with its arguments, --world-size N among them where there is no GPU. Pass these."
        )
    return count, options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
