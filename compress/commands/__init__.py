"""One module a command: its function of the same name, and `show`, of a group.

They import torch inside the functions, so that `--help` is quick.
"""
