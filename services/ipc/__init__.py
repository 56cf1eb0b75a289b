"""Communication between processes of one host: Unix sockets, framed messages, descriptors, and child processes."""
