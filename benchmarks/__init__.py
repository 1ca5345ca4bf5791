"""A script a question. Each runs what it compares in turn in one run, prints a table, and keeps JSON and a picture.

To add one: take `safeload.benching.bench` with the ways that answer the question (a way written by hand goes to
`safeload/peers.py`, one of another library to `safeload/streamers.py`, one of safeload's own to `safeload/racing.py`;
each is held to what `from_pretrained` loads before it is timed), state the question in the first line of the module's
docstring and the command in its second paragraph, and keep what it found in `results/`, with the command, the machine
and the versions, also where it is not what was hoped for.
"""
