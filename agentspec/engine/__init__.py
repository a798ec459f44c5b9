"""One engine: assembled, then run in this process, on a thread, or in a process behind a socket. Every process boundary
is here, text work's too."""
