"""What a group knows of its devices' memory and requests of balloond: the ledger, bookings, room for requests."""
