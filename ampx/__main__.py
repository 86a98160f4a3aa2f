"""`python -m ampx`, the same command as `ampx`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("ampx.cli", run_name="__main__")
