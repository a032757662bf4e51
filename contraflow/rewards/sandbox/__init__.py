"""Runs programs that nobody trusts, and gives back bytes that nobody evaluates. `pool` is the side that asks.

A cell is a warm Python process that shut itself off (`room` or `landlock`); each program is a fork of it that gives up
everything else (`confine`, `seccomp`) and runs (`inside`). All but `pool` run in there, on the standard library alone.
"""
