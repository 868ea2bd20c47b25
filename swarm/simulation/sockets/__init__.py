"""Real sockets in network namespaces, joined by a link shaper. Linux and root only; see
`lab.py`."""
