"""`festina`: the command line, and the pool that `festina up` starts on this machine."""
