"""The connection of a process to balloond, which outlives balloond.

lease       a lease of the process, by messages and descriptors over a socket
outbox      messages that balloond has not taken yet
loop        the thread that waits for sockets and descriptors
alive       the file that says whether processes hold memory
"""
