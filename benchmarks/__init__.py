"""A script a question. Each runs what it compares in turn in one run, prints a table, and keeps JSON and a picture.

To add one: take `safeload.benching.bench` with the ways that answer the question (a new way of others goes to
`safeload/peers.py`, one of safeload's own to `safeload.benching`), state the question in the first line of the module's
docstring and the command in its second paragraph, and keep what it found in `results/`, also where it is not what was
hoped for.
"""
