"""Rewrite training scripts written for other mixed-precision APIs into calls of ampx.

Everything is decided on Python's own syntax trees and done to the text, so that what is not rewritten keeps every
byte. A dialect module knows one old API: it reads the files of a program, and plans edits or says what needs a human.
Nothing is edited until all dialects have read all files; if one of them meets something it does not fully
understand, the program stays as it is.
"""
