"""What balloond decides, without I/O, clock or device: time comes as an argument, decisions leave as values."""
