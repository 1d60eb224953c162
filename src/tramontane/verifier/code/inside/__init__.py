"""Code that runs inside a sandbox: it imports only itself and the standard library.

`runner` is the first process, and executes Python programs; `program_side` and `tests_side` are the
two halves of a function test, imported only for one. `records` and `lockdown` import nothing else.
"""
