"""Between processes of one host: Unix sockets, framed messages, descriptors, and children."""
