"""What a group knows and asks of the memory of its devices: balloond's ledger, bookings, requests for room."""
