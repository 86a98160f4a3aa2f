"""Rewrite training scripts written for other mixed-precision APIs into calls of ampx.

Everything happens on LibCST's concrete syntax tree, so that what is not rewritten keeps every byte. A dialect module
knows one old API: it reads the tree, and plans edits or says what needs a human. Nothing is edited until all
dialects have read the file; if one of them meets something it does not fully understand, the file stays as it is.
"""
