"""Moving bytes between images and extents, one file for each kind of device."""
