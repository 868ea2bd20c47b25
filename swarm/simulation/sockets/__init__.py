"""The wide-area network under real sockets: hosts in network namespaces, joined by a link shaper.

Needs Linux and root. `lab.py` is the way in; `lab_process.py` owns the namespaces, so that all of
it is gone when that process is.
"""
