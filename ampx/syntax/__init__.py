"""Python files as they are written: their text, their syntax trees, what a name stands for, where a value comes from.

Read by `ampx migrate` and `ampx lint`; no file is run, and no framework is needed.
"""
