"""One engine: assembled, then run in this process, on a thread, or in a process behind a socket. All process boundaries
are in this package, that of text work included."""
