"""Code that runs inside a sandbox: it imports only itself and the standard library.

`runner` is the first process. `interpreter` executes a Python program; `program_side` and
`tests_side` are the two halves of a function test. Imports form a tree, with `descriptors`,
`wire` and `lockdown` at its leaves.
"""
