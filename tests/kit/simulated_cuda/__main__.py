"""`python -m simulated_cuda FOLDER SCRIPT [ARGUMENTS]` runs a script with the device; FOLDER keeps what is built."""

import pathlib
import runpy
import sys

import simulated_cuda

if __name__ == "__main__":
    simulated_cuda.start(pathlib.Path(sys.argv[1]))
    del sys.argv[:2]
    runpy.run_path(sys.argv[0], run_name="__main__")
